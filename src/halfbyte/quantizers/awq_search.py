"""AWQ: inputs that carry large activations get finer steps, by a scale folded into what comes before (Lin et al. 2023).

    y = W x = (W · s) (x / s),        s_j = a_j^α / sqrt(max · min),        a_j = sqrt(H_jj / tokens)

W · s is rounded, x / s is what the previous layer now gives. α is searched in [0, 1] for the least tr(D H Dᵀ),
D = Ŵ/s − W, over all weights that share the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..qtensor import QTensor

F64 = NDArray[np.float64]
ALPHAS = tuple(i / 20 for i in range(21))


def awq_scales(
    weights: Sequence[NDArray[Any]], hessian: NDArray[Any], quantize: Callable[[NDArray[Any]], QTensor]
) -> tuple[F64, float]:
    """(s [k], α) for weights [n_i, k] that share their inputs.

    hessian   [k, k], Σ x xᵀ over calibration inputs
    quantize  rounds a weight: `lambda w: mse(w, "int4:g128")`

    α = 0 is s = 1, plain rounding: the result is never worse on the calibration inputs. Raises ShapeError when shapes do not fit.
    """
    h = np.asarray(hessian, np.float64)
    for w in weights:
        if w.ndim != 2 or h.shape != (w.shape[1], w.shape[1]):
            raise ShapeError(f"[awq] weight {list(w.shape)} with a Hessian {list(h.shape)}; wanted [n, k] and [k, k]")
    size = np.sqrt(np.maximum(np.diag(h), 0))
    size = np.where(size > 0, size, size[size > 0].min() if (size > 0).any() else 1.0)
    best: tuple[float, float, F64] | None = None
    for alpha in ALPHAS:
        s = size**alpha
        s = s / np.sqrt(s.max() * s.min())
        total = 0.0
        for w in weights:
            d = quantize((w * s).astype(np.float32)).dequantize("float64") / s - w
            total += float(((d @ h) * d).sum())
        if best is None or total < best[0]:
            best = (total, alpha, s)
    assert best is not None
    return best[2], best[1]


def fold_into_rows(previous: NDArray[Any], scales: F64) -> NDArray[Any]:
    """The previous weight [k, …] (or norm weight, or bias, [k]) that gives x / s: its rows over s, in its own dtype."""
    shape = (-1,) + (1,) * (previous.ndim - 1)
    out: NDArray[Any] = (previous.astype(np.float64) / scales.reshape(shape)).astype(previous.dtype)
    return out
