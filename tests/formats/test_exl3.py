"""EXL3 against a slow reference written from its definition: Python integers for bits, Fractions
for values.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats import exl3, family_of
from halfbyte.formats.exl3 import codebook_values, decode, states, unpack_signs
from support.exl3_reference import slow_states, slow_value

RNG = np.random.default_rng(5)


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
    inner = codebook_values(codebook)[states(t)].astype(np.float64) * 2.0**40
    whole = inner.astype(np.int64)
    assert np.array_equal(whole, inner)  # so that sums of signed values are exact
    bits_of = np.array([bin(v).count("1") for v in range(128)])
    for i, j in [(0, 0), (k - 1, n - 1), *zip(RNG.integers(0, k, 4), RNG.integers(0, n, 4), strict=True)]:
        a, b = int(i) // 128 * 128, int(j) // 128 * 128
        row, column = (1 - 2 * (bits_of[int(at) & np.arange(128)] % 2) for at in (i & 127, j & 127))
        total = Fraction(int((row[:, None] * column * whole[a : a + 128, b : b + 128]).sum()), 2**40)
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


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 128), (127, 129), (128, 256), (130, 131), (255, 384), (0, 384)])
def test_a_window_of_rows_decodes_the_blocks_of_128_that_it_touches(first, last, monkeypatch):
    parts = {"trellis": trellis(128, 384, 4)}
    parts |= {f"{side}_scales": RNG.standard_normal(size).astype(np.float16) for side, size in (("input", 128), ("output", 384))}
    fmt = exl3.EXL3().format("exl3_4_mcg")
    whole = QTensor(fmt, (384, 128), parts).dequantize("float32")
    rows = []
    monkeypatch.setattr(exl3, "decode", lambda *given: rows.append(given[2].size) or decode(*given))
    found = family_of(fmt).decode(fmt, (last - first, 128), parts, np.dtype("float32"), (first, last))
    assert np.array_equal(found, whole[first:last])
    assert rows == [128 * len({row // 128 for row in range(first, last)})]
