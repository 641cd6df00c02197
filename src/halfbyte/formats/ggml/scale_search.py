"""The scale of a group with the least squared error, by trying a few.

For fixed codes with values v the best scale has a closed form: s = Σxv / Σv², with error Σx² −
(Σxv)² / Σv². With an offset, x ≈ s·q + o, s and o are the least-squares line through (q, x). The
search is over codes: the group's largest value is mapped to the end of the table and to 18
positions up to 0.9 steps inside and outside of it; each position gives codes, each codes their best
scale, and the least error wins. Bytes may differ from llama.cpp's, whose K-quants weight errors by
magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...numerics.minifloat import element_table
from ...numerics.row_slices import row_slices
from ...spec import Format
from ..rounding.policy import one_of
from .types import check_blocks

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_CHUNK = 1 << 18
_OFFSETS = np.linspace(-0.9, 0.9, 19, dtype=np.float32)
"""Positions of the extreme value that are tried, in steps of the table relative to its end."""
SMALLEST = np.float32(2.0**-126)
"""The smallest normal float32. The reciprocal of a smaller number overflows, so that such a divisor
counts as zero.
"""


SCALE_RULES = ("extreme", "search")
"""extreme: the largest value is mapped to the end of the range. search: the least squared error of
19 positions near it.
"""


def wants_search(fmt: Format, options: Mapping[str, Any]) -> bool:
    """True when the options of `encode` select the search (the default). FormatError for options
    other than `scale`.
    """
    unknown = sorted(set(options) - {"scale"})
    if unknown:
        raise FormatError(f"[quantize] {fmt.name} with option {', '.join(unknown)}; allowed: scale")
    rule = options.get("scale", "search")
    one_of("scale", rule, SCALE_RULES)
    return bool(rule == "search")


def safe_divide(x: Any, by: Any) -> Any:
    """x / by, and 0 where |by| is zero or too small to divide by."""
    out = np.zeros(np.broadcast_shapes(np.shape(x), np.shape(by)), np.result_type(x, by))
    return np.divide(x, by, out=out, where=~(np.abs(by) < SMALLEST))


def to_float16(x: Any, fmt: Format) -> NDArray[np.float16]:
    """x in float16. FormatError for a value beyond 65504: an infinite scale would decode zeros as
    NaN.
    """
    with np.errstate(over="ignore"):
        half: NDArray[np.float16] = x.astype(np.float16)
    if not np.isfinite(half).all():
        worst = np.abs(x).max()
        raise FormatError(
            f"[quantize] {fmt.name}: a group needs a float16 scale or minimum of {worst:.4g}; float16 ends at 65504. "
            "Divide the weight by a power of two first, or use mxfp4, whose scales reach 2^127"
        )
    return half


def float16_reaching(s: Any, peak: Any, steps: float, fmt: Format) -> NDArray[np.float16]:
    """The float16 nearest to scale s, or the next larger one where `steps` of the nearest miss
    |peak| by over half a step.

    That happens with subnormal float16 scales, which are coarse: weights near 1e-7 would be
    clipped, or all become zero. A peak below one step of the larger scale stays zero.
    """
    half = to_float16(s, fmt)
    wider = np.nextafter(half, np.copysign(np.float16(np.inf), s.astype(np.float16)))
    short = np.abs(peak) > np.abs(half.astype(np.float32)) * np.float32(steps + 0.5)
    return np.where(short & (np.abs(peak) >= np.abs(wider.astype(np.float32))), wider, half)


def extreme(x: F32) -> F32:
    """Signed value of largest magnitude of each group, the first among equals: [..., g] -> [...,
    1].
    """
    out: F32 = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    return out


def nearest(y: Any, element: str, bits: int) -> U8:
    """Code of the table value nearest to y, saturating. Integer ties go to the even integer, ties
    of `iq4_nl` up.
    """
    if element == "iq4_nl":
        # Midpoints of the table are multiples of one half, so twice y, floored, decides.
        codes: U8 = _iq4_codes()[np.clip(np.floor(y * 2) + 256, 0, 511).astype(np.int16)]
        return codes
    zero = 1 << (bits - 1) if element == "int" else 0
    codes = np.clip(np.rint(y) + zero, 0, (1 << bits) - 1).astype(np.uint8)
    return codes


@cache
def _iq4_codes() -> U8:
    """Code for each floor(2·y) from −256 to 255."""
    values = element_table("iq4_nl", 4)
    return np.searchsorted(values[:-1] + values[1:], np.arange(-256, 256), side="right").astype(np.uint8)


def scale_extreme(x: F32, element: str, bits: int) -> F32:
    """Scale that maps the value of largest magnitude to the table's first entry, the negative end:
    [..., g] -> [..., 1].
    """
    out: F32 = extreme(x) / np.float32(element_table(element, bits)[0])
    return out


def scale_search(x: F32, element: str, bits: int) -> F32:
    """Scale s for x ≈ s · element(code): [..., g] -> [..., 1]. Negative where a positive peak takes
    the longer, negative end of the table.
    """
    values = element_table(element, bits).astype(np.float32)
    peak = extreme(x)
    best, gain = peak / values[0], np.full(peak.shape, -1, np.float32)
    # Squares must neither overflow nor underflow: computed on x / peak, and scaled back at the end.
    unit = safe_divide(x, peak).astype(np.float32)
    for offset in _OFFSETS:
        end = values[0] + offset * (values[1] - values[0])
        v = values[nearest(unit * end, element, bits)]
        product, square = (unit * v).sum(-1, keepdims=True), (v * v).sum(-1, keepdims=True)
        won = product * product > gain * square
        gain = np.where(won, safe_divide(product * product, square), gain)
        best = np.where(won, safe_divide(product, square) * peak, best)
    out: F32 = best.astype(np.float32)
    return out


def line_search(x: F32, levels: int, *, below_zero: bool) -> tuple[F32, F32]:
    """Slope s ≥ 0 and offset o for x ≈ s·q + o with q = 0 … levels: [..., g] -> two of [..., 1].
    `below_zero` keeps o ≤ 0.
    """
    low, span = ends(x, below_zero)
    unit = safe_divide(x - low, span).astype(np.float32)  # 0 … 1, so that squares neither overflow nor underflow
    highest = safe_divide(-low, span)
    n, sum_x = x.shape[-1], unit.sum(-1, keepdims=True)
    slope, offset = np.full_like(low, 1 / levels), np.zeros_like(low)
    least = np.full_like(low, np.inf)
    for shift in _OFFSETS:
        q = np.clip(np.rint(unit * (levels + shift)), 0, levels)
        sum_q, sum_qq, sum_qx = q.sum(-1, keepdims=True), (q * q).sum(-1, keepdims=True), (q * unit).sum(-1, keepdims=True)
        s = safe_divide(n * sum_qx - sum_q * sum_x, n * sum_qq - sum_q * sum_q)
        o = (sum_x - s * sum_q) / n
        if below_zero:
            s = np.where(o > highest, safe_divide(sum_qx - highest * sum_q, sum_qq), s)
            o = np.minimum(o, highest)
        error = np.square(unit - s * q - o).sum(-1, keepdims=True)
        won = error < least
        least, slope, offset = np.where(won, error, least), np.where(won, s, slope), np.where(won, o, offset)
    return (slope * span).astype(np.float32), (offset * span + low).astype(np.float32)


def ends(x: F32, below_zero: bool) -> tuple[F32, F32]:
    """Smallest value of each group (at most 0 with `below_zero`), and the distance to its largest:
    two of [..., 1].
    """
    low = x.min(axis=-1, keepdims=True)
    if below_zero:
        low = np.minimum(low, np.float32(0))
    return low, x.max(axis=-1, keepdims=True) - low


def in_chunks(
    x: NDArray[np.floating], fmt: Format, block: int, encode: Callable[[F32], dict[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """`encode` over float32 rows [rows, k] of x [*lead, n, k], `_CHUNK` values at a time; parts
    [*lead, n, ...].

    Raises ShapeError when k is not whole blocks.
    """
    check_blocks(fmt.name, x.shape[-1], block)
    *lead, k = x.shape
    rows = x.reshape(-1, k)
    with np.errstate(over="ignore", invalid="ignore"):  # a span beyond float32 is infinite, and `to_float16` refuses it
        pieces = [encode(rows[some].astype(np.float32, order="C")) for some in row_slices(rows.shape, _CHUNK)]
    return {p: np.concatenate([piece[p] for piece in pieces]).reshape(*lead, -1) for p in pieces[0]}
