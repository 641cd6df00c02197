"""The value of a packed weight, evaluated exactly for any `Format`.

    value = ((element(code) − zero) · scale · super_scale · global) / divisor
            + bias − min · super_min

Each factor has few significant bits: an element of E2M1 has 2, a 4-bit code less its zero point 5,
an E8M0 scale 1, a float16 scale 11. A product needs the sum of these. Where float32 can represent
every intermediate result, or where only one operation rounds, float32 arithmetic *is* the exact
value rounded once, and is used because it is faster. Everything else is computed with `Exact`: in
float64 while 53 bits suffice for the product, with error terms of `two_product` beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..numerics.bits import unpack
from ..numerics.exact import F64, Exact, dtype_named, two_product, two_sum
from ..numerics.minifloat import element_significant_bits, element_table, scale_table
from ..spec import Format

Parts = Mapping[str, NDArray[Any]]
Window = tuple[int, int]
"""(first row, rows of the whole): rows of the flattened tensor, or of one matrix for `block`
groups.
"""

Expander = Callable[[NDArray[Any]], NDArray[Any]]
"""Function from values a group to values an element."""

NESTED_BLOCK = 256
"""Blocks that share an entry of `nested_absmax`."""

_SCALE_BITS = {"e8m0": 1, "e4m3": 4, "ue4m3": 4, "float16": 11, "bfloat16": 8, "float32": 24,
               "u4": 4, "u6": 6, "i6": 6, "i8": 8, "none": 0}  # fmt: skip
"""Significant bits of every value of a kind of scale."""


def element_values(fmt: Format, codes: NDArray[np.uint8], dtype: Any = np.float64) -> NDArray[Any]:
    """element(code) for unpacked codes. int and uint are computed, tables are looked up."""
    if fmt.element in ("uint", "int"):
        out: NDArray[Any] = codes.astype(dtype)
        if fmt.element == "int":
            out -= 1 << (fmt.bits - 1)
        return out
    table: NDArray[Any] = element_table(fmt.element, fmt.bits).astype(dtype)
    return table[codes]


def scale_values(kind: str, raw: NDArray[Any], dtype: Any = np.float64) -> NDArray[Any]:
    """Stored scales as numbers: a table for the 8-bit floats, a cast for the rest. Exact in either
    dtype.
    """
    if kind in ("e8m0", "e4m3", "ue4m3"):
        raw = scale_table(kind)[raw]
    out: NDArray[Any] = raw.astype(dtype)
    return out


def group_expander(fmt: Format, shape: tuple[int, ...], window: Window | None, index: NDArray[np.integer] | None) -> Expander:
    """The function from values a group to values an element, [*shape] or an array that broadcasts
    to it.
    """
    k = shape[-1]

    def along_row(a: NDArray[Any]) -> NDArray[Any]:
        if index is not None:
            return a[..., index]
        if a.shape[-1] == 1:
            return a
        return np.repeat(a, fmt.group_size, axis=-1)[..., :k]

    if fmt.grouping in ("flat", "strided"):
        rows = math.prod(shape[:-1])
        first, total = window or (0, rows)
        flat = np.arange(first * k, (first + rows) * k, dtype=np.int64)
        group = flat // fmt.group_size if fmt.grouping == "flat" else flat % max(1, -(-total * k // fmt.group_size))
        return lambda a: a.reshape(-1)[group].reshape(shape)
    if fmt.grouping == "block":
        first, total = window or (0, shape[-2])
        size = max(1, total if fmt.group_rows == -1 else fmt.group_rows)
        tile = (first + np.arange(shape[-2])) // size
        return lambda a: along_row(a[..., tile, :])
    return along_row


def _super(fmt: Format, a: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Second-level values [..., k/super_size] a super-group to values a group."""
    return np.repeat(a.astype(dtype), fmt.super_size // fmt.group_size, axis=-1)


def _value_bits(fmt: Format, parts: Parts) -> int:
    """Significant bits of element − zero, at most: integers up to the largest code or stored zero
    point.
    """
    bits = element_significant_bits(fmt.element, fmt.bits)
    if fmt.zero == "int":
        zeros = parts["zeros"]
        return max(bits, int(np.abs(zeros.astype(np.int32)).max(initial=0)).bit_length()) + 1
    return bits


def significant_bits(fmt: Format, parts: Parts) -> int:
    """An upper bound on the significant bits of (element − zero) · scale · super_scale · global."""
    total = _value_bits(fmt, parts) + _SCALE_BITS[fmt.scale]
    return total + (11 if fmt.super_size else 0) + (24 if fmt.global_op else 0)


def _rounds_once_in_float32(fmt: Format, parts: Parts, out: np.dtype[Any]) -> bool:
    """True when plain float32 arithmetic in the order of `_float32` equals the exact value rounded
    once to `out`.
    """
    if fmt.zero == "float" or fmt.divisor != 1.0 or fmt.global_op == "divide" or fmt.inverse or fmt.scale == "nested":
        return False
    bits = significant_bits(fmt, parts)
    additive = fmt.bias or bool(fmt.minimum)
    if out != np.float32:
        # The float32 value itself must be exact. A value beyond its range is beyond the narrower
        # ranges too, and the smallest scale times the smallest element of every format is a
        # multiple of 2^−149, float32's smallest step.
        return bits <= 24 and not additive
    if fmt.global_op:
        # Element · scale is exact, and of E4M3 stays in range; the global factor rounds.
        return fmt.scale in ("e4m3", "ue4m3") and not additive and bits - 24 <= 24
    if additive:
        # Exact products, one rounded addition. A product beyond float32 might come back into range
        # by the sum.
        wide = fmt.scale == "bfloat16" and not np.abs(parts["scales"].astype(np.float32)).max(initial=0) < 2.0**100
        return bits <= 24 and not wide
    # Two exact float32 operands, one multiplication.
    return fmt.super_size == 0 or _SCALE_BITS[fmt.scale] + 11 <= 24


def _float32(fmt: Format, shape: tuple[int, ...], parts: Parts, expand: Expander) -> NDArray[np.float32]:
    f32 = np.float32
    value = element_values(fmt, unpack(parts["codes"], fmt.bits, shape[-1]), f32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if fmt.zero == "int":
            value -= expand(parts["zeros"].astype(f32))
        if fmt.scale != "none":
            scale = scale_values(fmt.scale, parts["scales"], f32)
            value *= expand(scale * _super(fmt, parts["super_scales"], f32) if fmt.super_size else scale)
        if fmt.global_op:
            value *= parts["global_scale"].astype(f32)[..., None, None]
        if fmt.bias:
            value += expand(parts["biases"].astype(f32))
        if fmt.minimum:
            value -= expand(parts["mins"].astype(f32) * _super(fmt, parts["super_mins"], f32))
    return value


class _Term(NamedTuple):
    """One float64 summand: an upper bound on its significant bits, and whether it is the rounding
    error of another term.
    """

    value: F64
    bits: int
    is_error: bool = False


def _times(terms: list[_Term], factor: F64, bits: int) -> list[_Term]:
    """Every term times a factor of `bits` significant bits, exactly: beyond 53 bits the rounding
    errors become terms.
    """
    out = []
    for term in terms:
        # An infinite or NaN factor multiplies the leading term only: an error term times infinity
        # could cancel it.
        by = np.where(np.isfinite(factor), factor, 0.0) if term.is_error else factor
        if term.bits + bits <= 53:
            out.append(_Term(term.value * by, term.bits + bits, term.is_error))
            continue
        product, error = two_product(term.value, by)
        out.append(_Term(product, 53, term.is_error))
        if error.any():
            out.append(_Term(error, 53, True))
    return out


def _shifted(fmt: Format, parts: Parts, codes: NDArray[np.uint8], expand: Expander) -> list[_Term]:
    """element(code) − zero as one term, or as two where 53 bits do not hold the difference with a
    float zero point.
    """
    value = element_values(fmt, codes)
    if fmt.zero == "int":
        value = value - expand(parts["zeros"].astype(np.float64))
    if fmt.zero != "float":
        return [_Term(value, _value_bits(fmt, parts))]
    hi, lo = two_sum(value, -expand(parts["zeros"].astype(np.float64)))
    # A float16 zero point is a multiple of 2^−24 below 2^16. The error term is part of one operand:
    # 24 bits.
    terms = [_Term(hi, 41 if fmt.scale == "float16" else 53)]
    if np.nan_to_num(lo).any():
        terms.append(_Term(np.nan_to_num(lo), 24, True))
    return terms


def nested_factors(parts: Parts, shape: tuple[int, ...], window: Window | None) -> tuple[F64, F64]:
    """nested_map[byte] and nested_absmax of each block, float64 in the shape of `scales`."""
    scales = parts["scales"]
    first = window[0] * scales.shape[-1] if window is not None and scales.ndim > 1 else 0
    block = first + np.arange(scales.size).reshape(scales.shape)
    mapped = parts["nested_map"].astype(np.float64)[scales]
    return mapped, parts["nested_absmax"].astype(np.float64)[block // NESTED_BLOCK]


def _scaled(
    fmt: Format, shape: tuple[int, ...], parts: Parts, window: Window | None, terms: list[_Term], expand: Expander
) -> tuple[list[_Term], F64 | None]:
    """Terms times their group scales, and the divisor of scales that divide."""
    if fmt.scale == "none":
        return terms, None
    if fmt.scale != "nested":
        scale = expand(scale_values(fmt.scale, parts["scales"]))
        return (terms, scale) if fmt.inverse else (_times(terms, scale, _SCALE_BITS[fmt.scale]), None)
    mapped, absmax = nested_factors(parts, shape, window)
    offset = np.broadcast_to(parts["nested_offset"].astype(np.float64), mapped.shape)
    if not fmt.inverse:
        return _times(terms, expand(mapped * absmax), 48) + _times(terms, expand(offset), 24), None
    # (map / absmax + offset) · element, brought to the divisor absmax. Where absmax is infinite,
    # map / absmax is 0 by itself.
    infinite = np.isinf(absmax)
    mapped, absmax = np.where(infinite, mapped / absmax, mapped), np.where(infinite, 1.0, absmax)
    return _times(terms, expand(mapped), 24) + _times(terms, expand(offset * absmax), 48), expand(absmax)


def exact_values(fmt: Format, shape: tuple[int, ...], parts: Parts, window: Window | None = None) -> Exact:
    """The exact values of a tensor (or a window of its rows) as `Exact`, float64 [*shape] terms."""
    expand = group_expander(fmt, shape, window, parts.get("group_index"))
    divisors: list[F64] = []
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        terms = _shifted(fmt, parts, unpack(parts["codes"], fmt.bits, shape[-1]), expand)
        terms, divisor = _scaled(fmt, shape, parts, window, terms, expand)
        divisors += [] if divisor is None else [divisor]
        if fmt.super_size:
            terms = _times(terms, expand(_super(fmt, parts["super_scales"], np.float64)), 11)
        if fmt.global_op:
            factor = parts["global_scale"].astype(np.float64)[..., None, None]
            if fmt.global_op == "multiply":
                terms = _times(terms, factor, 24)
            else:
                divisors.append(factor)
        if fmt.divisor != 1.0:
            divisors.append(np.asarray(fmt.divisor, np.float64))
        summands = [t.value for t in terms]
        if fmt.bias:
            summands.append(expand(parts["biases"].astype(np.float64)))
        if fmt.minimum:
            summands.append(-expand(parts["mins"].astype(np.float64) * _super(fmt, parts["super_mins"], np.float64)))
    return Exact(summands, reduce(np.multiply, divisors) if divisors else None)


def decode_exact(fmt: Format, shape: tuple[int, ...], parts: Parts, dtype: Any, window: Window | None = None) -> NDArray[Any]:
    """Exact values rounded once, to nearest even, to `dtype` ("float32", "float16", "bfloat16" or
    "float64").

    A float64 result is the exact value where 53 bits hold it, else the value rounded to odd:
    rounding that again to a narrower dtype gives the correctly rounded result.
    """
    out = dtype_named(dtype)
    if out != np.float64 and _rounds_once_in_float32(fmt, parts, out):
        value = _float32(fmt, shape, parts, group_expander(fmt, shape, window, parts.get("group_index")))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return value.astype(out, copy=False)
    return exact_values(fmt, shape, parts, window).round(out)
