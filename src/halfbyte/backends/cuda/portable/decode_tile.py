"""Loading and decoding a tile of a packed weight: rows r by words c of eight elements, to finished
float32 values.

    value = (element − zero) · scale      or      element · scale + addend

with scale = group scale (· super scale) and addend = bias or −min · super_min. Each line below is
exact but for one rounding at the end (docs/design/layering.md, and formats/decode.py), so the
result is the exact value rounded once to float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..decode import E2M1, SMALL, code, element, scale_f32, word_f32
from ..lookups import SHARED, look_up

# What is added to or taken from element · scale.
NONE = tl.constexpr(0)
ZERO = tl.constexpr(1)  # integer zero points, int16
BIAS = tl.constexpr(2)  # float biases
MIN = tl.constexpr(3)  # small-integer minimum times a super minimum


class Weight(NamedTuple):
    """Pointers to a weight: planes of 8, 4, 2 and 1 bits, scales, and what a format may have beside
    them. What is absent points at the scales and is never read.
    """

    p8: Any
    p4: Any
    p2: Any
    p1: Any
    scales: Any
    super_scales: Any
    addends: Any
    super_minimums: Any
    global_scale: Any
    table: Any


class Planes(NamedTuple):
    """The words of eight codes: low and high four bytes of 8-bit codes; nibbles, pairs and bits of
    the others.
    """

    low: Any
    high: Any
    p4: Any
    p2: Any
    p1: Any


class Format(NamedTuple):
    """What a kernel is compiled for.

    words, group      words of eight inputs in a row; inputs that share a scale
    kind, bits, scale, addend    element, width of a code, kinds of scale and addend
    per_super         groups that share a super scale
    global_op, divide the tensor's factor: 0 none, 1 multiplies, 2 divides; whether the format's
    divisor applies
    units             0 in plane order; in fragment and lane order, units of 64 inputs in a row
    lanes             the planes lie in lane order
    decoder, fragment_decoder    assembly of a word of eight codes in either order (decoders.WORDS);
                      "" where codes are decoded one by one
    power             what the values of these two lack: a power of two
    """

    words: int
    group: int
    kind: int
    bits: int
    scale: int
    addend: int
    per_super: int
    global_op: int
    divide: bool
    units: int
    decoder: str = ""
    fragment_decoder: str = ""
    power: float = 1.0
    lanes: bool = False

    def constants(self) -> Format:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@triton.jit
def lane_plane(plane, first, c, h, mask, WIDTH: tl.constexpr):
    """The word of eight codes `c` of a plane in lane order, from two codes of each of four lanes;
    `first` counts lanes of all units before lane 4 g, rows g + 8 h.
    """
    out = tl.zeros(first.shape, tl.int32)
    for t in tl.static_range(4):
        if WIDTH == 4:
            v = tl.load(plane + (first + t) * 4 + 2 * h + c // 4, mask=mask, other=0) >> (4 * (c % 4))
        elif WIDTH == 2:
            v = tl.load(plane + (first + t) * 2 + h, mask=mask, other=0) >> (2 * c)
        else:
            v = tl.load(plane + first + t, mask=mask, other=0) >> (8 * h + c)
        v = (v & ((1 << WIDTH) - 1)) | (((v >> 16) & ((1 << WIDTH) - 1)) << WIDTH)
        out |= v << (2 * WIDTH * t)
    return out


@triton.jit
def lane_planes(weight, r, c, mask, F: tl.constexpr):
    """`load_planes` in lane order."""
    first = ((r // 16) * F.units + c // 8) * 32 + r % 8 * 4
    h = (r % 16 // 8).to(tl.int32)
    c = c % 8
    p4 = tl.zeros(first.shape, tl.int32)
    p2 = p4
    p1 = p4
    if F.bits >= 4:
        p4 = lane_plane(weight.p4.to(tl.pointer_type(tl.int32)), first, c, h, mask, 4)
    if ((F.bits == 7) or (F.bits == 6)) or ((F.bits == 3) or (F.bits == 2)):
        p2 = lane_plane(weight.p2.to(tl.pointer_type(tl.int32)), first, c, h, mask, 2)
    if ((F.bits == 7) or (F.bits == 5)) or ((F.bits == 3) or (F.bits == 1)):
        p1 = lane_plane(weight.p1.to(tl.pointer_type(tl.int32)), first, c, h, mask, 1)
    return Planes(p4, p4, p4, p2, p1)


@triton.jit
def load_planes(weight, r, c, mask, F: tl.constexpr):
    """The plane words of rows r by words c of eight codes."""
    if F.lanes:
        return lane_planes(weight, r, c, mask, F)
    else:
        return _load_planes(weight, r, c, mask, F)


@triton.jit
def _load_planes(weight, r, c, mask, F: tl.constexpr):
    """`load_planes` in plane and fragment order. In fragment order a word is put together from two
    words of four codes.
    """
    at = r * F.words + c
    zero = tl.zeros(at.shape, tl.int32)
    lo = zero
    hi = zero
    p4 = zero
    p2 = zero
    p1 = zero
    if (F.bits == 8) and (F.units > 0):  # half a unit: word 2 b + i, byte 2 h + p
        h = ((r % 16) // 8).to(tl.int32) * 16
        if F.group == 16:  # two lanes' words, t = 2 (c % 2) and the next
            line = (((r // 16) * F.units + c // 8) * 2 + c // 4 % 2) * 128 + (r % 8 * 4 + c % 2 * 2) * 4 + c % 4 // 2 * 2
            far = line + 4
        else:
            line = (((r // 16) * F.units + c // 8) * 2 + c // 4 % 2) * 128 + (r % 8 * 4 + c % 4) * 4
            far = line + 2
        lo = (tl.load(weight.p8 + line, mask=mask, other=0) >> h) & 0xFFFF
        lo |= ((tl.load(weight.p8 + line + 1, mask=mask, other=0) >> h) & 0xFFFF) << 16
        hi = (tl.load(weight.p8 + far, mask=mask, other=0) >> h) & 0xFFFF
        hi |= ((tl.load(weight.p8 + far + 1, mask=mask, other=0) >> h) & 0xFFFF) << 16
    elif F.bits == 8:
        lo = tl.load(weight.p8 + 2 * at, mask=mask, other=0)
        hi = tl.load(weight.p8 + 2 * at + 1, mask=mask, other=0)
    elif (F.bits == 4) and (F.units > 0):
        line = (((r // 16) * F.units + c // 8) * 32 + (r % 8) * 4) * 4 + 2 * ((c // 4) % 2)
        h = ((r % 16) // 8).to(tl.int32)
        for s in tl.static_range(2):
            if F.group == 16:
                word_at = line + (2 * (c % 2) + s) * 4 + (c % 4) // 2
            else:
                word_at = line + (c % 4) * 4 + s
            v = tl.load(weight.p4 + word_at, mask=mask, other=0)
            if F.kind == E2M1:  # order.spread_e2m1 undone for the two nibbles of this row
                low = ((v >> (9 - 3 * h)) & 0x00070007) | ((v >> (12 - 3 * h)) & 0x00080008)
                high = ((v >> (3 - 3 * h)) & 0x00070007) | ((v >> (11 - h)) & 0x00080008)
                v = low | (high << 8)
            else:
                v = (v >> (4 * h)) & 0x0F0F0F0F
            p4 |= ((v | (v >> 12)) & 0xFFFF) << (16 * s)
    elif (F.bits >= 4) and (F.bits < 8):
        p4 = tl.load(weight.p4 + at, mask=mask, other=0)
    if (F.bits == 2) and (F.units > 0):  # weight.p2 counts words of eight codes: [tile, unit, 16 rows, 8]
        line = ((r // 16) * F.units + c // 8) * 128 + r % 16 * 8 + c % 8
        p2 = tl.load(weight.p2 + line, mask=mask, other=0).to(tl.int32)
    elif ((F.bits == 7) or (F.bits == 6)) or ((F.bits == 3) or (F.bits == 2)):
        p2 = tl.load(weight.p2 + at, mask=mask, other=0).to(tl.int32)
    if ((F.bits == 7) or (F.bits == 5)) or ((F.bits == 3) or (F.bits == 1)):
        p1 = tl.load(weight.p1 + at, mask=mask, other=0).to(tl.int32)
    return Planes(lo, hi, p4, p2, p1)


@triton.jit
def elements(planes, table, F: tl.constexpr):
    """Eight float32 element values, less the factor F.power."""
    if F.kind >= SHARED:
        return look_up(planes.p4, table, F.kind)
    elif F.decoder != "":
        return word_f32(planes.p4, F.decoder)
    else:
        v = ()
        for j in tl.static_range(8):
            if F.bits == 8:
                word = planes.low if j < 4 else planes.high
                c = (word >> (8 * (j % 4))) & 255 if j % 4 else word & 255
            else:
                c = code(j, planes.low, planes.p4, planes.p2, planes.p1, F.bits)
            v = v + (element(c, table, F.kind, F.bits),)  # type: ignore[assignment] # Triton unrolls the loop
        return v


@triton.jit
def group_terms(weight, r, g, G, mask, F: tl.constexpr):
    """Scale and addend (zero point, bias or −min · super_min) of group g of row r, float32. G
    groups a row.
    """
    if F.units > 0:
        line = r % 8 * 2 + r % 16 // 8
        at = ((r // 16) * G + g) * 16 + line
        up = ((r // 16) * (G // F.per_super) + g // F.per_super) * 16 + line
    else:
        at = r * G + g
        up = r * (G // F.per_super) + g // F.per_super
    s = scale_f32(tl.load(weight.scales + at, mask=mask, other=0), F.scale)
    a = tl.zeros(s.shape, tl.float32)
    if F.scale == SMALL:
        s = s * tl.load(weight.super_scales + up, mask=mask, other=0).to(tl.float32)
    if (F.addend == ZERO) or (F.addend == BIAS):
        a = tl.load(weight.addends + at, mask=mask, other=0).to(tl.float32)
    if F.addend == MIN:
        low = tl.load(weight.addends + at, mask=mask, other=0).to(tl.float32)
        a = -low * tl.load(weight.super_minimums + up, mask=mask, other=0).to(tl.float32)
    return s, a


@triton.jit
def finish(v, s, a, POWER: tl.constexpr, ADD: tl.constexpr):
    """One element, which lacks the factor POWER, to its value: float32, one rounding."""
    if POWER != 1.0:
        v = v * POWER
    if ADD == ZERO:
        return (v - a) * s
    elif ADD == NONE:
        return v * s
    else:
        return tl.math.fma(v, s, a)


@triton.jit
def finish8(v, s, a, D: tl.constexpr, F: tl.constexpr):
    """Eight elements to their values, rounded to D."""
    out = ()
    for j in tl.static_range(8):
        out = out + (finish(v[j], s, a, F.power, F.addend).to(D),)  # type: ignore[assignment] # Triton unrolls the loop
    return out


@triton.jit
def interleave8(v, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Eight [ROWS, WORDS] tensors to one [ROWS, 8 · WORDS], element j of word c at 8 c + j."""
    a = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))  # last axes: (4s bit, 2s bit)
    b = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    # [ROWS, WORDS, 4s, 2s, 1s]: read row-major it is the element index.
    return tl.reshape(tl.join(a, b), (ROWS, 8 * WORDS))


@triton.jit
def apply_global_scale(v, weight, divisor, EXACT: tl.constexpr, F: tl.constexpr):
    """v times or over the weight's one factor (and over the format's divisor), rounded once to
    float32.

    EXACT says that v is unrounded (element · 8-bit scale: six bits), so float32 itself rounds once.
    Else float64 holds v · global exactly, and keeps its quotient clear of every float32 midpoint
    (docs/design/cuda.md).
    """
    if F.global_op == 0:
        return v
    elif EXACT and not F.divide:
        if F.global_op == 1:
            return v * tl.load(weight.global_scale)
        else:
            return tl.math.div_rn(v, tl.broadcast_to(tl.load(weight.global_scale), v.shape))
    else:
        g = tl.load(weight.global_scale).to(tl.float64)
        d = v.to(tl.float64)
        d = d * g if F.global_op == 1 else d / g
        if F.divide:
            d = d / divisor
        return d.to(tl.float32)
