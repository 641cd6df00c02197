"""A block of the weight as one dense tile in x's dtype, for the schedules that hand the matrix unit a decoded tile.

Fragment order is read as it lies, whole units of 512 bytes, and decoded word by word; rows and inputs are put in order by a
permutation of the tile, which costs a pass through shared memory that the tile takes anyway. Plane order goes word by word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode import E2M1, UINT, element, spread_e2m1_f32, u4_f32, u4b8_f32
from .decode_tile import elements, finish, group_terms, interleave8, load_planes

SPREAD = tl.constexpr(((9, 15), (6, 12), (3, 14), (0, 13)))  # order._E2M1_PLACES: lowest magnitude bit and sign bit of nibble i


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
def fragment_elements(w, TABLE, KIND: tl.constexpr, PACKED: tl.constexpr):
    """A word of fragment order -> eight float32 values by nibble; packed E2M1 still lacks 2^14."""
    if PACKED:
        if KIND == E2M1:
            return spread_e2m1_f32(w)
        elif KIND == UINT:
            return u4_f32(w)
        else:
            return u4b8_f32(w)
    else:
        return (
            nibble_f32(w, 0, TABLE, KIND), nibble_f32(w, 1, TABLE, KIND), nibble_f32(w, 2, TABLE, KIND),
            nibble_f32(w, 3, TABLE, KIND), nibble_f32(w, 4, TABLE, KIND), nibble_f32(w, 5, TABLE, KIND),
            nibble_f32(w, 6, TABLE, KIND), nibble_f32(w, 7, TABLE, KIND),
        )  # fmt: skip


@triton.jit
def fragment_block(
    P4, S, SUPER, A, SMIN, TABLE, tile, unit, tiles, G, D: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, ADD: tl.constexpr, PER: tl.constexpr, PACKED: tl.constexpr, UNITS: tl.constexpr, T: tl.constexpr,
    U: tl.constexpr,
):  # fmt: skip
    """Tiles tile … tile + T of 16 rows by units unit … unit + U of 64 inputs, dtype D: [16 T, 64 U]. Past the end: 0."""
    t = (tile + tl.arange(0, T)).to(tl.int64)[:, None, None]
    u = (unit + tl.arange(0, U))[None, :, None]
    lane = tl.arange(0, 128)[None, None, :]  # 4 (4 g + t) + 2 s + b
    inside = (t < tiles) & (u < UNITS)
    w = tl.load(P4 + (t * UNITS + u) * 128 + lane, mask=inside, other=0)
    v0, v1, v2, v3, v4, v5, v6, v7 = fragment_elements(w, TABLE, KIND, PACKED)
    RAW: tl.constexpr = PACKED and (KIND == E2M1)
    row = t * 16 + lane // 16
    if GROUP == 16:
        j = u * 64 + lane // 2 % 2 * 32 + lane % 2 * 16
    else:
        j = u * 64 + lane // 2 % 2 * 32
    live = inside & (j // GROUP < G)
    s0, a0 = group_terms(S, SUPER, A, SMIN, row, j // GROUP, G, live, SCALE, ADD, PER, UNITS)
    s1, a1 = group_terms(S, SUPER, A, SMIN, row + 8, j // GROUP, G, live, SCALE, ADD, PER, UNITS)
    # Nibble 4 p + 2 i + h: rows g + 8 h.
    p0 = tl.join(finish(v0, s0, a0, RAW, ADD).to(D), finish(v4, s0, a0, RAW, ADD).to(D))
    q0 = tl.join(finish(v2, s0, a0, RAW, ADD).to(D), finish(v6, s0, a0, RAW, ADD).to(D))
    p1 = tl.join(finish(v1, s1, a1, RAW, ADD).to(D), finish(v5, s1, a1, RAW, ADD).to(D))
    q1 = tl.join(finish(v3, s1, a1, RAW, ADD).to(D), finish(v7, s1, a1, RAW, ADD).to(D))
    both = tl.join(tl.join(p0, q0), tl.join(p1, q1))  # [T, U, 128, p, i, h]
    # [T, U, g, t, s, b, p, i, h] -> row (T, h, g), input (U, s, t, b, i, p), or (U, s, b, t, i, p) in groups of 16
    both = tl.reshape(both, (T, U, 8, 4, 2, 2, 2, 2, 2))
    if GROUP == 16:
        both = tl.permute(both, (0, 8, 2, 1, 4, 5, 3, 7, 6))
    else:
        both = tl.permute(both, (0, 8, 2, 1, 4, 3, 5, 7, 6))
    return tl.reshape(both, (16 * T, 64 * U))


@triton.jit
def weight_block(
    P8, P4, P2, P1, S, SUPER, A, SMIN, TABLE, row, word, n, G, D: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, PER: tl.constexpr, PACKED: tl.constexpr,
    UNITS: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Rows row … row + BN by words word … word + BW of eight inputs, finished and rounded once to D: [BN, 8 BW]."""
    if (UNITS > 0 and BITS == 4) and (BN % 16 == 0 and BW % 8 == 0):
        return fragment_block(
            P4, S, SUPER, A, SMIN, TABLE, row // 16, word // 8, (n + 15) // 16, G, D, GROUP, KIND, SCALE, ADD, PER, PACKED,
            UNITS, BN // 16, BW // 8,
        )  # fmt: skip
    else:
        r = row.to(tl.int64) + tl.arange(0, BN)
        c = word + tl.arange(0, BW)
        mask = (r < n)[:, None] & (c < WORDS)[None, :]
        lo, hi, p4, p2, p1 = load_planes(P8, P4, P2, P1, r[:, None], c[None, :], mask, WORDS, KIND, BITS, UNITS, GROUP)
        s, a = group_terms(S, SUPER, A, SMIN, r[:, None], (c * 8 // GROUP)[None, :], G, mask, SCALE, ADD, PER, UNITS)
        v0, v1, v2, v3, v4, v5, v6, v7 = elements(lo, hi, p4, p2, p1, TABLE, KIND, BITS, PACKED)
        RAW: tl.constexpr = PACKED and ((BITS == 4) and (KIND == E2M1))
        w = interleave8(
            finish(v0, s, a, RAW, ADD), finish(v1, s, a, RAW, ADD), finish(v2, s, a, RAW, ADD), finish(v3, s, a, RAW, ADD),
            finish(v4, s, a, RAW, ADD), finish(v5, s, a, RAW, ADD), finish(v6, s, a, RAW, ADD), finish(v7, s, a, RAW, ADD),
            BN, BW,
        )  # fmt: skip
        return w.to(D)  # last: Triton 3.6 finds no shared layout for a reshape that feeds the matrix unit
