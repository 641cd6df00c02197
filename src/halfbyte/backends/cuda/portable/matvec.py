"""m = 1 to 8: one pass over the packed weight at memory speed.

    y[m, r] = Σ_g scale[r, g] · (Σ_{j in g} x[m, j] · element[r, j]) + addend[r, g] · Σ_{j in g} x[m, j]

Each program owns BN rows and walks the words of the row BC at a time; a thread holds the same words of every row, so eight
activations are loaded once for BN rows. A word costs one load, its share of a scale, and for each element half a lop3, half a
subtraction, a conversion and a fused multiply-add. Sums are float32, in a fixed order: the same from run to run and for any m.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode import E2M1
from ..lookups import hold_table
from .decode_tile import NONE, ZERO, elements, globally, group_terms, load_planes


@triton.jit
def _dot8(X, base, c, mask, v0, v1, v2, v3, v4, v5, v6, v7, SUM: tl.constexpr):
    """Σ_j x[8 c + j] · v_j over a word, and Σ_j x[8 c + j] when SUM."""
    p = X + base + c * 8
    x0 = tl.load(p, mask=mask, other=0).to(tl.float32)
    x1 = tl.load(p + 1, mask=mask, other=0).to(tl.float32)
    x2 = tl.load(p + 2, mask=mask, other=0).to(tl.float32)
    x3 = tl.load(p + 3, mask=mask, other=0).to(tl.float32)
    x4 = tl.load(p + 4, mask=mask, other=0).to(tl.float32)
    x5 = tl.load(p + 5, mask=mask, other=0).to(tl.float32)
    x6 = tl.load(p + 6, mask=mask, other=0).to(tl.float32)
    x7 = tl.load(p + 7, mask=mask, other=0).to(tl.float32)
    d = v0 * x0[None, :]
    d = tl.math.fma(v1, tl.broadcast_to(x1[None, :], v1.shape), d)
    d = tl.math.fma(v2, tl.broadcast_to(x2[None, :], v1.shape), d)
    d = tl.math.fma(v3, tl.broadcast_to(x3[None, :], v1.shape), d)
    d = tl.math.fma(v4, tl.broadcast_to(x4[None, :], v1.shape), d)
    d = tl.math.fma(v5, tl.broadcast_to(x5[None, :], v1.shape), d)
    d = tl.math.fma(v6, tl.broadcast_to(x6[None, :], v1.shape), d)
    d = tl.math.fma(v7, tl.broadcast_to(x7[None, :], v1.shape), d)
    xs = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)) if SUM else x0
    return d, xs


@triton.jit
def matvec_kernel(
    Y, X, BIAS, P8, P4, P2, P1, S, SUPER, A, SMIN, GLOBAL, TABLE_PTR,
    n, ldx, G, divisor,
    WORDS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    PER: tl.constexpr, GLOBAL_OP: tl.constexpr, DIVIDE: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    UNITS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y (m, n) = x · wᵀ + bias for token program_id(1) and rows program_id(0) · BN on. X rows hold 8 · WORDS values, the tail
    zero."""
    hold_table(TABLE_PTR, KIND)
    r = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    token = tl.program_id(1).to(tl.int64)
    live = r < n
    RAW: tl.constexpr = PACKED and ((BITS == 4) and (KIND == E2M1))
    acc = tl.zeros((BN, BC), tl.float32)
    for c0 in tl.static_range(0, WORDS, BC):
        c = c0 + tl.arange(0, BC)
        inside = c < WORDS
        mask = live[:, None] & inside[None, :]
        lo, hi, p4, p2, p1 = load_planes(P8, P4, P2, P1, r[:, None], c[None, :], mask, WORDS, KIND, BITS, UNITS, GROUP)
        s, a = group_terms(S, SUPER, A, SMIN, r[:, None], (c * 8 // GROUP)[None, :], G, mask, SCALE, ADD, PER, UNITS)
        v0, v1, v2, v3, v4, v5, v6, v7 = elements(lo, hi, p4, p2, p1, TABLE_PTR, KIND, BITS, PACKED)
        d, xs = _dot8(X, token * ldx, c, inside, v0, v1, v2, v3, v4, v5, v6, v7, ADD != NONE)
        if RAW:
            d = d * 16384.0
        if ADD == NONE:
            acc = tl.math.fma(d, s, acc)
        elif ADD == ZERO:
            acc = tl.math.fma(tl.math.fma(-a, tl.broadcast_to(xs[None, :], a.shape), d), s, acc)
        else:
            acc += tl.math.fma(d, s, a * xs[None, :])
    y = tl.sum(acc, 1)
    y = globally(y, GLOBAL, divisor, GLOBAL_OP, DIVIDE, False)
    if HAS_BIAS:
        y += tl.load(BIAS + r, mask=live, other=0).to(tl.float32)
    tl.store(Y + token * n + r, y.to(Y.dtype.element_ty), mask=live)
