"""ModelOpt's QTensor.dequantize (0.47).

NVFP4         element · (scale · weight_scale_2) in float32, then a cast; the code of −0 reads as +0
MXFP4, MXFP8  element · 2^(byte − 127) in float32, then a cast; byte 255 is inf
INT4QTensor   (code − 8) / scale in the dtype of the scale, then a cast
NF4QTensor    scale = r(byte / double_scale) + zeros, rounded in the output dtype; table · scale in the wider of that and bfloat16
FP8, INT8     element · r(scale), the product rounded in the output dtype
int4 export   no decoder; code · scale in float32, then a cast
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import bfloat16, dtype_named
from .float32 import F32, e4m3_table, e8m0_table, elements, nested_scales, promoted, rounded, spread

if TYPE_CHECKING:
    from ..tensor.qtensor import QTensor


def decode(q: QTensor, dtype: Any) -> NDArray[Any]:
    """What .dequantize(dtype) returns."""
    out = dtype_named(dtype)
    with np.errstate(all="ignore"):
        return _value(q, out).astype(out)


def _value(q: QTensor, out: np.dtype[Any]) -> F32:
    place = spread(q)
    scales = q.parts["scales"]
    if q.format.scale == "e8m0":
        return elements(q) * place(e8m0_table(np.inf)[scales])
    if q.format.scale == "e4m3":
        factor = q.parts["global_scale"][..., None, None]
        return elements(q, negative_zero=False) * place(e4m3_table()[scales] * factor)
    if q.format.scale == "nested":
        return _nf4(q, out)
    if q.format.inverse:
        return rounded(elements(q) / place(scales.astype(np.float32)), scales.dtype)
    if q.format.element == "int" and q.format.bits == 4:
        return elements(q) * place(scales.astype(np.float32))
    return elements(q) * place(rounded(scales, out))


def _nf4(q: QTensor, out: np.dtype[Any]) -> F32:
    """The table is bfloat16, double_scale in the model's dtype; zeros, having no axis, takes the dtype of what it is added to."""
    held = dtype_named(q.details.get("double_scale_dtype", "bfloat16"))
    mapped, double = nested_scales(q)
    scales = rounded(rounded(mapped / double, held), out)
    scales = rounded(scales + rounded(q.parts["nested_offset"], out), out)
    return rounded(elements(q) * spread(q)(scales), promoted(out, bfloat16))
