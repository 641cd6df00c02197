"""bitsandbytes' dequantize_4bit and int8_vectorwise_dequant (0.50, CPU).

4 bit    table[code] · absmax in float32, then a cast
nested   absmax = nested_map[byte] · nested_absmax + nested_offset, two float32 roundings
fp4      code 8, +0 in the table, is −0: the AVX-512 kernel negates by the sign bit; rows of odd
         length and blocks of 2048 or more take another kernel
int8     (code · SCB) · float32(0.007874015718698502): the reciprocal of 127 to sixteen digits, not
         a division
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from ..spec import EncodedTensor
from .float32 import F32, codes, elements, nested_scales, scale_expander

_RECIPROCAL = np.float32(7.874015718698502e-3)


def _elements(q: EncodedTensor) -> F32:
    value = elements(q)
    if q.format.element == "bnb_fp4" and q.shape[-1] % 2 == 0 and q.format.group_size < 2048:
        value[codes(q) == 8] = -0.0
    return value


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What bitsandbytes returns, cast to `dtype`."""
    expand = scale_expander(q)
    with np.errstate(all="ignore"):
        if q.format.scale == "nested":
            mapped, absmax = nested_scales(q)
            scales = mapped * absmax + q.parts["nested_offset"]
        else:
            scales = q.parts["scales"]
        value = _elements(q) * expand(scales)
        if q.format.element == "int":
            value = value * _RECIPROCAL
        return value.astype(dtype_named(dtype))
