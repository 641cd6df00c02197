"""Host side of the fused schedule on Hopper: which weights it serves, and how its tiles are divided
among programs.
"""

from __future__ import annotations

import functools

import torch

from .. import device as gpu
from ..mma.plan import TokenBlocks
from ..tuning.table import exact
from ..tuning.wgmma_model import Step, plan
from ..tuning.wgmma_model import warming_tokens as model_tokens
from ..tuning.wgmma_tiles import (
    FEW_INPUTS,
    FEW_INPUTS_LEAST,
    FEW_ROWS,
    FEW_ROWS_MOST,
    LEAST_TOKENS,
    MANY_ROWS,
    FusedTile,
    WorkSplit,
    parts,
)
from ..weight import NEAR, WORKSPACE_BYTES, CudaWeight, call_key, element_family, group_elements
from .launch import FusedCall, arithmetic_of, launch

MOST = 1 << 24
"""Tokens and outputs of a launch: they reach the kernel as float32."""


def refusal(x: torch.Tensor, w: CudaWeight) -> str | None:
    """The sentence why the fused schedule cannot serve, or None."""
    if x.element_size() != 2:
        return f"schedule 'fused' takes float16 and bfloat16 activations, not {x.dtype}; use single-stage"
    if x.is_cuda and gpu.capability(x.device)[0] != 9:
        major, minor = gpu.capability(x.device)
        return f"schedule 'fused' is wgmma of compute capability 9.0 and this GPU has {major}.{minor}; use dequantize_then_gemm"
    if max(x.shape[0], w.shape[-2]) > MOST:
        return f"schedule 'fused' takes up to {MOST} tokens and outputs, not {x.shape[0]} and {w.shape[-2]}"
    if arithmetic_of(w, x.dtype == torch.float16) is None:
        if w.tiled and w.format.scale == "e8m0":
            near = NEAR[w.format.element]
            return f"schedule 'fused' takes float16 where E8M0 scales lie within 2^{near}, and these do not; use bfloat16"
        takes = "integers of up to 6 and of 8 bits, floats of 4, 6 and 8 and tables, in groups of 16, 32 or whole 64s"
        return f"schedule 'fused' takes {takes}, not {w.format.name}"
    return None


def pays(m: int, w: CudaWeight) -> bool:
    """True where this schedule is the fastest of those measured (`tuning/wgmma_tiles.py`; `halfbyte
    bench --device cuda --sweep`).
    """
    n, k = w.shape[-2:]
    least = FEW_INPUTS_LEAST if k < FEW_INPUTS and n < MANY_ROWS and not w.lanes else LEAST_TOKENS
    if n >= MANY_ROWS and (w.lanes or w.super_scales is not None) and (group_elements(w) <= 32 or w.format.bits == 6):
        least = 5 if group_elements(w) == 16 else 9
    return m >= least and not (n <= FEW_ROWS and m > FEW_ROWS_MOST)


