"""Small floating-point types: the value of every code by definition, the E8M0, E4M3 and UE4M3 scale
bytes, and rounding to codes.

A minifloat of e exponent and m mantissa bits with bias b has value (−1)^s · 2^(max(E,1)−b) · (M/2^m
+ [E>0]).

OCP Microscaling Formats 1.0 gives E2M1 (b = 1), E2M3 (1), E3M2 (3), E4M3 (7, S.1111.111 is NaN),
E5M2 (15, IEEE infinities and NaNs); E8M0 is the bare exponent 2^(b−127). UE4M3 is GGUF's reading of
an E4M3 scale byte: the sign is ignored, 0x7F is 0 and 0xFF is 480. The `fnuz` types (Noune et al.
2022) have one NaN, with the code of −0, and no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, plural

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

TIES = ("even", "away", "zero", "truncate")
"""Halfway between two codes: the even one, the larger or the smaller magnitude. `truncate` rounds
everything toward zero.
"""
ZEROS = ("keep", "value", "drop", "negative")
"""Sign of a code whose magnitude is 0, for elements that have a −0: see `sign_zeros`."""


@dataclass(frozen=True)
class Minifloat:
    """Geometry of a small float: exponent bits, mantissa bits, bias, and what its top codes mean."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "none"  # fn: the all-ones code is NaN; ieee: the top exponent is inf and NaN; fnuz: −0 is NaN

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


MINIFLOATS: dict[str, Minifloat] = {
    f.name: f
    for f in (
        Minifloat("e2m1", 2, 1, 1),
        Minifloat("e2m3", 2, 3, 1),
        Minifloat("e3m2", 3, 2, 3),
        Minifloat("e4m3", 4, 3, 7, "fn"),
        Minifloat("e5m2", 5, 2, 15, "ieee"),
        Minifloat("e3m4", 3, 4, 3, "ieee"),
        Minifloat("e4m3_ieee", 4, 3, 7, "ieee"),
        Minifloat("e4m3b11fnuz", 4, 3, 11, "fnuz"),
        Minifloat("e4m3fnuz", 4, 3, 8, "fnuz"),
        Minifloat("e5m2fnuz", 5, 2, 16, "fnuz"),
    )
}

# QLoRA (Dettmers et al. 2023), appendix E: quantiles of a normal distribution with an exact zero,
# as float32.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# ModelOpt keeps the same table to four digits, in bfloat16.
_NF4_MODELOPT = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
                 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)  # fmt: skip
# bitsandbytes' own "fp4": sign, then 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4 (float32); code 8 is +0.
# Not OCP E2M1.
_BNB_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
# ggml's non-linear 4-bit table, integers.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def minifloat_values(f: Minifloat) -> F64:
    """All 2^bits values of `f` in code order, straight from the definition."""
    codes = np.arange(1 << f.bits)
    sign = np.where(codes >> (f.bits - 1), -1.0, 1.0)
    exponent = (codes >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1)
    mantissa = codes & ((1 << f.mantissa_bits) - 1)
    fraction = mantissa / (1 << f.mantissa_bits) + (exponent > 0)
    value = sign * np.ldexp(fraction, np.maximum(exponent, 1) - f.bias)
    top = (1 << f.exponent_bits) - 1
    if f.specials == "fn":
        value[(exponent == top) & (mantissa == (1 << f.mantissa_bits) - 1)] = np.nan
    elif f.specials == "ieee":
        value[(exponent == top) & (mantissa == 0)] *= np.inf
        value[(exponent == top) & (mantissa != 0)] = np.nan
    elif f.specials == "fnuz":
        value[1 << (f.bits - 1)] = np.nan
    out: F64 = value
    return out


def element_table(element: str, bits: int) -> F64:
    """Value of every code of `element`, float64 [2^bits], read-only.

    `int` is code − 2^(bits−1), `uint` the code, `mxint` two's complement over 2^(bits−2); the rest
    are minifloats and `TABLES`. Raises FormatError for an unknown name.
    """
    return TABLES[element] if element in TABLES else _computed_table(element, bits)


@cache
def _computed_table(element: str, bits: int) -> F64:
    if element in MINIFLOATS:
        out = minifloat_values(MINIFLOATS[element])
    elif element == "int":
        out = np.arange(1 << bits, dtype=np.float64) - (1 << (bits - 1))
    elif element == "uint":
        out = np.arange(1 << bits, dtype=np.float64)
    elif element == "mxint":
        # OCP MXINT8: two's complement with an implied scale of 2^−6, so 1.0 is code 64.
        signed = np.arange(1 << bits, dtype=np.float64)
        signed[1 << (bits - 1) :] -= 1 << bits
        out = signed / (1 << (bits - 2)) if bits > 1 else signed
    else:
        raise FormatError(f"[element] {element!r} is not an element table")
    out.setflags(write=False)
    return out


def _table(values: Sequence[float], dtype: Any = np.float32) -> F64:
    """Values as `dtype` holds them, read-only."""
    out: F64 = np.array(values, np.float32).astype(dtype).astype(np.float64)
    out.setflags(write=False)
    return out


TABLES: dict[str, F64] = {
    "nf4": _table(_NF4),
    "nf4_modelopt": _table(_NF4_MODELOPT, ml_dtypes.bfloat16),
    "bnb_fp4": _table([*_BNB_FP4, *(0.0 - v for v in _BNB_FP4)]),
    "iq4_nl": _table(_IQ4_NL),
}
"""Element tables by name: the value of every code. A format with elements of its own adds them by
`add_table`.
"""


