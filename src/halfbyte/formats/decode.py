"""The one formula of docs/layering.md, evaluated exactly for any `Format`.

    value = ((element(code) − zero) · scale · super_scale · global) / divisor + bias − min · super_min

Each factor is a short binary number, so a product of them is exact in float64, and often in float32: an element of E2M1 has 2 significant bits,
a zero-shifted 4-bit code 5, an E8M0 scale 1, a float16 scale 11. `significant_bits` adds them up; where the sum says float32 holds
the product, or where a single operation rounds, float32 arithmetic *is* the exact value rounded once, and it is used because it is
faster. Everything else goes through `Exact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bits import unpack
from ..exact import Exact, bfloat16, dtype_named, two_product, two_sum
from ..minifloat import element_table, scale_table
from ..spec import Format

Parts = Mapping[str, NDArray[Any]]

_ELEMENT_BITS = {"e2m1": 2, "e2m3": 4, "e3m2": 3, "e4m3": 4, "e5m2": 3, "nf4": 24, "nf4_modelopt": 8, "bnb_fp4": 24, "iq4_nl": 7}
_SCALE_BITS = {"e8m0": 1, "e4m3": 4, "ue4m3": 4, "float16": 11, "bfloat16": 8, "float32": 24,
               "u4": 4, "u6": 6, "i6": 6, "i8": 8, "none": 0}  # fmt: skip


def element_values(fmt: Format, codes: NDArray[np.uint8], dtype: Any = np.float64) -> NDArray[Any]:
    """element(code) for unpacked codes. int and uint are computed, tables are looked up."""
    if fmt.element == "uint":
        return codes.astype(dtype)
    if fmt.element == "int":
        out = codes.astype(dtype)
        out -= 1 << (fmt.bits - 1)
        return out
    table: NDArray[Any] = element_table(fmt.element, fmt.bits).astype(dtype)
    return table[codes]


def scale_values(kind: str, raw: NDArray[Any], dtype: Any = np.float64) -> NDArray[Any]:
    """Stored scales as numbers: a table for the 8-bit floats, a cast for the rest. Exact in either dtype."""
    if kind in ("e8m0", "e4m3", "ue4m3"):
        table: NDArray[Any] = scale_table(kind).astype(dtype)
        return table[raw]
    return raw.astype(dtype)


def group_of(fmt: Format, k: int, group_index: NDArray[np.int32] | None = None) -> NDArray[np.integer] | None:
    """Group of each of k inputs, or None when a plain repeat does it."""
    if group_index is not None:
        return group_index
    return None


def spread(values: NDArray[Any], fmt: Format, k: int, index: NDArray[np.integer] | None) -> NDArray[Any]:
    """Per-group values [..., n, G] to per-element [..., n, k]. One group broadcasts; a short last group is cut."""
    if index is not None:
        return values[..., index]
    groups = values.shape[-1]
    if groups == 1:
        return np.broadcast_to(values, (*values.shape[:-1], k))
    return np.repeat(values, fmt.group_size, axis=-1)[..., :k]


def scale_index(fmt: Format, shape: tuple[int, ...], window: tuple[int, int] | None) -> NDArray[np.int64]:
    """Index into the flattened scales for each element of a (rows, k) window of a `flat` or `strided` matrix.

    window   (first row, rows of the whole matrix), None when the tensor is the whole
    """
    *_, n, k = shape
    first, total = window or (0, n)
    flat = np.arange(first * k, (first + n) * k, dtype=np.int64).reshape(n, k)
    if fmt.grouping == "flat":
        return flat // fmt.group_size
    return flat % (total * k // fmt.group_size)


def significant_bits(fmt: Format, parts: Parts) -> int:
    """An upper bound on the significant bits of (element − zero) · scale · super_scale · global."""
    element = _ELEMENT_BITS.get(fmt.element, fmt.bits)
    if fmt.zero == "int":
        element += 1
    total = element + _SCALE_BITS[fmt.scale]
    if fmt.super_size:
        total += 11
    if fmt.global_op:
        total += 24
    return total


def _rounds_once_in_float32(fmt: Format, parts: Parts, out: np.dtype[Any]) -> bool:
    """True when plain float32 arithmetic in the order of `_float32` equals the exact value rounded once to `out`."""
    if fmt.zero == "float" or fmt.divisor != 1.0 or fmt.global_op == "divide" or fmt.inverse or fmt.scale == "nested":
        return False
    bits = significant_bits(fmt, parts)
    additive = fmt.bias or bool(fmt.minimum)
    if fmt.scale in ("bfloat16", "float32") and fmt.scale != "none":
        # A product beyond float32 may come back into range by the added term; leave those to Exact.
        s = parts["scales"]
        if additive and s.size and not np.abs(s.astype(np.float32)).max(initial=0) < 2.0**100:
            return False
    if out == np.float32:
        if additive:
            return bits <= 24  # exact products, one rounded addition
        if fmt.global_op:
            return bits - 24 <= 24  # exact but for the last factor
        if fmt.super_size:
            return bits - _ELEMENT_BITS.get(fmt.element, fmt.bits) <= 24  # d · sc exact, the element rounds once
        return True  # two exact float32 operands, one multiplication
    # To a narrower type the float32 value itself must be exact.
    return bits <= 24 and not additive


def _float32(fmt: Format, shape: tuple[int, ...], parts: Parts, index: NDArray[np.integer] | None) -> NDArray[np.float32]:
    k = shape[-1]
    f32 = np.float32
    value = element_values(fmt, unpack(parts["codes"], fmt.bits, k), f32)
    if fmt.zero == "int":
        value -= spread(parts["zeros"].astype(f32), fmt, k, index)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scale = scale_values(fmt.scale, parts["scales"], f32)
        if fmt.super_size:
            per = fmt.super_size // fmt.group_size
            scale = scale * np.repeat(parts["super_scales"].astype(f32), per, axis=-1)
        if fmt.global_op:
            value *= spread(scale, fmt, k, index)
            value *= parts["global_scale"].astype(f32)[..., None, None]
        else:
            value *= spread(scale, fmt, k, index)
        if fmt.bias:
            value += spread(parts["biases"].astype(f32), fmt, k, index)
        if fmt.minimum:
            per = fmt.super_size // fmt.group_size
            low = parts["mins"].astype(f32) * np.repeat(parts["super_mins"].astype(f32), per, axis=-1)
            value -= spread(low, fmt, k, index)
    return value


def exact_values(
    fmt: Format, shape: tuple[int, ...], parts: Parts, window: tuple[int, int] | None = None
) -> Exact:
    """The exact values of a tensor (or a window of its rows) as `Exact`, float64 [*shape] terms."""
    k = shape[-1]
    index = parts.get("group_index")
    value = element_values(fmt, unpack(parts["codes"], fmt.bits, k))

    def per_element(a: NDArray[Any]) -> NDArray[Any]:
        if fmt.grouping in ("flat", "strided"):
            return a.reshape(-1)[scale_index(fmt, shape, window)].reshape(shape)
        if fmt.grouping == "block":
            first, total = window or (0, shape[-2])
            size = total if fmt.group_rows == -1 else fmt.group_rows
            rows = (first + np.arange(shape[-2])) // max(size, 1)
            a = a[..., rows, :]
        return spread(a, fmt, k, index)

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scale = per_element(scale_values(fmt.scale, parts["scales"])) if fmt.scale != "none" else np.float64(1)
        if fmt.super_size:
            per = fmt.super_size // fmt.group_size
            scale = scale * spread(np.repeat(parts["super_scales"].astype(np.float64), per, axis=-1), fmt, k, index)
        terms: list[NDArray[np.float64]]
        divisor: Any = None
        if fmt.zero == "float":
            hi, lo = two_sum(value, -per_element(parts["zeros"].astype(np.float64)))
            p, e = two_product(hi, scale)
            terms = [p, e, lo * scale]
        else:
            if fmt.zero == "int":
                value = value - per_element(parts["zeros"].astype(np.float64))
            if fmt.inverse:
                terms, divisor = [value], scale
            else:
                terms = [value * scale]
        if fmt.global_op:
            g = parts["global_scale"].astype(np.float64)[..., None, None]
            if fmt.global_op == "multiply":
                terms = [t * g for t in terms]
            else:
                divisor = g if divisor is None else divisor * g
        if fmt.divisor != 1.0:
            divisor = np.float64(fmt.divisor) if divisor is None else divisor * fmt.divisor
        if fmt.bias:
            terms.append(per_element(parts["biases"].astype(np.float64)))
        if fmt.minimum:
            per = fmt.super_size // fmt.group_size
            low = parts["mins"].astype(np.float64) * np.repeat(parts["super_mins"].astype(np.float64), per, axis=-1)
            terms.append(-per_element(low))
    return Exact(terms, None if divisor is None else np.asarray(divisor, np.float64))


def decode_exact(
    fmt: Format, shape: tuple[int, ...], parts: Parts, dtype: Any, window: tuple[int, int] | None = None
) -> NDArray[Any]:
    """Exact values rounded once, to nearest even, to `dtype` ("float32", "float16", "bfloat16" or "float64").

    float64 results are the exact value where it fits in 53 bits, else rounded to odd there: callers that round again, to any of
    the narrower types, get the right answer.
    """
    out = dtype_named(dtype)
    if fmt.grouping == "row" and out != np.float64 and _rounds_once_in_float32(fmt, parts, out):
        value = _float32(fmt, shape, parts, parts.get("group_index"))
        if out == np.float32:
            return value
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return value.astype(bfloat16 if out == bfloat16 else out)
    return exact_values(fmt, shape, parts, window).round(out)
