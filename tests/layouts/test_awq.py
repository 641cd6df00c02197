"""AWQ's four orders: an independent reading of the bits, both directions on random bytes, zero
points, and refusals.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import LayoutError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.awq.gemm import AWQConfig, interleave, key_in, rows_of_words, words_of_rows
from halfbyte.layouts.awq.gemv import zeros_width
from halfbyte.numerics.bits import pack, unpack
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.layout_tensors import field, halves, headers, integer_tensor, words

GEMM, GEMV, FAST, MARLIN = (LAYOUTS[f"awq-{v}"] for v in ("gemm", "gemv", "gemv_fast", "marlin"))
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def foreign(layout: str, rng: np.random.Generator, n: int, k: int, group: int) -> dict[str, np.ndarray]:
    """Random bytes in the shapes of a module."""
    groups = 1 if group == -1 else -(-k // group)
    if layout == "awq-gemm":
        return {"qweight": words(rng, k, n // 8), "qzeros": words(rng, groups, n // 8), "scales": halves(rng, groups, n)}
    if layout == "awq-gemv":
        width = zeros_width(k, group)
        return {"qweight": words(rng, n, k // 8), "qzeros": words(rng, n, width), "scales": halves(rng, n, 8 * width)}
    if layout == "awq-marlin":
        return {"qweight": words(rng, k // 16, 2 * n), "scales": halves(rng, groups, n)}
    rows = 8 * zeros_width(k, group)
    scales = (rng.integers(512, 4096, (rows, n)) / 65536).astype(np.float16)
    zeros = rng.integers(0, 16, (rows, n)).astype(np.float16)
    nudged = (-(scales * zeros)).view(np.uint16) + rng.integers(
        0, 2, (rows, n), dtype=np.uint16
    )  # some an ulp off any −scale·zero
    return {"qweight": words(rng, n // 4, k).view(np.int16)[:, :k], "qzeros": nudged.view(np.float16), "scales": scales}


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("name", ["awq-gemm", "awq-gemv", "awq-gemv_fast", "awq-marlin"])
def test_random_bytes_come_back(name: str, group: int) -> None:
    layout = LAYOUTS[name]
    for n, k in ((64, 256), (128, 128), (0, 64)):
        tensors = {s: np.ascontiguousarray(t) for s, t in foreign(name, np.random.default_rng(5), n, k, group).items()}
        config = {"bits": 4, "group_size": group}
        q = layout.unpack(tensors, config, "m")
        assert q.shape == (n, k)
        assert same_tensors(layout.pack(q, config), tensors)
        assert layout.describe(headers(tensors), config) == (q.format, q.shape)


@given(
    name=st.sampled_from(["awq-gemm", "awq-gemv", "awq-gemv_fast", "awq-marlin"]),
    n=st.integers(0, 3),
    k=st.integers(0, 4),
    group=st.sampled_from([32, 64, 128, 48, -1]),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_come_back(name: str, n: int, k: int, group: int, seed: int) -> None:
    layout = LAYOUTS[name]
    zeros = None if name == "awq-marlin" else (0, 15)
    q = integer_tensor(4, (64 * n, 64 * k), group, seed, zeros=zeros)
    config = {"bits": 4, "group_size": group}
    assert layout.unpack(layout.pack(q, config), config) == q


@given(n=st.integers(0, 5), k=st.integers(0, 40), bits=st.sampled_from([4, 8]), seed=st.integers(0, 1 << 16))
def test_gemm_holds_any_number_of_inputs(n: int, k: int, bits: int, seed: int) -> None:
    q = integer_tensor(bits, (8 * n, k), 16, seed, zeros=(0, (1 << bits) - 1))
    config = {"w_bit": bits, "q_group_size": 16}  # AutoAWQ's own words
    assert GEMM.unpack(GEMM.pack(q, config), config) == q


@given(n=st.integers(0, 9), k=st.integers(0, 20), group=st.sampled_from([8, 32, 64, 128, -1]), seed=st.integers(0, 1 << 16))
def test_gemv_holds_any_number_of_outputs(n: int, k: int, group: int, seed: int) -> None:
    q = integer_tensor(4, (n, 8 * k), group, seed, zeros=(0, 15))
    config = {"bits": 4, "group_size": group}
    assert GEMV.unpack(GEMV.pack(q, config), config) == q


def test_case_01_a_zero_code_of_0_stays_0_and_leaves_its_neighbours_alone() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (8, 2))
    zeros = np.array([[0], [3], [0], [15], [0], [7], [1], [0]], np.int16)
    parts = {"codes": pack(codes, 4), "scales": np.full((8, 1), 0.5, np.float16), "zeros": zeros}
    q = QTensor(format_named("uint4", -1), (8, 32), parts, origin="autoawq")
    for layout in (GEMM, GEMV):
        config = layout.config(q)
        back = layout.unpack(layout.pack(q, config), config)
        assert back.parts["zeros"].tolist() == zeros.tolist()
        assert back.dequantize()[0].tolist() == [0.5 * c for c in range(16)] * 2
        assert np.array_equal(back.dequantize(), 0.5 * (codes - zeros.astype(np.float32)))
    # On to a layout that stores zero − 1: refused, never wrapped; with v2 it goes through.
    gptq = LAYOUTS["gptq"]
    with pytest.raises(LayoutError, match="is 0; v1 stores the zero point minus 1"):
        gptq.pack(q, {"checkpoint_format": "gptq"})
    v2 = {"checkpoint_format": "gptq_v2", "bits": 4, "group_size": -1}
    assert np.array_equal(gptq.unpack(gptq.pack(q, v2), v2).dequantize(), q.dequantize())


def test_case_04_weights_and_zero_points_are_both_interleaved() -> None:
    codes = np.repeat(np.arange(8, dtype=np.uint8)[:, None], 32, axis=1)
    parts = {"codes": pack(codes, 4), "scales": np.ones((8, 1), np.float16), "zeros": np.arange(8, dtype=np.int16)[:, None]}
    tensors = GEMM.pack(QTensor(format_named("uint4", 32), (8, 32), parts), {})
    assert (tensors["qweight"].view(np.uint32) == 0x75316420).all()
    assert tensors["qzeros"].view(np.uint32).tolist() == [[0x75316420]]


def test_case_49_group_size_minus_one_is_one_group() -> None:
    n, k = 16, 4096
    tensors = foreign("awq-gemm", np.random.default_rng(0), n, k, -1)
    assert tensors["scales"].shape == (1, n)
    assert tensors["qzeros"].shape == (1, n // 8)
    q = GEMM.unpack(tensors, {"bits": 4, "group_size": -1})
    assert q.format == format_named("uint4", -1)
    assert same_tensors(GEMM.pack(q, {"bits": 4, "group_size": -1}), tensors)


@pytest.mark.parametrize("bits", [4, 8])
def test_gemm_codes_are_a_slow_reading_of_the_words(bits: int) -> None:
    rng = np.random.default_rng(1)
    n, k = 32, 16
    order = ORDER if bits == 4 else (0, 2, 1, 3)
    per = 32 // bits
    tensors = {"qweight": words(rng, k, n // per), "qzeros": words(rng, 1, n // per), "scales": halves(rng, 1, n)}
    q = GEMM.unpack(tensors, {"bits": bits, "group_size": -1})
    codes = unpack(q.parts["codes"], bits, k)
    for w in range(n // per):
        for i, column in enumerate(order):
            assert all(codes[per * w + column, j] == field(tensors["qweight"][j, w], bits, i) for j in range(k))
            assert q.parts["zeros"][per * w + column, 0] == field(tensors["qzeros"][0, w], bits, i)


def test_gemv_fast_codes_are_a_slow_reading_of_the_formula() -> None:
    n, k = 8, 128
    tensors = foreign("awq-gemv_fast", np.random.default_rng(2), n, k, 64)
    codes = unpack(FAST.unpack(tensors, {"bits": 4, "group_size": 64}).parts["codes"], 4, k)
    seen = np.zeros((n, k), bool)
    for i in range(n // 4):
        for c in range(k):
            for t in range(4):
                p = 4 * (c % 64) + t
                j = p % 64
                row = 4 * i + p // 64
                column = 64 * (c // 64) + 32 * (j // 32) + 8 * (j % 4) + 2 * ((j % 32) // 8) + (j % 8) // 4
                assert codes[row, column] == (int(tensors["qweight"][i, c]) >> (4 * t)) & 15
                seen[row, column] = True
    assert seen.all()


@pytest.mark.parametrize("groups", [1, 2])
def test_marlin_codes_and_scales_are_a_slow_reading_of_the_fragments(groups: int) -> None:
    n, k = 128, 32
    rng = np.random.default_rng(3)
    tensors = {"qweight": words(rng, k // 16, 2 * n), "scales": halves(rng, groups, n)}
    q = MARLIN.unpack(tensors, {"bits": 4, "group_size": k // groups})
    codes = unpack(q.parts["codes"], 4, k)
    for strip in range(k // 16):
        for block in range(n // 64):
            for thread in range(32):
                for tile in range(4):
                    word = tensors["qweight"][strip, 128 * block + 4 * thread + tile]
                    # a0 a1 of the lower half of k, a2 a3 of the upper, then the same eight outputs
                    # on
                    places = [(2 * (thread % 4) + dk, 16 * tile + thread // 4 + dn) for dn in (0, 8) for dk in (0, 1, 8, 9)]
                    for nibble, place in enumerate(ORDER):
                        dk, dn = places[place]
                        assert codes[64 * block + dn, 16 * strip + dk] == field(word, 4, nibble)
    expected = np.empty((n, groups), np.float16)
    for g in range(groups):
        for at in range(n):
            if groups == 1:
                base, i = at // 32 * 32, at % 32
                output = base + 2 * (i // 8) + (0, 1, 8, 9, 16, 17, 24, 25)[i % 8]
            else:
                base, i = at // 64 * 64, at % 64
                output = base + i // 8 + 8 * (i % 8)
            expected[output, g] = tensors["scales"][g, at]
    assert np.array_equal(q.parts["scales"].view(np.uint16), expected.view(np.uint16))


def test_marlin_takes_zero_points_of_8_and_no_other() -> None:
    q = integer_tensor(4, (64, 32), 16, zeros=(8, 8))
    back = MARLIN.unpack(MARLIN.pack(q, {}), {"bits": 4, "group_size": 16})
    assert back.format == format_named("int4", 16)
    assert np.array_equal(back.dequantize(), q.dequantize())
    q.parts["zeros"][3, 1] = 7
    with pytest.raises(
        LayoutError, match=r"1 zero points are not 8 \(the first, at group \(3, 1\), is 7\); the layout stores none"
    ):
        MARLIN.pack(q, {})


def test_gemv_fast_refuses_a_zero_point_its_float16_product_does_not_give_back() -> None:
    parts = {
        "codes": np.zeros((4, 32), np.uint8),
        "scales": np.full((4, 1), 6e-8, np.float16),
        "zeros": np.full((4, 1), 15, np.int16),
    }
    q = QTensor(format_named("uint4", -1), (4, 64), parts)
    assert FAST.unpack(FAST.pack(q, {}), {"bits": 4, "group_size": -1}) == q  # 15 units of the last place are exact
    parts["scales"] = np.full((4, 1), np.inf, np.float16)
    with pytest.raises(LayoutError, match=r"qzeros: -inf over the scale inf of output 0, group 0 is no zero point"):
        FAST.pack(QTensor(q.format, q.shape, parts), {})


@pytest.mark.parametrize(
    ("raw", "awq"),
    [
        ({"w_bit": 4}, True), ({"q_group_size": 128}, True), ({"version": "gemm", "zero_point": True}, True),
        ({"version": "gemm"}, False), ({"zero_point": True}, False), ({"bits": 4, "group_size": 128}, False), ({}, False),
    ],
)  # fmt: skip
def test_what_names_a_config_without_quant_method(raw: dict, awq: bool) -> None:
    assert AWQConfig.recognises(raw) is awq


def test_config_words_of_both_writers_are_read() -> None:
    tensors = foreign("awq-gemm", np.random.default_rng(0), 16, 64, 32)
    assert GEMM.describe(headers(tensors), {"w_bit": 4, "q_group_size": 32}) == GEMM.describe(
        headers(tensors), {"bits": 4, "group_size": 32}
    )
    assert GEMM.describe(headers(tensors), {}).format == format_named("uint4", 32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq-gemm", {"qzeros": None}, r"down\.qzeros is missing; the module has qweight, scales"),
        ("awq-gemm", {"qweight": np.zeros((64, 8), np.int16)}, r"down\.qweight is int16; allowed: int32"),
        (
            "awq-gemm",
            {"qweight": np.zeros((64, 9), np.int32)},
            r"down\.qweight has shape \[64, 9\]; wanted \[\*, 8\] for 64 outputs of 4 bits",
        ),
        ("awq-gemm", {"qzeros": np.zeros((2, 7), np.int32)}, r"down\.qzeros has shape \[2, 7\]; wanted \[2, 8\]"),
        ("awq-gemm", {"scales": np.zeros((2, 60), np.float16)}, r"down\.scales has 60 columns; words hold 8 codes of 4 bits"),
        ("awq-gemm", {"group_size": 16}, r"down\.scales has 2 groups; 64 inputs in groups of 16 are 4"),
        ("awq-gemm", {"bits": 3}, r"down: bits 3; allowed: 4, 8"),
        ("awq-gemv", {"scales": np.zeros((64, 9), np.float16)}, r"down\.scales has shape \[64, 9\]; wanted \[64, 32\]"),
        ("awq-gemv", {"group_size": 1}, r"down\.scales has room for 32 groups; 64 inputs are 64 of 1"),
        (
            "awq-gemv",
            {"qweight": np.zeros((64, 33), np.int32), "group_size": 8},
            r"down\.scales has room for 32 groups; 264 inputs are 33 of 8",
        ),
        (
            "awq-gemv",
            {"qzeros": np.zeros((60, 1), np.int32)},
            r"down\.qzeros has shape \[60, 1\]; wanted \[64, \*\] for 64 outputs",
        ),
        ("awq-gemv_fast", {"qweight": np.zeros((16, 65), np.int16)}, r"down\.qweight has 65 columns; words cover whole 64s"),
        ("awq-gemv_fast", {"qzeros": np.zeros((32, 63), np.float16)}, r"down\.qzeros has shape \[32, 63\]; wanted \[32, 64\]"),
        (
            "awq-gemv_fast",
            {"qzeros": np.full((32, 64), np.nan, np.float16)},
            r"down\.qzeros: nan over the scale .* is no zero point",
        ),
        (
            "awq-marlin",
            {"qweight": np.zeros((4, 64), np.int32)},
            r"down\.qweight has shape \[4, 64\]; wanted \[\*, 128\] for 64 outputs",
        ),
        ("awq-marlin", {"bits": 8}, r"down: bits 8; allowed: 4"),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_their_sizes(name: str, changes: dict, message: str) -> None:
    tensors = foreign(name, np.random.default_rng(0), 64, 64, 32)
    config = {"bits": 4, "group_size": 32}
    for key, value in changes.items():
        (tensors if key in tensors else config)[key] = value
    with pytest.raises(LayoutError, match=rf"\[{name}\] .*{message}" if not message.startswith("down:") else message):
        LAYOUTS[name].unpack({s: t for s, t in tensors.items() if t is not None}, config, "down")


@pytest.mark.parametrize(
    ("name", "q", "message"),
    [
        ("awq-gemm", integer_tensor(4, (12, 64), 32, zeros=(0, 15)), "12 outputs are not whole words of 8 columns"),
        ("awq-gemm", integer_tensor(4, (16, 64), 32, zeros=(16, 16)), "zero points lie outside 0 to 15"),
        ("awq-gemm", integer_tensor(4, (16, 64), 32, zeros=(0, 15), act_order=True), "has an act-order group index"),
        ("awq-gemm", integer_tensor(2, (16, 64), 32, zeros=(0, 3)), "holds 4, 8 bits, not 2"),
        ("awq-gemv", integer_tensor(4, (16, 60), 32, zeros=(0, 15)), "60 inputs are not whole words of 8"),
        ("awq-gemv_fast", integer_tensor(4, (6, 64), 32, zeros=(0, 15)), "words cover 4 outputs by 64 inputs"),
        (
            "awq-gemv_fast",
            integer_tensor(4, (8, 64), 32, zeros=(0, 15), scale_dtype="float32"),
            "scales are float32; the layout holds float16",
        ),
        ("awq-marlin", integer_tensor(4, (32, 64), 32), "strips are 64 outputs by 16 inputs"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(name: str, q: QTensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        LAYOUTS[name].pack(q, {})


@pytest.mark.parametrize(("n", "k"), [(8, 8), (16, 24), (1032, 1040), (1024, 1024), (8, 0), (0, 8), (2048, 40), (24, 37)])
def test_nibbles_turned_at_once_are_codes_put_in_order(n, k):
    """Rows of nibbles to AWQ's words and back, against the way over single codes."""
    codes = np.random.default_rng(n + k).integers(0, 16, (n, k)).astype(np.uint8)
    rows, wanted = pack(codes, 4), interleave(codes.T, 4)
    assert np.array_equal(words_of_rows(rows, k), wanted)
    assert np.array_equal(rows_of_words(wanted), rows)
    assert np.array_equal(rows_of_words(np.asfortranarray(wanted)), rows)


