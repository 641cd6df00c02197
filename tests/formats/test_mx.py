"""MX block exponents and element rounding against their definitions, in exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from halfbyte import format_named, quantize
from halfbyte.errors import FormatError
from halfbyte.formats.mx import LEAST_ERROR, MXPolicy, block_exponents, round_integers
from halfbyte.numerics.bits import unpack

LARGEST = {"mxfp4": 6, "mxfp6_e2m3": Fraction(15, 2), "mxfp6_e3m2": 28, "mxfp8_e4m3": 448, "mxfp8_e5m2": 57344,
           "mxint8": Fraction(127, 64), "mxint4": Fraction(7, 4), "mxint2": 1}  # fmt: skip
MANTISSA = {"mxfp4": 1, "mxfp6_e2m3": 3, "mxfp6_e3m2": 2, "mxfp8_e4m3": 3, "mxfp8_e5m2": 2, "mxint8": 6, "mxint4": 2, "mxint2": 0}


def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def ceil_log2(x: Fraction) -> int:
    e = floor_log2(x)
    return e if Fraction(2) ** e == x else e + 1


def slow_exponent(amax: Fraction, codec: str, rule: str) -> int:
    """The exponent of a block, by the table in formats/mx.py."""
    top = Fraction(LARGEST[codec])
    emax = floor_log2(top)
    if rule == "ceil":
        return ceil_log2(amax / top)
    if rule == "ceil_log2":
        return ceil_log2(amax) - emax
    if rule == "floor":
        return floor_log2(amax) - emax
    e = floor_log2(amax)
    steps = amax / Fraction(2) ** e * 2 ** MANTISSA[codec]
    return e - emax + (math.floor(steps + Fraction(1, 2)) >= 2 << MANTISSA[codec])


VALUES = np.array(
    [m * 2.0**e for e in (-120, -7, 0, 1, 5) for m in (1, 1.25, 1.4375, 1.5, 1.5001, 1.625, 1.6875, 1.74, 1.75, 1.7501, 1.8125,
     1.875, 1.9, 1.9375, 1.96875, 1.984375, 1.9921875, 1.999)], np.float64
)  # fmt: skip


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "ceil_log2"])
@pytest.mark.parametrize("codec", LARGEST)
def test_exponents(codec, rule):
    got = block_exponents(VALUES, format_named(codec), MXPolicy(scale=rule))
    want = [max(-127, min(127, slow_exponent(Fraction(v), codec, rule))) for v in VALUES.tolist()]
    assert got.tolist() == want


def test_the_reference_tells_rules_apart():
    at = {rule: slow_exponent(Fraction(15, 2), "mxfp4", rule) for rule in ("floor", "even", "ceil", "ceil_log2")}
    assert at == {"floor": 0, "even": 1, "ceil": 1, "ceil_log2": 1}
    assert slow_exponent(Fraction(13, 2), "mxfp4", "even") == 0
    assert slow_exponent(Fraction(5), "mxfp4", "ceil") == 0
    assert slow_exponent(Fraction(5), "mxfp4", "ceil_log2") == 1


@pytest.mark.parametrize(
    ("even_bits", "amax", "want"), [(1, 7.0, 1), (1, 6.99, 0), (2, 7.0, 0), (2, 7.5, 1), (3, 7.5, 0), (3, 7.75, 1)]
)
def test_even_rounds_to_the_bits_it_is_given(even_bits, amax, want):
    assert block_exponents(np.array([amax]), format_named("mxfp4"), MXPolicy(even_bits=even_bits)).tolist() == [want]


@pytest.mark.parametrize("codec", LARGEST)
@pytest.mark.parametrize("zero_byte", [0, 127])
def test_a_block_of_zeros_stores_its_byte(codec, zero_byte):
    q = quantize(np.zeros((1, 32), np.float32), codec, zero_byte=zero_byte)
    assert q.parts["scales"].tolist() == [[zero_byte]]
    assert not q.dequantize().any()


@pytest.mark.parametrize(("value", "byte"), [(2.0**-140, 0), (2.0**-125, 0), (2.0**-124, 1), (3e38, 252), (6.0 * 2.0**10, 137)])
def test_scale_bytes_of_extreme_blocks(value, byte):
    x = np.zeros((1, 32))
    x[0, 5] = value
    assert quantize(x, "mxfp4", scale="floor").parts["scales"][0, 0] == byte


@pytest.mark.parametrize(("byte0", "want"), [(2.0**-127, 4.0), (2.0**-126, 2.0), (1.0, 0.0)])
def test_a_block_with_scale_byte_0_is_divided_by_byte0(byte0, want):
    x = np.zeros((1, 32))
    x[0, 0] = 2.0**-125
    q = quantize(x, "mxfp4", scale="floor", byte0=byte0)
    assert q.parts["scales"][0, 0] == 0
    assert q.dequantize("float64")[0, 0] == want * 2.0**-127


TIES = {"even": [-2, -2, -1, 0, 0, 0, 1, 2, 2], "away": [-3, -2, -1, -1, 0, 1, 1, 2, 3], "zero": [-2, -2, -1, 0, 0, 0, 1, 2, 2],
        "truncate": [-2, -1, -1, 0, 0, 0, 1, 1, 2]}  # fmt: skip


@pytest.mark.parametrize("ties", TIES)
def test_ties_of_integers(ties):
    x = np.array([-2.5, -1.6, -1.2, -0.5, 0.0, 0.5, 1.2, 1.6, 2.5])
    np.testing.assert_array_equal(round_integers(x, ties), TIES[ties])


@pytest.mark.parametrize(("ties", "want"), [("even", 2), ("away", 2), ("zero", 1), ("truncate", 1)])
def test_one_and_a_half(ties, want):
    assert round_integers(np.array([1.5]), ties)[0] == want
    assert np.signbit(round_integers(np.array([-0.2]), ties)[0])


@pytest.mark.parametrize(("symmetric", "lowest"), [(False, 0x80), (True, 0x81)])
def test_the_lowest_code_of_mxint8(symmetric, lowest):
    """−2 under an exponent of 0 is code −128, or saturates at −127 when codes are symmetric."""
    x = np.full((1, 32), -1.999, np.float32)
    q = quantize(x, "mxint8", scale="floor", symmetric=symmetric)
    assert q.parts["scales"][0, 0] == 127
    assert set(unpack(q.parts["codes"], 8, 32)[0].tolist()) == {lowest}


def test_group_sizes_and_defaults():
    assert [format_named(f"mxfp4:g{g}").group_size for g in (16, 32, 64)] == [16, 32, 64]
    with pytest.raises(FormatError, match="allowed: 16, 32, 64"):
        format_named("mxfp4:g48")
    assert LEAST_ERROR["mxfp4"] == "even"
    assert LEAST_ERROR["mxfp8_e4m3"] == "ceil"
    assert LEAST_ERROR["mxint8"] == "floor"


def test_a_scale_below_float16_is_stored_as_1():
    """A producer that computes in float16 divides by a scale of 0 there; it stores 1 and divides by
    that.
    """
    x = np.zeros((1, 64), np.float16)
    x[0, 0], x[0, 32] = 2.0**-24, 2.0**-20
    q = quantize(x, "mxfp4", scale="floor", compute="input")
    assert q.parts["scales"].tolist() == [[127, 127 - 22]]
    assert q.dequantize()[0, 32] == 2.0**-20
    assert not q.dequantize()[0, :32].any()


@pytest.mark.parametrize(
    ("policy", "want"), [("torchao", 2.0), ("torchao-even", 2.0), ("torchao-ceil", 2.0), ("torchao-rceil", 0.0), ("ocp", 4.0)]
)
def test_what_each_producer_divides_a_block_with_scale_byte_0_by(policy, want):
    """4 · 2^-127, whose block has scale byte 0: torchao divides by 2^-126, or by 1."""
    x = np.zeros((1, 32))
    x[0, 0] = 2.0**-125
    q = quantize(x, "mxfp4", policy=policy)
    assert q.parts["scales"][0, 0] == 0
    assert q.dequantize("float64")[0, 0] == want * 2.0**-127


@pytest.mark.parametrize(("codec", "bits"), [("mxfp4", 1), ("mxfp6_e2m3", 3)])
@pytest.mark.parametrize(
    ("dtype", "mantissa", "bias"),
    [(ml_dtypes.bfloat16, 7, 127), (np.float32, 23, 127), (np.float16, 10, 15)],
    ids=["bfloat16", "float32", "float16"],
)
def test_compressed_tensors_rounds_the_bits_of_the_largest_magnitude(codec, bits, dtype, mantissa, bias):
    """Half a step of 1 + bits digits is added to the number's own bits, and the exponent field is
    what is left; subnormal numbers go to 0 or to the smallest normal one.
    """
    one = 1 << mantissa
    edges = [e + d for e in (0, one, 2 * one, 3 * one) for d in (0, 1, *(-(one >> s) - t for s in range(1, 6) for t in (0, 1)))]
    patterns = np.array(
        [*range(0, 3 * one, one // 61), *(e for e in edges if e >= 0)], np.uint32 if mantissa == 23 else np.uint16
    )
    x = np.zeros((patterns.size, 32), dtype)
    x[:, 3] = patterns.view(dtype)
    field = (patterns.astype(np.int64) + (one >> (bits + 1))) >> mantissa
    zero = 127 if bias == 15 else 0  # 2^-127 is 0 in float16, in place of which 1 is stored
    wanted = np.where(field == 0, zero, np.clip(field - bias - 2, -127, 127) + 127)
    assert quantize(x, codec, policy="compressed-tensors").parts["scales"][:, 0].tolist() == wanted.tolist()
