"""compressed-tensors: integers and floats in the dtype of the scales, microscaled and NVFP4 weights
in bfloat16; then a cast.

| kind | arithmetic |
|---|---|
| int, float elements | `(q − z) · scale` in the scales' dtype, one rounding |
| nvfp4 | `bfloat16( e2m1 · float32(block_scale / global_scale) )`, each step rounded to float32 |
| mxfp4, mxfp6, mxfp8 | `bfloat16( element · 2^(b − 127) )`; b = 255 is infinity, so a zero element gives NaN |

The result always has that dtype first; a request for another dtype casts it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.decode import element_values, group_expander, scale_values
from ..numerics.bits import unpack
from ..numerics.exact import bfloat16, dtype_named
from ..spec import EncodedTensor


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What a compressor's `decompress` returns, cast to `dtype`."""
    fmt, parts = q.format, q.parts
    expand = group_expander(fmt, q.shape, q.window, parts.get("group_index"))
    value = element_values(fmt, unpack(parts["codes"], fmt.bits, q.shape[-1]), np.float32)
    with np.errstate(all="ignore"):
        if fmt.float_scale:
            if fmt.zero == "int":
                value -= expand(parts["zeros"].astype(np.float32))
            native = parts["scales"].dtype
        else:
            native = bfloat16
        scale = scale_values(fmt.scale, parts["scales"], np.float32)
        if fmt.scale == "e8m0":
            scale[parts["scales"] == 255] = np.inf
        if fmt.global_op:
            scale = scale / parts["global_scale"].astype(np.float32)[..., None, None]
        value *= expand(scale)
        return value.astype(native).astype(dtype_named(dtype), copy=False)
