"""One rounding, no more: sums, products and quotients of floats, rounded once to the nearest even value.

A packed weight is a real number: a small integer or table value, times one to three scales, plus or minus another such product,
perhaps over a stored divisor. Here those reals are held exactly as sums of float64 terms (error-free transformations: Knuth's
two-sum, Dekker's product by Veltkamp splitting) and rounded once at the end. The device is rounding to odd (Boldo and
Melquiond 2008): a value truncated to 53 bits with its last bit set when anything was lost can be rounded again, to 51 bits or
fewer, as if from the real number.

The products keep clear of float64's range: scales are at most float32, so magnitudes stay within 2^±500.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import FormatError

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
    """The numpy dtype for 'float32', 'float16', 'bfloat16', 'float64', a dtype object, or a torch dtype.

    Raises FormatError for anything else.
    """
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is not None and found.name in DTYPES:
        return DTYPES[found.name]
    raise FormatError(f"[dtype] {dtype!r} is not a dtype to decode to; allowed: {', '.join(DTYPES)}")


def two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """s + t == a + b exactly, s the rounded sum (Knuth)."""
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def two_product(a: F64, b: F64) -> tuple[F64, F64]:
    """p + e == a · b exactly, p the rounded product (Dekker, Veltkamp split at 27 bits)."""
    p = a * b
    ca, cb = a * 134217729.0, b * 134217729.0
    ah, bh = ca - (ca - a), cb - (cb - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def to_odd(hi: F64, lo: F64) -> F64:
    """hi + lo (|lo| at most half an ulp of hi) rounded to odd in float64."""
    hi = np.asarray(hi, np.float64)
    lo = np.asarray(lo, np.float64)
    with np.errstate(invalid="ignore"):
        inexact = np.isfinite(hi) & (lo != 0)
        even = (hi.view(np.int64) & 1) == 0
        # Toward lo by one ulp when the last bit is even: the truncated value then has an odd last bit, or hi already is odd.
        direction = np.where(lo > 0, np.inf, -np.inf)
        return np.where(inexact & even, np.nextafter(hi, direction), hi)


def round_odd(x: F64, dtype: Any) -> NDArray[Any]:
    """float64 `x`, exact or rounded to odd, rounded once to `dtype`.

    NumPy goes from float64 to float32 and float16 in one rounding; to bfloat16 ml_dtypes goes through float32, so that step is
    made odd first.
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
        # A finite double beyond float32's range: keep the sign, let bfloat16 round its largest float32 to infinity.
        return odd.astype(dt)


def round_sum(terms: list[F64], dtype: Any) -> NDArray[Any]:
    """The exact sum of float64 terms, rounded once to `dtype`.

    One or two terms take one two-sum; more are distilled until no pair overlaps. NaN and infinity follow ordinary addition.
    """
    if len(terms) == 1:
        return round_odd(terms[0], dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        plain = terms[0]
        for t in terms[1:]:
            plain = plain + t
        parts = list(np.broadcast_arrays(*terms))
        for _ in range(len(parts) - 1):
            for i in range(len(parts) - 1, 0, -1):
                s, e = two_sum(parts[i - 1], parts[i])
                parts[i - 1], parts[i] = s, e
        hi, lo = parts[0], parts[1]
        for extra in parts[2:]:
            # What is left cannot change the rounding except by being there: give it to lo when lo is zero.
            lo = np.where(lo == 0, extra, lo)
        out = np.where(np.isfinite(plain), to_odd(hi, lo), plain)
    return round_odd(out, dtype)


def round_quotient(num: F64, den: F64, dtype: Any) -> NDArray[Any]:
    """num / den, both exact float64, rounded once to `dtype` (the sign of the remainder decides the odd bit)."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        num, den = np.broadcast_arrays(np.asarray(num, np.float64), np.asarray(den, np.float64))
        q = num / den
        p, e = two_product(q, den)
        remainder = (num - p) - e
        lo = np.where(np.isfinite(q) & np.isfinite(den), remainder * np.sign(den), 0.0)
        return round_odd(to_odd(q, lo), dtype)


class Exact:
    """A real number an element: a sum of float64 terms, over an optional divisor, not yet rounded.

    terms    arrays that broadcast together; their real sum is the numerator
    divisor  float64 array or None. A quotient has exactly one term.
    """

    __slots__ = ("divisor", "terms")

    def __init__(self, terms: list[F64], divisor: F64 | None = None) -> None:
        self.terms = terms
        self.divisor = divisor

    def round(self, dtype: Any) -> NDArray[Any]:
        """The value rounded once, to nearest even, to `dtype`."""
        if self.divisor is None:
            return round_sum(self.terms, dtype)
        (numerator,) = self.terms
        return round_quotient(numerator, self.divisor, dtype)
