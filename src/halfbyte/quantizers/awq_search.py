"""AWQ: inputs with large activations get finer steps, by a scale folded into the preceding
operation (Lin et al. 2023).

    y = W x = (W · s) (x / s),        s_j = a_j^α / sqrt(max · min),        a_j = sqrt(H_jj / tokens)

W · s is quantized; the preceding operation is changed to yield x / s. α is searched in [0, 1] for
the least tr(D H Dᵀ), D = Ŵ/s − W, over all weights that share the inputs: first multiples of 0.1 on
a subset of rows, then ±0.05 around the best; it is used if it beats α = 0 on all rows. Where the
preceding operation must stay exact, s are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, ShapeError
from ..tensor.qtensor import QTensor
from .arrays import functions, host
from .groups import checked_importance

F64 = NDArray[np.float64]
ALPHAS = tuple(i / 10 for i in range(11))
ROWS = 256
"""Evenly spaced rows of a weight on which α is searched."""
MANY = 8
"""Weights with a common input; for more of them (an MoE layer's experts) fewer rows of each are
used.
"""


def awq_scales(
    weights: Sequence[NDArray[Any]],
    hessian: NDArray[Any] | Sequence[NDArray[Any]],
    quantize: Callable[[NDArray[Any]], QTensor],
    *,
    powers: bool = False,
) -> tuple[F64, float]:
    """(s [k], α) for weights [n_i, k] that share their inputs.

    hessian   [k, k], Σ x xᵀ over calibration inputs, array or torch tensor, on whose device losses
              are computed; or one for each weight, where each is given some of the inputs (experts)
    quantize  rounds a weight: `lambda w: mse(w, "int4:g128")`
    powers    s are powers of two, so that scaling is exact

    α = 0 is s = 1, plain rounding: the result is never worse on the calibration inputs. Raises
    ShapeError when shapes do not fit.
    """
    many = isinstance(hessian, (list, tuple))
    own: dict[int, Any] = {}
    for h in hessian if many else [hessian]:
        xp = functions(h)
        own.setdefault(id(h), xp.cast(xp.array(h), xp.float64))
    each = [own[id(h)] for h in (hessian if many else [hessian] * len(weights))]
    for w, h in zip(weights, each, strict=True):
        if w.ndim != 2 or tuple(h.shape) != (w.shape[1], w.shape[1]):
            raise ShapeError(f"[awq] weight {list(w.shape)} with a Hessian {list(h.shape)}; wanted [n, k] and [k, k]")
    for h in own.values():
        if not functions(h).isfinite(h).all():
            raise FormatError("[awq] the Hessian has NaN or infinite entries; look at the calibration activations")
        checked_importance(h.diagonal(), "awq", "the Hessian's diagonal")
    size = np.sqrt(np.maximum(sum(host(h.diagonal()) for h in own.values()), 0))
    size = np.where(size > 0, size, size[size > 0].min() if (size > 0).any() else 1.0)
    rows = min(ROWS, max(16, MANY * ROWS // max(len(weights), 1)))
    part = [w[np.linspace(0, len(w) - 1, min(len(w), rows)).astype(int)] for w in weights]
    losses = {alpha: _loss(part, each, _scales(size, alpha, powers), quantize) for alpha in ALPHAS}
    best = min(losses, key=lambda a: losses[a])
    for alpha in (round(best - 0.05, 2), round(best + 0.05, 2)):
        if 0 < alpha < 1:
            losses[alpha] = _loss(part, each, _scales(size, alpha, powers), quantize)
    best = min(losses, key=lambda a: losses[a])
    scales, one = _scales(size, best, powers), np.ones(len(size))
    if best and max(len(w) for w in weights) > rows:
        best = best if _loss(weights, each, scales, quantize) < _loss(weights, each, one, quantize) else 0.0
    return (scales, best) if best else (one, 0.0)


def _scales(size: F64, alpha: float, powers: bool) -> F64:
    s: F64 = size**alpha
    s /= np.sqrt(s.max() * s.min())
    return np.exp2(np.rint(np.log2(s))) if powers else s


def _loss(weights: Sequence[NDArray[Any]], each: Sequence[Any], s: F64, quantize: Callable[[NDArray[Any]], QTensor]) -> float:
    """Σ tr(D H Dᵀ)."""
    total = 0.0
    for w, h in zip(weights, each, strict=True):
        d = functions(h).array(quantize((w * s).astype(np.float32)).dequantize("float64") / s - w)
        total += float(((d @ h) * d).sum())
    return total


def fold_into_rows(previous: NDArray[Any], scales: F64) -> NDArray[Any]:
    """The preceding weight [k, …] (or norm weight, or bias, [k]) divided by s along its rows, in
    its own dtype.
    """
    shape = (-1,) + (1,) * (previous.ndim - 1)
    out: NDArray[Any] = (previous.astype(np.float64) / scales.reshape(shape)).astype(previous.dtype)
    return out
