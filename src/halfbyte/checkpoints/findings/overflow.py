"""The largest magnitude that a packed weight can have, from its scales alone.

    max of |(e − zero) · scale · super_scale · global / divisor + bias − min · super_min|
    over e = the smallest element, the largest element

The value is linear in the element, so the two ends bound every code, and are reached if the code is
there. A float16 result is infinite where the exact magnitude is 65520 or more.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats.decode import element_values, scale_values
from ...numerics.minifloat import scale_table
from ...numerics.row_slices import row_slices
from ...tensor.qtensor import QTensor

FLOAT16_LIMIT = 65520.0
"""Halfway between the largest float16 and the next power of two: from here on rounding to nearest
gives infinity.
"""
CHUNK = 1 << 16
"""Groups processed at a time: temporaries stay near 0.5 MB each."""


class CheckpointWarning(UserWarning):
    """A loaded weight that may not survive what is usually done with it; see `Checkpoint.findings`."""


def largest_magnitude(q: QTensor) -> float:
    """The largest |value| over all codes; 0 for an empty tensor, NaN for raw ggml blocks, whose
    scales lie among their codes.
    """
    if q.format.opaque:
        return math.nan
    if not q.size or q.format.scale == "nested":
        return _coarse(q) if q.size else 0.0
    # A flat array of groups is one column of rows.
    return max(_exact(q, rows) for rows in row_slices(_rows(q), CHUNK))


def may_overflow_float16(q: QTensor) -> bool:
    """True when some code would decode to an infinite float16."""
    # Nearly every weight is far below, which the maximum of each part shows without temporaries.
    return not _coarse(q) < FLOAT16_LIMIT and largest_magnitude(q) >= FLOAT16_LIMIT


def overflow_text(q: QTensor) -> str:
    """The text of the warning and of the finding."""
    peak = largest_magnitude(q)
    return f"its scales allow magnitudes of {peak:.6g}, and float16 is infinite from 65520 on: use bfloat16 or float32"


def warn_of_overflow(q: QTensor, key: str) -> None:
    """Warn, naming the tensor, when a float16 copy of it could be infinite."""
    if may_overflow_float16(q):
        warnings.warn(f"[open] {key}: {overflow_text(q)}", CheckpointWarning, stacklevel=3)


def _coarse(q: QTensor) -> float:
    """A bound from the largest entry of each part; NaN when a part holds NaN, or for raw blocks."""
    fmt, parts = q.format, q.parts
    if fmt.opaque:
        return math.nan
    if fmt.inverse or fmt.global_op == "divide":
        return math.inf  # needs the smallest entries: left to the exact computation
    if fmt.scale == "nested":
        scale = peak(parts["nested_map"]) * peak(parts["nested_absmax"]) + peak(parts["nested_offset"])
    elif fmt.scale == "none":
        scale = 1.0
    elif fmt.scale in ("e8m0", "e4m3", "ue4m3"):
        used, flat = np.zeros(256, np.bool_), parts["scales"].reshape(-1)
        for i in range(0, flat.size, CHUNK):
            used[flat[i : i + CHUNK]] = True
        scale = float(np.abs(scale_table(fmt.scale)[used]).max(initial=0.0))
    else:
        scale = peak(parts["scales"])
    low, high = _ends(q)
    element = max(abs(low), abs(high)) + (peak(parts["zeros"]) if fmt.zero != "none" else 0.0)
    total = element * scale / fmt.divisor
    if fmt.super_size:
        total *= peak(parts["super_scales"])
    if fmt.global_op:
        total *= peak(parts["global_scale"])
    if fmt.bias:
        total += peak(parts["biases"])
    if fmt.minimum:
        total += peak(parts["mins"]) * peak(parts["super_mins"])
    return total


def peak(array: NDArray[Any]) -> float:
    """max |x|, by the integer order of the bits for floats (infinity and NaN are largest); 0 for an
    empty array.
    """
    if not array.size:
        return 0.0
    flat = array.reshape(-1)
    if array.dtype.kind in "iub":
        return float(max(int(flat.max()), -int(flat.min())))
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    bits = flat.view(unsigned)
    mask = unsigned.type((1 << (8 * array.dtype.itemsize - 1)) - 1)
    top = max(int((bits[i : i + CHUNK] & mask).max()) for i in range(0, bits.size, CHUNK))
    return float(np.array([top], unsigned).view(array.dtype)[0])


def _rows(q: QTensor) -> tuple[int, int]:
    """(rows, groups per row) of the parts that have an entry for each group."""
    shape = q.parts["scales"].shape if q.format.scale != "none" else q.parts["super_scales"].shape
    return (shape[0], 1) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


def _exact(q: QTensor, rows: slice) -> float:
    """The largest magnitude in a range of rows of groups."""
    fmt, parts = q.format, q.parts
    total, _ = _rows(q)

    def part(name: str) -> NDArray[np.float64]:
        return parts[name].reshape(total, -1)[rows].astype(np.float64)

    with np.errstate(all="ignore"):
        scale: NDArray[np.float64] = np.ones((1, 1))
        if fmt.scale != "none":
            scale = scale_values(fmt.scale, parts["scales"].reshape(total, -1)[rows])
        if fmt.inverse:
            scale = 1.0 / scale
        offset: Any = part("biases") if fmt.bias else 0.0
        if fmt.super_size:
            repeat = fmt.super_size // fmt.group_size
            scale = scale * np.repeat(part("super_scales"), repeat, axis=-1)
            if fmt.minimum:
                offset = -part("mins") * np.repeat(part("super_mins"), repeat, axis=-1)
        if fmt.global_op:
            factor = parts["global_scale"].astype(np.float64).reshape(-1)
            # Rows are counted over the stack: row r belongs to expert r / (rows of one).
            factor = factor[np.arange(rows.start, rows.stop) // max(1, total // factor.size)][:, None]
            scale = scale / factor if fmt.global_op == "divide" else scale * factor
        zero = part("zeros") if fmt.zero != "none" else 0.0
        ends = [np.abs((e - zero) * (scale / fmt.divisor) + offset) for e in _ends(q)]
        # fmax ignores NaN scales, which have a finding of their own.
        return float(max(np.fmax.reduce(end, axis=None, initial=0.0) for end in ends))


def _ends(q: QTensor) -> tuple[float, float]:
    """The smallest and the largest element."""
    values = element_values(q.format, np.arange(1 << q.format.bits, dtype=np.uint8))
    finite = values[np.isfinite(values)]
    return float(finite.min()), float(finite.max())
