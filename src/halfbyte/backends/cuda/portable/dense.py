"""x · wᵀ for decoded rows of a weight, the same bits for a token whatever the others: what the
batch-invariant mode multiplies with, since cuBLAS chooses another kernel for another m.

    y[token, row] = Σ over steps of STEP inputs   x · wᵀ      (float32, steps in order)

The tile has one size for all m, and a token's sums depend on no other token of its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

import torch

from .. import device as gpu


@triton.jit(do_not_specialize=["m", "n"])
def dense_kernel(
    Y, X, W, BIAS, m, n, k, ldx, ldy,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Y[token, row] of a tile. W (n, k) is contiguous, X has rows of ldx values, Y rows of ldy.
    Grid (n / ROWS, m / TOKENS).
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, k, STEP):
        j = start + tl.arange(0, STEP)
        x = tl.load(X + t[:, None] * ldx + j[None, :], mask=(t < m)[:, None] & (j < k)[None, :], other=0)
        w = tl.load(W + r[None, :] * k + j[:, None], mask=(r < n)[None, :] & (j < k)[:, None], other=0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(BIAS + r, mask=r < n, other=0).to(tl.float32)[None, :]
    tl.store(Y + t[:, None] * ldy + r[None, :], acc.to(Y.dtype.element_ty), mask=(t < m)[:, None] & (r < n)[None, :])


def dense_product(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out (m, n) = x (m, k) · rows (n, k)ᵀ + bias; x and rows of one type."""
    m, (n, k) = x.shape[0], rows.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, each, step, stages = (64, 64, 64, 4) if x.element_size() == 2 else (32, 32, 32, 2)
    with gpu.use(x.device):
        dense_kernel[(triton.cdiv(n, each), triton.cdiv(m, tokens))](
            out, x, rows, rows if bias is None else bias, m, n, k, x.stride(0), out.stride(0), HAS_BIAS=bias is not None,
            TOKENS=tokens, ROWS=each, STEP=step, num_warps=4, num_stages=stages, enable_fp_fusion=False,
        )  # fmt: skip
