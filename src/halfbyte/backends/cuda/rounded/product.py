"""yᵀ = W xᵀ for activations of 8 bits, any format whose elements are whole numbers of 8 bits or
E4M3 values, on any GPU.

    int8   segment sums are exact in int32; scales meet them in float32, in the order of the CPU's
           kernels (native/products.inl), so that both give the same bits
    fp8    segment sums are float32; y = (Σ over segments of sum · scale) · scale of the token

A step is a span: its segments one after another. Inputs are multiplied in their own order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..decode import E2M1, E4M3, INT, MXINT, UINT, code, element
from ..portable.decode_tile import BIAS, MIN, NONE, ZERO, apply_global_scale, group_terms, interleave8, load_planes
from .quantize import INT8, e4m3_byte


class Rounded(NamedTuple):
    """Pointers to rounded activations: codes int8 (m, padded), scales float32 (m, spans) or (m,) of
    FP8, sums of codes float32 (m, segments).
    """

    codes: Any
    scales: Any
    sums: Any


class Sizes(NamedTuple):
    """Inputs of a row of codes, spans and segments of a row."""

    padded: Any
    spans: Any
    segments: Any


class RoundedTile(NamedTuple):
    """What a kernel is compiled for, beside the format.

    mode, half       INT8 or FP8; FP8 is multiplied in float16, for GPUs without E4M3 products
    has_bias         a bias is added
    tokens, rows     of a tile
    segment, each    inputs of a segment; segments of a span
    unit             value of one step of the integer elements
    plus, less       what is added to a sum for each unit of x's sum, and what zero points are
                     lessened by (`launch.around_zero`)
    stages           steps whose loads are in flight
    """

    mode: int
    half: bool
    has_bias: bool
    tokens: int
    rows: int
    segment: int
    each: int
    unit: float
    plus: float
    less: float
    stages: int

    def constants(self) -> RoundedTile:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@triton.jit
def whole_element(c, table, F: tl.constexpr):
    """Code to its element as a whole number of the format's unit; of UINT with 8 bits less 128."""
    if F.kind == UINT:
        return c - 128 if F.bits == 8 else c
    elif F.kind == INT:
        return c - (1 << (F.bits - 1))
    elif F.kind == MXINT:
        return (c ^ (1 << (F.bits - 1))) - (1 << (F.bits - 1))
    elif F.kind == E2M1:
        v = (-0x379BCDF0 >> (4 * (c & 7))) & 15  # 0 1 2 3 4 6 8 12, a nibble each
        return tl.where(c > 7, -v, v)
    else:
        return tl.load(table + c).to(tl.int32)


