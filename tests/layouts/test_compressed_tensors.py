"""compressed-tensors: dense and padded words, packed zero points, every scope of scales, both
directions, and refusals.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from halfbyte.errors import LayoutError
from halfbyte.formats import family_of, format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.common.integers import monotone
from halfbyte.layouts.compressed_tensors.read import CompressedTensorsConfig
from halfbyte.layouts.compressed_tensors.words import packings, words_in
from halfbyte.layouts.quant_config.writer import DenseTensor, PackedModule
from halfbyte.numerics.bits import pack, unpack
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.layout_tensors import field, halves, headers, integer_tensor, words
from support.random_tensors import random_tensor

LAYOUT = LAYOUTS["compressed-tensors"]
FLOAT8 = ml_dtypes.float8_e4m3fn


def group_args(bits: int, group: int, **more) -> dict:
    strategy = {"strategy": "channel", "group_size": None} if group == -1 else {"strategy": "group", "group_size": group}
    return {"format": "pack-quantized", "weights": {"num_bits": bits, "type": "int", **strategy, **more}}


def padded_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """floor(32 / bits) codes a word, one code at a time."""
    per = 32 // bits
    n, k = codes.shape
    out = np.zeros((n, -(-k // per)), np.int64)
    for r in range(n):
        for j in range(k):
            out[r, j // per] |= int(codes[r, j]) << (bits * (j % per))
    return out.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_random_dense_words_come_back(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for lead in ((), (3,)):
        for group in (32, -1):
            n, k = 40, 96
            groups = 3 if group == 32 else 1
            tensors = {
                "weight_packed": words(rng, *lead, n, k * bits // 32),
                "weight_scale": halves(rng, *lead, n, groups),
                "weight_shape": np.array([*lead, n, k]),
                "weight_zero_point": words(rng, *lead, -(-n * bits // 32), groups),
            }
            config = group_args(bits, group, symmetric=False)
            q = LAYOUT.unpack(tensors, config, "m")
            assert q.shape == (*lead, n, k)
            assert q.format.name == f"uint{bits}"
            assert same_tensors(LAYOUT.pack(q, config), tensors)
            assert LAYOUT.describe(headers(tensors, LAYOUT.peek), config) == (q.format, q.shape)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("k", [32, 50, 96])
def test_padded_words_of_older_versions_are_told_by_their_width(bits: int, k: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (48, k), dtype=np.uint8)
    zeros = rng.integers(0, 1 << bits, (48, 1), dtype=np.uint8)
    tensors = {
        "weight_packed": padded_words(codes, bits),
        "weight_scale": halves(rng, 48, 1),
        "weight_shape": np.array([48, k]),
        "weight_zero_point": np.ascontiguousarray(padded_words(zeros.T.copy(), bits).T),
    }
    q = LAYOUT.unpack(tensors, group_args(bits, -1), "m")
    assert np.array_equal(unpack(q.parts["codes"], bits, k), codes)
    assert np.array_equal(q.parts["zeros"], zeros)
    assert same_tensors(LAYOUT.pack(q, group_args(bits, -1)), tensors)
    fresh = LAYOUT.pack(QTensor(q.format, q.shape, q.parts), group_args(bits, -1))  # what is new is written dense
    assert fresh["weight_packed"].shape == (48, -(-k * bits // 32))
    again = LAYOUT.unpack(fresh, group_args(bits, -1))
    assert again == q


@pytest.mark.parametrize(("bits", "k"), [(3, 20), (3, 12), (5, 12), (6, 9), (7, 5)])
def test_where_both_packings_have_the_same_width_the_unused_bits_decide(bits: int, k: int) -> None:
    assert packings(words_in(k, bits, "dense"), k, bits) == ("dense", "padded")
    rng = np.random.default_rng(k)
    codes = rng.integers(0, 1 << bits, (64, k), dtype=np.uint8)
    scale, shape = halves(rng, 64, 1), np.array([64, k])
    dense = LAYOUT.pack(
        QTensor(format_named(f"int{bits}", -1), (64, k), {"codes": pack(codes, bits), "scales": scale}), group_args(bits, -1)
    )
    old = {"weight_packed": padded_words(codes, bits), "weight_scale": scale, "weight_shape": shape}
    assert dense["weight_packed"].shape == old["weight_packed"].shape
    assert not np.array_equal(dense["weight_packed"], old["weight_packed"])
    for tensors, packing in ((dense, "dense"), (old, "padded")):
        q = LAYOUT.unpack(tensors, group_args(bits, -1))
        assert q.details["packing"] == packing
        assert np.array_equal(unpack(q.parts["codes"], bits, k), codes)
        assert same_tensors(LAYOUT.pack(q, group_args(bits, -1)), tensors)


def test_whole_32s_are_never_ambiguous() -> None:
    for bits in (3, 5, 6, 7):
        for k in range(32, 4097, 32):
            for packing in ("dense", "padded"):
                assert packings(words_in(k, bits, packing), k, bits) == (packing,)


def test_bits_nobody_reads_are_kept() -> None:
    rng = np.random.default_rng(0)
    # The tail of the last word; the two top bits of every padded word as well, alone where only
    # padded words have the width.
    for bits, k, width in ((4, 100, 13), (3, 50, 5), (3, 64, 7)):
        tensors = {
            "weight_packed": words(rng, 37, width),
            "weight_scale": halves(rng, 37, 1),
            "weight_shape": np.array([37, k]),
            "weight_zero_point": words(rng, words_in(37, bits, "dense"), 1),
        }
        q = LAYOUT.unpack(tensors, group_args(bits, -1))
        q.validate()
        assert same_tensors(LAYOUT.pack(q, group_args(bits, -1)), tensors)


@given(
    bits=st.integers(1, 8),
    lead=st.sampled_from([(), (2,), (0,)]),
    n=st.integers(0, 37),
    k=st.integers(1, 100),
    group=st.sampled_from([16, 32, 100, -1]),
    asymmetric=st.booleans(),
    scale=st.sampled_from(["float16", "bfloat16", "float32"]),
    act_order=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_come_back(bits, lead, n, k, group, asymmetric, scale, act_order, seed) -> None:
    zeros = (0, (1 << bits) - 1) if asymmetric else None
    q = integer_tensor(bits, (*lead, n, k), group, seed, zeros=zeros, scale_dtype=scale, act_order=act_order)
    assume(not np.array_equal(q.parts.get("group_index"), monotone(k, group)))
    config = LAYOUT.config(q)
    tensors = LAYOUT.pack(q, config)
    assert LAYOUT.unpack(tensors, config) == q
    assert LAYOUT.describe(headers(tensors, LAYOUT.peek), config) == (q.format, q.shape)


@given(
    bits=st.sampled_from([4, 8]),
    shape=st.tuples(st.integers(0, 40), st.integers(1, 70)),
    scope=st.sampled_from([(-1, -1), (16, 32), (128, 128), (-1, 32)]),
    asymmetric=st.booleans(),
    word=st.sampled_from(["pack-quantized", "int-quantized", "naive-quantized"]),
    seed=st.integers(0, 1 << 16),
)
def test_tensor_and_block_scales_come_back(bits, shape, scope, asymmetric, word, seed) -> None:
    rows, group = scope
    # One block, or one row, is also a tensor or a channel: the config's strategy tells them apart,
    # a missing one cannot.
    assume(rows != -1 or group == -1 or shape[0] > 1)
    zeros = (0, (1 << bits) - 1) if asymmetric else None
    q = integer_tensor(bits, shape, group, seed, zeros=zeros, rows=rows)
    config = LAYOUT.config(q)
    config["format"] = word
    if scope == (-1, 32):
        config["weights"] = {"num_bits": bits, "strategy": "group", "group_size": 32}
    tensors = LAYOUT.pack(q, config)
    assert LAYOUT.unpack(tensors, config) == q


@pytest.mark.parametrize("columns", [1, 4])
def test_scales_without_a_strategy_are_of_channels_or_groups(columns: int) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "weight": rng.integers(-8, 8, (6, 128)).astype(np.int8),
        "weight_scale": rng.standard_normal((6, columns)).astype(np.float32),
    }
    config = {"format": "int-quantized", "weights": {"num_bits": 4, "type": "int"}}
    assert LAYOUT.describe(headers(tensors), config).format.group_size == (-1 if columns == 1 else 32)


@pytest.mark.parametrize("word", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scope", [(None, -1), (-1, -1), (128, 128), (None, 32)])
def test_float8_of_every_scope_comes_back(word: str, scope: tuple[int | None, int]) -> None:
    rows, group = scope
    rng = np.random.default_rng(0)
    for shape in ((130, 160), (0, 160), (1, 160)):
        fmt = format_named(word, group, scale_dtype="float32", **({} if rows is None else {"rows": rows}))
        specs = family_of(fmt).geometry(fmt, shape)
        parts = {
            "codes": rng.integers(0, 256, specs["codes"].shape, dtype=np.uint8),
            "scales": rng.standard_normal(specs["scales"].shape).astype(np.float32),
        }
        q = QTensor(fmt, shape, parts)
        config = LAYOUT.config(q)
        tensors = LAYOUT.pack(q, config)
        assert tensors["weight"].dtype == (FLOAT8 if word == "fp8_e4m3" else ml_dtypes.float8_e5m2)
        assert LAYOUT.unpack(tensors, config) == q


@pytest.mark.parametrize("word", ["nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("lead", [(), (3,), (0,)])
def test_fp4_and_microscaled_weights_come_back(word: str, lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    fmt = format_named(word, **({"global_scale": "divide"} if word == "nvfp4" else {}))
    for n, k in ((5, 64), (0, 64), (4, 96)):
        parts = {
            p: rng.integers(0, 256, spec.shape).astype(spec.dtype)
            for p, spec in family_of(fmt).geometry(fmt, (*lead, n, k)).items()
        }
        q = QTensor(fmt, (*lead, n, k), parts)
        config = LAYOUT.config(q)
        tensors = LAYOUT.pack(q, config)
        assert LAYOUT.unpack(tensors, config) == q
        assert LAYOUT.describe(headers(tensors), config) == (q.format, q.shape)
        if n:
            assert LAYOUT.describe(headers(tensors), {}) == (q.format, q.shape)  # the headers tell the kind without a config
        assert same_tensors(LAYOUT.pack(LAYOUT.unpack(tensors, config), config), tensors)


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu])
def test_case_07_exponent_bytes_are_exponents_under_either_dtype(dtype: type) -> None:
    tensors = {
        "weight_packed": np.full((1, 16), 0x22, np.uint8),  # code 2 is 1.0
        "weight_scale": np.full((1, 1), 122, np.uint8).view(dtype),
    }
    q = LAYOUT.unpack(tensors, {"format": "mxfp4-pack-quantized"})
    assert (q.dequantize() == 0.03125).all()
    assert (q.dequantize("float32", "producer") == 0.03125).all()
    assert same_tensors(LAYOUT.pack(q, {}), tensors)


def test_case_09_an_odd_number_of_inputs_is_refused() -> None:
    fmt = format_named("nvfp4", global_scale="divide")
    specs = family_of(fmt).geometry(fmt, (5, 3))
    q = QTensor(fmt, (5, 3), {p: np.zeros(s.shape, s.dtype) for p, s in specs.items()})
    with pytest.raises(LayoutError, match="3 codes of 4 bits are not whole bytes"):
        LAYOUT.pack(q, {})


def test_case_10_unsigned_zero_points_keep_the_upper_half() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (8, 2))
    parts = {"codes": pack(codes, 4), "scales": np.ones((8, 1), np.float16), "zeros": np.full((8, 1), 10, np.int16)}
    q = QTensor(format_named("uint4", -1), (8, 32), parts)
    for word in ("pack-quantized", "int-quantized"):
        config = {"format": word, "weights": {"num_bits": 4, "strategy": "channel"}}
        tensors = LAYOUT.pack(q, config)
        back = LAYOUT.unpack(tensors, config)
        assert back.dequantize()[0].tolist() == [c - 10.0 for c in range(16)] * 2
        assert back.dequantize()[0, 15] == 5
        assert len(set(back.dequantize()[0, :16].tolist())) == 16
    assert tensors["weight"].max() == 7  # signed: q = 7, zero point 2
    assert (tensors["weight_zero_point"] == 2).all()


def test_case_11_packed_zero_points_are_unpacked_when_n_is_no_multiple_of_8() -> None:
    q = integer_tensor(4, (12, 128), 32, zeros=(0, 15))
    config = LAYOUT.config(q)
    tensors = LAYOUT.pack(q, config)
    assert tensors["weight_zero_point"].shape == (2, 4)
    back = LAYOUT.unpack(tensors, config)
    assert back.parts["zeros"].shape == (12, 4)
    assert np.array_equal(back.parts["zeros"], q.parts["zeros"])
    for r in range(12):
        for g in range(4):
            assert back.parts["zeros"][r, g] == field(tensors["weight_zero_point"][:, g], 4, r)
    wrong = QTensor(q.format, q.shape, {**q.parts, "zeros": np.full_like(q.parts["zeros"], 8)})
    assert not np.array_equal(back.dequantize(), wrong.dequantize())


def test_an_unset_group_index_means_groups_in_order() -> None:
    q = integer_tensor(4, (8, 64), 32)
    plain = LAYOUT.pack(q, LAYOUT.config(q))
    for index in (np.full(64, -1, np.int32), np.where(np.arange(64) == 3, -1, 0).astype(np.int32), monotone(64, 32)):
        tensors = {**plain, "weight_g_idx": index}
        back = LAYOUT.unpack(tensors, LAYOUT.config(q))
        assert "group_index" not in back.parts
        assert back == q
        assert same_tensors(LAYOUT.pack(back, LAYOUT.config(q)), tensors)


def test_zero_points_beside_symmetric_or_float_weights_are_kept() -> None:
    q = integer_tensor(8, (6, 32), -1)
    tensors = LAYOUT.pack(q, {"format": "int-quantized"}) | {"weight_zero_point": np.zeros((6, 1), np.int8)}
    back = LAYOUT.unpack(tensors, {})
    assert back.format.name == "uint8"
    assert np.array_equal(back.dequantize(), q.dequantize())
    assert same_tensors(LAYOUT.pack(back, {}), tensors)
    floats = {
        "weight": np.zeros((6, 32), FLOAT8),
        "weight_scale": np.ones((6, 1), np.float32),
        "weight_zero_point": np.zeros((6, 1), FLOAT8),
    }
    assert same_tensors(LAYOUT.pack(LAYOUT.unpack(floats, {}), {}), floats)
    floats["weight_zero_point"] = np.ones((6, 1), FLOAT8)
    with pytest.raises(LayoutError, match=r"weight_zero_point is float8_e4m3fn and not zero; a float weight has no zero point"):
        LAYOUT.unpack(floats, {})


def test_a_global_scale_that_multiplies_becomes_its_reciprocal_only_when_that_is_exact() -> None:
    fmt = format_named("nvfp4", global_scale="multiply")
    parts = {p: np.full(s.shape, 0x31, s.dtype) for p, s in family_of(fmt).geometry(fmt, (2, 32)).items()}
    q = QTensor(fmt, (2, 32), {**parts, "global_scale": np.array(2.0**-9, np.float32)})
    tensors = LAYOUT.pack(q, {})
    assert tensors["weight_global_scale"].tolist() == [512.0]
    assert np.array_equal(LAYOUT.unpack(tensors, {}).dequantize(), q.dequantize())
    with pytest.raises(
        LayoutError, match="its global scale multiplies, here it divides, and a reciprocal is exact only of a power of two"
    ):
        LAYOUT.pack(QTensor(fmt, (2, 32), {**parts, "global_scale": np.array(3e-4, np.float32)}), {})


def broken(changes: dict) -> tuple[dict[str, np.ndarray], dict]:
    tensors: dict = {
        "weight_packed": np.zeros((16, 16), np.int32),
        "weight_scale": np.ones((16, 4), np.float16),
        "weight_shape": np.array([16, 128]),
        "weight_zero_point": np.zeros((2, 4), np.int32),
    }
    config = {"num_bits": 4, "strategy": "group", "group_size": 32}
    for key, value in changes.items():
        (config if key in ("num_bits", "strategy", "group_size", "block_structure", "format") else tensors)[key] = value
    return {s: t for s, t in tensors.items() if t is not None}, config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, r"down\.weight_scale is missing; the module has weight_packed, weight_shape, weight_zero_point"),
        ({"weight_packed": np.zeros((16, 16), np.int64)}, r"down\.weight_packed is int64; allowed: int32, uint8"),
        ({"weight_packed": np.zeros(16, np.int32)}, r"down\.weight_packed has shape \[16\]; a weight has 2 or 3 axes"),
        ({"weight_packed": np.zeros((16, 15), np.int32)}, r"down\.weight_packed has 15 words a row; 128 codes of 4 bits take 16"),
        ({"num_bits": 3}, r"has 16 words a row; 128 codes of 3 bits take 12 \(13 before version 0\.19\)"),
        ({"format": "marlin-24"}, r"down: format 'marlin-24'; read: mixed-precision, pack-quantized, int-quantized"),
        ({"num_bits": None}, r"down: num_bits None; packed words hold 1 to 8"),
        ({"weight_shape": np.array([15, 128])}, r"down\.weight_shape is \[15, 128\]; weight_packed has 16 rows"),
        ({"weight_shape": np.array([128])}, r"down\.weight_shape is \[128\]"),
        ({"weight_scale": np.ones((16, 3), np.float16)}, r"down\.weight_scale has shape \[16, 3\]; wanted \[16, 4\]"),
        ({"weight_scale": np.ones((16, 4), np.int8)}, r"down\.weight_scale is int8; allowed"),
        (
            {"weight_zero_point": np.zeros((16, 4), np.int32)},
            r"weight_zero_point has shape \[16, 4\]; wanted \[2, 4\], 16 codes of 4 bits",
        ),
        (
            {"weight_zero_point": np.zeros((3, 4), np.int8)},
            r"weight_zero_point is int8 \[3, 4\]; wanted one signed integer a scale",
        ),
        ({"weight_g_idx": np.full(128, 4, np.int32)}, r"down\.weight_g_idx has 4 at input 0; there are 4 groups, 0 to 3"),
        ({"weight_g_idx": np.zeros(64, np.int32)}, r"down\.weight_g_idx has shape \[64\]; wanted \[128\] for 128 inputs"),
        ({"weight_packed": None, "weight": np.zeros((16, 128), np.float16)}, r"down\.weight is float16; allowed: int8, float8"),
        (
            {"weight_packed": None, "weight": np.full((16, 128), 9, np.int8)},
            r"down\.weight runs from 9 to 9; 4 bits hold -8 to 7",
        ),
        ({"weight_packed": np.zeros((16, 64), np.uint8)}, r"down\.weight_scale is float16; allowed: float8_e4m3fn"),
        (
            {"weight_packed": np.zeros((16, 60), np.uint8), "weight_scale": np.zeros((16, 7), FLOAT8)},
            r"down\.weight_scale has 7 scales a row; 120 inputs in groups of 16 take 8",
        ),
        (
            {"weight_packed": np.zeros((16, 64), np.uint8), "weight_scale": np.zeros((16, 8), FLOAT8)},
            r"down\.weight_global_scale is missing; the module has weight_packed",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_their_sizes(changes: dict, message: str) -> None:
    tensors, config = broken(changes)
    with pytest.raises(LayoutError, match=message):
        LAYOUT.unpack(tensors, config, "down")


@pytest.mark.parametrize(
    ("q", "config", "message"),
    [
        (integer_tensor(4, (8, 64), 32, zeros=(16, 16)), {}, "zero points lie outside 0 to 15"),
        (
            integer_tensor(4, (8, 64), 32),
            {"format": "nvfp4-pack-quantized"},
            "this weight is written as pack-quantized or int-quantized",
        ),
        (integer_tensor(4, (8, 64), 32), {"num_bits": 8}, "the config asks for num_bits 8; this weight has 4"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(q: QTensor, config: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        LAYOUT.pack(q, config)


@pytest.mark.parametrize("word", ["nf4", "affine4", "mxint8", "fp4"])
def test_other_codecs_are_refused(word: str) -> None:
    fmt = format_named(word)
    specs = family_of(fmt).geometry(fmt, (4, 128))
    q = QTensor(fmt, (4, 128), {p: np.zeros(s.shape, s.dtype) for p, s in specs.items()})
    with pytest.raises(LayoutError, match="the layout holds int, uint, fp8, nvfp4, mxfp4, mxfp6_e2m3 and mxfp8"):
        LAYOUT.pack(q, {})


@pytest.mark.parametrize(("word", "rows"), [("int8:g4", -1), ("uint4:g8", -1), ("fp8_e4m3:channel", 2), ("fp8_e4m3:g16", -1)])
@pytest.mark.parametrize("shape", [(5, 64), (2, 6, 64), (4, 0)], ids=str)
def test_blocks_of_all_rows_or_all_inputs_are_read_back(word: str, rows: int, shape: tuple[int, ...]) -> None:
    q = random_tensor(format_named(word, rows=rows), shape, 3)
    config = LAYOUT.config(q)
    back = LAYOUT.unpack(LAYOUT.pack(q, config), config)
    assert back.shape == q.shape
    assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True)
    assert back.parts["scales"].tobytes() == q.parts["scales"].tobytes()


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_code_below_or_above_its_width_is_refused(bits: int) -> None:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    tensors, config = broken({"weight_packed": None, "weight_zero_point": None, "weight": np.full((16, 128), low, np.int8)})
    config["num_bits"] = bits
    tensors["weight"][3, 5] = high
    q = LAYOUT.unpack(tensors, config, "down")
    assert np.array_equal(unpack(q.parts["codes"], bits, 128).astype(int) + low, tensors["weight"])
    for code in (low - 1, high + 1) if bits < 8 else ():
        tensors["weight"][3, 5] = code
        said = rf"down\.weight runs from {min(code, low)} to {max(code, low)}; {bits} bits hold {low} to {high}$"
        with pytest.raises(LayoutError, match=said):
            LAYOUT.unpack(tensors, config, "down")


@pytest.mark.parametrize("rows", [-1, 1, 2, 5])
@pytest.mark.parametrize("size", [-1, 1, 16, 64])
def test_a_tile_is_written_with_its_numbers_and_the_whole_as_a_tensor(rows: int, size: int) -> None:
    q = random_tensor(format_named("fp8_e4m3:channel", rows=5).with_(group_rows=rows, group_size=size), (5, 64), 3)
    weights = LAYOUT.config(q)["weights"]
    assert weights["group_size"] is None
    if (rows, size) == (-1, -1):
        assert weights["strategy"] == "tensor"
        assert "block_structure" not in weights
    else:
        assert weights["strategy"] == "block"
        assert weights["block_structure"] == [5 if rows == -1 else rows, 64 if size == -1 else size]


@pytest.mark.parametrize(("zero", "fits"), [(32767 - 8, True), (-(32767 - 8), True), (32767 - 7, False), (-(32767 - 7), False)])
def test_zero_points_take_16_bits(zero: int, fits: bool) -> None:
    tensors, config = broken({"weight_packed": None, "weight": np.zeros((16, 128), np.int8)})
    tensors["weight_zero_point"] = np.full((16, 4), zero, np.int32)
    if fits:
        assert np.array_equal(LAYOUT.unpack(tensors, config, "down").parts["zeros"], np.full((16, 4), zero + 8))
    else:
        with pytest.raises(LayoutError, match=rf"runs from {zero} to {zero}; zero points take 16 bits"):
            LAYOUT.unpack(tensors, config, "down")


@pytest.mark.parametrize(
    "names",
    [
        ("a.q_proj",),
        ("a.q_proj", "a.k_proj"),
        ("a.embed_tokens",),
        ("a.q_proj", "a.embed_tokens"),
        ("a.wte", "a.k_proj", "a.o_proj"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sets", [1, 2])
def test_a_written_config_gives_each_module_its_arguments(names: tuple[str, ...], sets: int) -> None:
    args = [group_args(4, 32), group_args(8, 64)]
    packed = [PackedModule(n, format_named("int4:g32"), (8, 64), args[i % sets]) for i, n in enumerate(names)]
    dense = [DenseTensor("a.gate.weight", (4, 64)), DenseTensor("a.norm.weight", (64,))]
    written = LAYOUT.write_config(packed, dense).entries["quantization_config"]
    groups = list(written["config_groups"].values())
    if sets == 1 or len(names) == 1:
        embeddings = any(n.endswith(("embed_tokens", "wte")) for n in names)
        assert [g["targets"] for g in groups] == [list(names) if embeddings else ["Linear"]]
    else:  # each group names its modules
        assert [g["targets"] for g in groups] == [list(names[0::2]), list(names[1::2])]
    reader = CompressedTensorsConfig(written, "config.json")
    for module in packed:
        found = reader.parameters(module.name)
        assert found is not None
        assert found["num_bits"] == module.params["weights"]["num_bits"]
    assert reader.parameters("a.gate") is None


@pytest.mark.parametrize("structure", [[0, 16], [8, 0], [-8, 16], [8.0, 16], ["8", 16], [8], [8, 16, 1], 8, None])
def test_a_block_structure_is_two_positive_sizes(structure: object) -> None:
    tensors = {"weight": np.zeros((16, 128), FLOAT8), "weight_scale": np.ones((2, 8), np.float32)}
    config = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
    with pytest.raises(LayoutError, match="wanted two positive sizes, rows and columns"):
        LAYOUT.unpack(tensors, config, "down")


@pytest.mark.parametrize(("bits", "k"), [(3, 20), (5, 12), (6, 9), (7, 5)])
def test_words_whose_unused_bits_are_clear_in_both_packings_are_dense(bits: int, k: int) -> None:
    tensors = {
        "weight_packed": np.zeros((4, words_in(k, bits, "dense")), np.int32), "weight_scale": np.ones((4, 1), np.float16),
        "weight_shape": np.array([4, k]),
    }  # fmt: skip
    assert LAYOUT.unpack(tensors, group_args(bits, -1)).details["packing"] == "dense"


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("zero", [-32751, 32767])
def test_the_least_and_the_largest_zero_point_that_is_held(dtype: type, zero: int) -> None:
    """Canonical zero points are int16: those of the file, at most 32767 − 8 in magnitude, plus 8."""
    config = {"format": "int-quantized", "weights": {"num_bits": 4, "strategy": "channel", "symmetric": False}}
    tensors = {
        "weight": np.zeros((2, 32), np.int8),
        "weight_scale": np.ones((2, 1), np.float16),
        "weight_zero_point": np.full((2, 1), zero - 8, dtype),
    }
    q = LAYOUT.unpack(tensors, config)
    assert q.parts["zeros"].tolist() == [[zero], [zero]]
    assert same_tensors(LAYOUT.pack(q, config), tensors)
    with pytest.raises(LayoutError, match="zero points take 16 bits"):
        LAYOUT.unpack({**tensors, "weight_zero_point": tensors["weight_zero_point"] + np.sign(zero, dtype=dtype)}, config)


@pytest.mark.parametrize(("n", "nbytes", "scales", "codec"), [
    (4, 0, 0, "mxfp4"), (4, 16, 1, "mxfp4"), (4, 24, 1, "mxfp6_e2m3"), (4, 48, 2, "mxfp6_e2m3"), (0, 32, 2, "mxfp4"),
    (4, 15, 1, None), (4, 17, 1, None), (4, 20, 1, None), (4, 32, 1, None), (4, 16, 0, None),
])  # fmt: skip
def test_bytes_and_scales_of_a_row_tell_mxfp4_from_mxfp6(n: int, nbytes: int, scales: int, codec: str | None) -> None:
    tensors = {"weight_packed": np.zeros((n, nbytes), np.uint8), "weight_scale": np.zeros((n, scales), np.uint8)}
    if codec is None:
        with pytest.raises(LayoutError, match=rf"weight_packed has {nbytes} bytes and {scales} scales|has {scales} scales a row"):
            LAYOUT.describe(tensors, {}, "m")
    else:
        fmt, shape = LAYOUT.describe(tensors, {}, "m")
        assert (fmt.name, shape) == (codec, (n, 8 * nbytes // fmt.bits))


@pytest.mark.parametrize(("target", "module", "meant"), [
    ("Linear", "a.q_proj", True), ("linear", "a.q_proj", False), ("q_proj", "a.q_proj", True), ("a.q_proj", "a.q_proj", True),
    ("A.q_proj", "a.q_proj", False), ("A.q_proj", "A.q_proj", True), ("re:.*q_proj", "a.q_proj", True),
    ("re:.*k_proj", "a.q_proj", False),
])  # fmt: skip
def test_a_target_is_a_class_where_it_begins_with_a_capital_and_has_no_dot(target: str, module: str, meant: bool) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": [target], "weights": weights}}}
    assert (CompressedTensorsConfig(config, "config.json").parameters(module) is not None) == meant


@pytest.mark.parametrize("strategy", ["group", "channel", None])
@pytest.mark.parametrize("size", [None, -1, 16, 32])
@pytest.mark.parametrize("groups", [1, 3])
def test_without_a_shape_the_inputs_are_those_of_the_groups_or_of_the_words(
    strategy: str | None, size: int | None, groups: int
) -> None:
    """The last word of a row may have room for codes that are not there."""
    args = {"num_bits": 5, "strategy": strategy, "group_size": size}
    grouped = strategy == "group" and size in (16, 32)
    k = groups * size if grouped else 64
    for lead in ((), (2,)):
        words, scale = np.zeros((*lead, 8, -(-k * 5 // 32)), np.int32), np.ones((*lead, 8, groups), np.float16)
        tensors = {"weight_packed": words, "weight_scale": scale}
        if groups == 3 and not grouped and (strategy == "channel" or size in (16, 32)):
            with pytest.raises(LayoutError, match="weight_scale"):
                LAYOUT.describe(tensors, args, "m")
            continue
        fmt, shape = LAYOUT.describe(tensors, args, "m")
        assert shape == (*lead, 8, k)
        if groups == 1 and strategy != "group":
            assert fmt.group_size == -1


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("dtype", ["int8", "int32", "float16"])
def test_zero_points_of_float_weights_are_0(value: int, dtype: str) -> None:
    q = random_tensor(format_named("fp8_e4m3", -1), (4, 8), 1)
    config = LAYOUT.config(q)
    tensors = LAYOUT.pack(q, config)
    zeros = np.zeros((4, 1), dtype)
    zeros[1, 0] = value
    tensors["weight_zero_point"] = zeros
    if value:
        with pytest.raises(LayoutError, match=f"weight_zero_point is {dtype} and not zero; a float weight has no zero point"):
            LAYOUT.unpack(tensors, config, "m")
    else:
        assert same_tensors(LAYOUT.pack(LAYOUT.unpack(tensors, config, "m"), config), tensors)


@pytest.mark.parametrize("low", [-(32767 - 8), -(32767 - 7), 0])
@pytest.mark.parametrize("high", [32767 - 8, 32767 - 7, 1])
def test_the_least_and_the_largest_of_many_zero_points_take_16_bits(low: int, high: int) -> None:
    tensors, config = broken({"weight_packed": None, "weight": np.zeros((16, 128), np.int8)})
    zeros = np.zeros((16, 4), np.int32)
    zeros[2, 1], zeros[5, 3] = low, high
    tensors["weight_zero_point"] = zeros
    if max(-low, high) > 32767 - 8:
        with pytest.raises(LayoutError, match=f"weight_zero_point runs from {min(low, 0)} to {high}; zero points take 16 bits"):
            LAYOUT.unpack(tensors, config, "m")
    else:
        assert np.array_equal(LAYOUT.unpack(tensors, config, "m").parts["zeros"], zeros + 8)


@pytest.mark.parametrize("unset", [[], [3], [0, 127], list(range(128))])
def test_an_index_with_an_unset_input_is_no_index(unset: list[int]) -> None:
    tensors, config = broken({})
    index = (np.arange(128, dtype=np.int32) // 32)[::-1].copy()
    index[unset] = -1
    q = LAYOUT.unpack(tensors | {"weight_g_idx": index}, config, "m")
    assert ("group_index" in q.parts) == (not unset)
    assert any("g_idx values" in key for key in q.details) == (0 < len(unset) < 128)
    assert np.array_equal(LAYOUT.pack(q, config)["weight_g_idx"], index)


@pytest.mark.parametrize("shape", [(8, 64), (3, 8, 64), (2, 3, 8, 64)])
@pytest.mark.parametrize("word", ["int4:g32", "uint4:g32", "nvfp4", "mxfp4", "mxfp8_e4m3", "fp8_e4m3"])
def test_the_layout_of_stacks_holds_stacks_of_packed_codes(shape: tuple[int, ...], word: str) -> None:
    stack = LAYOUTS["compressed-tensors-stack"]
    fmt = format_named(word, **({"global_scale": "divide"} if word == "nvfp4" else {}))
    assert (stack.misfit(fmt, shape) == "") == (len(shape) == 3 and "8" not in word)
    for dtype in (np.int32, np.uint8, np.int8, np.float16):
        tensors = {"packed": np.zeros(shape, dtype), "scale": np.ones((*shape[:-1], 2), np.float16)}
        assert stack.accepts(tensors) == (len(shape) == 3 and dtype in (np.int32, np.uint8))


@pytest.mark.parametrize(("word", "options", "shape", "said", "scale"), [
    ("mxfp4", {}, (4, 64), {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}, (4, 2)),
    ("nvfp4", {"global_scale": "divide"}, (4, 64),
     {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}, (4, 4)),
    ("int4:g32", {}, (4, 64), {"strategy": "group", "group_size": 32}, (4, 2)),
    ("int4:channel", {}, (4, 64), {"strategy": "channel", "group_size": None}, (4, 1)),
    ("fp8_e4m3", {"rows": -1}, (1, 64), {"strategy": "tensor", "group_size": None}, (1,)),
    ("fp8_e4m3", {"rows": -1}, (2, 4, 64), {"strategy": "tensor", "group_size": None}, (2, 1, 1)),
    *(("int8:g32", {"rows": -1}, (n, 64), {"strategy": "block", "group_size": None, "block_structure": [n, 32]}, (1, 2))
      for n in (1, 2, 5)),
    ("int8:channel", {"rows": 4}, (8, 60), {"strategy": "block", "group_size": None, "block_structure": [4, 60]}, (2, 1)),
])  # fmt: skip
def test_a_config_says_the_scope_and_the_dtype_of_scales(
    word: str, options: dict, shape: tuple, said: dict, scale: tuple
) -> None:
    q = random_tensor(format_named(word, **options), shape, 1)
    config = LAYOUT.config(q)
    weights = {
        "num_bits": q.format.bits,
        "type": "int" if word.startswith("int") else "float",
        "symmetric": True,
        "dynamic": False,
    }
    assert config["weights"] == weights | said
    tensors = LAYOUT.pack(q, config)
    assert tensors["weight_scale"].shape == scale
    assert np.array_equal(LAYOUT.unpack(tensors, config).dequantize(), q.dequantize(), equal_nan=True)
