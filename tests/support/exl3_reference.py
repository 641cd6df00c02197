"""EXL3 written from its definition, slowly: Python integers for bits, Fractions for codebooks.

Nothing of the library. `dense` gives a whole weight in float64, where every sum is exact.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np


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
    """(input, output) -> state, of one tile of int16 words, from one Python integer that holds the
    whole stream.
    """
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


def hadamard(size: int = 128) -> np.ndarray:
    """The Sylvester-Hadamard matrix of ±1: (−1)^popcount(i & j)."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)], np.float64)


def dense(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str) -> np.ndarray:
    """The weight (n, k) in float64: exact but for the last product with a scale."""
    k, n = 16 * trellis.shape[0], 16 * trellis.shape[1]
    inner = np.empty((k, n))
    for i in range(k // 16):
        for j in range(n // 16):
            for (r, c), state in slow_states(trellis[i, j]).items():
                inner[16 * i + r, 16 * j + c] = float(slow_value(codebook, state))
    h = hadamard()
    out = np.kron(np.eye(k // 128), h) @ inner @ np.kron(np.eye(n // 128), h) / 128
    return (out * (suh.astype(np.float64)[:, None] * svh.astype(np.float64))).T
