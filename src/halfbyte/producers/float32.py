"""Steps that several producers' decoders share, in float32: element lookup, expansion of group
values, intermediate roundings.

Each operation rounds once, as IEEE 754 float32 does, in the order in which the caller writes it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.decode import NESTED_BLOCK, Expander, element_values, group_expander
from ..numerics.bits import unpack
from ..numerics.minifloat import element_table, scale_table
from ..spec import EncodedTensor

F32 = NDArray[np.float32]


def codes(q: EncodedTensor) -> NDArray[np.uint8]:
    """Element codes, uint8 [*shape]."""
    return unpack(q.parts["codes"], q.format.bits, q.shape[-1])


def elements(q: EncodedTensor, *, negative_zero: bool = True) -> F32:
    """element(code), float32 [*shape]. `negative_zero=False` reads the code of −0 as +0."""
    if negative_zero or q.format.element != "e2m1":
        return element_values(q.format, codes(q), np.float32)
    table = element_table("e2m1", 4).astype(np.float32)
    table[8] = 0.0
    return table[codes(q)]


def scale_expander(q: EncodedTensor) -> Expander:
    """The function from values a group (an array in the shape of `scales`) to values an element
    (broadcasts to `q.shape`).
    """
    return group_expander(q.format, q.shape, q.window, q.parts.get("group_index"))


@cache
def e8m0_table(top: float) -> F32:
    """Values of the 256 E8M0 bytes. `top` is the producer's value of byte 255: NaN, or inf (2^128
    is inf in float32).
    """
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


def round_to(x: NDArray[Any], dtype: Any) -> F32:
    """float32 values rounded to `dtype`, as float32: an intermediate result that the producer
    stores in that dtype.
    """
    return x.astype(dtype).astype(np.float32)


def nested_scales(q: EncodedTensor) -> tuple[F32, F32]:
    """nested_map[byte] and the nested_absmax of its block of 256, both float32 in the shape of
    `scales`.
    """
    scales = q.parts["scales"]
    first = q.window[0] * scales.shape[-1] if q.window is not None and scales.ndim > 1 else 0
    block = (first + np.arange(scales.size)).reshape(scales.shape) // NESTED_BLOCK
    return q.parts["nested_map"][scales], q.parts["nested_absmax"][block]


def promote(a: Any, b: Any) -> np.dtype[Any]:
    """The result dtype of a torch operation on two float dtypes: their own when equal, else
    float32.
    """
    a, b = np.dtype(a), np.dtype(b)
    return a if a == b else np.dtype(np.float32)
