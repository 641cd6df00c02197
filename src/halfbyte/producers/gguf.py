"""gguf.quants.dequantize (gguf 0.17 to 0.19): float32 throughout, then a cast.

    Q4_0, Q5_0, Q8_0, IQ4_NL   d · q
    Q4_1, Q5_1                 (d · q) + m
    Q3_K, Q6_K, IQ4_XS         (d · sc) · q
    Q2_K, Q4_K, Q5_K           (d · sc) · q − dmin · mn
    MXFP4                      2^(b−128) · (2 · element): byte 255 is 2^127 before the element
                               doubles it, so 0.5 stays finite
    NVFP4                      (ue4m3 / 2) · (2 · element)

Both 4-bit floats look elements up as small integers, where code 8 is +0. The factor of a tensor
(`.scale`), which gguf.quants does not apply, is multiplied in last. Types stored as raw blocks are
decoded by gguf.quants itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..numerics.exact import dtype_named
from ..numerics.minifloat import scale_table
from ..spec import EncodedTensor
from .float32 import F32, elements, scale_expander


def decode(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What gguf.quants.dequantize returns, cast to `dtype`."""
    with np.errstate(all="ignore"):
        value = _blocks(q) if q.format.opaque else _value(q)
        if q.format.global_op:
            value = value * q.parts["global_scale"][..., None, None]
        return value.astype(dtype_named(dtype), copy=False)


def _value(q: EncodedTensor) -> F32:
    fmt, expand = q.format, scale_expander(q)
    if fmt.element == "e2m1":
        doubled = elements(q, negative_zero=False) * np.float32(2)
        product: F32 = expand(_half_scales(fmt.scale)[q.parts["scales"]]) * doubled
        return product
    scale = q.parts["scales"].astype(np.float32)
    if fmt.super_size:
        scale = _per_group(q, "super_scales") * scale
    value = expand(scale) * elements(q)
    if fmt.bias:
        value += expand(q.parts["biases"].astype(np.float32))
    if fmt.minimum:
        value -= expand(_per_group(q, "super_mins") * q.parts["mins"].astype(np.float32))
    return value


def _per_group(q: EncodedTensor, part: str) -> F32:
    """Values of super-blocks, repeated for each of their groups."""
    return np.repeat(q.parts[part].astype(np.float32), q.format.super_size // q.format.group_size, axis=-1)


@cache
def _half_scales(kind: str) -> F32:
    """Half the value of every scale byte, float32 [256], for elements that are looked up doubled."""
    half = scale_table(kind) / 2
    if kind == "e8m0":
        half[255] = 2.0**127
    table: F32 = half.astype(np.float32)
    table.setflags(write=False)
    return table


def _blocks(q: EncodedTensor) -> F32:
    from ..formats.ggml.raw_blocks import dequantize_blocks

    return dequantize_blocks(q.format.name, q.parts["blocks"])
