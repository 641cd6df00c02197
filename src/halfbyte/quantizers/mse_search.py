"""Round to nearest with the parameters of least squared error, weighted by the importance of each
input.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import format_named
from ..numerics.array_interop import is_torch
from ..spec import Format
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .arrays import functions, host
from .fitting import fit_weight
from .grid import Grid, Params
from .groups import checked_importance, split_groups

ROWS = 1 << 20
"""Elements per block, so that a candidate's arrays stay in cache."""


def mse(weight: NDArray[Any], codec: str | Format, importance: NDArray[Any] | None = None) -> QTensor:
    """`weight` [n, k] (or [e, n, k]) packed with the least squared error found by `fitting`.

    weight      array, or a torch tensor of an integer, affine or E2M1 format: the search runs on
                its device
    codec       `codec[:gN]` or a Format whose grid is one scale a group
    importance  [k]: the weight of the squared error at each input, for example the diagonal of XᵀX;
                1 by default, and where all are 0

    Never worse than `quantize`, whose parameters are among the candidates. Raises FormatError for
    K-quants and other formats without such a grid, for importances that are NaN, infinite or
    negative, and what `quantize` raises.
    """
    if importance is not None and not checked_importance(importance, "mse"):
        importance = None
    fmt, x, xp = format_named(codec), weight if is_torch(weight) else np.asarray(weight), functions(weight)
    if x.ndim > 2 and len(x):
        pieces = [mse(m, fmt, importance) for m in x]
        return QTensor(fmt, tuple(x.shape), {p: np.stack([i.parts[p] for i in pieces]) for p in pieces[0].parts})
    grid = Grid(fmt)
    grid.check(x)
    if not math.prod(x.shape):
        return quantize(host(x), fmt)
    values = xp.cast(x, xp.float64)
    rows = max(1, ROWS // x.shape[1])
    if fmt.global_op or len(x) <= rows:
        return _written(values, *fit_weight(grid, values, importance))
    pieces = [_written(v, *fit_weight(grid, v, importance)) for v in (values[i : i + rows] for i in range(0, len(x), rows))]
    return QTensor(fmt, tuple(x.shape), {p: np.concatenate([i.parts[p] for i in pieces]) for p in pieces[0].parts})


def _written(x: NDArray[np.float64], grid: Grid, params: Params) -> QTensor:
    codes = grid.codes(split_groups(x, grid.fmt.group_size), params.at((..., None)))
    return grid.tensor(codes.reshape(len(x), -1)[:, : x.shape[1]], params, tuple(x.shape))
