"""The matrix-vector product of weights in word order: one pass over the packed weight a token.
Weights in fragment order take `mma/kernel.py`.

    y[m, r] = Σ_g  scale[r, g] · Σ_{j in g} x[m, j] · element[r, j]  +  addend[r, g] · Σ_{j in g} x[m, j]

It serves 1 or 2 tokens; up to 8 with float32 activations, and up to 16 where float16 cannot hold a
weight.

Each program owns BN rows and walks the words of the row BC at a time; a thread holds the same words
of every row, so eight activations are loaded once for BN rows. A word costs one load, its share of
a scale, and for each element half a lop3, half a subtraction, a conversion and a fused
multiply-add. Sums are float32, in a fixed order: the same from run to run and for any m.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..lookups import hold_table
from .decode_tile import NONE, ZERO, apply_global_scale, elements, group_terms, load_planes


@triton.jit
def _dot8(X, base, c, mask, v, SUM: tl.constexpr):
    """Σ_j x[8 c + j] · v_j over a word, and Σ_j x[8 c + j] when SUM."""
    p = X + base + c * 8
    x = (tl.load(p, mask=mask, other=0).to(tl.float32),)
    for j in tl.static_range(1, 8):
        x = x + (tl.load(p + j, mask=mask, other=0).to(tl.float32),)  # type: ignore[assignment] # Triton unrolls the loop
    d = v[0] * x[0][None, :]
    for j in tl.static_range(1, 8):
        d = tl.math.fma(v[j], tl.broadcast_to(x[j][None, :], v[1].shape), d)
    xs = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])) if SUM else x[0]  # type: ignore[misc] # the loop has made it eight
    return d, xs


@triton.jit
def matvec_kernel(
    Y, X, BIAS, weight, n, ldx, G, divisor, format: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr
):
    """y (m, n) = x · wᵀ + bias for token program_id(1) and rows program_id(0) · BN on. X rows hold
    8 · words values, the tail zero.
    """
    F: tl.constexpr = format.constants()
    hold_table(weight.table, F.kind)
    r = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    token = tl.program_id(1).to(tl.int64)
    live = r < n
    acc = tl.zeros((BN, BC), tl.float32)
    for c0 in tl.static_range(0, F.words, BC):
        c = c0 + tl.arange(0, BC)
        inside = c < F.words
        mask = live[:, None] & inside[None, :]
        planes = load_planes(weight, r[:, None], c[None, :], mask, F)
        s, a = group_terms(weight, r[:, None], (c * 8 // F.group)[None, :], G, mask, F)
        v = elements(planes, weight.table, F)
        d, xs = _dot8(X, token * ldx, c, inside, v, F.addend != NONE)
        if F.power != 1.0:
            d = d * F.power
        if F.addend == NONE:
            acc = tl.math.fma(d, s, acc)
        elif F.addend == ZERO:
            acc = tl.math.fma(tl.math.fma(-a, tl.broadcast_to(xs[None, :], a.shape), d), s, acc)
        else:
            acc += tl.math.fma(d, s, a * xs[None, :])
    y = tl.sum(acc, 1)
    y = apply_global_scale(y, weight, divisor, False, F)
    if HAS_BIAS:
        y += tl.load(BIAS + r, mask=live, other=0).to(tl.float32)
    tl.store(Y + token * n + r, y.to(Y.dtype.element_ty), mask=live)
