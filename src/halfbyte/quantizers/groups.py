"""Rows split into groups; the last group is padded with zeros of weight 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from .arrays import functions, host

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


def checked_importance(importance: Any, op: str, what: str = "the importance") -> bool:
    """True when there are weights of errors, False when all are 0: then every input counts the
    same.

    Raises FormatError for NaN, infinite and negative entries: a scale chosen under them is noise.
    """
    values = np.asarray(host(importance), np.float64)
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise FormatError(
            f"[{op}] {what} has {int(bad.sum())} of {values.size} entries that are NaN, infinite or negative (the first is "
            f"{values.flat[at]:g} at input {at}); finite numbers of at least 0 are allowed. Look at the calibration activations"
        )
    return bool((values > 0).any())


def group_weights(x: Any, size: int, importance: F64 | None) -> F64:
    """[1, G, g] for a weight x [n, k]: the weight of each input's error: `importance` [k] or 1, and
    0 in the padding.
    """
    xp = functions(x)
    row = xp.full((x.shape[1],), 1.0) if importance is None else xp.cast(xp.array(importance), xp.float64)
    return split_groups(row[None], size)
