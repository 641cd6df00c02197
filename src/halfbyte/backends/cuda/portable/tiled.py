"""Packed products for any m, a decoded tile of the weight at a time: three schedules, to be
compared.

    single-stage     load, decode, multiply, one step after the other: the baseline
    double-buffered  the loads of the next steps are in flight while a tile is decoded and
                     multiplied
    striped          the same, and the steps of all tiles, k included, are dealt out evenly to as
                     many programs as the machine holds; pieces of one tile are added in the order
                     of their programs, whoever comes last

    y = Σ over steps of BK inputs   x[BM, BK] · value(w)[BN, BK]ᵀ      (float32 accumulators)

Every weight is rounded once to x's dtype. The decoded tile reaches the matrix unit through shared
memory (tl.dot).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..lookups import hold_table
from .decode_tile import apply_global_scale
from .tile_loads import weight_block


class TiledTile(NamedTuple):
    """A bias is added; tokens and rows of a tile; words of eight inputs a step; steps in flight."""

    has_bias: bool
    tokens: int
    rows: int
    words: int
    stages: int

    def constants(self) -> TiledTile:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@triton.jit
def _steps(X, weight, t, row, low, high, m, n, ldx, G, F: tl.constexpr, T: tl.constexpr):
    """Steps low … high of the tile at tokens t and rows from `row` on, float32 [tokens, rows]."""
    acc = tl.zeros((T.tokens, T.rows), tl.float32)
    for step in tl.range(low, high, num_stages=T.stages):
        j = step * T.words * 8 + tl.arange(0, T.words * 8)
        x = tl.load(X + t[:, None] * ldx + j[None, :], mask=(t < m)[:, None] & (j < F.words * 8)[None, :], other=0)
        w = weight_block(weight, row, step * T.words, n, G, X.dtype.element_ty, F, T.rows, T.words)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _write(Y, BIAS, weight, acc, t, r, m, n, divisor, F: tl.constexpr, T: tl.constexpr):
    """Finished sums to y."""
    acc = apply_global_scale(acc, weight, divisor, False, F)
    if T.has_bias:
        acc += tl.load(BIAS + r, mask=r < n, other=0).to(tl.float32)[None, :]
    tl.store(Y + t[:, None] * n + r[None, :], acc.to(Y.dtype.element_ty), mask=(t < m)[:, None] & (r < n)[None, :])


@triton.jit(do_not_specialize=["m"])
def tile_kernel(Y, X, BIAS, weight, m, n, ldx, G, divisor, format: tl.constexpr, tile: tl.constexpr):
    """y (m, n), one program a tile, tokens fastest: programs that run together share rows of the
    weight. Single-stage with one stage, double-buffered with more.
    """
    F: tl.constexpr = format.constants()
    T: tl.constexpr = tile.constants()
    hold_table(weight.table, F.kind)
    tokens = (m + T.tokens - 1) // T.tokens
    row = tl.program_id(0) // tokens * T.rows
    t = tl.program_id(0) % tokens * T.tokens + tl.arange(0, T.tokens).to(tl.int64)
    acc = _steps(X, weight, t, row, 0, (F.words + T.words - 1) // T.words, m, n, ldx, G, F, T)
    _write(Y, BIAS, weight, acc, t, row + tl.arange(0, T.rows), m, n, divisor, F, T)


@triton.jit(do_not_specialize=["m"])
def striped_kernel(Y, X, BIAS, weight, scratch, m, n, ldx, G, divisor, format: tl.constexpr, tile: tl.constexpr):
    """y (m, n). Program p of P takes steps p · total / P to (p + 1) · total / P of total = tiles ·
    STEPS, tile by tile.

    scratch  [P, 2, tokens, rows] float32: what a program has of its first tile, when it did not
             begin it, and of its last, when it did not end it; and [tiles] counters, zero between
             launches: the program that completes a tile adds the pieces and resets its counter.
    """
    F: tl.constexpr = format.constants()
    T: tl.constexpr = tile.constants()
    hold_table(weight.table, F.kind)
    STEPS: tl.constexpr = (F.words + T.words - 1) // T.words
    tokens = (m + T.tokens - 1) // T.tokens
    programs = tl.num_programs(0)
    p = tl.program_id(0)
    total = ((n + T.rows - 1) // T.rows * tokens).to(tl.int64) * STEPS
    low, high = (total * p // programs).to(tl.int32), (total * (p + 1) // programs).to(tl.int32)
    at = tl.arange(0, T.tokens)[:, None] * T.rows + tl.arange(0, T.rows)[None, :]
    for index in tl.range(low // STEPS, (high + STEPS - 1) // STEPS):
        begin, end = tl.maximum(low - index * STEPS, 0), tl.minimum(high - index * STEPS, STEPS)
        row = index // tokens * T.rows
        r = row + tl.arange(0, T.rows)
        t = index % tokens * T.tokens + tl.arange(0, T.tokens).to(tl.int64)
        acc = _steps(X, weight, t, row, begin, end, m, n, ldx, G, F, T)
        if (begin == 0) & (end == STEPS):
            _write(Y, BIAS, weight, acc, t, r, m, n, divisor, F, T)
        elif end > begin:
            tl.store(scratch[0] + (p.to(tl.int64) * 2 + (begin == 0).to(tl.int64)) * (T.tokens * T.rows) + at, acc)
            tl.debug_barrier()
            item = total * 0 + index * STEPS
            first = ((item + 1) * programs - 1) // total  # the program that has the index's first step
            last = ((item + STEPS) * programs - 1) // total
            if tl.atomic_add(scratch[1] + index, 1, sem="acq_rel") == last - first:
                acc = tl.load(scratch[0] + (first * 2 + 1) * (T.tokens * T.rows) + at, cache_modifier=".cg")
                for q in tl.range(first + 1, last + 1):
                    acc += tl.load(scratch[0] + q * 2 * (T.tokens * T.rows) + at, cache_modifier=".cg")
                tl.store(scratch[1] + index, 0)
                _write(Y, BIAS, weight, acc, t, r, m, n, divisor, F, T)
