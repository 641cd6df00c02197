"""Rows cut into groups, the last one filled up with weightless zeros."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def cut(x: F64, size: int) -> F64:
    """[n, k] -> [n, G, g]; zeros behind the end."""
    n, k = x.shape
    g = k if size == -1 else size
    count = -(-k // g) if g else 0
    if count * g == k:
        return x.reshape(n, count, g)
    out = np.zeros((n, count * g))
    out[:, :k] = x
    return out.reshape(n, count, g)


def weights(k: int, size: int, importance: F64 | None) -> F64:
    """[1, G, g]: what an error at each input counts, `importance` [k] or 1, and 0 behind the end."""
    row = np.ones(k) if importance is None else np.asarray(importance, np.float64)
    return cut(row[None], size)
