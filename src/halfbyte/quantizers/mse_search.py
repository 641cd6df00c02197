"""Round to nearest with the parameters of least squared error, weighted by the importance of each
input.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..formats import format_named
from ..numerics.array_interop import is_torch
from ..spec import Format
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .arrays import functions, host
from .fitting import fit_weight
from .grid import Grid, Params, has_grid
from .groups import checked_importance, split_groups
from .super_blocks import check_array, has_super_blocks, mse_of_super_blocks

ROWS = 1 << 20
"""Elements per block, so that a candidate's arrays stay in cache."""


def mse(weight: NDArray[Any], codec: str | Format, importance: NDArray[Any] | None = None) -> QTensor:
    """`weight` [n, k] (or [e, n, k]) packed with the least squared error found by `fitting`.

    weight      array, or a torch tensor of an integer, affine or E2M1 format: the search runs on
                its device
    codec       `codec[:gN]` or a Format for which `has_search` is true: one scale a group, or ggml's
                super-blocks (as NumPy arrays)
    importance  [k], or [e, k] for a stack: the weight of the squared error at each input, for
                example the diagonal of XᵀX; 1 by default, and where all are 0

    Never worse than `quantize`, whose parameters are among the candidates. Raises ShapeError for an
    importance of another shape, FormatError for other formats (flat blocks, codebooks), for
    importances that are NaN, infinite or negative, and what `quantize` raises.
    """
    fmt, x, xp = format_named(codec), weight if is_torch(weight) else np.asarray(weight), functions(weight)
    if importance is not None:
        given = tuple(importance.shape)
        if given not in (tuple(x.shape[-1:]), (*x.shape[:-2], *x.shape[-1:])):
            stacked = f" or {[x.shape[0], x.shape[-1]]}" if x.ndim > 2 else ""
            raise ShapeError(f"[mse] importance {list(given)} for a weight {list(x.shape)}; wanted {[x.shape[-1]]}{stacked}")
        if not checked_importance(importance, "mse"):
            importance = None
    if x.ndim > 2 and len(x):
        each = [importance] * len(x) if importance is None or importance.ndim == 1 else importance
        pieces = [mse(m, fmt, i) for m, i in zip(x, each, strict=True)]
        return QTensor(fmt, tuple(x.shape), {p: np.stack([i.parts[p] for i in pieces]) for p in pieces[0].parts})
    if has_super_blocks(fmt):
        check_array(x, fmt, "mse")
        return mse_of_super_blocks(x, fmt, importance)
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


def has_search(fmt: Format) -> bool:
    """True for a format that `mse` supports."""
    return has_grid(fmt) or has_super_blocks(fmt)


def _written(x: NDArray[np.float64], grid: Grid, params: Params) -> QTensor:
    codes = grid.codes(split_groups(x, grid.fmt.group_size), params.at((..., None)))
    return grid.tensor(codes.reshape(len(x), -1)[:, : x.shape[1]], params, tuple(x.shape))
