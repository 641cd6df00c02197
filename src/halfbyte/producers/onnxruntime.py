"""onnxruntime's MatMulNBits (1.32, CPU) on the identity: (code − zero) · scale in float32, rounded to the model's dtype, that
of the scales.

Float zero points are multiplied on their own: code · scale + (−zero · scale). A product of −0 leaves the matrix product as +0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from .float32 import elements, rounded, spread

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def decode(q: QTensor, dtype: Any) -> NDArray[Any]:
    """Column j of the model's output for the unit vector e_j, cast to `dtype`."""
    place = spread(q)
    held = q.parts["scales"].dtype
    scales = q.parts["scales"].astype(np.float32)
    with np.errstate(all="ignore"):
        value = elements(q)
        if q.format.zero == "float":
            value = value * place(scales) + place(-q.parts["zeros"].astype(np.float32) * scales)
        elif q.format.zero == "int":
            value = (value - place(q.parts["zeros"].astype(np.float32))) * place(scales)
        else:
            value = value * place(scales)
        return (rounded(value, held) + np.float32(0)).astype(dtype_named(dtype))
