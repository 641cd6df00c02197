"""The gated activation of gate and up products that lie in memory (for products in registers:
`mma/epilogue.gated`).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

import torch

from .. import device as gpu


@triton.jit
def gate_kernel(G, U, OUT, f, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """OUT[p, j] = act(G[p, j], U[p, j]), float32 until the store, as `mma/epilogue.gated`. Rows
    of G and U are `stride` apart. Grid (pairs, f / BLOCK).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    p = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = j < f
    g = tl.load(G + p * stride + j, mask=keep, other=0)
    u = tl.load(U + p * stride + j, mask=keep, other=0)
    if KIND == 1:
        out = g / (1 + tl.exp(-g)) * u
    elif KIND == 2:  # gpt-oss: limit 7, alpha 1.702
        g = tl.where(g > 7.0, 7.0, g)
        u = tl.where(u > 7.0, 7.0, tl.where(u < -7.0, -7.0, u))
        out = g / (1 + tl.exp(-1.702 * g)) * (u + 1)
    else:  # gelu by tanh(z) = 1 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        out = 0.5 * g * (2 - 2 / (tl.exp(2 * z) + 1)) * u
    tl.store(OUT + p * f + j, out.to(OUT.dtype.element_ty), mask=keep)


def gated(wide: Sequence[torch.Tensor], kind: int, dtype: torch.dtype) -> torch.Tensor:
    """act(gate) · up -> (pairs, f) in `dtype`; float32 products of gates and of ups (pairs, f), or
    one of both, gates first.
    """
    gates, ups = wide if len(wide) == 2 else wide[0].chunk(2, 1)
    pairs, f = gates.shape
    hidden = torch.empty((pairs, f), dtype=dtype, device=gates.device)
    with gpu.use(gates.device):
        gate_kernel[(pairs, triton.cdiv(f, 1024))](
            gates, ups, hidden, f, gates.stride(0), kind, BLOCK=1024, **gpu.overlap_options(gates.device)
        )
    return hidden
