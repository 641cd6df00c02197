"""EXL3 against a slow reference written from its definition: Python integers for bits, Fractions for values."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats.exl3 import codebook_values, decode, states, unpack_signs

RNG = np.random.default_rng(5)


def half(bits: int) -> Fraction:
    """A float16 from its 16 bits, by definition."""
    sign, exponent, mantissa = bits >> 15, bits >> 10 & 31, bits & 1023
    magnitude = Fraction(mantissa, 1024) + (exponent > 0)
    return (-1) ** sign * magnitude * Fraction(2) ** (max(exponent, 1) - 15)


def to_float16(x: Fraction) -> Fraction:
    """Rounded to 11 significant bits, half to even; no value here is subnormal or too large."""
    if x == 0:
        return x
    exponent = 0
    while abs(x) * Fraction(2) ** exponent < 1024:
        exponent += 1
    while abs(x) * Fraction(2) ** exponent >= 2048:
        exponent -= 1
    return round(x * Fraction(2) ** exponent) / Fraction(2) ** exponent


@cache
def slow_value(codebook: str, state: int) -> Fraction:
    if codebook == "mul1":
        x = state * 0x83DCD12D % 2**32
        total = sum(x >> shift & 255 for shift in (0, 8, 16, 24))
        return to_float16(half(0x6400 + total) * half(0x1EEE) + half(0xC931))
    x = (state * 89226354 + 64248484 if codebook == "3inst" else state * 0xCBAC1FED) % 2**32
    y = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return to_float16(half(y & 0xFFFF) + half(y >> 16))


def slow_states(tile: np.ndarray) -> dict[tuple[int, int], int]:
    """(input, output) -> state, of one tile of int16 words, from one Python integer that holds the whole stream."""
    bits = len(tile) // 16
    words = np.ascontiguousarray(tile).view(np.uint32).tolist()
    stream = int("".join(f"{w:032b}" for w in words), 2)
    size = 256 * bits
    doubled = stream << size | stream
    out = {}
    for t in range(256):
        state = doubled >> (size - (t + 1) * bits) & 0xFFFF
        lane, j = divmod(t, 8)
        row = lane % 4 * 2 + (j & 1) + 8 * (j >> 1 & 1)
        out[row, lane // 4 + 8 * (j >> 2)] = state
    return out


def trellis(k: int, n: int, bits: int) -> np.ndarray:
    return RNG.integers(-(1 << 15), 1 << 15, (k // 16, n // 16, 16 * bits), dtype=np.int64).astype(np.int16)


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_codebooks(codebook):
    values = codebook_values(codebook)
    assert values.shape == (65536,)
    assert np.array_equal(values.astype(np.float16).astype(np.float64), values)
    for state in [0, 1, 2, 255, 256, 32767, 32768, 65535, *RNG.integers(0, 65536, 2000).tolist()]:
        assert Fraction(values[state]) == slow_value(codebook, state)


@pytest.mark.parametrize("bits", range(1, 9))
def test_states_of_every_width(bits):
    t = trellis(32, 48, bits)
    got = states(t)
    for i in range(2):
        for j in range(3):
            want = slow_states(t[i, j])
            assert len(want) == 256
            assert all(got[16 * i + r, 16 * j + c] == state for (r, c), state in want.items())


def test_consecutive_states_overlap():
    """The trellis: the state of a code is that of the code before it, shifted by `bits`."""
    for bits in (1, 3, 8):
        order = [r * 16 + c for r, c in slow_states(trellis(16, 16, bits)[0, 0])]
        got = states(trellis(16, 16, bits)).reshape(-1)[order].astype(int)
        assert ((got[:-1] << bits & 0xFFFF) == (got[1:] >> bits << bits)).all()
        assert (got[-1] << bits & 0xFFFF) == (got[0] >> bits << bits)


@pytest.mark.parametrize(("k", "n", "bits", "codebook"), [(128, 128, 3, "3inst"), (256, 128, 4, "mcg"), (128, 256, 2, "mul1")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_values_are_the_definitions(k, n, bits, codebook, dtype):
    t = trellis(k, n, bits)
    suh, svh = ((RNG.standard_normal(size) / 8).astype(np.float16) for size in (k, n))
    got = decode(t, suh, svh, codebook, dtype)
    assert got.shape == (n, k)
    inner = codebook_values(codebook)[states(t)]
    for i, j in [(0, 0), (k - 1, n - 1), *zip(RNG.integers(0, k, 4), RNG.integers(0, n, 4), strict=True)]:
        a, b = int(i) // 128 * 128, int(j) // 128 * 128
        total = Fraction(0)
        for p in range(128):
            for q in range(128):
                sign = (-1) ** ((int(i) & p & 127).bit_count() + (int(j) & q & 127).bit_count())
                total += sign * Fraction(inner[a + p, b + q])
        exact = total / 128 * Fraction(float(suh[i])) * Fraction(float(svh[j]))
        if dtype == "float64":
            assert abs(Fraction(float(got[j, i])) - exact) <= abs(exact) * Fraction(1, 2**52)
        else:
            best = abs(Fraction(float(got[j, i])) - exact)
            for neighbour in (np.nextafter(got[j, i], got.dtype.type(s)) for s in (np.inf, -np.inf)):
                assert best <= abs(Fraction(float(neighbour)) - exact)


def test_older_files_have_signs():
    words = np.array([0b101, -32768], np.int16)
    want = np.ones(32)
    want[[0, 2, 31]] = -1
    assert unpack_signs(words).dtype == np.float16
    np.testing.assert_array_equal(unpack_signs(words), want)


def test_refusals():
    one = np.ones(128, np.float16)
    with pytest.raises(FormatError, match="codebook 'lut'; allowed: 3inst, mcg, mul1"):
        codebook_values("lut")
    for bad in (trellis(16, 16, 4).astype(np.int32), trellis(16, 16, 4)[0], trellis(16, 16, 9), trellis(16, 16, 1)[..., :5]):
        with pytest.raises(ShapeError, match=r"\[exl3\] trellis is "):
            states(bad)
    with pytest.raises(ShapeError, match="multiples of 128"):
        decode(trellis(128, 64, 4), one, one[:64], "mcg", "float32")
    with pytest.raises(ShapeError, match=r"output scales are float16 \[64\]"):
        decode(trellis(128, 128, 4), one, one[:64], "mcg", "float32")
