"""Activations to 8-bit codes and scales, as `numerics/activations.py` defines them, one program a
token.

Codes of inputs past k are 0. Where the scales of a span are adjacent, those of tokens past the last
are 0, and so are sums, since tiles read them. In an `order` other than STRAIGHT the inputs of each
32 are stored in the order in which the words of fragment order meet them in wgmma's register
operand (`wgmma.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INT8 = tl.constexpr(0)
FP8 = tl.constexpr(1)

STRAIGHT = tl.constexpr(0)
BY_NIBBLES = tl.constexpr(1)
BY_BYTES = tl.constexpr(2)
BY_E2M1 = tl.constexpr(3)
BY_16 = tl.constexpr(4)  # added to one of these: words of groups of 16

WHOLE_TOKENS = tl.constexpr(256)
"""Tokens of which the scales of x are whole multiples where those of a span are adjacent."""


class Rounding(NamedTuple):
    """What the kernel is compiled for.

    mode              INT8 or FP8
    span, segment     inputs of one scale of INT8, and of one sum of codes
    block             inputs at a time, whole spans
    sums              codes are summed by segment
    order             STRAIGHT, BY_NIBBLES, BY_BYTES or BY_E2M1
    by_token          scales and sums of a token are adjacent; else those of a span or segment
    numbers           codes are stored as numbers of Q's type
    """

    mode: int
    span: int
    segment: int
    block: int
    sums: bool
    order: int
    by_token: bool
    numbers: bool = False

    def constants(self) -> Rounding:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@triton.jit
def e4m3_byte(y):
    """A float32 of at most 448 to the nearest E4M3 byte, ties to even."""
    whole = y.to(tl.int32, bitcast=True)
    size = whole & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    lifted = tl.abs(y) * 512.0 + 8388608.0  # rounds to a whole number of 2^-9
    small = lifted.to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(size < (121 << 23), small, normal)
    return code | ((whole >> 24) & 0x80)


@triton.jit
def whole_number(y):
    """A float32 between −2^22 and 2^22 to the nearest whole number, ties to even."""
    return ((y + 12582912.0).to(tl.int32, bitcast=True) & 0x7FFFFF) - 0x400000


@triton.jit
def stored_at(j, ORDER: tl.constexpr):
    """Where input j is stored: of 32 inputs, 8 t + 4 b + 2 i + p comes to 16 b + 4 t + 2 p + i in
    BY_NIBBLES, to 16 b + 4 t + 2 i + p in BY_BYTES, to 16 b + 4 t + 2 p + 1 − i in BY_E2M1;
    BY_16 more, input 16 b + 4 t + 2 i + p does.
    """
    if ORDER == STRAIGHT:
        return j
    else:
        t = (j >> 3) & 3
        b = (j >> 2) & 1
        low = j & 3
        if ORDER % BY_16 == BY_NIBBLES:
            low = ((low & 1) << 1) | (low >> 1)
        elif ORDER % BY_16 == BY_E2M1:
            low = ((low & 1) << 1) | (1 - (low >> 1))
        if ORDER >= BY_16:
            return (j & -4) | low
        return (j & -32) | (b << 4) | (t << 2) | low


@triton.jit
def clear_absent(P, line, lines, first, stride, TOKENS: tl.constexpr):
    """Zeros for the tokens from `first` on, at most TOKENS, in some of the `lines` of P."""
    t = first + tl.arange(0, TOKENS)
    tl.store(P + line[:, None] * stride + t[None, :], 0.0, mask=(line < lines)[:, None] & (t < stride)[None, :])


@triton.jit
def quantize_kernel(Q, SCALES, SUMS, X, k, padded, ldx, spans, segments, stride, rounding: tl.constexpr, PDL: tl.constexpr):
    """Q int8 (m, padded), SCALES float32 (m, spans) or (m,), SUMS float32 (m, segments); not
    `by_token` SCALES (spans, stride) or (stride,) and SUMS (segments, stride). PDL: the launch
    overlaps with the kernels before and after.
    """
    R: tl.constexpr = rounding.constants()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    EACH: tl.constexpr = R.block // R.segment
    token = tl.program_id(0).to(tl.int64)
    clears = token == tl.num_programs(0) - 1
    if R.mode == INT8:
        SPANS: tl.constexpr = R.block // R.span
        first = tl.program_id(1) * R.block
        j = first + tl.arange(0, R.block)
        x = tl.load(X + token * ldx + j, mask=j < k, other=0).to(tl.float32)
        x = tl.reshape(x, (SPANS, R.span))
        size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as a whole number NaN is larger than any float32
        peak = tl.max(size, 1)
        usable = (peak < 0x7F800000) & (peak > 0)
        safe = tl.where(usable, peak, 0x3F800000).to(tl.float32, bitcast=True)
        lift = tl.where(safe < 1e-36, 1.2676506002282294e30, 1.0)
        inverse = tl.math.div_rn(tl.full((SPANS,), 127.0, tl.float32), safe * lift)
        x = tl.where(usable[:, None], x, 0.0)
        q = whole_number(x * lift[:, None] * inverse[:, None])
        scale = tl.math.div_rn(safe, tl.full((SPANS,), 127.0, tl.float32))
        scale = tl.where(usable, scale, tl.where(peak == 0, 0.0, float("nan")))
        s = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
        tl.store(SCALES + (token * spans + s if R.by_token else s * stride + token), scale, mask=s < spans)
        if not R.by_token:
            if clears:
                clear_absent(SCALES, s, spans, token + 1, stride, WHOLE_TOKENS)
        if R.sums:
            total = tl.sum(tl.reshape(q, (EACH, R.segment)), 1)
            e = tl.program_id(1) * EACH + tl.arange(0, EACH)
            tl.store(SUMS + (token * segments + e if R.by_token else e * stride + token), total.to(tl.float32), mask=e < segments)
            if not R.by_token:
                if clears:
                    clear_absent(SUMS, e, segments, token + 1, stride, WHOLE_TOKENS)
        tl.store(Q + token * padded + stored_at(j, R.order), tl.reshape(q, (R.block,)).to(tl.int8), mask=j < padded)
    else:
        largest = tl.zeros((R.block,), tl.int32)
        for first in range(0, padded, R.block):
            j = first + tl.arange(0, R.block)
            x = tl.load(X + token * ldx + j, mask=j < k, other=0).to(tl.float32)
            largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        peak = tl.max(largest, 0)
        finite = peak < 0x7F800000
        field = tl.maximum(((tl.where(finite, peak, 0) + 0x1FFFFF) >> 23) - 8, 1)  # 448 is 1.75 · 2^8
        scale = (field << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - field) << 23).to(tl.float32, bitcast=True)
        tl.store(SCALES + token, tl.where(finite, scale, float("nan")))
        if not R.by_token:
            if clears:
                clear_absent(SCALES, tl.arange(0, 1), 1, token + 1, stride, WHOLE_TOKENS)
        for first in range(0, padded, R.block):
            j = first + tl.arange(0, R.block)
            x = tl.load(X + token * ldx + j, mask=(j < k) & finite, other=0).to(tl.float32)
            code = e4m3_byte(x * inverse)
            stored = e4m3_value(code).to(Q.dtype.element_ty) if R.numbers else code.to(tl.int8)
            tl.store(Q + token * padded + stored_at(j, R.order), stored, mask=j < padded)
            if R.sums:
                total = tl.sum(tl.reshape(e4m3_value(code), (EACH, R.segment)), 1)
                e = first // R.segment + tl.arange(0, EACH)
                tl.store(SUMS + (token * segments + e if R.by_token else e * stride + token), total, mask=e < segments)
                if not R.by_token:
                    if clears:
                        clear_absent(SUMS, e, segments, token + 1, stride, WHOLE_TOKENS)


@triton.jit
def e4m3_value(c):
    """An E4M3 byte that is no NaN to float32."""
    h = ((c & 0x80) << 8) | ((c & 0x7F) << 7)
    return h.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