@triton.jit
def operand(planes, table, F: tl.constexpr, T: tl.constexpr, INPUTS: tl.constexpr):
    """The elements of a tile of the weight, [rows, INPUTS], as the matrix unit takes them."""
    v = ()
    for j in tl.static_range(8):
        if F.bits == 8:
            word = planes.low if j < 4 else planes.high
            c = (word >> (8 * (j % 4))) & 255
        else:
            c = code(j, planes.low, planes.p4, planes.p2, planes.p1, F.bits)
        if T.mode == INT8:
            e = whole_element(c, table, F).to(tl.int8)
        elif T.half:
            e = element(c, table, F.kind, F.bits).to(tl.float16)
        elif F.kind == E4M3:
            e = c.to(tl.int8)
        else:
            e = e4m3_byte(element(c, table, F.kind, F.bits)).to(tl.int8)
        v = v + (e,)  # type: ignore[assignment] # Triton unrolls the loop
    w = interleave8(v, T.rows, INPUTS // 8)
    if (T.mode == INT8) or T.half:
        return w
    else:
        return w.to(tl.float8e4nv, bitcast=True)


@triton.jit
def e4m3_half(c):
    """E4M3 codes to float16."""
    h = ((c & 0x80) << 8) | ((c & 0x7F) << 7)
    return (h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.float16)


@triton.jit
def activations(Q, t, j, mask, padded, T: tl.constexpr):
    """Codes of tokens t and inputs j, [inputs, tokens], as the matrix unit takes them."""
    q = tl.load(Q + t[None, :] * padded + j[:, None], mask=mask, other=0)
    if T.mode == INT8:
        return q
    elif T.half:
        return e4m3_half(q.to(tl.int32) & 255)
    else:
        return q.to(tl.float8e4nv, bitcast=True)


@triton.jit
def segment_sum(Q, weight, t, r, at, m, n, padded, F: tl.constexpr, T: tl.constexpr):
    """Σ element · code of the segment from input `at` on, float32 [rows, tokens]. The matrix unit
    takes 32 inputs: a segment of 16 is multiplied with zeros beside it.
    """
    INPUTS: tl.constexpr = T.segment if T.segment >= 32 else 32
    first = at // INPUTS * INPUTS
    c = first // 8 + tl.arange(0, INPUTS // 8)
    planes = load_planes(weight, r[:, None], c[None, :], (r < n)[:, None] & (c < F.words)[None, :], F)
    w = operand(planes, weight.table, F, T, INPUTS)
    j = first + tl.arange(0, INPUTS)
    mask = (t < m)[None, :] & ((j >= at) & (j < at + T.segment))[:, None]
    x = activations(Q, t, j, mask, padded, T)
    if T.mode == INT8:
        return tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
    else:
        return tl.dot(w, x, out_dtype=tl.float32)


@triton.jit(do_not_specialize=["m"])
def rounded_kernel(Y, x, BIAS_VALUES, weight, m, n, sizes, G, divisor, format: tl.constexpr, tile: tl.constexpr):
    """y (m, n), one program a tile, tokens fastest. x is Rounded, sizes are Sizes."""
    F: tl.constexpr = format.constants()
    T: tl.constexpr = tile.constants()
    Q = x.codes
    padded = sizes.padded
    spans = sizes.spans
    segments = sizes.segments
    tokens = (m + T.tokens - 1) // T.tokens
    r = tl.program_id(0) // tokens * T.rows + tl.arange(0, T.rows).to(tl.int64)
    t = tl.program_id(0) % tokens * T.tokens + tl.arange(0, T.tokens).to(tl.int64)
    total = tl.zeros((T.rows, T.tokens), tl.float32)
    for span in tl.range(0, spans, num_stages=T.stages):
        part = tl.zeros((T.rows, T.tokens), tl.float32)
        if T.mode == INT8:
            x_scale = tl.load(x.scales + t * spans + span, mask=t < m, other=0)
        for i in tl.static_range(T.each):
            s = span * T.each + i
            at = s * T.segment
            sum = segment_sum(Q, weight, t, r, at, m, n, padded, F, T)
            g = at // F.group
            scale, added = group_terms(weight, r, tl.minimum(g, G - 1), G, (r < n) & (g < G), F)
            if (F.addend != NONE) or (T.plus != 0.0):
                x_sum = tl.load(x.sums + t * segments + s, mask=t < m, other=0)
                if T.plus != 0.0:
                    sum += T.plus * x_sum[None, :]
            scale = scale * T.unit
            if T.mode == INT8 and T.each == 1:
                sum = sum * x_scale[None, :]
                if F.addend != NONE:
                    x_sum = x_scale * x_sum
            if F.addend == ZERO:
                sum = tl.math.fma((T.less - added)[:, None] + tl.zeros_like(sum), x_sum[None, :] + tl.zeros_like(sum), sum)
            if T.mode == INT8 and T.each > 1:
                part = tl.math.fma(sum, (scale * 0.0078125)[:, None] + tl.zeros_like(sum), part)
            else:
                if (F.addend == BIAS) or (F.addend == MIN):
                    total = tl.math.fma(added[:, None] + tl.zeros_like(sum), x_sum[None, :] + tl.zeros_like(sum), total)
                total = tl.math.fma(sum, scale[:, None] + tl.zeros_like(sum), total)
        if T.mode == INT8 and T.each > 1:
            total = tl.math.fma(part, (x_scale * 128.0)[None, :] + tl.zeros_like(part), total)
    if T.mode != INT8:
        total = total * tl.load(x.scales + t, mask=t < m, other=0)[None, :]
    total = apply_global_scale(total, weight, divisor, False, F)
    if T.has_bias:
        total += tl.load(BIAS_VALUES + r, mask=r < n, other=0).to(tl.float32)[:, None]
    y = tl.trans(total)
    tl.store(Y + t[:, None] * n + r[None, :], y.to(Y.dtype.element_ty), mask=(t < m)[:, None] & (r < n)[None, :])
