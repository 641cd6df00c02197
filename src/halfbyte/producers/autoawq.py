"""AutoAWQ: `(q − z) · scale` in float16, one rounding; asked for another dtype, the scales are cast first.

GEMV, GEMVFast and Marlin files have no decoder outside their CUDA kernels. The weight that was quantized into them is the same
formula, GEMVFast's with the zero points that −scale · zero was made from, and that is what is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from .integers import scaled

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def decode(q: QTensor, dtype: Any) -> NDArray[Any]:
    """What AutoAWQ's GEMM dequantization returns, transposed to (n, k)."""
    return scaled(q, dtype)