def activations(x: torch.Tensor, w: CudaWeight) -> torch.Tensor:
    """x in the weight's input order, as TMA reads it: the stride of rows a multiple of 16 bytes,
    16-byte aligned.
    """
    if w.order is not None:
        x = x.index_select(1, w.order)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or x.stride(0) < x.shape[1]:
        whole = x.new_empty((x.shape[0], -(-x.shape[1] // 8) * 8))[:, : x.shape[1]]
        x = whole.copy_(x)
    return x


def family_of(w: CudaWeight) -> str:
    """Weights that take the same time: those of `element_family`, biases as zero points; `supers`
    with two levels of scales, `planes` of others in lane order.
    """
    if w.lanes or w.super_scales is not None:
        return "planes" if w.super_scales is None else "supers"
    return element_family(w).replace("biased", "affine")


def steps_for(m: int, w: CudaWeight, half: bool) -> tuple[Step, ...]:
    """The launches for m tokens: measured on this card for this very call (`halfbyte tune`), else
    what the cost model finds.
    """
    n, k = w.shape[-2:]
    return _steps(m, n, k, w.tiled, family_of(w), half, gpu.multiprocessors(w.device), gpu.card_name(w.device))


@functools.lru_cache(maxsize=1 << 14)
def _steps(m: int, n: int, k: int, units: int, family: str, half: bool, most: int, card: str) -> tuple[Step, ...]:
    """`steps_for`, by what it depends on of a weight and a GPU."""
    measured = exact(card, "fused", "4-bit", n, k, m)
    if measured:
        tile = FusedTile(*measured)
        return (Step(0, m, tile, split_tiles(m, n, units, tile, most)),)
    return plan(m, n, units, family, half, most)


def warming_tokens(tokens: tuple[int, ...], w: CudaWeight, half: bool) -> list[int]:
    """Numbers of tokens in the range of `tokens` whose launches have every tile of the range."""
    first, last = max(5 if w.lanes or w.super_scales is not None else LEAST_TOKENS, min(tokens)), max(tokens)
    if first > last:
        return []
    n = w.shape[-2]
    return model_tokens(first, last, n, w.tiled, family_of(w), half, gpu.multiprocessors(w.device))


def fused(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: FusedTile | None = None, x_scales: torch.Tensor | None = None
) -> torch.Tensor:
    """y (m, n) = x wᵀ + bias; m ≥ 1, x float16 or bfloat16, a weight for which `refusal` is None;
    `x_scales` float32 (m) multiply the sums of tokens.
    """
    m, n = x.shape[0], w.shape[-2]
    x = activations(x, w)
    key = ("fused", *call_key(x, w, bias)) if tile is None and x_scales is None else None
    y: torch.Tensor | None = w.launches.again(key, x, bias)
    if y is not None:
        return y
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if tile is not None:
        launch(x, w, bias, y, tile, split_tiles(m, n, w.tiled, tile, gpu.multiprocessors(x.device)), x_scales=x_scales)
        return y
    steps = steps_for(m, w, x.dtype == torch.float16)
    launches = []
    for first, end, one, split in steps:
        part = None if x_scales is None else x_scales[first:end]
        again = launch(x[first:end], w, bias, y[first:end], one, split, x_scales=part)
        if again is not None:
            launches.append((2 * first * n, 2 * first * x.stride(0), again))
    if key is not None and len(launches) == len(steps):
        w.launches.keep(key, FusedCall((m, n), launches))
    return y


@functools.lru_cache(maxsize=4096)
def split_tiles(m: int, n: int, units: int, tile: FusedTile, most: int) -> WorkSplit:
    """How the tiles of y (m, n) are divided among at most `most` programs; `units` of 64 inputs a
    row.
    """
    bn = 64 * tile.rows * tile.groups
    rows, tokens = -(-n // bn), -(-m // tile.tokens)
    tiles = rows * tokens
    room = min(most, max(1, WORKSPACE_BYTES // (8 * bn * tile.tokens)))
    split = min(tile.split, units) or parts(tiles % most if tiles >= most else tiles, room, units)
    programs = min(most, tiles * split)
    rest = tiles % programs
    sharing = max(1, min(programs, rest * split if rest * split <= room else rest))
    return WorkSplit(programs, rest, sharing, 2 * sharing * bn * tile.tokens if sharing > rest > 0 else 0)


def fused_blocks(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, table: TokenBlocks, tile: FusedTile, gate: int, dtype: torch.dtype
) -> torch.Tensor:
    """Padded rows of x, tile.tokens a block, through each block's expert -> the same rows, of
    `dtype`.
    """
    n = w.shape[-2]
    blocks, rows = table.expert.numel(), -(-n // (64 * tile.rows * tile.groups))
    y = torch.empty((x.shape[0], n // 2 if gate else n), dtype=dtype, device=x.device)
    split = WorkSplit(min(gpu.multiprocessors(x.device), rows * blocks), 1, 1)
    launch(x, w, bias, y, tile, split, table, gate)
    return y
