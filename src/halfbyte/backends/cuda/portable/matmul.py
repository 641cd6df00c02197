"""m = 2 to 64 on the matrix unit: a tile of the weight is decoded in registers, rounded once to x's
dtype, and multiplied.

    y = Σ over tiles of BK inputs   x[BM, BK] · value(w)[BN, BK]ᵀ      (float32 accumulators)

With SPLIT > 1 the inputs are divided among SPLIT programs, each writes its float32 partial sums,
and the last to arrive adds them in order: the result does not depend on who was last.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..lookups import hold_table
from .decode_tile import apply_global_scale, elements, finish8, group_terms, interleave8, load_planes


class MatmulTile(NamedTuple):
    """A bias is added; programs that share the inputs; tokens and rows of a tile; words of eight
    inputs a step.
    """

    has_bias: bool
    split: int
    tokens: int
    rows: int
    words: int

    def constants(self) -> MatmulTile:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@triton.jit(do_not_specialize=["m"])  # one kernel for every m of a tile: nothing compiles again at m = 1, 16, 17
def matmul_kernel(Y, X, BIAS, weight, scratch, m, n, ldx, G, divisor, format: tl.constexpr, tile: tl.constexpr):
    """y (m, n). Grid (n / rows, m / tokens, split). X rows hold 8 · words values, the tail zero.
    `scratch`: float32 partial sums [split, m, n] and arrival counters.
    """
    F: tl.constexpr = format.constants()
    T: tl.constexpr = tile.constants()
    hold_table(weight.table, F.kind)
    r = tl.program_id(0).to(tl.int64) * T.rows + tl.arange(0, T.rows)
    t = tl.program_id(1).to(tl.int64) * T.tokens + tl.arange(0, T.tokens)
    part = tl.program_id(2)
    live = r < n
    STEPS: tl.constexpr = (F.words + T.words - 1) // T.words
    EACH: tl.constexpr = (STEPS + T.split - 1) // T.split
    acc = tl.zeros((T.tokens, T.rows), tl.float32)
    for i in range(EACH):
        step = part * EACH + i  # past the last step every load is masked
        c = step * T.words + tl.arange(0, T.words)
        j = step * T.words * 8 + tl.arange(0, T.words * 8)
        mask = live[:, None] & (c < F.words)[None, :]
        x = tl.load(X + t[:, None] * ldx + j[None, :], mask=(t < m)[:, None] & (j < F.words * 8)[None, :], other=0)
        planes = load_planes(weight, r[:, None], c[None, :], mask, F)
        s, a = group_terms(weight, r[:, None], (c * 8 // F.group)[None, :], G, mask, F)
        v = elements(planes, weight.table, F)
        w = interleave8(finish8(v, s, a, X.dtype.element_ty, F), T.rows, T.words)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    at = t[:, None] * n + r[None, :]
    keep = (t < m)[:, None] & live[None, :]
    last = True
    if T.split > 1:
        plane = m.to(tl.int64) * n
        tl.store(scratch[0] + part * plane + at, acc, mask=keep)
        tl.debug_barrier()
        index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(scratch[1] + index, 1, sem="acq_rel") == T.split - 1
        if last:
            acc = tl.zeros((T.tokens, T.rows), tl.float32)
            for p in range(T.split):
                acc += tl.load(scratch[0] + p * plane + at, mask=keep, other=0, cache_modifier=".cg")
            tl.store(scratch[1] + index, 0)
    if last:
        acc = apply_global_scale(acc, weight, divisor, False, F)
        if T.has_bias:
            acc += tl.load(BIAS + r, mask=live, other=0).to(tl.float32)[None, :]
        tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=keep)
