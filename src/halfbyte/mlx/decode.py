"""Packed rows decoded by MLX operations, for devices without Metal.

    value = ((element(code) − zero) · scale · factor) / divisor + bias      float64 throughout, so that only the last step rounds

Source: the formula of docs/design/layering.md. MLX has float64 on the CPU only, where this runs.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..backends.metal.weight import MetalWeight
from ..numerics.minifloat import element_table, scale_table
from ..spec import Format

CPU = mx.cpu


def codes_of(w: MetalWeight, start: int, stop: int) -> mx.array:
    """Codes of rows start to stop, uint32 [rows, 8 · units]: code j of eight is bits j·b to j·b + b
    − 1 of `bits` bytes.
    """
    bits = w.format.bits
    octets = w.codes[start:stop].reshape(stop - start, w.units, bits).astype(mx.uint64)
    shifts = mx.array(np.arange(bits, dtype=np.uint64) * 8)
    whole = (octets << shifts).sum(axis=-1, keepdims=True)
    each = (whole >> mx.array(np.arange(8, dtype=np.uint64) * bits)) & mx.array((1 << bits) - 1, mx.uint64)
    return each.astype(mx.uint32).reshape(stop - start, -1)


def scales_of(fmt: Format, raw: mx.array) -> mx.array:
    """Stored scales as float64."""
    if fmt.scale in ("e8m0", "e4m3", "ue4m3"):
        return mx.take(mx.array(scale_table(fmt.scale), mx.float64), raw.astype(mx.uint32))
    return raw.astype(mx.float64)


def _spread(w: MetalWeight, a: mx.array) -> mx.array:
    """Values a group -> values an input."""
    k = w.shape[-1]
    return mx.repeat(a, k if w.groups == 1 else w.format.group_size, axis=-1)[:, :k]


def rows_float32(w: MetalWeight, start: int, stop: int) -> mx.array:
    """Rows start to stop of a matrix as float32 [rows, k], exact values rounded once; inputs in the
    file's order.
    """
    fmt, k = w.format, w.shape[-1]
    with mx.stream(CPU):
        table = mx.array(element_table(fmt.element, fmt.bits), mx.float64)
        value = mx.take(table, codes_of(w, start, stop))[:, :k]
        if fmt.zero == "int":
            value = value - _spread(w, w.addends[start:stop].astype(mx.float64))
        value = value * _spread(w, scales_of(fmt, w.scales[start:stop]))
        factor = w.factors[0].astype(mx.float64)
        if fmt.global_op:
            value = value * factor if fmt.global_op == "multiply" else value / factor
        if fmt.divisor != 1.0:
            value = value / mx.array(fmt.divisor, mx.float64)
        if fmt.bias:
            value = value + _spread(w, w.addends[start:stop].astype(mx.float64))
        if w.order is not None:
            value = mx.take(value, mx.argsort(w.order), axis=1)
        return value.astype(mx.float32)
