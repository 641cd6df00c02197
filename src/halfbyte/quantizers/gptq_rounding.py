"""GPTQ: round one input after another, and let the inputs still to come take up the error (Frantar et al. 2022).

    least  tr((W − Ŵ) H (W − Ŵ)ᵀ)        H = XᵀX over calibration inputs, [k, k]

With U the upper Cholesky factor of the inverse of H + λ·mean(diag H)·I, rounding input j with error
e_j = (w_j − ŵ_j) / U_jj takes e_j · U_j,l off every later input l. Blocks of inputs are updated among themselves at once, the
rest once a block.

Any grid of `grid.Grid` serves: integers, affine, MX, NVFP4. Parameters of a group are fitted when its first input comes up, to
weights that have taken up all error so far. With `act_order` inputs come by falling diag H, and parameters are fitted
beforehand, so that groups stay in order and need no index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, ShapeError
from ..formats import format_named
from ..formats.base import finite
from ..formats.encode import quantize
from ..qtensor import QTensor
from ..spec import Format
from .fitting import fit, fit_factor, fit_weight
from .grid import F64, Grid, Params, factor_of

BLOCK = 64
"""Inputs whose updates stay among themselves."""


def gptq(
    weight: NDArray[Any], hessian: NDArray[Any], codec: str | Format, *, act_order: bool = False, damping: float = 0.01
) -> QTensor:
    """`weight` [n, k] packed so that its products with inputs like the calibration's change least.

    hessian    [k, k], Σ x xᵀ over calibration inputs (any positive factor)
    codec      `codec[:gN]` or a Format with one scale a group
    act_order  inputs that matter most first
    damping    of the mean of the diagonal, added to it; raised tenfold until the matrix is positive definite

    An input that calibration never saw (zero on the diagonal) is rounded to nearest. Raises ShapeError when the shapes do not
    fit, FormatError for a format without a grid or numbers that are not finite.
    """
    fmt = format_named(codec)
    x = finite(weight, fmt.name).astype(np.float64)
    h = np.array(hessian, np.float64)
    if x.ndim != 2 or h.shape != (x.shape[1], x.shape[1]):
        raise ShapeError(f"[gptq] weight {list(x.shape)} with a Hessian {list(h.shape)}; wanted [n, k] and [k, k]")
    if not np.isfinite(h).all():
        raise FormatError("[gptq] the Hessian has NaN or infinite entries; look at the calibration activations")
    importance = np.maximum(np.diag(h), 0)
    dead = importance == 0
    h[dead, dead] = max(float(importance.mean()), 1.0) if dead.any() else 0.0
    weighing = np.where(dead, float(importance[~dead].min()) if (~dead).any() else 1.0, importance)
    grid = Grid(fmt)
    params: Params | None = None
    if act_order:
        grid, params = fit_weight(grid, x, weighing)
    elif fmt.global_op:
        grid = fit_factor(grid.with_factor(factor_of(quantize(x, fmt))), x, weighing)
    order = np.argsort(-importance, kind="stable") if act_order else np.arange(x.shape[1])
    factor = inverse_factor(h[np.ix_(order, order)], damping)
    return _walk(x, grid, params, weighing, order, factor)


def inverse_factor(h: F64, damping: float) -> F64:
    """U, upper triangular, with Uᵀ U = (H + λ mean(diag H) I)⁻¹."""
    k = len(h)
    mean = float(np.trace(h)) / max(k, 1)
    while True:
        try:
            # H = L Lᵀ reversed: the Cholesky factor of the inverse without inverting twice.
            lower = np.linalg.cholesky((h + damping * mean * np.eye(k))[::-1, ::-1])
            break
        except np.linalg.LinAlgError:
            damping = damping * 10 if damping else 1e-6
    # J H J = L Lᵀ, so H⁻¹ = (J L⁻¹ J)ᵀ (J L⁻¹ J), and J L⁻¹ J is upper triangular.
    upper: F64 = np.linalg.inv(lower)[::-1, ::-1]
    return upper


def _walk(x: F64, grid: Grid, params: Params | None, importance: F64, order: NDArray[np.intp], factor: F64) -> QTensor:
    """Codes of x [n, k], inputs in `order`; parameters are those given, or are fitted as groups come up."""
    n, k = x.shape
    size = k if grid.fmt.group_size == -1 else grid.fmt.group_size
    fitted = [params.at((slice(None), g)) for g in range(params.scale.shape[1])] if params is not None else []
    # Inputs are rows here, so that what is read and written for one of them lies together.
    w = np.ascontiguousarray(x[:, order].T)
    codes = np.empty((k, n), np.uint8)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors = np.zeros((stop - start, n))
        for j in range(start, stop):
            column = int(order[j])
            if params is None and column % size == 0:
                last = min(column + size, k)
                # What lies beyond this block has not been told of its errors yet.
                seen = w[column:last].copy()
                if last > stop:
                    seen[stop - column :] -= factor[start:j, stop:last].T @ errors[: j - start]
                fitted.append(fit(grid, np.ascontiguousarray(seen.T), importance[None, column:last]))
            own = fitted[column // size]
            codes[column] = grid.codes(w[j], own)
            e = (w[j] - grid.values(codes[column], own)) / factor[j, j]
            w[j + 1 : stop] -= np.multiply.outer(factor[j, j + 1 : stop], e)
            errors[j - start] = e
        w[stop:] -= factor[start:stop, stop:].T @ errors
    return grid.tensor(np.ascontiguousarray(codes.T), _beside(fitted, n), (n, k))


def _beside(groups: list[Params], n: int) -> Params:
    """Parameters [n] of each group as one [n, G]."""
    if not groups:
        return Params(np.zeros((n, 0)))
    beside: list[F64 | None] = []
    for field in ("scale", "zero", "bias"):
        values = [getattr(g, field) for g in groups]
        beside.append(None if values[0] is None else np.stack(values, -1))
    assert beside[0] is not None
    return Params(beside[0], beside[1], beside[2])


def weighted_error(weight: NDArray[Any], packed: QTensor, hessian: NDArray[Any]) -> float:
    """tr((W − Ŵ) H (W − Ŵ)ᵀ) / tr(W H Wᵀ): the relative squared error of the layer's outputs on the calibration inputs."""
    w, h = np.asarray(weight, np.float64), np.asarray(hessian, np.float64)
    d = w - packed.dequantize("float64")
    whole = float(((w @ h) * w).sum())
    return float(((d @ h) * d).sum()) / whole if whole else 0.0
