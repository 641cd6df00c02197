"""AutoGPTQ 0.7: `scale · (q − z)` in the dtype of the scales, one rounding; asked for another dtype, the scales are cast first.

`qlinear_cuda` takes a stored zero point plus 1 as it is, so 16 at 4 bits; the older `qlinear_cuda_old` masks the sum to `bits`
bits, so 0. The second is asked for by `details["variant"] == "cuda_old"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .integers import scaled

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def decode(q: QTensor, dtype: Any) -> NDArray[Any]:
    """What AutoGPTQ's matrix product with the identity returns, transposed to (n, k)."""
    if q.details.get("variant") == "cuda_old" and q.format.zero == "int":
        return scaled(q, dtype, q.parts["zeros"] & np.int16((1 << q.format.bits) - 1))
    return scaled(q, dtype)
