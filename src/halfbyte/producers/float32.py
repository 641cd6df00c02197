"""The float32 steps that many producers' decoders share: codes through a table, group values spread, products rounded on the way.

Everything here is plain float32 arithmetic, one IEEE rounding an operation, in the order a caller writes it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..formats.decode import NESTED_BLOCK, element_values, placement
from ..numerics.bits import unpack
from ..numerics.minifloat import element_table, scale_table

if TYPE_CHECKING:
    from ..formats.decode import Place
    from ..tensor.qtensor import QTensor

F32 = NDArray[np.float32]


def codes(q: QTensor) -> NDArray[np.uint8]:
    """Element codes, uint8 [*shape]."""
    return unpack(q.parts["codes"], q.format.bits, q.shape[-1])


def elements(q: QTensor, *, negative_zero: bool = True) -> F32:
    """element(code), float32 [*shape]. `negative_zero=False` reads the code of −0 as +0."""
    if negative_zero or q.format.element != "e2m1":
        return element_values(q.format, codes(q), np.float32)
    table = element_table("e2m1", 4).astype(np.float32)
    table[8] = 0.0
    return table[codes(q)]


def spread(q: QTensor) -> Place:
    """The function that takes an array in the shape of the scales to one that broadcasts to `q.shape`."""
    return placement(q.format, q.shape, q.window, q.parts.get("group_index"))


@cache
def e8m0_table(top: float) -> F32:
    """Values of the 256 E8M0 bytes, with what a producer makes of byte 255: NaN, inf or 2^128 (which float32 has as inf)."""
    table = scale_table("e8m0").astype(np.float32)
    table[255] = top
    table.setflags(write=False)
    return table


@cache
def e4m3_table() -> F32:
    """Values of the 256 signed E4M3 bytes; 0x7F and 0xFF are NaN."""
    table = scale_table("e4m3").astype(np.float32)
    table.setflags(write=False)
    return table


def rounded(x: NDArray[Any], dtype: Any) -> F32:
    """float32 values rounded to `dtype` and back: an intermediate held in that dtype."""
    return x.astype(dtype).astype(np.float32)


def nested_scales(q: QTensor) -> tuple[F32, F32]:
    """nested_map[byte] and the nested_absmax of its block of 256, both float32 in the shape of `scales`."""
    scales = q.parts["scales"]
    first = q.window[0] * scales.shape[-1] if q.window is not None and scales.ndim > 1 else 0
    block = (first + np.arange(scales.size)).reshape(scales.shape) // NESTED_BLOCK
    return q.parts["nested_map"][scales], q.parts["nested_absmax"][block]


def promoted(a: Any, b: Any) -> np.dtype[Any]:
    """The dtype torch computes in when tensors of two float dtypes meet: their own when equal, else float32."""
    a, b = np.dtype(a), np.dtype(b)
    return a if a == b else np.dtype(np.float32)
