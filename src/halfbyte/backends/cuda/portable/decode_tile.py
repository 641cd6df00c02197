"""Loading and decoding a tile of a packed weight: rows r by words c of eight elements, to finished float32 values.

    value = (element − zero) · scale      or      element · scale + addend

with scale = group scale (· super scale) and addend = bias or −min · super_min. Each line below is exact but for one rounding at
the end (docs/design/layering.md, and formats/decode.py), so the result is the exact value rounded once to float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode import E2M1, INT, SMALL, UINT, code, e2m1_raw_f32, element, scale_f32, u4_f32, u4b8_f32
from ..lookups import SHARED, look_up

# What is added to or taken from element · scale.
NONE = tl.constexpr(0)
ZERO = tl.constexpr(1)  # integer zero points, int16
BIAS = tl.constexpr(2)  # float biases
MIN = tl.constexpr(3)  # small-integer minimum times a super minimum


@triton.jit
def load_planes(
    P8,
    P4,
    P2,
    P1,
    r,
    c,
    mask,
    WORDS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The plane words of rows r by words c: (low four bytes, high four bytes) for 8 bits, (nibbles, pairs, bits) below.

    UNITS is 0 in plane order; in fragment order it counts units of 64 inputs, and the word is put together from two words of
    four codes.
    """
    at = r * WORDS + c
    zero = tl.zeros(at.shape, tl.int32)
    lo = zero
    hi = zero
    p4 = zero
    p2 = zero
    p1 = zero
    if (BITS == 8) and (UNITS > 0):  # half a unit: word 2 b + i, byte 2 h + p
        h = ((r % 16) // 8).to(tl.int32) * 16
        if GROUP == 16:  # two lanes' words, t = 2 (c % 2) and the next
            line = (((r // 16) * UNITS + c // 8) * 2 + c // 4 % 2) * 128 + (r % 8 * 4 + c % 2 * 2) * 4 + c % 4 // 2 * 2
            far = line + 4
        else:
            line = (((r // 16) * UNITS + c // 8) * 2 + c // 4 % 2) * 128 + (r % 8 * 4 + c % 4) * 4
            far = line + 2
        lo = (tl.load(P8 + line, mask=mask, other=0) >> h) & 0xFFFF
        lo |= ((tl.load(P8 + line + 1, mask=mask, other=0) >> h) & 0xFFFF) << 16
        hi = (tl.load(P8 + far, mask=mask, other=0) >> h) & 0xFFFF
        hi |= ((tl.load(P8 + far + 1, mask=mask, other=0) >> h) & 0xFFFF) << 16
    elif BITS == 8:
        lo = tl.load(P8 + 2 * at, mask=mask, other=0)
        hi = tl.load(P8 + 2 * at + 1, mask=mask, other=0)
    elif (BITS == 4) and (UNITS > 0):
        line = (((r // 16) * UNITS + c // 8) * 32 + (r % 8) * 4) * 4 + 2 * ((c // 4) % 2)
        h = ((r % 16) // 8).to(tl.int32)
        for s in tl.static_range(2):
            if GROUP == 16:
                word_at = line + (2 * (c % 2) + s) * 4 + (c % 4) // 2
            else:
                word_at = line + (c % 4) * 4 + s
            v = tl.load(P4 + word_at, mask=mask, other=0)
            if KIND == E2M1:  # order.spread_e2m1 undone for the two nibbles of this row
                low = ((v >> (9 - 3 * h)) & 0x00070007) | ((v >> (12 - 3 * h)) & 0x00080008)
                high = ((v >> (3 - 3 * h)) & 0x00070007) | ((v >> (11 - h)) & 0x00080008)
                v = low | (high << 8)
            else:
                v = (v >> (4 * h)) & 0x0F0F0F0F
            p4 |= ((v | (v >> 12)) & 0xFFFF) << (16 * s)
    elif (BITS >= 4) and (BITS < 8):
        p4 = tl.load(P4 + at, mask=mask, other=0)
    if (BITS == 2) and (UNITS > 0):  # P2 counts words of eight codes: [tile, unit, 16 rows, 8]
        line = ((r // 16) * UNITS + c // 8) * 128 + r % 16 * 8 + c % 8
        p2 = tl.load(P2 + line, mask=mask, other=0).to(tl.int32)
    elif ((BITS == 7) or (BITS == 6)) or ((BITS == 3) or (BITS == 2)):
        p2 = tl.load(P2 + at, mask=mask, other=0).to(tl.int32)
    if ((BITS == 7) or (BITS == 5)) or ((BITS == 3) or (BITS == 1)):
        p1 = tl.load(P1 + at, mask=mask, other=0).to(tl.int32)
    return lo, hi, p4, p2, p1


@triton.jit
def elements(lo, hi, p4, p2, p1, table, KIND: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Eight float32 element values, and the power of two that still multiplies them (1 unless the raw E2M1 form is used)."""
    if KIND >= SHARED:
        v0, v1, v2, v3, v4, v5, v6, v7 = look_up(p4, table, KIND)
    elif PACKED and ((BITS == 4) and (KIND == UINT)):
        v0, v1, v2, v3, v4, v5, v6, v7 = u4_f32(p4)
    elif PACKED and ((BITS == 4) and (KIND == INT)):
        v0, v1, v2, v3, v4, v5, v6, v7 = u4b8_f32(p4)
    elif PACKED and ((BITS == 4) and (KIND == E2M1)):
        v0, v1, v2, v3, v4, v5, v6, v7 = e2m1_raw_f32(p4)
    elif BITS == 8:
        v0 = element(lo & 255, table, KIND, BITS)
        v1 = element((lo >> 8) & 255, table, KIND, BITS)
        v2 = element((lo >> 16) & 255, table, KIND, BITS)
        v3 = element((lo >> 24) & 255, table, KIND, BITS)
        v4 = element(hi & 255, table, KIND, BITS)
        v5 = element((hi >> 8) & 255, table, KIND, BITS)
        v6 = element((hi >> 16) & 255, table, KIND, BITS)
        v7 = element((hi >> 24) & 255, table, KIND, BITS)
    else:
        v0 = element(code(0, lo, p4, p2, p1, BITS), table, KIND, BITS)
        v1 = element(code(1, lo, p4, p2, p1, BITS), table, KIND, BITS)
        v2 = element(code(2, lo, p4, p2, p1, BITS), table, KIND, BITS)
        v3 = element(code(3, lo, p4, p2, p1, BITS), table, KIND, BITS)
        v4 = element(code(4, lo, p4, p2, p1, BITS), table, KIND, BITS)
        v5 = element(code(5, lo, p4, p2, p1, BITS), table, KIND, BITS)
        v6 = element(code(6, lo, p4, p2, p1, BITS), table, KIND, BITS)
        v7 = element(code(7, lo, p4, p2, p1, BITS), table, KIND, BITS)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def group_terms(S, SUPER, A, SMIN, r, g, G, mask, SCALE: tl.constexpr, ADD: tl.constexpr, PER: tl.constexpr, UNITS: tl.constexpr):
    """Scale and addend (zero point, bias or −min · super_min) of group g of row r, float32. PER groups share a super scale."""
    if UNITS > 0:
        line = r % 8 * 2 + r % 16 // 8
        at = ((r // 16) * G + g) * 16 + line
        up = ((r // 16) * (G // PER) + g // PER) * 16 + line
    else:
        at = r * G + g
        up = r * (G // PER) + g // PER
    s = scale_f32(tl.load(S + at, mask=mask, other=0), SCALE)
    a = tl.zeros(s.shape, tl.float32)
    if SCALE == SMALL:
        s = s * tl.load(SUPER + up, mask=mask, other=0).to(tl.float32)
    if (ADD == ZERO) or (ADD == BIAS):
        a = tl.load(A + at, mask=mask, other=0).to(tl.float32)
    if ADD == MIN:
        low = tl.load(A + at, mask=mask, other=0).to(tl.float32)
        a = -low * tl.load(SMIN + up, mask=mask, other=0).to(tl.float32)
    return s, a


@triton.jit
def finish(v, s, a, RAW: tl.constexpr, ADD: tl.constexpr):
    """One element to its value: float32, one rounding."""
    if RAW:
        v = v * 16384.0
    if ADD == ZERO:
        return (v - a) * s
    elif ADD == NONE:
        return v * s
    else:
        return tl.math.fma(v, s, a)


@triton.jit
def interleave8(v0, v1, v2, v3, v4, v5, v6, v7, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Eight [ROWS, WORDS] tensors to one [ROWS, 8 · WORDS], element j of word c at 8 c + j."""
    a = tl.join(tl.join(v0, v4), tl.join(v2, v6))  # last axes: (4s bit, 2s bit)
    b = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    # [ROWS, WORDS, 4s, 2s, 1s]: read row-major it is the element index.
    return tl.reshape(tl.join(a, b), (ROWS, 8 * WORDS))


@triton.jit
def globally(v, GLOBAL, divisor, GLOBAL_OP: tl.constexpr, DIVIDE: tl.constexpr, EXACT: tl.constexpr):
    """v times or over the weight's one factor (and over the format's divisor), rounded once to float32.

    EXACT says that v is unrounded (element · 8-bit scale: six bits), so float32 itself rounds once. Else float64 holds v ·
    global exactly, and keeps its quotient clear of every float32 midpoint (docs/design/cuda.md).
    """
    if GLOBAL_OP == 0:
        return v
    elif EXACT and not DIVIDE:
        if GLOBAL_OP == 1:
            return v * tl.load(GLOBAL)
        else:
            return tl.math.div_rn(v, tl.broadcast_to(tl.load(GLOBAL), v.shape))
    else:
        g = tl.load(GLOBAL).to(tl.float64)
        wide = v.to(tl.float64)
        wide = wide * g if GLOBAL_OP == 1 else wide / g
        if DIVIDE:
            wide = wide / divisor
        return wide.to(tl.float32)
