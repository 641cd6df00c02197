"""GPTQ: round one input after another and compensate the error in the remaining inputs (Frantar et
al. 2022).

    minimize  tr((W − Ŵ) H (W − Ŵ)ᵀ)        H = XᵀX over calibration inputs, [k, k]

With U the upper Cholesky factor of the inverse of H + λ·mean(diag H)·I, rounding input j with error
e_j = (w_j − ŵ_j) / U_jj subtracts e_j · U_j,l from every later input l. Updates are applied
immediately within a block of inputs, and once a block to the rest.

Any `grid.Grid` is supported: integers, affine, MX, NVFP4; and the super-blocks of Q2_K to Q6_K and
IQ4_XS. The parameters of a group (of a super-block) are fitted at its first input, to the updated
weights. With `act_order` inputs are processed by falling diag H and parameters are fitted
beforehand, so that groups stay in order and need no index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, ShapeError
from ..formats import format_named
from ..formats.base import require_finite
from ..numerics.array_interop import is_torch
from ..spec import Format
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .arrays import functions, host
from .fitting import fit, fit_factor, fit_weight
from .grid import F64, Grid, Params, factor_of
from .groups import checked_importance
from .super_blocks import SuperBlockColumns, check_array, has_super_blocks

BLOCK = 64
"""Inputs per block of updates."""


@dataclass(frozen=True, eq=False)
class Factored:
    """A factored Hessian, shared by weights with a common input.

    importance  [k]: its diagonal, the smallest of it for inputs that calibration never saw
    order       [k]: inputs as they are rounded
    act_order   whether that is by falling importance
    factor      [k, k]: U of the inputs in that order
    """

    importance: Any
    order: NDArray[np.intp]
    act_order: bool
    factor: Any


def factored(hessian: Any, *, act_order: bool = False, damping: float = 0.01) -> Factored:
    """Factor a Hessian [k, k] for `gptq`, which accepts the result in its place. FormatError for
    numbers that are not finite.
    """
    xp = functions(hessian if is_torch(hessian) else np.zeros(0))
    h = xp.cast(xp.array(hessian), xp.float64) + 0.0
    if not xp.isfinite(h).all():
        raise FormatError("[gptq] the Hessian has NaN or infinite entries; look at the calibration activations")
    checked_importance(h.diagonal(), "gptq", "the Hessian's diagonal")
    importance = host(h.diagonal())
    dead = importance == 0
    if dead.any():
        h[xp.array(dead), xp.array(dead)] = max(float(importance.mean()), 1.0)
    weighing = np.where(dead, float(importance[~dead].min()) if (~dead).any() else 1.0, importance)
    order = np.argsort(-importance, kind="stable") if act_order else np.arange(len(importance))
    at = xp.array(order)
    return Factored(xp.array(weighing), order, act_order, inverse_factor(h[at[:, None], at], damping))


def gptq(weight: Any, hessian: Any, codec: str | Format, *, act_order: bool = False, damping: float = 0.01) -> QTensor:
    """`weight` [n, k] packed with the least change of its products with calibration inputs.

    weight     array, or a torch tensor of an integer, affine or E2M1 format: computed on its device
    hessian    [k, k], Σ x xᵀ over calibration inputs (any positive factor), on the weight's device;
               or `factored` of it
    codec      `codec[:gN]` or a Format with one scale a group
    act_order  most important inputs first
    damping    of the mean of the diagonal, added to it; raised tenfold until the matrix is positive
               definite

    An input that calibration never saw (zero on the diagonal) is rounded to nearest. Raises
    ShapeError when the shapes do not fit, FormatError for a format without a grid or numbers that
    are not finite.
    """
    fmt, xp = format_named(codec), functions(weight)
    columns: _GroupColumns | SuperBlockColumns = SuperBlockColumns(fmt) if has_super_blocks(fmt) else _GroupColumns(Grid(fmt))
    if isinstance(columns, SuperBlockColumns):
        check_array(weight if is_torch(weight) else np.zeros(0), fmt, "gptq")
    else:
        columns.grid.check(weight if is_torch(weight) else np.zeros(0))
    x = xp.cast(weight if is_torch(weight) else require_finite(weight, fmt.name), xp.float64)
    given = hessian.factor if isinstance(hessian, Factored) else hessian
    if x.ndim != 2 or tuple(given.shape) != (x.shape[1], x.shape[1]):
        raise ShapeError(f"[gptq] weight {list(x.shape)} with a Hessian {list(given.shape)}; wanted [n, k] and [k, k]")
    if not xp.isfinite(x).all():
        raise FormatError(f"[gptq] the weight has NaN or infinite values; {fmt.name} holds finite weights only")
    ready = hessian if isinstance(hessian, Factored) else factored(xp.array(hessian), act_order=act_order, damping=damping)
    if not math.prod(x.shape):
        return quantize(host(x), fmt)
    return _walk(x, columns, columns.before(x, ready), ready)


def inverse_factor(h: F64, damping: float) -> F64:
    """U, upper triangular, with Uᵀ U = (H + λ mean(diag H) I)⁻¹."""
    k, xp = len(h), functions(h)
    mean = float(h.diagonal().sum()) / max(k, 1)
    while True:
        try:
            # H = L Lᵀ reversed: the Cholesky factor of the inverse without inverting twice.
            lower = xp.linalg.cholesky(xp.flip(h + damping * mean * xp.eye(k), (0, 1)))
            break
        except xp.LinAlgError:
            damping = damping * 10 if damping else 1e-6
    # J H J = L Lᵀ, so H⁻¹ = (J L⁻¹ J)ᵀ (J L⁻¹ J), and J L⁻¹ J is upper triangular.
    upper: F64 = xp.flip(xp.linalg.inv(lower), (0, 1))
    return upper


class _GroupColumns:
    """Groups under one scale each, fitted one column of them after another.

    grid  values are rounded on
    span  inputs of a group
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.span = grid, grid.fmt.group_size
        self._fitted: list[Params] = []

    def before(self, x: F64, ready: Factored) -> list[Params]:
        """What is fitted to the weights x [n, k] before the walk: the tensor scale, where the
        format has one, and with act_order the parameters of every group.
        """
        if ready.act_order:
            self.grid, params = fit_weight(self.grid, x, ready.importance)
            self._fitted = [params.at((slice(None), g)) for g in range(params.scale.shape[1])]
        elif self.grid.fmt.global_op:
            # The default tensor scale depends on the largest element alone.
            largest = int(functions(x).amax(functions(x).abs(x), axis=1).argmax())
            factor = factor_of(quantize(host(x[largest : largest + 1]), self.grid.fmt))
            self.grid = fit_factor(self.grid.with_factor(factor), x, ready.importance)
        return list(self._fitted)

    def fit(self, x: F64, importance: F64) -> list[Params]:
        """The parameters [n] of the next group, for weights x [n, span]."""
        self._fitted.append(fit(self.grid, x, importance[None]))
        return self._fitted[-1:]

    def tensor(self, codes: NDArray[np.uint8], shape: tuple[int, int]) -> QTensor:
        """The packed weight of codes [n, k] under the fitted parameters."""
        return self.grid.tensor(codes, _beside(self._fitted, shape[0]), shape)


