"""ModelOpt's eight kinds: random bytes, drawn shapes, independent readings of the bits, scale
shapes, refusals.
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
from halfbyte.layouts.modelopt.base import KINDS
from halfbyte.numerics.bits import unpack
from halfbyte.numerics.exact import DTYPES
from halfbyte.tensor.qtensor import QTensor
from support.layout_tensors import headers
from support.random_tensors import check_return, check_round_trip, finite_tensor, random_array, random_tensor

MODELOPT = LAYOUTS["modelopt"]
E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16


def foreign(kind: str, rng: np.random.Generator, lead: tuple[int, ...] = (), n: int = 6, k: int = 256) -> tuple[dict, dict]:
    """(tensors, config) of random bytes."""
    r = lambda dtype, *shape: random_array(rng, dtype, *lead, *shape)  # noqa: E731
    if kind == "nvfp4":
        return {"weight": r(np.uint8, n, k // 2), "weight_scale": r(E4M3, n, k // 16), "weight_scale_2": r(np.float32)}, {
            "quant_algo": "NVFP4"
        }
    if kind in ("mxfp4", "mxfp4 typed"):
        return {"weight": r(np.uint8, n, k // 2), "weight_scale": r(E8M0 if "typed" in kind else np.uint8, n, k // 32)}, {
            "quant_algo": "mxfp4"
        }
    if kind == "mxfp8":
        return {"weight": r(E4M3, n, k), "weight_scale": r(np.uint8, n, k // 32)}, {"quant_algo": "MXFP8"}
    if kind == "int4":
        return {"weight": r(np.uint8, n // 2, k), "weight_scale": r(BF16, n, k // 128)}, {
            "quant_algo": "W4A16_AWQ",
            "group_size": 128,
        }
    if kind == "int4 w4a8":
        tensors = {
            "weight": r(np.uint8, n // 2, k),
            "weight_scale": r(np.float32, n, k // 128),
            "weight_scale_2": np.array(0.3, np.float32),
        }
        return tensors, {"quant_algo": "W4A8_AWQ", "group_size": 128}
    if kind == "fp8 tensor":
        return {"weight": r(E4M3, n, k), "weight_scale": r(np.float32)}, {"quant_algo": "FP8"}
    if kind == "fp8 row":
        return {"weight": r(E4M3, n, k), "weight_scale": r(np.float32, n)}, {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    if kind == "fp8 tile":
        return {"weight": r(E4M3, n, k), "weight_scale": r(np.float32, -(-n // 128), k // 128)}, {"quant_algo": "FP8_PB_WO"}
    if kind == "int8":
        return {"weight": r(np.int8, n, k), "weight_scale": r(np.float32, n)}, {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
    if kind == "INT4QTensor":
        return {"weight": r(np.uint8, n, k // 2), "weight_scale_inv": random_array(rng, BF16, n * k // 128, 1)}, {
            "group_size": 128
        }
    assert kind == "NF4QTensor"
    doubles = -(-n * k // 64 // 256)
    tensors = {
        "weight": random_array(rng, np.uint8, n * k // 2),
        "weight_scale": random_array(rng, np.int8, doubles, 256),
        "weight_double_scale": random_array(rng, BF16, doubles),
        "weight_scale_zeros": random_array(rng, BF16),
    }
    return tensors, {"shape": [n, k], "group_size": 64}


ALL = (
    "nvfp4",
    "mxfp4",
    "mxfp4 typed",
    "mxfp8",
    "int4",
    "int4 w4a8",
    "fp8 tensor",
    "fp8 row",
    "fp8 tile",
    "int8",
    "INT4QTensor",
    "NF4QTensor",
)
STACKED = ("nvfp4", "mxfp4", "mxfp8", "int4", "fp8 tensor", "fp8 row", "fp8 tile", "int8")


@pytest.mark.parametrize("kind", ALL)
def test_random_bytes_come_back(kind: str) -> None:
    for seed, n in enumerate((6, 130, 0)):
        tensors, config = foreign(kind, np.random.default_rng(seed), n=n)
        q = check_round_trip(MODELOPT, tensors, config)
        assert q.shape == (n, 256)
        assert sum(k.recognises(tensors) for k in KINDS) == 1


@pytest.mark.parametrize("lead", [(3,), (0,)], ids=str)
@pytest.mark.parametrize("kind", STACKED)
def test_random_stacks_of_experts_come_back(kind: str, lead: tuple[int, ...]) -> None:
    tensors, config = foreign(kind, np.random.default_rng(4), lead)
    assert check_round_trip(MODELOPT, tensors, config).shape == (*lead, 6, 256)


WORDS = {
    "nvfp4": (format_named("nvfp4"), 16),
    "mxfp4": (format_named("mxfp4"), 32),
    "mxfp8": (format_named("mxfp8_e4m3"), 32),
    "int4": (format_named("int4", 32, scale_dtype="bfloat16"), 32),
    "int4 row": (format_named("int4", -1, scale_dtype="float16"), 16),
    "int4 inverse": (format_named("int4", 32, scale_dtype="bfloat16", inverse=True), 32),
    "int8": (format_named("int8", -1, scale_dtype="float32"), 5),
    "fp8": (format_named("fp8_e4m3"), 7),
    "fp8 tensor": (format_named("fp8_e4m3", rows=-1), 7),
    "fp8 tile": (format_named("fp8_e4m3", 128, rows=128), 100),
}


@given(
    word=st.sampled_from(sorted(WORDS)), lead=st.sampled_from([(), (0,), (3,)]), n=st.integers(0, 5), units=st.integers(0, 3),
    seed=st.integers(0, 1 << 16),
)  # fmt: skip
def test_drawn_tensors_come_back(word, lead, n, units, seed) -> None:
    fmt, unit = WORDS[word]
    rows = 2 * n if word.startswith("int4") else n
    check_return(MODELOPT, random_tensor(fmt, (*lead, rows, unit * units), seed))


@given(n=st.integers(0, 9), k=st.integers(1, 70), group=st.sampled_from([16, 64]), seed=st.integers(0, 1 << 16))
def test_drawn_nf4_tensors_come_back_with_partial_blocks(n, k, group, seed) -> None:
    q = random_tensor(format_named("nf4_modelopt", group, nested=True), (n, k), seed)
    parts = {
        **q.parts,
        "nested_map": np.arange(-128, 128, dtype=np.float32),
        "nested_absmax": np.full(q.parts["nested_absmax"].shape, 147, np.float32),
        "nested_offset": np.array(0.0859375, np.float32),
    }
    check_return(MODELOPT, QTensor(q.format, q.shape, parts))


def test_the_int4_export_pairs_output_rows_in_twos_complement() -> None:
    tensors, config = foreign("int4", np.random.default_rng(0), n=4)
    q = MODELOPT.unpack(tensors, config)
    codes = unpack(q.parts["codes"], 4, 256)
    for i, j in np.ndindex(2, 256):
        byte = int(tensors["weight"][i, j])
        for half, nibble in enumerate((byte & 15, byte >> 4)):
            signed = nibble - 16 if nibble > 7 else nibble
            assert int(codes[2 * i + half, j]) - 8 == signed


def test_the_qtensors_put_the_even_element_high() -> None:
    tensors, config = foreign("INT4QTensor", np.random.default_rng(0), n=2)
    codes = unpack(MODELOPT.unpack(tensors, config).parts["codes"], 4, 256)
    assert np.array_equal(codes[:, 0::2], tensors["weight"] >> 4)
    assert np.array_equal(codes[:, 1::2], tensors["weight"] & 15)
    tensors, config = foreign("NF4QTensor", np.random.default_rng(0), n=2)
    flat = unpack(MODELOPT.unpack(tensors, config).parts["codes"], 4, 256).reshape(-1)
    assert np.array_equal(flat[0::2], tensors["weight"] >> 4)


def test_nf4_padding_of_codes_and_scales_is_kept() -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "weight": random_array(rng, np.uint8, 64),  # 128 codes for 5 x 21 = 105 weights in two blocks of 64
        "weight_scale": random_array(rng, np.int8, 1, 256),
        "weight_double_scale": np.array([0xFFFF], np.uint16).view(BF16),  # a NaN whose bits no cast would make
        "weight_scale_zeros": np.array(0.25, BF16),
    }
    q = check_round_trip(MODELOPT, tensors, {"shape": [5, 21]})
    assert q.format.grouping == "flat"


def test_nf4_rows_of_scales_beyond_the_last_block_are_kept() -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "weight": random_array(rng, np.uint8, 64), "weight_scale": random_array(rng, np.int8, 3, 256),
        "weight_double_scale": np.array([0.5, 2.0, 3.0], BF16), "weight_scale_zeros": np.array(0.25, BF16),
    }  # fmt: skip
    check_round_trip(MODELOPT, tensors, {"shape": [5, 21]})


def test_scales_that_divide_and_scales_that_multiply() -> None:
    weight = np.full((2, 16), 0x9A, np.uint8)  # codes 9 and 10: 1 and 2
    divides = MODELOPT.unpack({"weight": weight, "weight_scale_inv": np.array([[4.0], [4.0]], BF16)}, {"group_size": 32})
    assert divides.dequantize()[0, :2].tolist() == [0.25, 0.5]
    packed = np.full((1, 32), 0x21, np.uint8)
    multiplies = MODELOPT.unpack({"weight": packed, "weight_scale": np.array([[4.0], [4.0]], BF16)}, {"group_size": 32})
    assert multiplies.dequantize()[:, 0].tolist() == [4.0, 8.0]


def test_a_shared_global_scale_serves_a_stack_and_keeps_its_shape() -> None:
    tensors, config = foreign("nvfp4", np.random.default_rng(0), (3,))
    for shape in ((), (1,), (3, 1, 1)):
        scale = np.broadcast_to(np.float32(0.5), shape).copy()
        q = check_round_trip(MODELOPT, {**tensors, "weight_scale_2": scale}, config)
        assert q.parts["global_scale"].tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(LayoutError, match=r"m\.weight_scale_2 has shape \[2\]; wanted one factor, or one for each of \[3\]"):
        MODELOPT.describe({**tensors, "weight_scale_2": np.zeros(2, np.float32)}, config, "m")


def test_the_shapes_of_a_float8_scale_are_kept() -> None:
    tensors, config = foreign("fp8 tensor", np.random.default_rng(0))
    for shape in ((), (1,), (1, 1)):
        check_round_trip(MODELOPT, {**tensors, "weight_scale": np.ones(shape, np.float32)}, config)
    tensors, config = foreign("fp8 tile", np.random.default_rng(0), n=200)
    check_round_trip(MODELOPT, {**tensors, "weight_scale": tensors["weight_scale"].reshape(2, 1, 2, 1)}, config)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize(("n", "k", "block"), [(300, 200, 128), (100, 384, 128), (384, 100, 128), (129, 128, 128), (200, 64, 64)])
def test_tiles_of_a_float8_scale_are_found_with_and_without_axes_of_1(lead: tuple[int, ...], n: int, k: int, block: int) -> None:
    rows, columns = -(-n // block), -(-k // block)
    config = {"quant_algo": "FP8_PB_WO", "group_size": block}
    assert rows != columns
    scale = (np.arange(int(np.prod(lead)) * rows * columns, dtype=np.float32) + 1).reshape(*lead, rows, columns)
    weight = np.full((*lead, n, k), 0x38, np.uint8).view(E4M3)  # ones
    want = scale.repeat(block, axis=-2).repeat(block, axis=-1)[..., :n, :k]
    for shape in (scale.shape, (*lead, rows, 1, columns, 1)):
        tensors = {"weight": weight, "weight_scale": scale.reshape(shape)}
        q = check_round_trip(MODELOPT, tensors, config)
        assert np.array_equal(q.dequantize(), want)
        assert q.details == ({} if shape == scale.shape else {"weight_scale_shape": list(shape)})
    swapped = scale.reshape(*lead, columns, rows)
    for shape in (swapped.shape, (*lead, columns, 1, rows, 1)):
        with pytest.raises(LayoutError, match="weight_scale has shape"):
            MODELOPT.describe({"weight": weight, "weight_scale": swapped.reshape(shape)}, config, "m")


@pytest.mark.parametrize(("kind", "scale"), [("nvfp4", 0x7F), ("nvfp4", 0xFF)])
def test_case_08_nan_scale_bytes_are_read_as_nan_and_kept(kind: str, scale: int) -> None:
    tensors, config = foreign(kind, np.random.default_rng(0), n=1, k=32)
    tensors["weight_scale"] = np.array([[scale, 0x38]], np.uint8).view(E4M3)
    tensors["weight_scale_2"] = np.array(1.0, np.float32)
    q = check_round_trip(MODELOPT, tensors, config)
    for arithmetic in ("exact", "producer"):
        value = q.dequantize("float32", arithmetic)
        assert np.isnan(value[0, :16]).all()
        assert np.isfinite(value[0, 16:]).all()


def test_case_08_a_zero_block_reads_as_exact_zero() -> None:
    for byte in (0, 1, 56):  # whatever scale a writer gives a block of zeros
        tensors = {
            "weight": np.zeros((1, 16), np.uint8),
            "weight_scale": np.full((1, 2), byte, np.uint8).view(E4M3),
            "weight_scale_2": np.array(1e-5, np.float32),
        }
        assert not MODELOPT.unpack(tensors, {}).dequantize().any()


def test_case_09_an_odd_k_is_refused_not_run_together() -> None:
    q = random_tensor(format_named("nvfp4"), (5, 3), 0)  # canonical rows start on a byte, the true k is kept
    assert q.parts["codes"].shape == (5, 2)
    with pytest.raises(LayoutError, match="k = 3 is odd and rows are whole bytes"):
        MODELOPT.pack(q, {})
    with pytest.raises(LayoutError, match="pairs output rows and n is odd"):
        MODELOPT.pack(random_tensor(format_named("int4", -1), (5, 4), 0), {})


def test_what_does_not_fit_is_refused() -> None:
    tensors, _ = foreign("nvfp4", np.random.default_rng(0))
    with pytest.raises(LayoutError, match=r"quant_algo FP8, but the tensors .* are NVFP4"):
        MODELOPT.describe(tensors, {"quant_algo": "FP8"}, "m")
    with pytest.raises(LayoutError, match=r"m\.weight_scale_2 is missing"):
        MODELOPT.describe({s: t for s, t in tensors.items() if s != "weight_scale_2"}, {}, "m")
    with pytest.raises(LayoutError, match="no kind of weight that ModelOpt stores"):
        MODELOPT.describe({"weight": np.zeros((2, 2), np.float32), "weight_scale": np.zeros(2, np.float32)}, {}, "m")
    flat, _ = foreign("NF4QTensor", np.random.default_rng(0))
    with pytest.raises(LayoutError, match=r'm\.weight is flat .* its shape is not in the file, give "shape"'):
        MODELOPT.describe(headers(flat), {}, "m")
    for fmt in (format_named("nvfp4", global_scale="divide"), format_named("uint4"), format_named("mxfp4", 16)):
        with pytest.raises(LayoutError, match="ModelOpt holds nvfp4"):
            MODELOPT.pack(random_tensor(fmt, (2, 128), 0), {})


@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 row", "fp8 tile", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_byte_codes_round_the_scale_then_the_product(kind: str, dtype: str) -> None:
    fmt = {"fp8 tensor": WORDS["fp8 tensor"], "fp8 row": WORDS["fp8"], "fp8 tile": WORDS["fp8 tile"], "int8": WORDS["int8"]}[
        kind
    ][0]
    q = finite_tensor(fmt, (130, 256), 5, "modelopt")
    scale = q.parts["scales"].astype(DTYPES[dtype]).astype(np.float32)
    if fmt.grouping == "block" and fmt.group_rows == 128:
        scale = np.repeat(np.repeat(scale, 128, 0)[:130], 128, 1)
    raw = q.parts["codes"].view(E4M3) if fmt.family == "fp8" else (q.parts["codes"].astype(np.int16) - 128)
    expected = (raw.astype(np.float32) * scale).astype(DTYPES[dtype])
    got = q.dequantize(dtype, "producer")
    assert np.array_equal(got.astype(np.float32), expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("group", "blocks", "fits"),
    [(1, 128, True), (1, 127, False), (2, 64, True), (None, 128, True), (None, 129, False), (-1, 2, False)],
)
def test_int4_with_a_scale_of_its_own_for_each_input(group: int | None, blocks: int, fits: bool) -> None:
    tensors = {"weight": np.zeros((2, 32), np.uint8), "weight_scale_inv": np.ones((blocks, 1), np.float32)}
    if fits:
        fmt, shape = MODELOPT.describe(tensors, {"group_size": group}, "m")
        assert (fmt.group_size, shape) == (128 // blocks, (2, 64))
    else:
        with pytest.raises(LayoutError, match=r"m\.weight_scale_inv has|group_size is"):
            MODELOPT.describe(tensors, {"group_size": group}, "m")


@pytest.mark.parametrize(("n", "k", "group", "fits"), [(3, 8, 4, True), (2, 9, 3, False), (2, 8, 3, False), (1, 6, 3, True)])
def test_int4_of_odd_inputs_or_broken_groups_is_refused(n: int, k: int, group: int, fits: bool) -> None:
    fmt = format_named("int4", group, scale_dtype="float32", inverse=True)
    q = finite_tensor(fmt, (n, k), 0, "modelopt")
    if fits:
        assert MODELOPT.unpack(MODELOPT.pack(q, {}), {"group_size": group}, "m") == q
    else:
        with pytest.raises(LayoutError, match=rf"rows of {k} are not whole bytes in whole groups of {group}"):
            MODELOPT.pack(q, {})


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PC_PT", "FP8_PB_WO", ""])
def test_the_algorithm_says_whose_the_scale_of_one_row_is(algo: str) -> None:
    """One scale of a one-row weight may be the row's, the tensor's or a tile's."""
    tensors = {"weight": np.zeros((1, 64), E4M3), "weight_scale": np.ones((1, 1), np.float32)}
    fmt, shape = MODELOPT.describe(tensors, {"quant_algo": algo}, "m")
    options = {"FP8": {"rows": -1}, "FP8_PB_WO": {"rows": 128}}.get(algo, {})
    if algo:
        assert fmt == format_named("fp8_e4m3", 128 if "PB" in algo else -1, scale_dtype="float32", **options)
    assert shape == (1, 64)


@pytest.mark.parametrize("factors", [(2.0, 2.0, 2.0), (2.0, 2.0, 3.0), (2.0, 3.0, 2.0), (3.0, 2.0, 2.0)])
def test_one_stored_factor_serves_a_stack_while_all_are_equal(factors: tuple[float, ...]) -> None:
    tensors, config = foreign("nvfp4", np.random.default_rng(0), (3,))
    q = MODELOPT.unpack({**tensors, "weight_scale_2": np.array(2.0, np.float32)}, config, "m")
    assert q.parts["global_scale"].tolist() == [2.0] * 3
    other = QTensor(q.format, q.shape, q.parts | {"global_scale": np.float32(factors)}, origin=q.origin, details=q.details)
    stored = MODELOPT.pack(other, config)["weight_scale_2"]
    assert stored.tolist() == (2.0 if len(set(factors)) == 1 else list(factors))
