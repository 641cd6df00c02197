"""Host side of the fused schedule on Hopper: which weights it serves, and how its tiles are dealt out."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from .fused_launch import Blocks, Share, launch, nothing, way
from .fused_tiles import LEAST_TOKENS, FusedTile, fused_tile, parts
from .launch import _card, _multiprocessors
from .weight import NEAR, CudaWeight


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def refusal(x: torch.Tensor, w: CudaWeight) -> str | None:
    """The sentence why the fused schedule cannot serve, or None."""
    if x.element_size() != 2:
        return f"schedule 'fused' takes float16 and bfloat16 activations, not {x.dtype}; use single-stage"
    if x.is_cuda and _capability(x.device)[0] != 9:
        major, minor = _capability(x.device)
        return f"schedule 'fused' is wgmma of compute capability 9.0 and this GPU has {major}.{minor}; use dequantize_then_gemm"
    if way(w, x.dtype == torch.float16) is None:
        if w.tiled and w.format.scale == "e8m0":
            near = NEAR[w.format.element]
            return f"schedule 'fused' takes float16 where E8M0 scales lie within 2^{near}, and these do not; use bfloat16"
        takes = "integers of 2, 4 and 8 bits and floats of 4 and 8 with 16-bit or 8-bit float scales"
        return f"schedule 'fused' takes {takes}, not {w.format.name}"
    return None


def pays(m: int, w: CudaWeight) -> bool:
    """True where this schedule is the fastest of those measured (fused_tiles)."""
    return m >= LEAST_TOKENS


def _activations(x: torch.Tensor, w: CudaWeight) -> torch.Tensor:
    """x in the weight's input order, as the copy engine can read it: rows a multiple of 16 bytes apart, 16-byte aligned."""
    if w.order is not None:
        x = x.index_select(1, w.order)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or x.stride(0) < x.shape[1]:
        whole = x.new_empty((x.shape[0], -(-x.shape[1] // 8) * 8))[:, : x.shape[1]]
        x = whole.copy_(x)
    return x


def fused(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: FusedTile | None = None) -> torch.Tensor:
    """y (m, n) = x wᵀ + bias; m ≥ 1, x float16 or bfloat16, a weight for which `refusal` is None."""
    m, n = x.shape[0], w.shape[-2]
    x = _activations(x, w)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = tile or fused_tile(n, m, w.shape[-1], _card(w.device))
    bn = 64 * tile.rows * tile.groups
    rows = -(-n // bn)
    if tile.split >= 0:
        launch(x, w, bias, y, tile, _share(w, m, tile, rows, 0))
        return y
    half, tile = replace(tile, tokens=tile.tokens // 2, stages=tile.stages + 1, split=0), replace(tile, split=0)
    tokens, most = -(-m // tile.tokens), _multiprocessors(w.device)
    first = rows % (most // tokens) if most % tokens == 0 and rows * tokens > most else 0
    if first:  # blocks of rows that make no whole round
        launch(x, w, bias, y, half, _share(w, m, half, first, 0))
    launch(x, w, bias, y, tile, _share(w, m, tile, rows - first, first * bn))
    return y


def _share(w: CudaWeight, m: int, tile: FusedTile, rows: int, base: int) -> Share:
    """How `rows` blocks of rows from row `base` on and all tokens are dealt out."""
    tokens, most = -(-m // tile.tokens), _multiprocessors(w.device)
    tiles = rows * tokens
    split = min(tile.split, w.tiled) or parts(tiles % most if tiles >= most else tiles, most, w.tiled)
    programs = min(most, tiles * split)
    rest = tiles % programs
    sharing = max(1, min(programs, rest * split))
    partial = nothing(w.device)
    if sharing > rest:
        size = 2 * sharing * 64 * tile.rows * tile.groups * tile.tokens
        partial = torch.empty(size, dtype=torch.float32, device=w.device)
    return Share(programs, rest, sharing, rows, base, tokens, partial)


def fused_blocks(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, table: Blocks, tile: FusedTile, gate: int, dtype: torch.dtype
) -> torch.Tensor:
    """Padded rows of x, tile.tokens a block, through each block's expert -> rows in the same places, of `dtype`."""
    n = w.shape[-2]
    blocks, rows = table.expert.numel(), -(-n // (64 * tile.rows * tile.groups))
    y = torch.empty((x.shape[0], n // 2 if gate else n), dtype=dtype, device=x.device)
    share = Share(min(_multiprocessors(w.device), rows * blocks), 1, 1, rows, 0, blocks, nothing(w.device))
    launch(x, w, bias, y, tile, share, table, gate)
    return y
