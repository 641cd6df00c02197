"""NVFP4's scale rule by its definition: exact rationals for the default, each order of operations
for one block by hand.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from halfbyte import format_named, quantize
from halfbyte.errors import FormatError
from halfbyte.numerics.bits import unpack
from halfbyte.numerics.minifloat import MINIFLOATS, minifloat_values

E4M3 = [Fraction(v) for v in minifloat_values(MINIFLOATS["e4m3"])[:127]]
E2M1 = [Fraction(v) for v in minifloat_values(MINIFLOATS["e2m1"])[:8]]


def nearest(x: Fraction, values: list[Fraction]) -> int:
    """Index of the nearest value, ties to the even code."""
    return min(range(len(values)), key=lambda i: (abs(values[i] - x), i & 1))


def reference(x: np.ndarray, g: Fraction) -> tuple[int, list[int]]:
    """Scale byte and codes of one block of 16 under a tensor scale g: nearest E4M3 of amax / 6 / g,
    at least 2^−9.
    """
    amax = max(abs(Fraction(float(v))) for v in x)
    byte = nearest(min(max(amax / 6 / g, E4M3[1]), E4M3[-1]), E4M3) if amax else 0
    step = E4M3[byte] * g
    return byte, [nearest(min(abs(Fraction(float(v))) / step, E2M1[-1]), E2M1) if step else 0 for v in x]


def blocks(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, 48)) * np.exp(rng.uniform(-9, 3, (4, 3)).repeat(16, axis=1))
    x[0, :16] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", ["multiply", "divide", "amax", "none"])
def test_the_default_is_the_definition(level, seed):
    x = blocks(seed)
    q = quantize(x, "nvfp4", global_scale=level)
    amax = np.abs(x).max()
    stored = Fraction(float(q.parts["global_scale"])) if level != "none" else Fraction(1)
    g = {"multiply": stored, "divide": 1 / stored, "amax": stored / 2688, "none": stored}[level]
    if level in ("multiply", "divide"):
        want = np.float32(amax / np.float64(2688)) if level == "multiply" else np.float32(1 / np.float64(amax) * 2688)
        assert q.parts["global_scale"] == want
    if level == "amax":
        assert q.parts["global_scale"] == amax
    codes = unpack(q.parts["codes"], 4, 48)
    for row in range(4):
        for block in range(3):
            part = x[row, 16 * block : 16 * block + 16]
            byte, magnitudes = reference(part, g)
            assert q.parts["scales"][row, block] == byte
            np.testing.assert_array_equal(codes[row, 16 * block : 16 * block + 16] & 7, magnitudes)
            np.testing.assert_array_equal(codes[row, 16 * block : 16 * block + 16] >> 3, np.signbit(part))


def test_the_reference_sees_another_byte():
    x = blocks(0)[1, :16]
    byte, codes = reference(x, Fraction(1))
    assert reference(x * 2, Fraction(1)) == (byte + 8, codes)


F32 = np.float32


RAW = {
    "joint": lambda amax, g, h: amax / (F32(6) * g),
    "reciprocal": lambda amax, g, h: (amax / F32(6)) / g,
    "inverse": lambda amax, g, h: (amax / F32(6)) * h,
    "stepwise": lambda amax, g, h: (amax / F32(6)) * h,
}
SCALED = {
    "joint": lambda x, s, g, h: x / (s * g),
    "reciprocal": lambda x, s, g, h: x * ((F32(1) / g) / s),
    "inverse": lambda x, s, g, h: x / (s / h),
    "stepwise": lambda x, s, g, h: (x / s) * h,
}


@pytest.mark.parametrize("order", RAW)
@pytest.mark.parametrize("level", ["multiply", "divide", "amax", "none"])
@pytest.mark.parametrize("seed", range(2))
def test_each_order_of_operations_in_float32(order, level, seed):
    """The operations of the module's table, written out one float32 operation at a time."""
    x = blocks(seed)[1:2]
    q = quantize(x, "nvfp4", global_scale=level, order=order, compute="float32", scale_floor=0.0)
    stored = F32(q.parts.get("global_scale", 1))
    g = {"divide": F32(1) / stored, "amax": stored / F32(2688)}.get(level, stored)
    h = {"divide": stored, "amax": F32(2688) / stored}.get(level, F32(1) / stored)
    table = minifloat_values(MINIFLOATS["e4m3"])
    for block in range(3):
        part = x[0, 16 * block : 16 * block + 16]
        raw = RAW[order](np.abs(part).max(), g, h)
        byte = nearest(min(Fraction(float(raw)), E4M3[-1]), E4M3)
        assert q.parts["scales"][0, block] == byte
        scaled = SCALED[order](part, F32(table[byte]), g, h) if byte else np.zeros(16)
        want = [nearest(min(Fraction(abs(float(v))), E2M1[-1]), E2M1) for v in scaled]
        np.testing.assert_array_equal(unpack(q.parts["codes"], 4, 48)[0, 16 * block : 16 * block + 16] & 7, want)


@pytest.mark.parametrize(("zero_scale", "byte"), [(0.0, 0x00), (1.0, 0x38), (0.125, 0x20), (2.0**-6, 0x08)])
def test_the_scale_of_a_block_of_zeros(zero_scale, byte):
    x = np.zeros((1, 32), np.float32)
    x[0, 16:] = 1
    assert quantize(x, "nvfp4", zero_scale=zero_scale).parts["scales"].tolist() == [[byte, 0x7E]]


def test_a_tensor_of_zeros_has_tensor_scale_1():
    for level in ("multiply", "divide", "amax"):
        assert quantize(np.zeros((2, 16), np.float32), "nvfp4", global_scale=level).parts["global_scale"] == 1


def test_formats():
    assert format_named("nvfp4").group_size == 16
    assert [(f.global_op, f.divisor) for f in (format_named("nvfp4", global_scale=s) for s in ("amax", "none", "divide"))] == [
        ("multiply", 2688.0), ("", 1.0), ("divide", 1.0)]  # fmt: skip
    with pytest.raises(FormatError, match="nvfp4 with group size 32; allowed: 16"):
        format_named("nvfp4:g32")


@pytest.mark.parametrize("order", ["joint", "stepwise"])
@pytest.mark.parametrize(("amax", "byte"), [(101.99, 0x58), (102.01, 0x59), (107.99, 0x59), (114.01, 0x5A)])
def test_a_stored_amax_counts_over_2688(order, amax, byte):
    """With amax 2688 the tensor scale is 1: block scales amax / 6 just beside the midpoints of 16,
    18 and 20.
    """
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 2688, amax
    assert quantize(x, "nvfp4", global_scale="amax", order=order).parts["scales"].tolist() == [[0x7E, byte]]
