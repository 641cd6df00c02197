"""Packed products for any m, a decoded tile of the weight at a time: the schedules that people compare.

    single-stage     load, decode, multiply, one step after the other: the baseline
    double-buffered  the loads of the next steps are in flight while a tile is decoded and multiplied
    striped          the same, and the steps of all tiles, k included, are dealt out evenly to as many programs as the machine
                     holds; pieces of one tile are added in the order of their programs, whoever comes last

    y = Σ over steps of BK inputs   x[BM, BK] · value(w)[BN, BK]ᵀ      (float32 accumulators)

Every weight is rounded once to x's dtype. The decoded tile reaches the matrix unit through shared memory (tl.dot).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..lookups import hold_table
from .decode_tile import globally
from .tile_loads import weight_block


@triton.jit
def _steps(
    X, P8, P4, P2, P1, S, SUPER, A, SMIN, TABLE, t, row, low, high, m, n, ldx, G,
    WORDS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    PER: tl.constexpr, PACKED: tl.constexpr, UNITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Steps low … high of the tile at tokens t and rows from `row` on, float32 [BM, BN]."""
    acc = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(low, high, num_stages=STAGES):
        j = step * BW * 8 + tl.arange(0, BW * 8)
        x = tl.load(X + t[:, None] * ldx + j[None, :], mask=(t < m)[:, None] & (j < WORDS * 8)[None, :], other=0)
        w = weight_block(
            P8, P4, P2, P1, S, SUPER, A, SMIN, TABLE, row, step * BW, n, G, X.dtype.element_ty, WORDS, GROUP, KIND, BITS, SCALE,
            ADD, PER, PACKED, UNITS, BN, BW,
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _write(
    Y, BIAS, GLOBAL, acc, t, r, m, n, divisor, GLOBAL_OP: tl.constexpr, DIVIDE: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Finished sums to y."""
    acc = globally(acc, GLOBAL, divisor, GLOBAL_OP, DIVIDE, False)
    if HAS_BIAS:
        acc += tl.load(BIAS + r, mask=r < n, other=0).to(tl.float32)[None, :]
    tl.store(Y + t[:, None] * n + r[None, :], acc.to(Y.dtype.element_ty), mask=(t < m)[:, None] & (r < n)[None, :])


@triton.jit(do_not_specialize=["m"])
def tile_kernel(
    Y, X, BIAS, P8, P4, P2, P1, S, SUPER, A, SMIN, GLOBAL, TABLE_PTR,
    m, n, ldx, G, divisor,
    WORDS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    PER: tl.constexpr, GLOBAL_OP: tl.constexpr, DIVIDE: tl.constexpr, PACKED: tl.constexpr, UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y (m, n), one program a tile, tokens fastest: programs that run together share rows of the weight. Single-stage with
    STAGES 1, double-buffered with more."""
    hold_table(TABLE_PTR, KIND)
    tokens = (m + BM - 1) // BM
    row = tl.program_id(0) // tokens * BN
    t = tl.program_id(0) % tokens * BM + tl.arange(0, BM).to(tl.int64)
    acc = _steps(
        X, P8, P4, P2, P1, S, SUPER, A, SMIN, TABLE_PTR, t, row, 0, (WORDS + BW - 1) // BW, m, n, ldx, G, WORDS, GROUP, KIND,
        BITS, SCALE, ADD, PER, PACKED, UNITS, BM, BN, BW, STAGES,
    )  # fmt: skip
    _write(Y, BIAS, GLOBAL, acc, t, row + tl.arange(0, BN), m, n, divisor, GLOBAL_OP, DIVIDE, HAS_BIAS)


@triton.jit(do_not_specialize=["m"])
def striped_kernel(
    Y, X, BIAS, P8, P4, P2, P1, S, SUPER, A, SMIN, GLOBAL, TABLE_PTR, PARTIAL, COUNT,
    m, n, ldx, G, divisor,
    WORDS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    PER: tl.constexpr, GLOBAL_OP: tl.constexpr, DIVIDE: tl.constexpr, PACKED: tl.constexpr, UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y (m, n). Program p of P takes steps p · total / P to (p + 1) · total / P of total = tiles · STEPS, tile by tile.

    PARTIAL  [P, 2, BM, BN] float32: what a program has of its first tile, when it did not begin it, and of its last, when it did
             not end it. COUNT [tiles] is zero between launches: the program that completes a tile adds the pieces and resets it.
    """
    hold_table(TABLE_PTR, KIND)
    STEPS: tl.constexpr = (WORDS + BW - 1) // BW
    tokens = (m + BM - 1) // BM
    programs = tl.num_programs(0)
    p = tl.program_id(0)
    total = ((n + BN - 1) // BN * tokens).to(tl.int64) * STEPS
    low, high = (total * p // programs).to(tl.int32), (total * (p + 1) // programs).to(tl.int32)
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    for tile in tl.range(low // STEPS, (high + STEPS - 1) // STEPS):
        begin, end = tl.maximum(low - tile * STEPS, 0), tl.minimum(high - tile * STEPS, STEPS)
        row = tile // tokens * BN
        r = row + tl.arange(0, BN)
        t = tile % tokens * BM + tl.arange(0, BM).to(tl.int64)
        acc = _steps(
            X, P8, P4, P2, P1, S, SUPER, A, SMIN, TABLE_PTR, t, row, begin, end, m, n, ldx, G, WORDS, GROUP, KIND, BITS, SCALE,
            ADD, PER, PACKED, UNITS, BM, BN, BW, STAGES,
        )  # fmt: skip
        if (begin == 0) & (end == STEPS):
            _write(Y, BIAS, GLOBAL, acc, t, r, m, n, divisor, GLOBAL_OP, DIVIDE, HAS_BIAS)
        elif end > begin:
            tl.store(PARTIAL + (p.to(tl.int64) * 2 + (begin == 0).to(tl.int64)) * (BM * BN) + at, acc)
            tl.debug_barrier()
            item = total * 0 + tile * STEPS
            first = ((item + 1) * programs - 1) // total  # the program that has the tile's first step
            last = ((item + STEPS) * programs - 1) // total
            if tl.atomic_add(COUNT + tile, 1, sem="acq_rel") == last - first:
                acc = tl.load(PARTIAL + (first * 2 + 1) * (BM * BN) + at, cache_modifier=".cg")
                for q in tl.range(first + 1, last + 1):
                    acc += tl.load(PARTIAL + q * 2 * (BM * BN) + at, cache_modifier=".cg")
                tl.store(COUNT + tile, 0)
                _write(Y, BIAS, GLOBAL, acc, t, r, m, n, divisor, GLOBAL_OP, DIVIDE, HAS_BIAS)
