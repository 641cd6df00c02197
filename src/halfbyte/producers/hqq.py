"""HQQ's Quantizer.dequantize (0.2.8): r(r(code − zero) · scale), both roundings in the compute
dtype.

The compute dtype is `details["compute_dtype"]`, or that of scales and zero points.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from ..spec import EncodedTensor
from .float32 import elements, promote, round_to, scale_expander


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What HQQ returns, cast to `dtype`."""
    expand = scale_expander(q)
    scale_dtype = q.parts["scales"].dtype
    compute = promote(dtype_named(q.details.get("compute_dtype", scale_dtype.name)), scale_dtype)
    with np.errstate(all="ignore"):
        shifted = round_to(elements(q) - expand(q.parts["zeros"].astype(np.float32)), compute)
        value = round_to(shifted * expand(q.parts["scales"].astype(np.float32)), compute)
        return value.astype(dtype_named(dtype))
