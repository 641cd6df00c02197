"""A block of the weight as one dense tile in x's dtype, for the schedules whose operand is a
decoded tile.

Fragment order is read in units of 512 bytes and decoded word by word; a permutation of the tile, on
its way through shared memory, puts rows and inputs in order. Plane order is decoded word by word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode import E2M1, element, word_f32
from .decode_tile import elements, finish, finish8, group_terms, interleave8, load_planes

SPREAD = tl.constexpr(((9, 15), (6, 12), (3, 14), (0, 13)))  # order.E2M1_BITS: lowest magnitude bit and sign bit of nibble i


@triton.jit
def nibble_f32(w, NIBBLE: tl.constexpr, TABLE, KIND: tl.constexpr):
    """One nibble of a word of fragment order -> float32, without inline assembly."""
    if KIND == E2M1:
        half = w >> (NIBBLE // 4 * 16)
        c = ((half >> SPREAD[NIBBLE % 4][0]) & 7) | (((half >> SPREAD[NIBBLE % 4][1]) & 1) << 3)
    else:
        c = (w >> (4 * NIBBLE)) & 15
    return element(c, TABLE, KIND, 4)


@triton.jit
def fragment_elements(w, TABLE, F: tl.constexpr):
    """A word of fragment order -> eight float32 values by nibble, less the factor F.power."""
    if F.fragment_decoder != "":
        return word_f32(w, F.fragment_decoder)
    else:
        return (
            nibble_f32(w, 0, TABLE, F.kind), nibble_f32(w, 1, TABLE, F.kind), nibble_f32(w, 2, TABLE, F.kind),
            nibble_f32(w, 3, TABLE, F.kind), nibble_f32(w, 4, TABLE, F.kind), nibble_f32(w, 5, TABLE, F.kind),
            nibble_f32(w, 6, TABLE, F.kind), nibble_f32(w, 7, TABLE, F.kind),
        )  # fmt: skip


@triton.jit
def fragment_block(weight, tile, unit, tiles, G, D: tl.constexpr, F: tl.constexpr, T: tl.constexpr, U: tl.constexpr):
    """Tiles tile … tile + T of 16 rows by units unit … unit + U of 64 inputs, dtype D: [16 T, 64
    U]. Past the end: 0.
    """
    t = (tile + tl.arange(0, T)).to(tl.int64)[:, None, None]
    u = (unit + tl.arange(0, U))[None, :, None]
    lane = tl.arange(0, 128)[None, None, :]  # 4 (4 g + t) + 2 s + b
    inside = (t < tiles) & (u < F.units)
    w = tl.load(weight.p4 + (t * F.units + u) * 128 + lane, mask=inside, other=0)
    v = fragment_elements(w, weight.table, F)
    row = t * 16 + lane // 16
    if F.group == 16:
        j = u * 64 + lane // 2 % 2 * 32 + lane % 2 * 16
    else:
        j = u * 64 + lane // 2 % 2 * 32
    live = inside & (j // F.group < G)
    s0, a0 = group_terms(weight, row, j // F.group, G, live, F)
    s1, a1 = group_terms(weight, row + 8, j // F.group, G, live, F)
    # Nibble 4 p + 2 i + h: rows g + 8 h.
    p0 = tl.join(finish(v[0], s0, a0, F.power, F.addend).to(D), finish(v[4], s0, a0, F.power, F.addend).to(D))
    q0 = tl.join(finish(v[2], s0, a0, F.power, F.addend).to(D), finish(v[6], s0, a0, F.power, F.addend).to(D))
    p1 = tl.join(finish(v[1], s1, a1, F.power, F.addend).to(D), finish(v[5], s1, a1, F.power, F.addend).to(D))
    q1 = tl.join(finish(v[3], s1, a1, F.power, F.addend).to(D), finish(v[7], s1, a1, F.power, F.addend).to(D))
    both = tl.join(tl.join(p0, q0), tl.join(p1, q1))  # [T, U, 128, p, i, h]
    # [T, U, g, t, s, b, p, i, h] -> row (T, h, g), input (U, s, t, b, i, p), or (U, s, b, t, i, p)
    # in groups of 16
    both = tl.reshape(both, (T, U, 8, 4, 2, 2, 2, 2, 2))
    if F.group == 16:
        both = tl.permute(both, (0, 8, 2, 1, 4, 5, 3, 7, 6))
    else:
        both = tl.permute(both, (0, 8, 2, 1, 4, 3, 5, 7, 6))
    return tl.reshape(both, (16 * T, 64 * U))


@triton.jit
def weight_block(weight, row, word, n, G, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Rows row … row + ROWS by words word … word + WORDS of eight inputs, finished and rounded once
    to D: [ROWS, 8 WORDS].
    """
    if (F.units > 0 and F.bits == 4 and not F.lanes) and (ROWS % 16 == 0 and WORDS % 8 == 0):
        return fragment_block(weight, row // 16, word // 8, (n + 15) // 16, G, D, F, ROWS // 16, WORDS // 8)
    else:
        r = row.to(tl.int64) + tl.arange(0, ROWS)
        c = word + tl.arange(0, WORDS)
        mask = (r < n)[:, None] & (c < F.words)[None, :]
        planes = load_planes(weight, r[:, None], c[None, :], mask, F)
        s, a = group_terms(weight, r[:, None], (c * 8 // F.group)[None, :], G, mask, F)
        v = elements(planes, weight.table, F)
        w = interleave8(finish8(v, s, a, tl.float32, F), ROWS, WORDS)
        return w.to(D)  # last: Triton 3.6 finds no shared layout for a reshape that feeds the matrix unit
