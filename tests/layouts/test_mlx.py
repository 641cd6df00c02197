"""MLX words: random bytes of every mode, drawn shapes, an independent reading of the bits, mixed
dtypes, refusals.
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
from halfbyte.numerics.bits import unpack
from halfbyte.numerics.exact import bfloat16
from support.golden_case import same_numbers
from support.layout_tensors import headers
from support.random_tensors import check_return, check_round_trip, finite_tensor, random_array, random_tensor

MLX = LAYOUTS["mlx"]
FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
WIDTHS = (1, 2, 3, 4, 5, 6, 8)


def affine(rng: np.random.Generator, bits: int, group: int, *shape: int, dtype=np.float16, biases=None) -> dict[str, np.ndarray]:
    *rows, k = shape
    return {
        "weight": random_array(rng, np.uint32, *rows, k * bits // 32),
        "scales": random_array(rng, dtype, *rows, k // group),
        "biases": random_array(rng, biases or dtype, *rows, k // group),
    }


def blocks(rng: np.random.Generator, mode: str, *shape: int, dtype=np.uint8) -> dict[str, np.ndarray]:
    *rows, k = shape
    bits, group = MODES[mode]
    return {"weight": random_array(rng, np.uint32, *rows, k * bits // 32), "scales": random_array(rng, dtype, *rows, k // group)}


@pytest.mark.parametrize("shape", [(7, 256), (0, 128), (3, 5, 128), (2, 0, 128), (4, 0)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", WIDTHS)
def test_random_affine_bytes_come_back(bits: int, group: int, dtype: str, shape: tuple[int, ...]) -> None:
    tensors = affine(np.random.default_rng(bits), bits, group, *shape, dtype=FLOATS[dtype])
    q = check_round_trip(MLX, tensors, {"bits": bits, "group_size": group, "mode": "affine"})
    assert q.format == format_named(f"affine{bits}", group, scale_dtype=dtype)
    assert q.shape == shape


@pytest.mark.parametrize("shape", [(7, 256), (0, 128), (3, 5, 64), (4, 0)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_random_block_bytes_come_back_nan_and_negative_scales_included(mode: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    tensors = blocks(rng, mode, *shape)
    bits, group = MODES[mode]
    q = check_round_trip(MLX, tensors, {"bits": bits, "group_size": group, "mode": mode})
    assert q.shape == shape
    typed = blocks(rng, mode, *shape, dtype=ml_dtypes.float8_e4m3fn if mode == "nvfp4" else ml_dtypes.float8_e8m0fnu)
    check_round_trip(MLX, typed, {"mode": mode})
    if mode == "nvfp4" and len(shape) == 2:
        q = check_round_trip(MLX, {**tensors, "global_scale": random_array(rng, np.float32)}, {"mode": mode})
        assert q.format.divisor == 2688


@given(
    bits=st.sampled_from(WIDTHS),
    group=st.sampled_from([32, 64, 128]),
    lead=st.sampled_from([(), (0,), (1,), (3,)]),
    n=st.integers(0, 5),
    groups=st.integers(0, 3),
    dtype=st.sampled_from(sorted(FLOATS)),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_affine_tensors_come_back(bits, group, lead, n, groups, dtype, seed) -> None:
    q = random_tensor(format_named(f"affine{bits}", group, scale_dtype=dtype), (*lead, n, group * groups), seed)
    check_return(MLX, q)


@given(
    word=st.sampled_from(["mxfp4", "mxfp8_e4m3", "nvfp4", "nvfp4 amax"]),
    lead=st.sampled_from([(), (0,), (3,)]),
    n=st.integers(0, 5),
    groups=st.integers(0, 3),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_block_tensors_come_back(word, lead, n, groups, seed) -> None:
    options = {} if not word.startswith("nvfp4") else {"global_scale": "amax" if "amax" in word else "none"}
    fmt = format_named(word.partition(" ")[0], **options)
    q = random_tensor(fmt, ((*lead, n, 32 * groups) if "amax" not in word else (n, 32 * groups)), seed)
    check_return(MLX, q)


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_lie_least_significant_bit_first_in_little_endian_words(bits: int) -> None:
    tensors = affine(np.random.default_rng(9), bits, 32, 3, 96)
    codes = unpack(MLX.unpack(tensors, {"bits": bits, "group_size": 32}).parts["codes"], bits, 96)
    for r in range(3):
        row = sum(int(w) << (32 * i) for i, w in enumerate(tensors["weight"][r]))
        assert codes[r].tolist() == [row >> (bits * j) & ((1 << bits) - 1) for j in range(96)]


def test_words_are_read_without_a_copy() -> None:
    tensors = affine(np.random.default_rng(0), 4, 64, 8, 128)
    q = MLX.unpack(tensors, {"bits": 4, "group_size": 64})
    assert all(
        np.shares_memory(q.parts[p], tensors[s]) for p, s in (("codes", "weight"), ("scales", "scales"), ("biases", "biases"))
    )


@pytest.mark.parametrize("scales", FLOATS)
@pytest.mark.parametrize("biases", FLOATS)
def test_case_30_mixed_scale_and_bias_dtypes_are_widened_and_written_back(scales: str, biases: str) -> None:
    q = finite_tensor(format_named("affine4", 32, scale_dtype="float32"), (4, 64), 1)
    tensors = {
        "weight": q.parts["codes"].view(np.uint32),
        "scales": q.parts["scales"].astype(FLOATS[scales]),
        "biases": q.parts["biases"].astype(FLOATS[biases]),
    }
    config = {"bits": 4, "group_size": 32, "mode": "affine"}
    got = check_round_trip(MLX, tensors, config)
    assert got.format.scale == (scales if scales == biases else "float32")
    code = unpack(got.parts["codes"], 4, 64).astype(np.float64)
    s, b = (np.repeat(tensors[t].astype(np.float64), 32, axis=1) for t in ("scales", "biases"))
    exact = (code * s + b).astype(np.float32)  # four bits times a float32 and one more sum: exact in float64
    assert np.array_equal(got.dequantize("float32"), exact)
    # mx.dequantize rounds the product in the dtype of the scales and the sum in the wider of the
    # two.
    held = FLOATS[scales]
    product = (code * s).astype(np.float32).astype(held).astype(np.float32)
    total = product + b.astype(np.float32)
    total = total.astype(held).astype(np.float32) if scales == biases else total
    assert same_numbers(got.dequantize("float32", "producer"), total)
    assert np.isfinite(total).all()


@pytest.mark.parametrize(("scales", "biases"), [("float16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16")])
def test_mixed_dtypes_come_back_whatever_their_bits(scales: str, biases: str) -> None:
    for seed in range(20):
        tensors = affine(np.random.default_rng(seed), 4, 32, 8, 128, dtype=FLOATS[scales], biases=FLOATS[biases])
        check_round_trip(MLX, tensors, {"bits": 4, "group_size": 32})


def test_float32_biases_under_nan_bits_stay_nan() -> None:
    tensors = affine(np.random.default_rng(2), 4, 32, 4, 64, dtype=np.float32)
    tensors["biases"][0, 0] = np.nan
    q = MLX.unpack(tensors, {"bits": 4, "group_size": 32})
    assert np.isnan(q.dequantize()[0, :32]).all()


def test_bits_or_group_size_may_be_left_out_not_both() -> None:
    tensors = affine(np.random.default_rng(0), 4, 32, 2, 128)
    assert MLX.describe(tensors, {"bits": 4}).format.group_size == 32
    assert MLX.describe(tensors, {"group_size": 32}).format.bits == 4
    # 4 bits in groups of 32 and 2 bits in groups of 64 have the same shapes: the config decides,
    # nothing is guessed.
    assert MLX.describe(tensors, {"bits": 2, "group_size": 64}).shape == (2, 256)
    with pytest.raises(LayoutError, match="the shapes leave both open"):
        MLX.describe(tensors, {}, "m")


def test_what_does_not_fit_is_refused_by_name() -> None:
    rng = np.random.default_rng(0)
    good = affine(rng, 4, 64, 2, 128)
    config = {"bits": 4, "group_size": 64}
    with pytest.raises(LayoutError, match=r"m\.biases is missing"):
        MLX.unpack({s: t for s, t in good.items() if s != "biases"}, config, "m")
    with pytest.raises(LayoutError, match="do not fit these tensors"):
        MLX.unpack(good, {"bits": 8, "group_size": 64}, "m")
    with pytest.raises(LayoutError, match=r"bits 7, group_size 64; allowed: bits 1, 2, 3, 4, 5, 6, 8"):
        MLX.unpack(good, {"bits": 7, "group_size": 64}, "m")
    with pytest.raises(LayoutError, match=r"m\.weight is int32; allowed: uint32"):
        MLX.unpack({**good, "weight": good["weight"].view(np.int32)}, config, "m")
    with pytest.raises(LayoutError, match=r"m\.biases is there, but mode mxfp4 has weight, scales and nothing else"):
        MLX.unpack({**blocks(rng, "mxfp4", 2, 128), "biases": good["biases"]}, {"mode": "mxfp4"}, "m")
    with pytest.raises(LayoutError, match="mode 'quartic'; allowed: affine, mxfp4, mxfp8, nvfp4"):
        MLX.unpack(good, {"mode": "quartic"}, "m")
    with pytest.raises(LayoutError, match="mode mxfp4 with bits 8"):
        MLX.unpack(blocks(rng, "mxfp4", 2, 128), {"mode": "mxfp4", "bits": 8}, "m")


def test_pack_refuses_what_mlx_cannot_hold() -> None:
    for fmt, shape, why in (
        (format_named("affine4", 16), (2, 64), "groups of 16; MLX has 32, 64, 128"),
        (format_named("affine4", 64), (2, 96), "not whole groups"),
        (format_named("int4", 32), (2, 64), "MLX holds affine1 to affine8"),
        (format_named("nvfp4"), (2, 64), "MLX holds"),
        (format_named("nvfp4", global_scale="amax"), (3, 2, 64), "a stack of experts has no global scale"),
    ):
        with pytest.raises(LayoutError, match=why):
            MLX.pack(random_tensor(fmt, shape, 0), {})
    q = random_tensor(format_named("affine4", 32), (2, 64), 0)
    with pytest.raises(LayoutError, match="the config asks for bits 8; this weight has 4"):
        MLX.pack(q, {"bits": 8})
    with pytest.raises(LayoutError, match="no group index"):
        MLX.pack(type(q)(q.format, q.shape, {**q.parts, "group_index": np.zeros(64, np.int32)}), {})


def test_headers_are_enough() -> None:
    tensors = affine(np.random.default_rng(0), 3, 64, 2, 5, 128, dtype=bfloat16)
    assert MLX.describe(headers(tensors), {"bits": 3, "group_size": 64}).shape == (2, 5, 128)


@pytest.mark.parametrize(("given", "found"), [({"bits": 3}, (3, 64)), ({"group_size": 32}, (4, 32)), ({"bits": 8}, (8, 64))])
@pytest.mark.parametrize("shape", [(4, 0), (2, 4, 0)])
def test_a_weight_without_inputs_has_4_bits_and_groups_of_64_unless_the_config_says(
    given: dict, found: tuple, shape: tuple
) -> None:
    tensors = {"weight": np.zeros(shape, np.uint32), "scales": np.zeros(shape, np.float16), "biases": np.zeros(shape, np.float16)}
    fmt, described = MLX.describe(tensors, given, "m")
    assert ((fmt.bits, fmt.group_size), described) == (found, shape)


@pytest.mark.parametrize("shape", [(64,), ()])
@pytest.mark.parametrize("which", ["weight", "scales"])
def test_weights_and_scales_have_two_axes_at_least(which: str, shape: tuple[int, ...]) -> None:
    tensors = affine(np.random.default_rng(0), 4, 32, 4, 64)
    tensors[which] = np.zeros(shape, tensors[which].dtype)
    with pytest.raises(LayoutError, match="all axes but the last must agree"):
        MLX.describe(tensors, {"bits": 4, "group_size": 32}, "m")


def test_rows_that_fill_no_whole_groups_are_said_to() -> None:
    for size in (-1, 32, 64, 128):
        for k in (32, 60, 64, 96, 128, 160):
            said = MLX.unfilled(format_named("affine4", size), (4, k))
            assert said == (f"rows of {k}; MLX wants whole groups of {size}" if size != -1 and k % size else "")