def _walk(x: F64, columns: _GroupColumns | SuperBlockColumns, fitted: list[Params], ready: Factored) -> QTensor:
    """Codes of x [n, k], inputs in their order; the parameters of groups are `fitted`, or come from
    `columns` at the first input of each of its spans.
    """
    n, k = x.shape
    xp, grid, factor, order = functions(x), columns.grid, ready.factor, ready.order
    size = k if grid.fmt.group_size == -1 else grid.fmt.group_size
    span = k if columns.span == -1 else columns.span
    given = bool(fitted)
    # Inputs are rows here, so that what is read and written for one of them lies together.
    w = xp.ascontiguousarray(x[:, xp.array(order)].T)
    pivots = host(factor.diagonal()).tolist()
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors = xp.zeros((stop - start, n))
        for j in range(start, stop):
            column = int(order[j])
            if not given and column % span == 0:
                last = min(column + span, k)
                # Inputs beyond this block have not received its errors yet.
                seen = w[column:last] + 0.0
                if last > stop:
                    seen[stop - column :] -= factor[start:j, stop:last].T @ errors[: j - start]
                fitted += columns.fit(xp.ascontiguousarray(seen.T), ready.importance[column:last])
            own, e = grid.nearest(w[j], fitted[column // size])
            e -= w[j]
            e /= -pivots[j]
            w[j + 1 : stop] -= factor[j, j + 1 : stop, None] * e
            errors[j - start] = e
            w[j] = own  # rounded inputs change no more
        w[stop:] -= factor[start:stop, stop:].T @ errors
    w = w[xp.array(np.argsort(order))]
    codes = [grid.codes_of(w[g * size : (g + 1) * size], params) for g, params in enumerate(fitted)]
    return columns.tensor(host(xp.concatenate(codes).T), (n, k))


def _beside(groups: list[Params], n: int) -> Params:
    """Parameters [n] of each group as one [n, G], on the host."""
    if not groups:
        return Params(np.zeros((n, 0)))
    beside: list[F64 | None] = []
    xp = functions(groups[0].scale)
    for field in ("scale", "zero", "bias"):
        values = [getattr(g, field) for g in groups]
        beside.append(None if values[0] is None else host(xp.stack(values, -1)))
    assert beside[0] is not None
    return Params(beside[0], beside[1], beside[2])


def weighted_error(weight: NDArray[Any], packed: QTensor, hessian: NDArray[Any]) -> float:
    """tr((W − Ŵ) H (W − Ŵ)ᵀ) / tr(W H Wᵀ): the relative squared error of the layer's outputs on the
    calibration inputs.
    """
    w, h = np.asarray(weight, np.float64), np.asarray(hessian, np.float64)
    d = w - packed.dequantize("float64")
    whole = float(((w @ h) * w).sum())
    return float(((d @ h) * d).sum()) / whole if whole else 0.0