def add_table(name: str, values: Sequence[float]) -> None:
    """Register an element table of 2^bits values, each a float32 number.

    Raises FormatError when the name is taken, or when values are not as many as some width has
    codes, or not float32 numbers.
    """
    if name in TABLES or name in MINIFLOATS or name in ("int", "uint", "mxint"):
        raise FormatError(f"[element] {name!r} is taken; give the table a name of its own")
    if len(values) not in (2, 4, 8, 16, 32, 64, 128, 256):
        raise FormatError(f"[element] {name!r} has {plural(len(values), 'value')}; allowed: 2^bits for 1 to 8 bits")
    table = _table(values)
    if not np.array_equal(table, np.asarray(values, np.float64), equal_nan=True):
        raise FormatError(f"[element] {name!r} has values that float32 does not hold; round them first")
    TABLES[name] = table


def element_significant_bits(element: str, bits: int) -> int:
    """Significant bits of every value of an element, at most; at least 24 for a table of values
    that are no multiples of 2^−16.

    Where element and scale together have 24 bits or fewer, float32 arithmetic is exact: the
    smallest scale times the smallest element is then a multiple of 2^−149, float32's smallest step.
    """
    if element in ("int", "uint", "mxint"):
        return bits
    values = element_table(element, bits)
    mantissa, exponent = np.frexp(values[np.isfinite(values) & (values != 0)])
    whole = np.abs(np.ldexp(mantissa, 53)).astype(np.int64)
    zeros = np.log2((whole & -whole).astype(np.float64)).astype(int)
    fine = element not in MINIFLOATS and (exponent + zeros - 53).min(initial=0) < -16
    return int((53 - zeros).max(initial=24 if fine else 1))


@cache
def scale_table(kind: str) -> F64:
    """Value of every byte of an 8-bit scale kind (`e8m0`, `e4m3`, `ue4m3`), float64 [256],
    read-only.
    """
    b = np.arange(256)
    if kind == "e8m0":
        out = np.ldexp(1.0, b - 127)
        out[255] = np.nan
    elif kind == "e4m3":
        out = minifloat_values(MINIFLOATS["e4m3"])
    elif kind == "ue4m3":
        # ggml ignores the sign bit, but compares the whole byte with 0x7F to read NaN as 0: 0xFF
        # stays 480.
        magnitude = b & 0x7F
        exponent, mantissa = magnitude >> 3, magnitude & 7
        out = np.ldexp(mantissa / 8 + (exponent > 0), np.maximum(exponent, 1) - 7)
        out[0x7F] = 0.0
    else:
        raise FormatError(f"[scale] {kind!r} is not an 8-bit scale kind")
    out.setflags(write=False)
    return out


def e8m0_encode(exponent: NDArray[np.integer]) -> U8:
    """Unbiased exponents -> E8M0 bytes, clamped to 2^−127 … 2^127 (bytes 0 to 254)."""
    return np.clip(np.asarray(exponent, np.int64) + 127, 0, 254).astype(np.uint8)


@cache
def _grid(element: str) -> tuple[F64, F64]:
    """Non-negative finite values of a minifloat in code order, and the midpoints between
    neighbours.
    """
    values = element_table(element, MINIFLOATS[element].bits)
    half = values[: len(values) // 2]
    positive = half[np.isfinite(half)]
    return positive, (positive[:-1] + positive[1:]) / 2


def round_to_element(x: NDArray[np.floating], element: str, ties: str = "even") -> U8:
    """Nearest code of a minifloat, saturating: |x| beyond the largest finite value takes that
    value.

    x        any float array; the comparison is exact in float64
    ties     one of `TIES`
    Returns uint8 codes; the sign bit follows x's sign bit, −0.0 included. NaN takes the largest
    magnitude's code and is the caller's to refuse first.
    """
    if ties not in TIES:
        raise FormatError(f"[ties] {ties!r}; allowed: {', '.join(TIES)}")
    x = np.asarray(x, np.float64)
    values, mid = _grid(element)
    mag = np.abs(x)
    if ties == "truncate":
        code = np.searchsorted(values, mag, side="right") - 1
    else:
        code = np.searchsorted(mid, mag)  # a tie lands on the lower code
        if ties != "zero":
            up = np.append(mid, np.nan)[code] == mag
            code = code + (up if ties == "away" else up & (code & 1 == 1))
    negative = np.signbit(x)
    if MINIFLOATS[element].specials == "fnuz":
        negative = negative & (code > 0)
    out: U8 = code.astype(np.uint8) | (negative.astype(np.uint8) << np.uint8(MINIFLOATS[element].bits - 1))
    return out


def sign_zeros(codes: U8, x: NDArray[np.floating], element: str, zeros: str) -> U8:
    """`codes` of `x` with the sign bit of zero magnitudes set by a rule of `ZEROS`.

    keep      x's sign bit: −0.0 and small negatives become −0
    value     the sign of the number: small negatives become −0, −0.0 becomes +0
    drop      always +0
    negative  as `value`, but every exact zero becomes −0 (ModelOpt's MXFP4)
    """
    if zeros not in ZEROS:
        raise FormatError(f"[zeros] {zeros!r}; allowed: {', '.join(ZEROS)}")
    if zeros == "keep":
        return codes
    top = np.uint8(1 << (MINIFLOATS[element].bits - 1))
    is_zero = (codes & ~top) == 0
    negative = {"value": x < 0, "drop": np.zeros(x.shape, bool), "negative": x <= 0}[zeros]
    return np.where(is_zero, np.where(negative, top, np.uint8(0)), codes)
