"""mx.dequantize (MLX 0.32, CPU and Metal).

    affine         r(r(code · scale) + bias), both roundings in the dtype of the scales, then a cast
    mxfp4, mxfp8   r(element · r(scale)), both in the output dtype; scale byte 255 is inf, so 0 · inf is NaN
    nvfp4          the same with an E4M3 scale; with a global scale g: element · (scale · (g / 2688)) in float32, then a cast

Where scales and biases differ in dtype the product is rounded in the scales' dtype and the sum in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from .float32 import e4m3_table, e8m0_table, elements, rounded, spread

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def decode(q: QTensor, dtype: Any) -> NDArray[Any]:
    """What mx.dequantize returns, cast to `dtype`."""
    out = dtype_named(dtype)
    with np.errstate(all="ignore"):
        return _affine(q).astype(out) if q.format.bias else _blocks(q, out)


def _affine(q: QTensor) -> NDArray[np.float32]:
    place = spread(q)
    held = q.parts["scales"].dtype
    product_dtype = dtype_named(q.details.get("scales_dtype", held.name))
    product = rounded(elements(q) * place(q.parts["scales"].astype(np.float32)), product_dtype)
    return rounded(product + place(q.parts["biases"].astype(np.float32)), held)


def _blocks(q: QTensor, out: np.dtype[Any]) -> NDArray[Any]:
    place = spread(q)
    table = e8m0_table(np.inf) if q.format.scale == "e8m0" else e4m3_table()
    scales = table[q.parts["scales"]]
    if q.format.global_op:
        factor = q.parts["global_scale"].astype(np.float32) / np.float32(q.format.divisor)
        return (elements(q) * place(scales * factor[..., None, None])).astype(out)
    return (elements(q) * place(rounded(scales, out))).astype(out)
