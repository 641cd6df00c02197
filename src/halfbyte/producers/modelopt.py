"""ModelOpt's QTensor.dequantize (0.47).

NVFP4         element · (scale · weight_scale_2) in float32, then a cast; the code of −0 reads as +0
MXFP4, MXFP8  element · 2^(byte − 127) in float32, then a cast; byte 255 is inf
INT4QTensor   (code − 8) / scale in the dtype of the scale, then a cast
NF4QTensor    scale = r(byte / double_scale) + zeros, rounded in the output dtype; table · scale in
              the wider of that and bfloat16
FP8, INT8     element · r(scale), the product rounded in the output dtype
int4 export   ModelOpt has no decoder for it; code · scale in float32, then a cast
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import bfloat16, dtype_named
from ..spec import EncodedTensor
from .float32 import F32, e4m3_table, e8m0_table, elements, nested_scales, promote, round_to, scale_expander


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What .dequantize(dtype) returns."""
    out = dtype_named(dtype)
    with np.errstate(all="ignore"):
        return _value(q, out).astype(out)


def _value(q: EncodedTensor, out: np.dtype[Any]) -> F32:
    expand = scale_expander(q)
    scales = q.parts["scales"]
    if q.format.scale == "e8m0":
        return elements(q) * expand(e8m0_table(np.inf)[scales])
    if q.format.scale == "e4m3":
        factor = q.parts["global_scale"][..., None, None]
        return elements(q, negative_zero=False) * expand(e4m3_table()[scales] * factor)
    if q.format.scale == "nested":
        return _nf4(q, out)
    if q.format.inverse:
        return round_to(elements(q) / expand(scales.astype(np.float32)), scales.dtype)
    if q.format.element == "int" and q.format.bits == 4:
        return elements(q) * expand(scales.astype(np.float32))
    return elements(q) * expand(round_to(scales, out))


def _nf4(q: EncodedTensor, out: np.dtype[Any]) -> F32:
    """The table is bfloat16 and double_scale has the model's dtype; zeros is 0-d, so it takes the
    other operand's dtype.
    """
    double_dtype = dtype_named(q.details.get("double_scale_dtype", "bfloat16"))
    mapped, double = nested_scales(q)
    scales = round_to(round_to(mapped / double, double_dtype), out)
    scales = round_to(scales + round_to(q.parts["nested_offset"], out), out)
    return round_to(elements(q) * scale_expander(q)(scales), promote(out, bfloat16))
