"""torchao's dequantize of its tensor subclasses (0.18).

MXTensor      element · r(scale), the product rounded in the output dtype; scale byte 255 is NaN
NVFP4Tensor   element · (scale · per_tensor_scale) in float32, then a cast
Intx, Int8    r(code − zero_point) in the output dtype, times scale in the wider of the two dtypes,
              then a cast
Float8Tensor  element · scale in float32, then a cast
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from ..spec import EncodedTensor
from .float32 import F32, e4m3_table, e8m0_table, elements, promote, round_to, scale_expander


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What .dequantize(dtype) returns."""
    out = dtype_named(dtype)
    with np.errstate(all="ignore"):
        return _value(q, out).astype(out)


def _value(q: EncodedTensor, out: np.dtype[Any]) -> F32:
    expand = scale_expander(q)
    scales = q.parts["scales"]
    if q.format.scale == "e8m0":
        return elements(q) * expand(round_to(e8m0_table(np.nan)[scales], out))
    if q.format.scale == "e4m3":
        factor = q.parts["global_scale"][..., None, None] if q.format.global_op else np.float32(1)
        return elements(q) * expand(e4m3_table()[scales] * factor)
    if q.format.family == "fp8":
        return elements(q) * expand(scales.astype(np.float32))
    codes = elements(q)
    if q.format.zero != "none":
        # A signed code and its zero point are stored plus 2^(bits−1); the producer rounds the
        # signed numbers.
        shift = np.float32(1 << (q.format.bits - 1) if q.details.get("signed") else 0)
        zeros = q.parts["zeros"].astype(np.float32) - shift
        codes = round_to(round_to(codes - shift, out) - expand(round_to(zeros, out)), out)
    return round_to(codes * expand(scales.astype(np.float32)), promote(out, scales.dtype))
