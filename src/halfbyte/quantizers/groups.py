"""Rows split into groups; the last group is padded with zeros of weight 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import functions

F64 = NDArray[np.float64]


def split_groups(x: F64, size: int) -> F64:
    """[n, k] -> [n, G, g]; zero-padded."""
    n, k = x.shape
    g = k if size == -1 else size
    count = -(-k // g) if g else 0
    if count * g == k:
        return x.reshape(n, count, g)
    out: F64 = functions(x).zeros((n, count * g))
    out[:, :k] = x
    return out.reshape(n, count, g)


def group_weights(x: Any, size: int, importance: F64 | None) -> F64:
    """[1, G, g] for a weight x [n, k]: the weight of each input's error: `importance` [k] or 1, and 0 in the padding."""
    xp = functions(x)
    row = xp.full((x.shape[1],), 1.0) if importance is None else xp.cast(xp.array(importance), xp.float64)
    return split_groups(row[None], size)
