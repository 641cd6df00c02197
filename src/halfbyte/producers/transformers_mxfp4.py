"""transformers' gpt-oss loader (5.24): ldexp(e2m1, byte − 127), rounded once to the output dtype,
bfloat16 by default.

Byte 255 is 2^128: 0.5 · 2^128 is finite, 0 stays 0, 1 and more are inf. The loader returns experts
transposed, (experts, k, rows); this is (experts, rows, k), as stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from ..numerics.minifloat import element_table
from ..spec import EncodedTensor
from .float32 import codes, scale_expander

_HALF_SCALE = np.ldexp(1.0, np.arange(256) - 128).astype(np.float32)
"""2^(byte − 128): half the scale, so that byte 255 is finite in float32. Bytes 0 and 1 are
subnormal, and exact.
"""


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What convert_moe_packed_tensors(dtype=dtype) returns, not transposed."""
    twice = (element_table(q.format.element, q.format.bits) * 2).astype(np.float32)
    with np.errstate(all="ignore"):
        value = twice[codes(q)] * scale_expander(q)(_HALF_SCALE[q.parts["scales"]])
        return value.astype(dtype_named(dtype))
