"""Exact arithmetic with one final rounding: sums, products and quotients of floats, rounded once to
nearest even.

A packed weight is a real number: a small integer or table value, times one to three scales, plus or
minus another such product, perhaps over a stored divisor. Here those reals are represented exactly
as sums of float64 terms (error-free transformations: Knuth's two-sum, Dekker's product with
Veltkamp splitting) and rounded once at the end. The method is rounding to odd (Boldo and Melquiond
2008): a value truncated to 53 bits with its last bit set when anything was lost can be rounded
again, to 51 bits or fewer, as if from the real number.

Products neither overflow nor underflow float64: scales are at most float32, so magnitudes stay
within 2^±500.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError

F64 = NDArray[np.float64]
bfloat16 = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": bfloat16,
}
"""Output dtypes by the names users write."""


def dtype_named(dtype: Any) -> np.dtype[Any]:
    """The numpy dtype for 'float32', 'float16', 'bfloat16', 'float64', a dtype object, or a torch
    dtype.

    Raises FormatError for anything else.
    """
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    try:
        parsed = None if dtype is None else np.dtype(dtype)  # NumPy takes None for float64
    except TypeError:
        parsed = None
    if parsed is not None and parsed.name in DTYPES:
        return DTYPES[parsed.name]
    raise FormatError(f"[dtype] {dtype!r} is not a dtype to decode to; allowed: {', '.join(DTYPES)}")


def two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """s + t == a + b exactly, s the rounded sum (Knuth)."""
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def two_product(a: F64, b: F64) -> tuple[F64, F64]:
    """p + e == a · b exactly, p the rounded product (Dekker, Veltkamp split at 27 bits); e is 0
    where p is not finite.
    """
    p = a * b
    ca, cb = a * 134217729.0, b * 134217729.0
    ah, bh = ca - (ca - a), cb - (cb - b)
    al, bl = a - ah, b - bh
    e = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    return p, np.where(np.isfinite(p), e, 0.0)


def to_odd(hi: F64, lo: F64) -> F64:
    """hi + lo (|lo| at most half an ulp of hi) rounded to odd in float64."""
    hi = np.asarray(hi, np.float64)
    lo = np.asarray(lo, np.float64)
    with np.errstate(invalid="ignore"):
        inexact = np.isfinite(hi) & (lo != 0)
        even = (hi.view(np.int64) & 1) == 0
        # Toward lo by one ulp when the last bit is even: the truncated value then has an odd last
        # bit, or hi already is odd.
        direction = np.where(lo > 0, np.inf, -np.inf)
        return np.where(inexact & even, np.nextafter(hi, direction), hi)


def round_once(x: F64, dtype: Any) -> NDArray[Any]:
    """float64 `x`, exact or rounded to odd, rounded once to `dtype`.

    NumPy goes from float64 to float32 and float16 in one rounding; to bfloat16 ml_dtypes goes
    through float32, so that step is made odd first.
    """
    dt = dtype_named(dtype)
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dt != bfloat16:
            return x.astype(dt)
        f = x.astype(np.float32)
        back = f.astype(np.float64)
        finite = np.isfinite(f) & (back != x)
        even = (f.view(np.int32) & 1) == 0
        toward = np.where(x > back, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)
        odd = np.where(finite & even, np.nextafter(f, toward), f)
        # A finite double beyond float32's range: keep the sign, let bfloat16 round its largest
        # float32 to infinity.
        return odd.astype(dt)


def distil(terms: list[F64]) -> list[F64]:
    """The same real sum as non-overlapping terms, largest first: two-sum leaves every adjacent pair
    unchanged.

    Zeros are last. Elements with NaN or infinite terms have no meaning; callers replace them.
    """
    parts = [np.array(t) for t in np.broadcast_arrays(*terms)]
    changed = True
    while changed:
        changed = False
        for i in range(len(parts) - 1, 0, -1):
            s, e = two_sum(parts[i - 1], parts[i])
            finite = np.isfinite(s)
            if (finite & ((s != parts[i - 1]) | (e != parts[i]))).any():
                changed = True
                parts[i - 1], parts[i] = np.where(finite, s, parts[i - 1]), np.where(finite, e, parts[i])
    return parts


def _tail(parts: list[F64]) -> F64:
    """The first non-zero term after the leading one of a distilled sum; it has the sign of the sum
    of all terms after the leading one.
    """
    out = np.zeros_like(parts[0])
    for t in parts[:0:-1]:
        out = np.where(t != 0, t, out)
    return out


def round_sum(terms: list[F64], dtype: Any) -> NDArray[Any]:
    """The exact sum of float64 terms, rounded once to `dtype`. NaN and infinity follow ordinary
    addition.
    """
    if len(terms) == 1:
        return round_once(terms[0], dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        plain = sum(terms[1:], terms[0])
        parts = list(two_sum(*np.broadcast_arrays(*terms))) if len(terms) == 2 else distil(terms)
        out = np.where(np.isfinite(plain), to_odd(parts[0], _tail(parts)), plain)
    return round_once(out, dtype)


def round_quotient(terms: list[F64], den: F64, dtype: Any) -> NDArray[Any]:
    """The exact sum of float64 terms over `den`, rounded once to `dtype`.

    Two quotients are computed, the second of the exact remainder of the first; the sign of the last
    remainder decides the odd bit.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        *terms, den = np.broadcast_arrays(*(np.asarray(t, np.float64) for t in terms), np.asarray(den, np.float64))
        plain = sum(terms[1:], terms[0]) / den
        parts = distil(terms) if len(terms) > 1 else terms
        first = parts[0] / den
        rest = distil([*parts, *(-t for t in two_product(first, den))])
        second = rest[0] / den
        rest = distil([*rest, *(-t for t in two_product(second, den))])
        hi, lo = two_sum(first, second)
        sign = np.sign(np.where(rest[0] != 0, rest[0], 0.0)) * np.sign(den)
        out = np.where(np.isfinite(plain) & np.isfinite(den), to_odd(hi, np.where(lo != 0, lo, sign)), plain)
    return round_once(out, dtype)


class Exact:
    """A real number an element: a sum of float64 terms, over an optional divisor, not yet rounded.

    terms    arrays that broadcast together; their real sum is the numerator
    divisor  float64 array or None
    """

    __slots__ = ("divisor", "terms")

    def __init__(self, terms: list[F64], divisor: F64 | None = None) -> None:
        self.terms = terms
        self.divisor = divisor

    def round(self, dtype: Any) -> NDArray[Any]:
        """The value rounded once, to nearest even, to `dtype`."""
        if self.divisor is None:
            return round_sum(self.terms, dtype)
        return round_quotient(self.terms, self.divisor, dtype)
