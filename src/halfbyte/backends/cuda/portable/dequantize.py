"""Packed weight to dense, and rows of it by index: one program a tile of rows by words."""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode import E2M1, E4M3S, UE4M3
from ..lookups import hold_table
from .decode_tile import elements, finish, globally, group_terms, interleave8, load_planes


@triton.jit(do_not_specialize=["n"])
def dequantize_kernel(
    OUT, IDS, P8, P4, P2, P1, S, SUPER, A, SMIN, GLOBAL, TABLE_PTR,
    n, k, G, divisor,
    WORDS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    PER: tl.constexpr, GLOBAL_OP: tl.constexpr, DIVIDE: tl.constexpr, GATHER: tl.constexpr, PACKED: tl.constexpr,
    UNITS: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """OUT[i, :] = w[row i, :] (or w[IDS[i], :]). WORDS is ceil(k / 8); GROUP elements share a scale. n, the rows written."""
    hold_table(TABLE_PTR, KIND)
    i = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BW + tl.arange(0, BW)
    r = i
    if GATHER:
        r = tl.load(IDS + i, mask=i < n, other=0)
    mask = (i[:, None] < n) & (c[None, :] < WORDS)
    lo, hi, p4, p2, p1 = load_planes(P8, P4, P2, P1, r[:, None], c[None, :], mask, WORDS, KIND, BITS, UNITS, GROUP)
    v0, v1, v2, v3, v4, v5, v6, v7 = elements(lo, hi, p4, p2, p1, TABLE_PTR, KIND, BITS, PACKED)
    s, a = group_terms(S, SUPER, A, SMIN, r[:, None], (c * 8 // GROUP)[None, :], G, mask, SCALE, ADD, PER, UNITS)
    RAW: tl.constexpr = PACKED and ((BITS == 4) and (KIND == E2M1))
    v0 = finish(v0, s, a, RAW, ADD)
    v1 = finish(v1, s, a, RAW, ADD)
    v2 = finish(v2, s, a, RAW, ADD)
    v3 = finish(v3, s, a, RAW, ADD)
    v4 = finish(v4, s, a, RAW, ADD)
    v5 = finish(v5, s, a, RAW, ADD)
    v6 = finish(v6, s, a, RAW, ADD)
    v7 = finish(v7, s, a, RAW, ADD)
    out = interleave8(v0, v1, v2, v3, v4, v5, v6, v7, BN, BW)
    out = globally(out, GLOBAL, divisor, GLOBAL_OP, DIVIDE, (KIND == E2M1) and ((SCALE == E4M3S) or (SCALE == UE4M3)))
    j = tl.program_id(1) * BW * 8 + tl.arange(0, BW * 8)
    at = i[:, None] * k + j[None, :]
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=(i[:, None] < n) & (j[None, :] < k))
