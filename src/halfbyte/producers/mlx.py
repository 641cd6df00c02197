"""mx.dequantize (MLX 0.32, CPU and Metal).

    affine         r(r(code · scale) + bias), both roundings in the dtype of the scales, then a cast
    mxfp4, mxfp8   r(element · r(scale)), both in the output dtype; scale byte 255 is inf, so 0 ·
                   inf is NaN
    nvfp4          the same with an E4M3 scale; with a global scale g: element · (scale · (g /
                   2688)) in float32, then a cast

Where scales and biases differ in dtype the product is rounded in the scales' dtype and the sum in
float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from ..spec import EncodedTensor
from .float32 import e4m3_table, e8m0_table, elements, round_to, scale_expander


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What mx.dequantize returns, cast to `dtype`."""
    out = dtype_named(dtype)
    with np.errstate(all="ignore"):
        return _affine(q).astype(out) if q.format.bias else _blocks(q, out)


def _affine(q: EncodedTensor) -> NDArray[np.float32]:
    expand = scale_expander(q)
    sum_dtype = q.parts["scales"].dtype
    product_dtype = dtype_named(q.details.get("scales_dtype", sum_dtype.name))
    product = round_to(elements(q) * expand(q.parts["scales"].astype(np.float32)), product_dtype)
    return round_to(product + expand(q.parts["biases"].astype(np.float32)), sum_dtype)


def _blocks(q: EncodedTensor, out: np.dtype[Any]) -> NDArray[Any]:
    expand = scale_expander(q)
    table = e8m0_table(np.inf) if q.format.scale == "e8m0" else e4m3_table()
    scales = table[q.parts["scales"]]
    if q.format.global_op:
        factor = q.parts["global_scale"].astype(np.float32) / np.float32(q.format.divisor)
        return (elements(q) * expand(scales * factor[..., None, None])).astype(out)
    return (elements(q) * expand(round_to(scales, out))).astype(out)
