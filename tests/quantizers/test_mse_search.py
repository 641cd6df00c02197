"""Searched scales: never worse than rounding to nearest, and next to what trying everything finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte import format_named, quantize
from halfbyte.errors import FormatError
from halfbyte.numerics.minifloat import element_table, round_to_element
from halfbyte.quantizers import mse
from halfbyte.quantizers.grid import Grid, Params

CODECS = (
    "int4:g32", "int4:channel", "int3:g64", "int2:g32", "int8:g32", "uint4:g32", "uint2:g32", "affine4:g64", "affine2:g32",
    "q4_0", "q4_1", "q5_0", "q8_0", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "mxint8", "nvfp4", "fp4:g32", "fp8_e4m3", "iq4_nl",
    "nf4:g64",
)  # fmt: skip


def squared(x: np.ndarray, q, importance: np.ndarray | float = 1.0) -> float:
    return float((importance * (x - q.dequantize("float64")) ** 2).sum())


@pytest.mark.parametrize("codec", CODECS)
@given(seed=st.integers(0, 2**20), n=st.integers(1, 4), heavy=st.booleans())
@settings(max_examples=5, deadline=None)
def test_never_worse_than_round_to_nearest(codec, seed, n, heavy):
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(3, (n, 128)) if heavy else rng.standard_normal((n, 128))).astype(np.float32) * 0.02
    importance = rng.uniform(0, 2, 128)
    plain = quantize(x, codec)
    assert squared(x, mse(x, codec)) <= squared(x, plain) * (1 + 1e-12)
    assert squared(x, mse(x, codec, importance), importance) <= squared(x, plain, importance) * (1 + 1e-12)
    assert mse(x, codec).format == plain.format


@pytest.mark.parametrize("codec", ["int4:g32", "mxfp4", "nvfp4", "affine4:g32", "uint4:g32", "fp4:g32"])
def test_better_on_weights_with_outliers(codec):
    x = np.random.default_rng(0).standard_t(3, (64, 256)).astype(np.float32)
    assert squared(x, mse(x, codec)) < 0.99 * squared(x, quantize(x, codec))


@pytest.mark.parametrize("seed", range(5))
def test_a_float_scale_next_to_the_best_of_twenty_thousand(seed):
    x = np.random.default_rng(seed).standard_t(4, (1, 32))
    grid = Grid(format_named("int4:g32", scale_dtype="float32"))
    best = np.inf
    for scale in np.linspace(0.2, 1.2, 10_000) * np.abs(x).max() / 7.5:
        for sign in (1, -1):
            best = min(best, ((x - grid.rounded(x, Params(np.array(sign * scale)))) ** 2).sum())
    assert squared(x, mse(x, grid.fmt)) <= 1.01 * best


@pytest.mark.parametrize("seed", range(5))
def test_e4m3_scales_are_the_best_of_all_bytes(seed):
    """One level: every positive scale byte tried by hand."""
    x = np.random.default_rng(seed).standard_t(4, (3, 64)) * 3
    q = mse(x, format_named("nvfp4", global_scale="none"))
    table, elements = element_table("e4m3", 8), element_table("e2m1", 4)
    for row in range(3):
        for g in range(4):
            group = x[row, 16 * g : 16 * g + 16]
            errors = {}
            for byte in range(1, 0x7F):
                values = elements[round_to_element(group / table[byte], "e2m1")] * table[byte]
                errors[byte] = ((group - values) ** 2).sum()
            chosen = int(q.parts["scales"][row, g])
            assert errors[chosen] == min(errors.values())


@pytest.mark.parametrize("seed", range(5))
def test_mx_exponents_are_the_best_of_all(seed):
    x = np.random.default_rng(seed).standard_t(4, (4, 64)) * 0.01
    q = mse(x, "mxfp4")
    elements = element_table("e2m1", 4)
    for row in range(4):
        for g in range(2):
            group = x[row, 32 * g : 32 * g + 32]
            errors = {
                b: ((group - elements[round_to_element(group * 2.0 ** (127 - b), "e2m1")] * 2.0 ** (b - 127)) ** 2).sum()
                for b in range(100, 150)
            }
            assert errors[int(q.parts["scales"][row, g])] == min(errors.values())


def test_two_levels_of_nvfp4_gain_from_the_tensor_scale():
    """A tensor scale that puts the block scales on E4M3 numbers loses less than one set by the
    largest block.
    """
    x = np.random.default_rng(3).standard_normal((64, 256))
    x[0, 0] = 40  # sets amax / 2688 far from what the other blocks want
    two = mse(x, "nvfp4")
    assert squared(x, two) < squared(x, quantize(x, "nvfp4"))
    assert two.parts["global_scale"].shape == ()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fill", [0.0, 1e-30, 1e-40, -7.0, 1.0])
def test_case_13_constant_tiny_and_zero_groups(codec, fill):
    x = np.full((3, 64), fill, np.float32)
    q = mse(x, codec)
    assert np.isfinite(q.dequantize()).all()
    assert squared(x, q) <= squared(x, quantize(x, codec))
    if fill == 0:
        assert not q.dequantize().any()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 5, 64), (1, 64), (3, 50)])
def test_shapes(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert mse(x, "int4:g32").shape == shape
    assert squared(x, mse(x, "int4:g32")) <= squared(x, quantize(x, "int4:g32"))


def test_a_long_weight_is_searched_in_pieces(monkeypatch):
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    whole = mse(x, "int4:g32")
    monkeypatch.setattr("halfbyte.quantizers.mse_search.ROWS", 64 * 7)
    assert mse(x, "int4:g32") == whole


@pytest.mark.parametrize("codec", ["iq2_xxs", "hqq4", "bnb_int8", "tq1_0"])
def test_formats_without_a_search_say_so(codec):
    with pytest.raises(FormatError, match=r"has no grid of one scale a group; allowed for mse and gptq: int.* q2_K to q6_K"):
        mse(np.zeros((2, 256), np.float32), codec)


@pytest.mark.parametrize("codec", ["int4:g32", "uint4:g32", "affine4:g32", "mxfp4", "nvfp4", "int8:g32", "uint2:g32"])
def test_rounding_without_codes_is_rounding_with_codes(codec):
    """Every multiple of an eighth of a step, middles among them, and beyond the ends."""
    grid = Grid(format_named(codec))
    x = np.arange(-300, 300)[None] / 8.0
    for scale in (1.0, 0.25, -1.0, 0.0):
        zero = np.full((1, 1), 5.0) if grid.fmt.zero == "int" else None
        params = Params(np.full((1, 1), scale), zero, np.full((1, 1), 0.75) if grid.fmt.bias else None)
        assert np.array_equal(grid.rounded(x, params), grid.values(grid.codes(x, params), params))
