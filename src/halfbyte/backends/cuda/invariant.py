"""The batch-invariant mode: a row of y has the same bits whatever the number of rows of x and
whatever the others hold.

The order of a row's sums is part of the kernel and of the weight, never of m:

    fused      tiles of one `deep` alone, never cut in parts: how tall or wide a tile is changes
               which sums a program has, not their order
    otherwise  rows decoded to x's type and multiplied by one tile of `portable/dense.py`

The schedules that `linear` takes otherwise change with m: the kernel for few tokens divides the
inputs among its warps, and cut tiles add parts.
"""

from __future__ import annotations

import torch

from . import device as gpu
from . import launch
from .fallback import kernel as fallback
from .fallback.weight import CanonicalWeight
from .portable.dense import dense_product
from .tuning.wgmma_tiles import FusedTile, invariant_tile, uncut
from .weight import CudaWeight, call_key
from .wgmma import schedule
from .wgmma.launch import FusedCall
from .wgmma.launch import launch as launch_fused


def linear(x: torch.Tensor, w: CudaWeight | CanonicalWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y (m, n) = x wᵀ + bias, m ≥ 1."""
    if isinstance(w, CanonicalWeight):
        return fallback.linear(x, w, bias, dense_product)
    if schedule.refusal(x, w) is not None:
        return launch.dense_matmul(x, w, bias, dense_product)
    x = schedule.activations(x, w)
    m, n = x.shape[0], w.shape[-2]
    key = "invariant", *call_key(x, w, bias)
    y: torch.Tensor | None = w.launches.again(key, x, bias)
    if y is not None:
        return y
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = invariant_tile(m, n)
    again = launch_fused(x, w, bias, y, tile, uncut(m, n, tile, gpu.multiprocessors(x.device)))
    w.launches.keep(key, again and FusedCall((m, n), [(0, 0, again)]))
    return y


def warming_tokens(tokens: tuple[int, ...], w: CudaWeight) -> list[int]:
    """Numbers of tokens in the range of `tokens` whose tiles are all those of the range."""
    first: dict[FusedTile, int] = {}
    for m in range(min(tokens), max(tokens) + 1):
        first.setdefault(invariant_tile(m, w.shape[-2]), m)
    return list(first.values())
