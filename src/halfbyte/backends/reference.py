"""The referee: NumPy, obvious, always there.

linear: y[:, r] = x · W[r]ᵀ for blocks r of rows, each block decoded exactly to float32, multiplied
in float32 by NumPy's BLAS and dropped. There is never a dense copy of the weight: a block is
`BLOCK_ELEMENTS` elements or one row.

With rounded activations x is replaced by its rounded values, as `numerics/activations.py` defines
them, and multiplied in the same way.

Within one call the order of summation is BLAS's, so a row's result may differ in its last bits
between batch sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.activations import refusal as activations_refusal
from ..numerics.activations import rounded
from ..numerics.exact import dtype_named
from ..tensor.qtensor import BLOCK_ELEMENTS, QTensor
from .base import Backend, Call, Prepared


class ReferenceBackend(Backend):
    """The NumPy backend; it computes on the canonical order itself."""

    name = "reference"
    device = "cpu"

    def reason(self) -> str | None:
        return None

    def refuses(self, call: Call) -> str | None:
        if call.activations != "exact" and (why := activations_refusal(call.format, call.activations)):
            return why
        if call.schedule not in (None, "dequantize_then_gemm"):
            return (
                f"the reference backend has one schedule, 'dequantize_then_gemm' a block of rows at a time, not {call.schedule!r}"
            )
        return None

    def prepare(self, w: QTensor) -> Prepared:
        return Prepared(self.name, w.format, w.shape, w, w.nbytes)

    def linear(
        self, x: NDArray[Any], w: Prepared, bias: NDArray[Any] | None, *, activations: str = "exact", schedule: str | None = None
    ) -> NDArray[Any]:
        q: QTensor = w.data
        n, k = q.shape
        x32 = np.ascontiguousarray(x, dtype=np.float32)
        if activations != "exact":
            x32 = rounded(x32, q.format, activations, q.parts.get("group_index"))
        y = np.empty((x.shape[0], n), np.float32)
        step = max(1, BLOCK_ELEMENTS // max(1, k))
        for start in range(0, n, step):
            stop = min(start + step, n)
            block = q.rows(start, stop).dequantize("float32")
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(x32, block.T, out=y[:, start:stop])
        if bias is not None:
            y += bias.astype(np.float32)
        with np.errstate(over="ignore"):
            return y.astype(x.dtype, copy=False)

    def embedding(self, ids: NDArray[np.int64], w: Prepared, dtype: str) -> NDArray[Any]:
        q: QTensor = w.data
        out = np.empty((len(ids), q.shape[1]), dtype_named(dtype))
        unique, inverse = np.unique(ids, return_inverse=True)
        rows = np.empty((len(unique), q.shape[1]), out.dtype)
        for i, row in enumerate(unique.tolist()):
            rows[i] = q.rows(row, row + 1).dequantize(dtype)[0]
        np.take(rows, inverse, axis=0, out=out)
        return out

    def dequantize(self, w: Prepared, dtype: str) -> NDArray[Any]:
        dense: NDArray[Any] = w.data.dequantize(dtype)
        return dense

    def expert(self, w: Prepared, index: int) -> Prepared:
        return self.prepare(w.data[index])

    def canonical(self, w: Prepared) -> dict[str, Any] | None:
        return dict(w.data.parts)

    def describe(self) -> str:
        return f"NumPy {np.__version__}"
