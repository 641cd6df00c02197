"""HQQ's Quantizer.dequantize (0.2.8): r(r(code − zero) · scale), both roundings in the compute dtype, that of scale and zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from .float32 import elements, promoted, rounded, spread

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def decode(q: QTensor, dtype: Any) -> NDArray[Any]:
    """What HQQ returns, cast to `dtype`."""
    place = spread(q)
    held = q.parts["scales"].dtype
    compute = promoted(dtype_named(q.details.get("compute_dtype", held.name)), held)
    with np.errstate(all="ignore"):
        shifted = rounded(elements(q) - place(q.parts["zeros"].astype(np.float32)), compute)
        value = rounded(shifted * place(q.parts["scales"].astype(np.float32)), compute)
        return value.astype(dtype_named(dtype))
