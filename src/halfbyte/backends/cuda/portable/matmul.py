"""m = 2 to 64 on the matrix unit: a tile of the weight is decoded in registers, rounded once to x's dtype, and multiplied.

    y = Σ over tiles of BK inputs   x[BM, BK] · value(w)[BN, BK]ᵀ      (float32 accumulators)

With SPLIT > 1 the inputs are divided among SPLIT programs, each writes its float32 partial sums, and the last to arrive adds
them in order: the result does not depend on who was last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode import E2M1
from ..lookups import hold_table
from .decode_tile import elements, finish, globally, group_terms, interleave8, load_planes


@triton.jit(do_not_specialize=["m"])  # one kernel for every m of a tile: nothing compiles again at m = 1, 16, 17
def matmul_kernel(
    Y, X, BIAS, P8, P4, P2, P1, S, SUPER, A, SMIN, GLOBAL, TABLE_PTR, PARTIAL, COUNT,
    m, n, ldx, G, divisor,
    WORDS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    PER: tl.constexpr, GLOBAL_OP: tl.constexpr, DIVIDE: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    UNITS: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """y (m, n). Grid (n / BN, m / BM, SPLIT). X rows hold 8 · WORDS values, the tail zero."""
    hold_table(TABLE_PTR, KIND)
    r = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    t = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    live = r < n
    RAW: tl.constexpr = PACKED and ((BITS == 4) and (KIND == E2M1))
    STEPS: tl.constexpr = (WORDS + BW - 1) // BW
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(EACH):
        step = part * EACH + i  # past the last step every load is masked
        c = step * BW + tl.arange(0, BW)
        j = step * BW * 8 + tl.arange(0, BW * 8)
        mask = live[:, None] & (c < WORDS)[None, :]
        x = tl.load(X + t[:, None] * ldx + j[None, :], mask=(t < m)[:, None] & (j < WORDS * 8)[None, :], other=0)
        lo, hi, p4, p2, p1 = load_planes(P8, P4, P2, P1, r[:, None], c[None, :], mask, WORDS, KIND, BITS, UNITS, GROUP)
        s, a = group_terms(S, SUPER, A, SMIN, r[:, None], (c * 8 // GROUP)[None, :], G, mask, SCALE, ADD, PER, UNITS)
        v0, v1, v2, v3, v4, v5, v6, v7 = elements(lo, hi, p4, p2, p1, TABLE_PTR, KIND, BITS, PACKED)
        d: tl.constexpr = X.dtype.element_ty
        w = interleave8(
            finish(v0, s, a, RAW, ADD).to(d), finish(v1, s, a, RAW, ADD).to(d), finish(v2, s, a, RAW, ADD).to(d),
            finish(v3, s, a, RAW, ADD).to(d), finish(v4, s, a, RAW, ADD).to(d), finish(v5, s, a, RAW, ADD).to(d),
            finish(v6, s, a, RAW, ADD).to(d), finish(v7, s, a, RAW, ADD).to(d), BN, BW,
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    at = t[:, None] * n + r[None, :]
    keep = (t < m)[:, None] & live[None, :]
    last = True
    if SPLIT > 1:
        plane = m.to(tl.int64) * n
        tl.store(PARTIAL + part * plane + at, acc, mask=keep)
        tl.debug_barrier()
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(COUNT + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.zeros((BM, BN), tl.float32)
            for p in range(SPLIT):
                acc += tl.load(PARTIAL + p * plane + at, mask=keep, other=0, cache_modifier=".cg")
            tl.store(COUNT + tile, 0)
    if last:
        acc = globally(acc, GLOBAL, divisor, GLOBAL_OP, DIVIDE, False)
        if HAS_BIAS:
            acc += tl.load(BIAS + r, mask=live, other=0).to(tl.float32)[None, :]
        tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=keep)
