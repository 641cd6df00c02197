"""GPTQModel: `scale · (q − z)` in the dtype of the scales, one rounding; asked for another dtype, the scales are cast first.

Zero points are those of v2: files of v1 have the subtraction of ones undone, wrapping, before anything is decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from .integers import scaled

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def decode(q: QTensor, dtype: Any) -> NDArray[Any]:
    """What GPTQModel's dequantized weight is, as (n, k)."""
    return scaled(q, dtype)
