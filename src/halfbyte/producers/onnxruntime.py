"""onnxruntime's MatMulNBits (1.32, CPU) on the identity: (code − zero) · scale in float32, rounded
to the dtype of the scales.

With float zero points the two products are separate: code · scale + (−zero · scale). The matrix
product returns −0 as +0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from ..spec import EncodedTensor
from .float32 import elements, round_to, scale_expander


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """Column j of the model's output for the unit vector e_j, cast to `dtype`."""
    expand = scale_expander(q)
    scale_dtype = q.parts["scales"].dtype
    scales = q.parts["scales"].astype(np.float32)
    with np.errstate(all="ignore"):
        value = elements(q)
        if q.format.zero == "float":
            value = value * expand(scales) + expand(-q.parts["zeros"].astype(np.float32) * scales)
        elif q.format.zero == "int":
            value = (value - expand(q.parts["zeros"].astype(np.float32))) * expand(scales)
        else:
            value = value * expand(scales)
        return (round_to(value, scale_dtype) + np.float32(0)).astype(dtype_named(dtype))