def test_strips_of_marlin_stay_apart_in_a_wide_weight() -> None:
    """63 strips and more, where a division by 63 in place of 64 shows."""
    n, k = 64 * 63, 16
    rng = np.random.default_rng(4)
    tensors = {"qweight": words(rng, 1, 2 * n), "scales": halves(rng, 1, n)}
    q = MARLIN.unpack(tensors, {"bits": 4, "group_size": k})
    last = MARLIN.unpack(
        {"qweight": tensors["qweight"][:, -128:], "scales": tensors["scales"][:, -64:]}, {"bits": 4, "group_size": k}
    )
    assert np.array_equal(q.parts["codes"][-64:], last.parts["codes"])
    assert np.array_equal(q.parts["scales"][-64:].view(np.uint16), last.parts["scales"].view(np.uint16))
    assert same_tensors(MARLIN.pack(q, {}), tensors)


def test_gemv_fast_keeps_rows_beyond_its_own_number() -> None:
    tensors = foreign("awq-gemv_fast", np.random.default_rng(5), 8, 64, 32)
    usual = tensors["scales"].shape[0]
    config = {"bits": 4, "group_size": 32}
    assert "rows" not in FAST.unpack(tensors, config).details
    more = {s: np.concatenate([t, t[:8]]) if s != "qweight" else t for s, t in tensors.items()}
    q = FAST.unpack(more, config)
    assert q.details["rows"] == usual + 8
    assert same_tensors(FAST.pack(q, config), more)


