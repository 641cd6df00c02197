"""The largest magnitude a packed weight can hold, from its scales alone.

    max over e in {smallest element, largest element} of |(e − zero) · scale · super_scale · global / divisor + bias − min · super_min|

The value is linear in the element, so the two ends bound every code, and are reached if the code is there. A float16 result is infinite where the
exact magnitude is 65520 or more.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.decode import scale_values
from ..minifloat import element_table
from ..qtensor import QTensor

FLOAT16_LIMIT = 65520.0
"""Halfway between the largest float16 and the next power of two: from here on rounding to nearest gives infinity."""


class CheckpointWarning(UserWarning):
    """A loaded weight that may not survive what is usually done with it; see `Checkpoint.findings`."""


def largest_magnitude(q: QTensor) -> float:
    """An upper bound on |value| over all codes; 0 for an empty tensor, NaN for raw ggml blocks, whose scales lie among their codes."""
    fmt, parts = q.format, q.parts
    if fmt.opaque:
        return math.nan
    if not q.size:
        return 0.0
    with np.errstate(all="ignore"):
        scale = _scales(q)
        offset: Any = 0.0
        if fmt.super_size:
            repeat = fmt.super_size // fmt.group_size
            scale = scale * np.repeat(parts["super_scales"].astype(np.float64), repeat, axis=-1)
            if fmt.minimum:
                offset = -parts["mins"].astype(np.float64) * np.repeat(parts["super_mins"].astype(np.float64), repeat, axis=-1)
        if fmt.global_op:
            factor = parts["global_scale"].astype(np.float64)[..., None, None]
            scale = scale / factor if fmt.global_op == "divide" else scale * factor
        if fmt.bias:
            offset = parts["biases"].astype(np.float64)
        zero = parts["zeros"].astype(np.float64) if fmt.zero != "none" else 0.0
        ends = [np.abs((e - zero) * (scale / fmt.divisor) + offset) for e in _element_range(q)]
        # fmax passes over NaN scales, which are a finding of their own.
        return float(max(np.fmax.reduce(end, axis=None, initial=0.0) for end in ends))


def may_overflow_float16(q: QTensor) -> bool:
    """True when some code would decode to an infinite float16."""
    return largest_magnitude(q) >= FLOAT16_LIMIT


def overflow_text(q: QTensor) -> str:
    """The sentence of warning and finding."""
    return f"its scales allow magnitudes of {largest_magnitude(q):.6g}, and float16 is infinite from 65520 on: use bfloat16 or float32"


def warn_of_overflow(q: QTensor, key: str) -> None:
    """Warn, naming the tensor, when a float16 copy of it could be infinite."""
    if may_overflow_float16(q):
        warnings.warn(f"[open] {key}: {overflow_text(q)}", CheckpointWarning, stacklevel=3)


def _scales(q: QTensor) -> NDArray[np.float64]:
    fmt, parts = q.format, q.parts
    if fmt.scale == "nested":
        # |byte code · nested absmax| + |offset| over the whole tensor: blocks share these, so there is no more to say of each.
        return np.array([np.abs(parts["nested_map"].astype(np.float64)).max() * np.fmax.reduce(np.abs(parts["nested_absmax"].astype(np.float64)))
                         + abs(float(parts["nested_offset"]))])  # fmt: skip
    if fmt.scale == "none":
        return np.ones(1)
    scale = scale_values(fmt.scale, parts["scales"])
    return 1.0 / scale if fmt.inverse else scale


def _element_range(q: QTensor) -> tuple[float, float]:
    fmt = q.format
    if fmt.element == "uint":
        return 0.0, float((1 << fmt.bits) - 1)
    if fmt.element == "int":
        return -float(1 << (fmt.bits - 1)), float((1 << (fmt.bits - 1)) - 1)
    table = element_table(fmt.element, fmt.bits)
    finite = table[np.isfinite(table)]
    return float(finite.min()), float(finite.max())
