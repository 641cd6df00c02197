"""The range of a group as a scale: end to end, or tied to the end farther from zero."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .policy import ratio


def edge_scale(
    low: NDArray[Any], high: NDArray[Any], steps: int, floor: float = 0.0
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(scale, edge, count) with edge = scale · count exactly but for rounding: 0 then lies on the grid that starts at edge.

    low, high   least and greatest elements of groups, in the dtype of the arithmetic
    steps       codes less one
    floor       smallest magnitude of the scale before it is tied to the edge

    edge is the end farther from zero, count the nearest whole number of steps from 0 to it, and scale = edge / count; the scale
    of a positive edge is negative, so that codes count from the edge. MLX's affine rule. A constant group has scale and count 0;
    a group whose edge is less than half a step from 0 keeps its plain scale and has edge 0.
    """
    of = low.dtype.type
    scale = np.maximum((high - low) / of(steps), of(floor))
    below = np.abs(low) > np.abs(high)
    scale, edge = np.where(below, scale, -scale), np.where(below, low, high)
    count = np.rint(ratio(edge, scale))
    tied = np.where(count == 0, scale, edge / np.where(count == 0, of(1), count))
    return tied, np.where((count == 0) & (scale != 0), of(0), edge), count
