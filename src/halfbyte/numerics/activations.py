"""Activations rounded to 8 bits, by definition: what every backend's rounded modes compute with,
and which formats they serve.

    int8        q = rint(x · 127 / max|x|), scale max|x| / 127, over a span of at most 128 inputs
    int8_token  the same over all inputs of a token, where the weight has one group a row; else int8
    fp8         E4M3(x / scale), scale the least power of two for which no |x| of a token exceeds 448

A segment is one group, at most 128 inputs: what is summed before the weight's scale is applied. A
span is one segment, or the segments of 128 inputs. NaN and infinity make a scale NaN.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import Format
from .minifloat import element_significant_bits, element_table

F32 = NDArray[np.float32]

LONGEST_SEGMENT = 128
SCALE_BITS = {"e8m0": 1, "e4m3": 4, "ue4m3": 4, "float16": 11, "bfloat16": 8, "float32": 24}
"""Significant bits of a group scale."""
INTEGRAL_TABLES = {"e2m1": (0.5, 12), "iq4_nl": (1.0, 127)}
"""Tables of small whole numbers: their unit, and minus the smallest entry in units."""
LARGEST_E4M3 = 448.0
LONGEST_TOKEN_ROW = 65536
"""Inputs, padded, that `int8_token` gives one scale: so many products of two bytes fit in 32 bits."""


def segment_length(longest: int) -> int:
    """Inputs of a segment where the longest group has so many: the group, padded to eight, or a
    divisor of a longer group padded to 32.
    """
    if longest <= LONGEST_SEGMENT:
        return -(-longest // 8) * 8
    padded = -(-longest // 32) * 32
    return next(s for s in (128, 64, 32) if padded % s == 0)


def product_bits(fmt: Format) -> int:
    """Significant bits of an element, less its zero point, times its group scale, at most, where
    the zero point is one of the codes.
    """
    return element_significant_bits(fmt.element, fmt.bits) + (fmt.zero == "int") + SCALE_BITS.get(fmt.scale, 24)


def activation_span(fmt: Format, segment: int) -> int:
    """Inputs that one scale of 8-bit activations covers: whole segments, up to 128 inputs, or one
    segment.

    The sums of several segments are in units of that scale, 127 times the product of element and
    scale for a one-hot row. That must be exact in float32, or the row would not return the weight.
    Elements of more than 4 bits keep one scale a segment, whose error is smaller.
    """
    if fmt.bits > 4 or fmt.super_size or fmt.bias or fmt.minimum:
        return segment
    return segment * max(1, LONGEST_SEGMENT // segment) if product_bits(fmt) + 7 <= 24 else segment


def is_integral(fmt: Format) -> bool:
    """True where every element is a whole number of one unit that fits in 8 bits."""
    return fmt.element in ("int", "uint", "mxint") or (fmt.bits == 4 and fmt.element in INTEGRAL_TABLES)


@cache
def exact_in_e4m3(element: str, bits: int) -> bool:
    """True where every finite element is an E4M3 value."""
    if element == "mxint" or (element in ("int", "uint") and bits > 5):
        return False
    values = element_table(element, bits)
    values = values[np.isfinite(values)]
    if np.abs(values).max(initial=0) > LARGEST_E4M3:
        return False
    return bool((np.isin(np.abs(values), np.abs(e4m3_values()))).all())


@cache
def e4m3_values() -> NDArray[np.float64]:
    """The finite values of E4M3."""
    values: NDArray[np.float64] = element_table("e4m3", 8)
    return values[np.isfinite(values)]


def refusal(fmt: Format, activations: str) -> str | None:
    """Why weights of this format have no product with activations rounded so, or None."""
    if fmt.opaque:
        return f"{fmt.name} is kept as {fmt.kept_as}, whose values are no codes under scales; use activations='exact'"
    if fmt.grouping not in ("row", "block"):
        return f"{fmt.name} has {fmt.grouping} groups; rounded activations take groups along a row"
    if activations in ("int8", "int8_token") and not is_integral(fmt):
        return f"{fmt.name} has elements {fmt.element!r}, which are not whole numbers of 8 bits; use activations='exact' or 'fp8'"
    if activations == "fp8" and not exact_in_e4m3(fmt.element, fmt.bits):
        return (
            f"{fmt.name} has {fmt.bits}-bit elements {fmt.element!r}, which E4M3 does not hold exactly; use "
            "activations='exact' or 'int8'"
        )
    return None


def round_int8(x: F32, span: int) -> tuple[NDArray[np.int8], F32]:
    """Codes (m, k) and scales (m, ceil(k / span)) of x (m, k); the last span may be short."""
    m, k = x.shape
    codes = np.zeros((m, k), np.int8)
    scales = np.zeros((m, -(-k // span)), np.float32)
    for i, start in enumerate(range(0, k, span)):
        part = x[:, start : start + span]
        peak = np.abs(part).max(-1, keepdims=True)
        usable = np.isfinite(peak) & (peak > 0)
        safe = np.where(usable, peak, np.float32(1))
        lift = np.where(safe < np.float32(1e-36), np.float32(2.0**100), np.float32(1))
        inverse = np.float32(127) / (safe * lift)
        scaled = np.where(usable, part, np.float32(0)) * lift * inverse
        codes[:, start : start + span] = np.rint(scaled).astype(np.int8)
        scales[:, i] = np.where(usable, safe / np.float32(127), np.where(peak == 0, np.float32(0), np.float32(np.nan)))[:, 0]
    return codes, scales


def round_e4m3(x: F32) -> tuple[NDArray[np.uint8], F32]:
    """E4M3 bytes (m, k) and scales (m,) of x (m, k): powers of two from 2^-126 on; ties to even."""
    peak = np.abs(x).max(-1, initial=np.float32(0))
    finite = np.isfinite(peak)
    bits = np.where(finite, peak, np.float32(0)).view(np.int32)
    field = np.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)  # 448 is 1.75 · 2^8
    scale = (field << 23).astype(np.int32).view(np.float32)
    inverse = ((254 - field) << 23).astype(np.int32).view(np.float32)
    y = np.where(finite[:, None], x, np.float32(0)) * inverse[:, None]
    return _e4m3_bytes(y), np.where(finite, scale, np.float32(np.nan))


def _e4m3_bytes(y: F32) -> NDArray[np.uint8]:
    """Values of at most 448 to the nearest E4M3 byte."""
    whole = y.view(np.int32)
    size = whole & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = np.rint(np.abs(y) * np.float32(512)).astype(np.int32)  # below 2^-6: multiples of 2^-9
    code = np.where(size < (121 << 23), small, normal)
    out: NDArray[np.uint8] = (code | ((whole >> 24) & 0x80)).astype(np.uint8)
    return out


def rounded(x: F32, fmt: Format, activations: str, group_index: NDArray[Any] | None = None) -> F32:
    """x (m, k) as a product with a weight of this format sees it in a rounded mode.

    group_index  the group of each input where groups are not in order
    """
    if activations == "fp8":
        codes8, scale = round_e4m3(x)
        table = element_table("e4m3", 8).astype(np.float32)
        return table[codes8] * scale[:, None]
    k = x.shape[1]
    groups = max(fmt.groups(k), 1)
    index = np.arange(k) // max(fmt.group_size, 1) if group_index is None and groups > 1 else group_index
    counts = np.array([k]) if index is None else np.bincount(index, minlength=groups)
    size = k if groups == 1 else int(counts.max()) if group_index is not None else fmt.group_size
    segment = segment_length(size)
    length = -(-size // segment) * segment  # groups as the segments see them, padded
    at = np.zeros(k, np.int64) if index is None else np.asarray(index, np.int64)
    order = np.argsort(at, kind="stable")
    slot = np.empty(k, np.int64)
    slot[order] = np.arange(k) - np.repeat(np.cumsum(counts) - counts, counts)
    slot += at * length
    padded = np.zeros((x.shape[0], groups * length), np.float32)
    padded[:, slot] = x
    token = activations == "int8_token" and groups == 1 and length <= LONGEST_TOKEN_ROW
    span = length if token else activation_span(fmt, segment)
    codes, scales = round_int8(padded, span)
    values = codes.astype(np.float32) * np.repeat(scales, span, axis=1)[:, : padded.shape[1]]
    return np.ascontiguousarray(values[:, slot])


__all__ = [
    "INTEGRAL_TABLES", "LONGEST_SEGMENT", "SCALE_BITS", "activation_span", "exact_in_e4m3", "is_integral",
    "product_bits", "refusal", "round_e4m3", "round_int8", "rounded", "segment_length",
]  # fmt: skip
