"""Packed weight to dense, and rows of it by index: one program a tile of rows by words."""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode import E2M1, E4M3S, UE4M3
from ..lookups import hold_table
from .decode_tile import apply_global_scale, elements, finish8, group_terms, interleave8, load_planes


@triton.jit(do_not_specialize=["n"])
def dequantize_kernel(
    OUT, IDS, weight, n, k, G, divisor, format: tl.constexpr, GATHER: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr
):
    """OUT[i, :] = w[row i, :] (or w[IDS[i], :]) for the n rows written; G scale groups a row."""
    F: tl.constexpr = format.constants()
    hold_table(weight.table, F.kind)
    i = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BW + tl.arange(0, BW)
    r = i
    if GATHER:
        r = tl.load(IDS + i, mask=i < n, other=0)
    mask = (i[:, None] < n) & (c[None, :] < F.words)
    v = elements(load_planes(weight, r[:, None], c[None, :], mask, F), weight.table, F)
    s, a = group_terms(weight, r[:, None], (c * 8 // F.group)[None, :], G, mask, F)
    out = interleave8(finish8(v, s, a, tl.float32, F), BN, BW)
    out = apply_global_scale(out, weight, divisor, (F.kind == E2M1) and ((F.scale == E4M3S) or (F.scale == UE4M3)), F)
    j = tl.program_id(1) * BW * 8 + tl.arange(0, BW * 8)
    at = i[:, None] * k + j[None, :]
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=(i[:, None] < n) & (j[None, :] < k))