@pytest.mark.parametrize("suffix", ["qzeros", "scaled_zeros"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_gemv_fast_reads_offsets_of_whole_scales_alone(dtype, suffix: str) -> None:
    """An offset between two zero points was rounded to one of them: other values without a word."""
    rng = np.random.default_rng(6)
    tensors = {s: t if s == "qweight" else t.astype(dtype) for s, t in foreign("awq-gemv_fast", rng, 8, 64, 32).items()}
    zeros = rng.integers(1, 16, tensors["scales"].shape)
    exact = -(tensors["scales"] * zeros.astype(dtype))
    tensors[suffix] = exact
    if suffix != "qzeros":
        del tensors["qzeros"]
    config = {"bits": 4, "group_size": 32}
    assert np.array_equal(FAST.unpack(tensors, config, "m").parts["zeros"], zeros[:2].T)
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        beside = exact.copy()
        beside[1, 3] = -tensors["scales"][1, 3] * dtype(1 + share)
        with pytest.raises(LayoutError, match=rf"m\.{suffix}: .* of output 3, group 1 is no zero point; wanted a whole number"):
            FAST.unpack({**tensors, suffix: beside}, config, "m")


def test_gemv_fast_has_zero_point_0_under_a_scale_of_0() -> None:
    tensors = foreign("awq-gemv_fast", np.random.default_rng(8), 8, 64, 32)
    tensors["scales"][1, 3] = tensors["qzeros"][1, 3] = 0
    q = FAST.unpack(tensors, {"bits": 4, "group_size": 32})
    assert (q.parts["scales"][3, 1], q.parts["zeros"][3, 1]) == (0, 0)
    assert not q.dequantize()[3, 32:].any()


def test_gemv_fast_writes_new_offsets_where_scales_have_changed() -> None:
    """Those kept from the file belong to its scales."""
    q = FAST.unpack(foreign("awq-gemv_fast", np.random.default_rng(7), 8, 64, 32), {"bits": 4, "group_size": 32})
    assert "offsets" in q.details
    scales = (q.parts["scales"] * np.float16(1.375)).astype(np.float16)
    changed = QTensor(q.format, q.shape, {**q.parts, "scales": scales}, origin=q.origin, details=q.details)
    written = FAST.pack(changed, {})
    assert np.array_equal(written["qzeros"][:2].T, -(scales * q.parts["zeros"].astype(np.float16)))
    assert np.array_equal(FAST.unpack(written, {"bits": 4, "group_size": 32}).dequantize(), changed.dequantize())


def test_gemv_fast_names_the_zero_point_that_does_not_come_back() -> None:
    parts = {"codes": np.zeros((4, 32), np.uint8), "scales": np.ones((4, 1), np.float16), "zeros": np.full((4, 1), 3, np.int16)}
    parts["scales"][2, 0] = 0
    with pytest.raises(LayoutError, match=r"zero point 3 at group \(2, 0\) under scale 0"):
        FAST.pack(QTensor(format_named("uint4", -1), (4, 64), parts), {})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "bits"), ({"bits": 4}, "bits"), ({"w_bit": 8}, "w_bit"), ({"bits": 4, "w_bit": 8}, "bits"),
        ({"bits": None, "w_bit": 8}, "w_bit"),
    ],
)  # fmt: skip
def test_a_parameter_is_under_autoawqs_key_where_transformers_own_says_nothing(config: dict, key: str) -> None:
    assert key_in(config, "bits", "w_bit") == key
