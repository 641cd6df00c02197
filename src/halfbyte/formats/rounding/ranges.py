"""The scale of a group from its range, such that the end of the range farther from zero, and zero,
are codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .policy import ratio


def edge_scale(
    low: NDArray[Any], high: NDArray[Any], steps: int, floor: float = 0.0
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(scale, edge, count) with edge = scale · count up to rounding, so that 0 is on the grid of
    codes that starts at edge.

    low, high   least and greatest elements of groups, in the dtype of the arithmetic
    steps       codes less one
    floor       least magnitude of the scale before it is adjusted to the edge

    edge is the end farther from zero, count the nearest whole number of steps from 0 to it, and
    scale = edge / count; the scale of a positive edge is negative, so that codes count from the
    edge. MLX's affine rule. A constant group has scale and count 0; a group whose edge is less than
    half a step from 0 keeps the scale (high − low) / steps and has edge 0.
    """
    of = low.dtype.type
    scale = np.maximum((high - low) / of(steps), of(floor))
    below = np.abs(low) > np.abs(high)
    scale, edge = np.where(below, scale, -scale), np.where(below, low, high)
    count = np.rint(ratio(edge, scale))
    adjusted = np.where(count == 0, scale, edge / np.where(count == 0, of(1), count))
    return adjusted, np.where((count == 0) & (scale != 0), of(0), edge), count
