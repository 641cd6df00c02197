"""x · wᵀ for decoded rows of a weight, the same bits for a token whatever the others: what the
batch-invariant mode multiplies with, since cuBLAS chooses another kernel for another m.

    y[token, row] = Σ over steps of STEP inputs   x · wᵀ      (float32, steps in order)

The tile has one size for all m, and a token's sums depend on no other token of its tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

import torch

from .. import device as gpu


class DenseTile(NamedTuple):
    """A bias is added; tokens and rows of a tile; inputs a step."""

    has_bias: bool
    tokens: int
    rows: int
    step: int

    def constants(self) -> DenseTile:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@triton.jit(do_not_specialize=["m", "n"])
def dense_kernel(Y, X, W, BIAS, m, n, k, ldx, ldy, tile: tl.constexpr):
    """Y[token, row] of a tile. W (n, k) is contiguous, X has rows of ldx values, Y rows of ldy.
    Grid (n / rows, m / tokens).
    """
    T: tl.constexpr = tile.constants()
    r = tl.program_id(0).to(tl.int64) * T.rows + tl.arange(0, T.rows)
    t = tl.program_id(1).to(tl.int64) * T.tokens + tl.arange(0, T.tokens)
    acc = tl.zeros((T.tokens, T.rows), tl.float32)
    for start in range(0, k, T.step):
        j = start + tl.arange(0, T.step)
        x = tl.load(X + t[:, None] * ldx + j[None, :], mask=(t < m)[:, None] & (j < k)[None, :], other=0)
        w = tl.load(W + r[None, :] * k + j[:, None], mask=(r < n)[None, :] & (j < k)[:, None], other=0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if T.has_bias:
        acc += tl.load(BIAS + r, mask=r < n, other=0).to(tl.float32)[None, :]
    tl.store(Y + t[:, None] * ldy + r[None, :], acc.to(Y.dtype.element_ty), mask=(t < m)[:, None] & (r < n)[None, :])


def dense_product(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out (m, n) = x (m, k) · rows (n, k)ᵀ + bias; x and rows of one type."""
    m, (n, k) = x.shape[0], rows.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, each, step, stages = (64, 64, 64, 4) if x.element_size() == 2 else (32, 32, 32, 2)
    with gpu.use(x.device):
        dense_kernel[(triton.cdiv(n, each), triton.cdiv(m, tokens))](
            out,
            x,
            rows,
            rows if bias is None else bias,
            m,
            n,
            k,
            x.stride(0),
            out.stride(0),
            tile=DenseTile(bias is not None, tokens, each, step),
            num_warps=4,
            num_stages=stages,
            enable_fp_fusion=False,
        )
