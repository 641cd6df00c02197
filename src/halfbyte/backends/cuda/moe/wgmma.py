"""Experts at many tokens on Hopper: the fused schedule over (expert, token block) tiles.

The plan is `routing.route`'s: pairs in order of expert, in blocks of one expert. Each block gets
rows of its own in a copy of x, as many as a tile has tokens, so that the copy engine reads whole
boxes and writes whole boxes; rows that no pair fills are never written, never read back, and touch
nothing but their own column of a product.

    gather   x_pad[block, i] = x[token of the block's i-th pair];  where[pair] = that row
    up       hidden = act(gate_up_e · x_pad), rounded once to x's dtype; alternating rows of gate
             and up are activated in registers, two halves or two stacks by activation.py
    down     routed = down_e · hidden, float32
    combine  y[i] = Σ_t weight[i, t] · routed[where[i, t]], in order of t
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

import torch

from .. import device as gpu
from ..mma.plan import TokenBlocks
from ..tuning.wgmma_tiles import LEAST_PAIRS, FusedTile, expert_tile
from ..weight import CudaWeight
from ..wgmma.launch import arithmetic_of
from ..wgmma.schedule import fused_blocks
from .activation import gated
from .routing import route, weighted_sum


@triton.jit(do_not_specialize=["ldx"], do_not_specialize_on_alignment=["X", "WHERE"])
def gather_kernel(X, OUT, WHERE, blocks, k, ldx, BT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Row `program` of the padded copy OUT of X, and in WHERE the row of its pair. Grid (blocks ·
    BT,).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = row // BT
    if block < tl.load(blocks.count):
        rank = tl.load(blocks.first + block) + (row % BT).to(tl.int32)
        if rank < tl.load(blocks.last + block):
            tl.store(WHERE + tl.load(blocks.y_row + rank), row.to(tl.int32))
            source = X + tl.load(blocks.x_row + rank).to(tl.int64) * ldx
            for start in range(0, k, BLOCK):
                c = start + tl.arange(0, BLOCK)
                tl.store(OUT + row * k + c, tl.load(source + c, mask=c < k), mask=c < k)


def serves(x: torch.Tensor, ups: tuple[CudaWeight, ...], down: CudaWeight, kind: int, interleaved: bool) -> bool:
    """True where the fused schedule takes a block of experts: Hopper, finished weights, whole
    16-byte rows.
    """
    half, stacks = x.dtype == torch.float16, (*ups, down)
    if not x.is_cuda or gpu.capability(x.device)[0] != 9 or any(w.order is not None for w in stacks):
        return False
    rows = ups[0].shape[1]
    hidden = rows // 2 if kind and len(ups) == 1 else rows
    whole = rows % (16 if kind and interleaved else 8) == 0 and down.shape[1] % 8 == 0 and hidden % 8 == 0 and x.shape[1] % 8 == 0
    return whole and all(arithmetic_of(w, half) is not None for w in stacks)


def enough(pairs: int, experts: int) -> bool:
    """True from as many pairs on as this has been the faster one."""
    return pairs >= LEAST_PAIRS * experts


def mixture(
    x: torch.Tensor,
    ups: tuple[tuple[CudaWeight, torch.Tensor | None], ...],
    down: CudaWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    kind: int,
    interleaved: bool,
    down_bias: torch.Tensor | None,
    tile: FusedTile | None = None,
) -> torch.Tensor:
    """x (m, k) through a stack of experts -> (m, h) in x's dtype, for what `serves` takes. `ups`
    are one stack of gates and ups, side by side or in two halves, or a stack each; a stack comes
    with its bias.
    """
    m, top = topk_ids.shape
    k = x.shape[1]
    tile = tile or expert_tile(m * top, down.shape[0])
    blocks: TokenBlocks = route(topk_ids, down.shape[0], tile.tokens).blocks
    blocks = blocks._replace(expert=blocks.expert.to(torch.int32))  # at m = 1 topk_ids itself
    rows = blocks.expert.numel() * tile.tokens
    with gpu.use(x.device):
        x_pad = torch.empty((rows, k), dtype=x.dtype, device=x.device)
        where = torch.empty(m * top, dtype=torch.int32, device=x.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        gather_kernel[(rows,)](
            x, x_pad, where, blocks, k, x.stride(0), BT=tile.tokens, BLOCK=1024, num_warps=4, **gpu.overlap_options(x.device)
        )
        if kind == 0 or interleaved:
            hidden = fused_blocks(x_pad, *ups[0], blocks, tile, kind, x.dtype)
        else:
            hidden = gated([fused_blocks(x_pad, w, bias, blocks, tile, 0, torch.float32) for w, bias in ups], kind, x.dtype)
        routed = fused_blocks(hidden, down, down_bias, blocks, tile, 0, torch.float32)
    return weighted_sum(routed, where, topk_weights, x.dtype)
