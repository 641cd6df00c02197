"""GPTQ words: an independent reading of the bits, both directions on random bytes, the traps of v1
zero points, and refusals.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.checkpoints.quant_config import read_config
from halfbyte.errors import CheckpointError, LayoutError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.common.integers import monotone
from halfbyte.layouts.quant_config.writer import DenseTensor, PackedModule
from halfbyte.numerics.bits import unpack
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.layout_tensors import field, halves, headers, integer_tensor, words

GPTQ = LAYOUTS["gptq"]
BITS = (2, 3, 4, 5, 6, 7, 8)
V1 = {"checkpoint_format": "gptq"}
V1_MODEL = {"checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
V2 = {"checkpoint_format": "gptq_v2"}
PLANAR = {"checkpoint_format": "gptq_p", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
WRITERS = {"v1": V1, "v1 gptqmodel": V1_MODEL, "v2": V2, "planar": PLANAR}


def foreign(rng: np.random.Generator, bits: int, n: int, k: int, group: int, g_idx: str = "monotone") -> dict[str, np.ndarray]:
    """Random bytes in the shapes of a module: any word and any float16 is valid there."""
    groups = -(-k // group) if group != -1 else min(k, 1)
    tensors = {
        "qweight": words(rng, -(-k * bits // 32), n),
        "qzeros": words(rng, groups, -(-n * bits // 32)),
        "scales": halves(rng, groups, n),
    }
    if g_idx == "monotone":
        tensors["g_idx"] = monotone(k, group)
    elif g_idx == "act-order":
        tensors["g_idx"] = rng.integers(0, groups, k).astype(np.int32)
    return tensors


@pytest.mark.parametrize("g_idx", ["monotone", "act-order", "absent"])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("bits", BITS)
def test_random_bytes_come_back(bits: int, writer: str, g_idx: str) -> None:
    rng = np.random.default_rng(bits)
    for group in (32, 64, -1):
        config = {**WRITERS[writer], "bits": bits, "group_size": group}
        tensors = foreign(rng, bits, 64, 128, group, g_idx)
        q = GPTQ.unpack(tensors, config, "m")
        assert q.shape == (64, 128)
        assert same_tensors(GPTQ.pack(q, config), tensors)
        assert GPTQ.describe(headers(tensors), config) == (q.format, q.shape)


@pytest.mark.parametrize("bits", BITS)
def test_the_canonical_codes_are_a_slow_reading_of_the_words(bits: int) -> None:
    rng = np.random.default_rng(7)
    tensors = foreign(rng, bits, 32, 96, 32)
    planar = bits in (5, 6, 7)
    q = GPTQ.unpack(tensors, {**(PLANAR if planar else V2), "bits": bits, "group_size": 32})
    codes = unpack(q.parts["codes"], bits, 96)
    for r in range(32):
        column = tensors["qweight"][:, r]
        for j in range(96):
            if not planar:
                expected = field(column, bits, j)
            else:
                expected, low, row = 0, 0, bits * (j // 32)
                for plane in [width for width in (4, 2, 1) if bits & width]:
                    expected |= field(column[row : row + plane], plane, j % 32) << low
                    low, row = low + plane, row + plane
            assert codes[r, j] == expected
    if not planar:
        zeros = [[field(tensors["qzeros"][g], bits, r) for g in range(3)] for r in range(32)]
        assert q.parts["zeros"].tolist() == zeros


@given(
    bits=st.sampled_from(BITS),
    n=st.sampled_from([0, 32, 64]),
    units=st.integers(0, 5),
    group=st.sampled_from([16, 32, 48, 128, -1]),
    writer=st.sampled_from(sorted(WRITERS)),
    scale=st.sampled_from(["float16", "bfloat16", "float32"]),
    act_order=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_come_back(bits, n, units, group, writer, scale, act_order, seed) -> None:
    top = 1 << bits
    zeros = {"v1": (1, top), "v1 gptqmodel": (1, top - 1)}.get(writer, (0, top - 1))
    q = integer_tensor(bits, (n, 32 * units), group, seed, zeros=zeros, scale_dtype=scale, act_order=act_order)
    if act_order and np.array_equal(q.parts.get("group_index"), monotone(32 * units, group)):
        q = QTensor(
            q.format, q.shape, {p: a for p, a in q.parts.items() if p != "group_index"}
        )  # in order: no index is canonical
    config = {**WRITERS[writer], "bits": bits, "group_size": group}
    assert GPTQ.unpack(GPTQ.pack(q, config), config) == q


@given(n=st.integers(0, 41), k=st.integers(1, 70), bits=st.sampled_from([2, 3, 4, 8]), seed=st.integers(0, 1 << 16))
def test_widths_round_up_and_g_idx_tells_the_inputs(n: int, k: int, bits: int, seed: int) -> None:
    q = integer_tensor(bits, (n, k), 16, seed, zeros=(0, (1 << bits) - 1))
    config = {**V2, "bits": bits, "group_size": 16}
    tensors = GPTQ.pack(q, config)
    assert tensors["qweight"].shape == (-(-k * bits // 32), n)
    assert tensors["qzeros"].shape == (-(-k // 16), -(-n * bits // 32))
    assert GPTQ.unpack(tensors, config) == q


def test_bits_that_fill_the_last_word_are_kept() -> None:
    rng = np.random.default_rng(3)
    config = {**V2, "bits": 3, "group_size": 16}
    tensors = foreign(rng, 3, 41, 50, 16)
    q = GPTQ.unpack(tensors, config)
    q.validate()
    assert same_tensors(GPTQ.pack(q, config), tensors)
    part = GPTQ.pack(q[:40], config)  # the rows of a slice no longer match what was kept: the filling is zero then
    assert (np.asarray(part["qweight"])[-1].view(np.uint32) >> np.uint32(50 * 3 % 32) == 0).all()


def test_case_02_v2_to_v1_to_v2_of_zero_points_1_to_15_is_identical() -> None:
    q = integer_tensor(4, (64, 128), 32, zeros=(1, 15))
    first = GPTQ.pack(q, {**V2, "bits": 4, "group_size": 32})
    for v1 in (V1, V1_MODEL):
        middle = GPTQ.pack(GPTQ.unpack(first, V2 | {"bits": 4, "group_size": 32}), v1 | {"bits": 4, "group_size": 32})
        stored = middle["qzeros"].view(np.uint32)
        assert np.array_equal(stored + np.uint32(0x11111111), first["qzeros"].view(np.uint32))
        again = GPTQ.pack(GPTQ.unpack(middle, v1 | {"bits": 4, "group_size": 32}), V2 | {"bits": 4, "group_size": 32})
        assert same_tensors(again, first)


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_5_to_7_bits_are_the_same_words_under_every_label(bits: int) -> None:
    """GPTQModel reads them as `gptq_p`, zero points of 0 included, whatever the label."""
    q = integer_tensor(bits, (64, 64), 32, zeros=(0, (1 << bits) - 1))
    assert GPTQ.config(q)["checkpoint_format"] == "gptq_p"
    planar = GPTQ.pack(q, PLANAR)
    for config in WRITERS.values():
        assert same_tensors(GPTQ.pack(q, config), planar)
        assert GPTQ.unpack(planar, {**config, "bits": bits, "group_size": 32}) == q


@pytest.mark.parametrize("n", [2, 33, 48])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_of_one_plane_are_the_ordinary_words(bits: int, n: int) -> None:
    """So they need no whole 32s in a checkpoint that is `gptq_p` for another weight."""
    q = integer_tensor(bits, (n, 64), 32, zeros=(0, (1 << bits) - 1))
    planar = GPTQ.pack(q, PLANAR)
    assert same_tensors(planar, GPTQ.pack(q, V2))
    assert GPTQ.unpack(planar, {**PLANAR, "bits": bits, "group_size": 32}) == q


@pytest.mark.parametrize("writer", ["v1", "v1 gptqmodel"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_case_02_writing_v1_with_a_zero_point_of_0_is_refused(bits: int, writer: str) -> None:
    q = integer_tensor(bits, (32, 64), 32, zeros=(0, 0))
    with pytest.raises(
        LayoutError,
        match=r"64 zero points lie outside 1 to \d+, the first, at group \(0, 0\), is 0; .*write checkpoint_format gptq_v2",
    ):
        GPTQ.pack(q, WRITERS[writer])
    assert GPTQ.config(q)["checkpoint_format"] == "gptq_v2"
    assert GPTQ.unpack(GPTQ.pack(q, GPTQ.config(q)), GPTQ.config(q)) == q


def test_case_02_a_zero_point_of_16_goes_into_v1_of_autogptq_only() -> None:
    q = integer_tensor(4, (32, 64), 32, zeros=(16, 16))
    assert (GPTQ.pack(q, V1)["qzeros"].view(np.uint32) == 0xFFFFFFFF).all()
    with pytest.raises(LayoutError, match=r"outside 0 to 15, .* is 16; v1 .* holds 1 to 16"):
        GPTQ.pack(q, V2)
    with pytest.raises(LayoutError, match="outside 1 to 15"):
        GPTQ.pack(q, V1_MODEL)


def test_case_02_borrowed_words_of_gptqmodel_are_undone_word_by_word() -> None:
    zeros = np.array([[0, 5, 0, 0, 15, 1, 8, 0]], np.uint32)
    stored = (int(sum(int(z) << (4 * i) for i, z in enumerate(zeros[0]))) - 0x11111111) & 0xFFFFFFFF
    tensors = foreign(np.random.default_rng(0), 4, 8, 32, 32)
    tensors["qzeros"] = np.array([[stored]], np.uint32).view(np.int32)
    config = {**V1_MODEL, "bits": 4, "group_size": 32}
    q = GPTQ.unpack(tensors, config)
    assert q.parts["zeros"].T.tolist() == zeros.tolist()
    assert same_tensors(GPTQ.pack(q, config), tensors)
    wrong = GPTQ.unpack(tensors, {**V1, "bits": 4, "group_size": 32}).parts["zeros"].T.tolist()
    assert wrong != zeros.tolist()


def test_case_03_three_bit_words_are_sized_by_bits_not_by_codes_a_word() -> None:
    q = integer_tensor(3, (64, 128), 128, zeros=(1, 7))
    tensors = GPTQ.pack(q, V1)
    assert tensors["qweight"].shape == (12, 64)
    assert tensors["qzeros"].shape == (1, 6)


@pytest.mark.parametrize("g_idx", ["monotone", "absent"])
def test_case_49_group_size_minus_one_is_one_group(g_idx: str) -> None:
    n, k = 16, 4096
    tensors = foreign(np.random.default_rng(1), 4, n, k, -1, g_idx)
    assert tensors["scales"].shape == (1, n)
    assert tensors["qzeros"].shape == (1, n // 8)
    config = {**V1, "bits": 4, "group_size": -1}
    q = GPTQ.unpack(tensors, config)
    assert q.format == format_named("uint4", -1)
    assert "group_index" not in q.parts
    assert same_tensors(GPTQ.pack(q, config), tensors)


def test_a_symmetric_tensor_is_written_with_the_middle_zero_point() -> None:
    q = integer_tensor(4, (32, 64), 32)
    tensors = GPTQ.pack(q, V1)
    assert (tensors["qzeros"].view(np.uint32) == 0x77777777).all()
    back = GPTQ.unpack(tensors, {**V1, "bits": 4, "group_size": 32})
    assert np.array_equal(back.dequantize(), q.dequantize())
    assert GPTQ.config(q)["sym"] is True


def test_without_bits_in_the_config_the_widths_give_them() -> None:
    for bits in BITS:
        tensors = foreign(np.random.default_rng(0), bits, 64, 128, 32)
        assert GPTQ.describe(headers(tensors), V2) == (format_named(f"uint{bits}", 32), (64, 128))


def broken(**changes) -> tuple[dict[str, np.ndarray], dict]:
    tensors = foreign(np.random.default_rng(0), 4, 64, 128, 32)
    config = {**V1, "bits": 4, "group_size": 32}
    for name, value in changes.items():
        if name in tensors:
            tensors[name] = value
        else:
            config[name] = value
    return {s: t for s, t in tensors.items() if t is not None}, config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qzeros": None}, r"down\.qzeros is missing; the module has g_idx, qweight, scales"),
        ({"qweight": np.zeros((16, 64), np.float32)}, r"down\.qweight is float32; allowed: int8, int16, int32, int64"),
        ({"scales": np.zeros((4, 64), np.int8)}, r"down\.scales is int8; allowed: float16, bfloat16, float32"),
        ({"qweight": np.zeros((16, 63), np.int32)}, r"down\.qweight has shape \[16, 63\]; wanted \[\*, 64\] for the 64 columns"),
        (
            {"qweight": np.zeros((17, 64), np.int32)},
            r"down\.qweight has shape \[17, 64\]; wanted \[16, 64\] for 128 inputs of 4 bits",
        ),
        ({"qzeros": np.zeros((4, 9), np.int32)}, r"down\.qzeros has shape \[4, 9\]; wanted \[4, 8\] for 64 outputs of 4 bits"),
        ({"qzeros": np.zeros((3, 8), np.int32)}, r"down\.qzeros has shape \[3, 8\]; wanted \[4, \*\] for the 4 groups"),
        ({"scales": np.zeros((64,), np.float16)}, r"down\.scales has shape \[64\]; wanted \[\*, \*\]"),
        ({"group_size": 64}, r"down\.scales has 4 groups; 128 inputs in groups of 64 are 2"),
        ({"bits": 9}, r"bits 9; allowed: 2, 3, 4, 5, 6, 7, 8"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format 'marlin'; read: gptq, gptq_v2, gptq_p"),
        ({"g_idx": np.full(128, 4, np.int32)}, r"down\.g_idx has 4 at input 0; there are 4 groups, 0 to 3"),
        ({"g_idx": np.array([0] * 127 + [-1], np.int32)}, r"down\.g_idx has -1 at input 127"),
        ({"g_idx": np.zeros(120, np.int64)}, r"down\.g_idx is int64; allowed: int32"),
        ({"g_idx": None, "bits": 3}, r"down\.qweight has 16 rows of words; 3-bit codes fill a multiple of 3 rows"),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_their_sizes(changes: dict, message: str) -> None:
    tensors, config = broken(**changes)
    with pytest.raises(LayoutError, match=message):
        GPTQ.unpack(tensors, config, "down")


@pytest.mark.parametrize(
    ("q", "config", "message"),
    [
        (integer_tensor(4, (2, 32, 64), 32, zeros=(1, 9)), V1, "holds matrices .* write the experts of a stack one by one"),
        (integer_tensor(1, (32, 64), 32, zeros=(1, 1)), V1, "holds 2, 3, 4, 5, 6, 7, 8 bits, not 1"),
        (integer_tensor(4, (32, 64), 32, zeros=(1, 9), rows=8), V1, "its groups are block"),
        (integer_tensor(4, (32, 64), 32, zeros=(1, 9)), {"bits": 8}, "the config asks for bits 8; this weight has 4"),
        (integer_tensor(5, (40, 64), 32, zeros=(1, 9)), PLANAR, "planar words hold whole 32s"),
        (integer_tensor(4, (32, 64), 32, zeros=(1, 9)).rows(0, 4), {"checkpoint_format": "exl2"}, "checkpoint_format 'exl2'"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(q: QTensor, config: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        GPTQ.pack(q, config)


def test_other_codecs_are_refused() -> None:
    fmt = format_named("mxfp4")
    q = QTensor(fmt, (32, 64), {"codes": np.zeros((32, 32), np.uint8), "scales": np.zeros((32, 2), np.uint8)})
    with pytest.raises(LayoutError, match=r"\[gptq\] mxfp4:g32 of shape \(32, 64\) cannot be written: the layout holds integers"):
        GPTQ.pack(q, V1)
    with pytest.raises(LayoutError, match="the layout holds integers"):
        GPTQ.config(q)


@pytest.mark.parametrize(("config", "first", "last"), [(V1, 1, 16), (V1_MODEL, 1, 15), (V2, 0, 15)])
def test_case_02_the_first_and_last_zero_point_of_each_form(config: dict, first: int, last: int) -> None:
    for zero in (first, last):
        q = integer_tensor(4, (32, 64), 32, zeros=(zero, zero))
        back = GPTQ.unpack(GPTQ.pack(q, config), {**config, "bits": 4, "group_size": 32})
        assert np.array_equal(back.parts["zeros"], q.parts["zeros"])
    for zero in (first - 1, last + 1):
        with pytest.raises(LayoutError, match=f"64 zero points lie outside {first} to {last}"):
            GPTQ.pack(integer_tensor(4, (32, 64), 32, zeros=(zero, zero)), config)


@pytest.mark.parametrize("dtype", ["int16", "int64"])
def test_words_of_another_width_come_back_in_that_width(dtype: str) -> None:
    q = integer_tensor(4, (64, 64), 32, zeros=(1, 15))
    config = {**V1, "bits": 4, "group_size": 32, "pack_dtype": dtype}
    tensors = GPTQ.pack(q, config)
    assert tensors["qweight"].dtype == dtype
    back = GPTQ.unpack(tensors, config)
    assert back.details["pack_dtype"] == dtype
    assert same_tensors(GPTQ.pack(back, V1), tensors)
    assert "pack_dtype" not in GPTQ.unpack(GPTQ.pack(q, V1), {**V1, "bits": 4, "group_size": 32}).details


def test_narrow_words_come_in_whole_words_of_32_bits():
    """Three rows of int8 words under four columns: the rows count."""
    tensors = {
        "qweight": np.zeros((3, 4), np.int8),
        "qzeros": np.zeros((1, 2), np.int8),
        "scales": np.ones((1, 4), np.float16),
    }
    with pytest.raises(LayoutError, match="qweight has 3 rows; words of 32 bits wanted"):
        GPTQ.describe(tensors, {"bits": 4, "pack_dtype": "int8"}, "m")


def test_a_config_says_act_order_where_one_module_has_it():
    for orders in ((False, True), (True, False), (False, False)):
        packed = [
            PackedModule(
                f"layers.{i}.q", format_named("int4", 32), (64, 64), {**V1, "bits": 4, "group_size": 32, "desc_act": order}
            )
            for i, order in enumerate(orders)
        ]
        config = GPTQ.write_config(packed, []).entries["quantization_config"]
        assert config["desc_act"] == any(orders)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_one_row_of_words_has_32_bits_of_inputs(bits: int) -> None:
    tensors = foreign(np.random.default_rng(bits), bits, 16, 32 // bits, -1, "absent")
    assert GPTQ.describe(headers(tensors), {**V2, "bits": bits}, "m").shape == (16, 32 // bits)


def test_a_dynamic_rule_is_an_object_or_null() -> None:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    reader = read_config({**base, "dynamic": {"+:.*up_proj": None, "+:.*down_proj": {"bits": 8}, "-:.*gate_proj": None}}, "c")
    found = [reader.parameters(f"layers.0.{name}_proj") for name in ("up", "down", "gate")]
    assert [None if p is None else p["bits"] for p in found] == [4, 8, None]
    with pytest.raises(CheckpointError, match=r"c: dynamic rule '\+:x' is 8; wanted an object"):
        read_config({**base, "dynamic": {"+:x": 8}}, "c")


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        ({"format": "gptq_v2"}, "gptq_v2"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "gptq"),
        ({"format": "safetensors"}, None),
        ({}, None),
    ],
)
def test_an_older_config_calls_the_checkpoint_format_format(stated: dict, read: str | None) -> None:
    reader = read_config({"quant_method": "gptq", "bits": 4, "group_size": 32, **stated}, "c")
    assert reader.parameters("layers.0.up_proj").get("checkpoint_format") == read


def test_empty_zero_points_do_not_say_the_width() -> None:
    tensors = foreign(np.random.default_rng(1), 4, 32, 64, 32)
    with pytest.raises(LayoutError, match=r"m: bits None; allowed: 2, 3, 4"):
        GPTQ.describe(headers({**tensors, "qzeros": np.zeros((0, 4), np.int32)}), {**V2, "group_size": 32}, "m")


def test_a_group_may_be_one_input() -> None:
    tensors = foreign(np.random.default_rng(1), 4, 32, 32, 1)
    assert GPTQ.describe(headers(tensors), {**V2, "bits": 4, "group_size": 1}, "m").format == format_named("uint4", 1)
    with pytest.raises(LayoutError, match="m: group_size 0; allowed: 1 or more, or -1 for the whole row"):
        GPTQ.describe(headers(tensors), {**V2, "bits": 4, "group_size": 0}, "m")


def test_groups_that_no_size_makes_are_refused() -> None:
    tensors = foreign(np.random.default_rng(1), 4, 32, 64, 24)
    with pytest.raises(LayoutError, match=r"m\.scales has 3 groups; 64 inputs in groups of -1 are 1"):
        GPTQ.describe(headers(tensors), {**V2, "bits": 4}, "m")


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_v1_holds_no_other_width_beside_one_that_is_always_planar(bits):
    def module(name: str, width: int, label: str) -> PackedModule:
        return PackedModule(name, format_named(f"int{width}:g32"), (32, 32), {
            "bits": width, "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": label,
        })  # fmt: skip

    wide, narrow = module("a", bits, "gptq"), module("b", 4, "gptq")
    with pytest.raises(LayoutError, match=f"a has {bits} bits and b 4; beside 5, 6 or 7 bits v1 holds no other widths"):
        GPTQ.write_config([narrow, wide], [])
    for packed in ([wide, wide._replace(name="c")], [narrow], [module("a", bits, "gptq_p"), module("b", 4, "gptq_p")]):
        assert GPTQ.write_config(packed, []).entries["quantization_config"]["quant_method"] == "gptq"


@pytest.mark.parametrize("names", [("a.q",), ("a.q", "lm_head"), ("lm_head", "a.q"), ("a.lm_head", "b"), ("lm_head2", "b")])
@pytest.mark.parametrize("symmetric", [(True, True), (True, False), (False, True), (False, False)])
def test_a_config_says_lm_head_where_one_is_packed_and_sym_where_all_are(names: tuple, symmetric: tuple) -> None:
    packed = [
        PackedModule(name, format_named("int4", 32), (64, 64), {**V1, "bits": 4, "group_size": 32, "sym": sym})
        for name, sym in zip(names, symmetric, strict=False)
    ]
    config = GPTQ.write_config(packed, []).entries["quantization_config"]
    assert config["lm_head"] == any(n.split(".")[-1] == "lm_head" for n in names)
    assert config["sym"] == all(symmetric[: len(names)])


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 15), (1, 15), (8, 8), (7, 8), (8, 9), (0, 8), (1, 1)])
def test_v1_is_written_unless_it_cannot_store_a_zero_point(low: int, high: int, act_order: bool) -> None:
    """v1 stores a zero point less 1; symmetric weights have the middle code everywhere."""
    for first in (low, high):
        q = integer_tensor(4, (32, 64), 32, zeros=(high, high), act_order=act_order)
        q.parts["zeros"][0, 0], q.parts["zeros"][-1, -1] = first, low
        config = GPTQ.config(q)
        assert config["checkpoint_format"] == ("gptq_v2" if low == 0 else "gptq")
        assert config["sym"] == (low == high == 8)
        assert config["desc_act"] == act_order
        assert (config["bits"], config["group_size"], config["quant_method"]) == (4, 32, "gptq")
        assert GPTQ.unpack(GPTQ.pack(q, config), config) == q


def test_a_config_names_dense_modules_and_other_widths_but_no_head() -> None:
    """Readers take the head as dense by default; the first rule that matches decides."""
    one = {**V1, "group_size": 32, "bits": 4}
    packed = [PackedModule(name, format_named("int4", 32), (64, 64), one | more) for name, more in (
        ("a.q", {}), ("a.k", {"bits": 8}), ("a.v", {}), ("a.o", {"group_size": 64}),
    )]  # fmt: skip
    names = ("lm_head", "model.lm_head", "a.gate", "lm_head.gate")
    files = GPTQ.write_config(packed, [DenseTensor(f"{name}.weight", (8, 64)) for name in names])
    config = files.entries["quantization_config"]
    assert config["dynamic"] == {
        r"+:^a\.k$": {"bits": 8, "group_size": 32}, r"+:^a\.o$": {"bits": 4, "group_size": 64},
        r"-:^a\.gate$": {}, r"-:^lm_head\.gate$": {},
    }  # fmt: skip
    assert files.beside == {"quantize_config.json": config}
    reader = read_config({"quantization_config": config}, "config.json")
    assert [reader.parameters(name) is None for name in ("a.gate", "lm_head.gate", "a.q")] == [True, True, False]
    assert [reader.parameters(name)["bits"] for name in ("a.q", "a.k", "a.o")] == [4, 8, 4]
    assert "dynamic" not in GPTQ.write_config(packed[:1], []).entries["quantization_config"]
