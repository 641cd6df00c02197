"""Host side of the fused schedule on Hopper: which weights it serves, tensor maps, and the launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .decode import E8M0_NORMAL, ELEMENTS, SCALES
from .fused_tiles import LEAST_TOKENS, FusedTile, fused_tile, parts
from .launch import _card, _constants, _counter, _multiprocessors, _on, _overlap
from .weight import CudaWeight
from .wgmma import wgmma_kernel

HALF, BFLOAT, WIDE = 0, 1, 2
"""The arithmetics of register_operand."""


def way(w: CudaWeight, half: bool) -> int | None:
    """How a weight is finished for x in float16 (`half`) or bfloat16, or None where that would not be exact. (Values of 65520 and
    more overflow float16, as in `dequantize`.)"""
    scale = w.format.scale
    if not w.units or w.format.minimum or w.super_scales is not None:
        return None
    if scale == "e8m0":
        return None if half and w.top < 0 else (HALF if half else BFLOAT)
    if scale in ("e4m3", "ue4m3"):
        return HALF if half else BFLOAT
    if scale == "float16":
        return HALF if half else WIDE
    if scale == "bfloat16":
        return WIDE if half else BFLOAT
    return None


def refusal(x: torch.Tensor, w: CudaWeight) -> str | None:
    """The sentence why the fused schedule cannot serve, or None."""
    if x.element_size() != 2:
        return f"schedule 'fused' takes float16 and bfloat16 activations, not {x.dtype}; use single-stage"
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 9:
        major, minor = torch.cuda.get_device_capability(x.device)
        return f"schedule 'fused' is wgmma of compute capability 9.0 and this GPU has {major}.{minor}; use dequantize_then_gemm"
    if way(w, x.dtype == torch.float16) is None:
        if w.units and w.format.scale == "e8m0":
            return "schedule 'fused' takes float16 where E8M0 scales lie within 2^24, and these do not; use bfloat16"
        return f"schedule 'fused' takes 4-bit integers and E2M1 with 16-bit or 8-bit float scales, not {w.format.name}"
    return None


def pays(m: int, w: CudaWeight) -> bool:
    """True where this schedule is the fastest of those measured (fused_tiles)."""
    return m >= LEAST_TOKENS


@functools.cache
def _layout(width: int, rank: int, bits: int) -> Any:
    """Boxes whose rows are `width` elements, swizzled as far as they are wide."""
    return gl.NVMMASharedLayout(min(128, width * bits // 8), bits, rank=rank)


def _map(t: torch.Tensor, shape: list[int]) -> Any:
    """A tensor map whose boxes are `shape`."""
    return TensorDescriptor.from_tensor(t, shape, _layout(shape[-1], len(shape), 8 * t.element_size()))


def _activations(x: torch.Tensor, w: CudaWeight) -> torch.Tensor:
    """x in the weight's input order, as the copy engine can read it: rows a multiple of 16 bytes apart, 16-byte aligned."""
    if w.order is not None:
        x = x.index_select(1, w.order)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or x.stride(0) < x.shape[1]:
        whole = x.new_empty((x.shape[0], -(-x.shape[1] // 8) * 8))[:, : x.shape[1]]
        x = whole.copy_(x)
    return x


@dataclass(frozen=True)
class Blocks:
    """Token blocks of a stack of experts, on the device: how many there are, and each one's expert and span of pairs."""

    count: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def fused(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: FusedTile | None = None) -> torch.Tensor:
    """y (m, n) = x wᵀ + bias; m ≥ 1, x float16 or bfloat16, a weight for which `refusal` is None."""
    m, n = x.shape[0], w.shape[-2]
    x = _activations(x, w)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = tile or fused_tile(n, m, w.shape[-1], _card(w.device))
    bn, tokens, most = 64 * tile.rows * tile.groups, triton.cdiv(m, tile.tokens), _multiprocessors(w.device)
    rows = triton.cdiv(n, bn)
    first = 0  # blocks of rows that make no whole round
    if tile.split < 0:
        half = replace(tile, tokens=tile.tokens // 2, stages=tile.stages + 1, split=0)
        tile = replace(tile, split=0)
        first = rows % (most // tokens) if most % tokens == 0 and rows * tokens > most else 0
        if first:
            _tiles(x, w, bias, y, half, first, 0)
    _tiles(x, w, bias, y, tile, rows - first, first * bn)
    return y


def _tiles(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, y: torch.Tensor, tile: FusedTile, rows: int, base: int
) -> None:
    """`rows` blocks of rows of y from row `base` on, all tokens."""
    tokens = triton.cdiv(x.shape[0], tile.tokens)
    most, tiles = _multiprocessors(w.device), rows * tokens
    split = min(tile.split, w.units) or parts(tiles % most if tiles >= most else tiles, most, w.units)
    programs = min(most, tiles * split)
    rest = tiles % programs
    sharing = max(1, min(programs, rest * split))
    size = 2 * sharing * 64 * tile.rows * tile.groups * tile.tokens if sharing > rest else 1
    partial = torch.empty(size, dtype=torch.float32, device=x.device)
    _launch(x, w, bias, y, tile, programs, partial, rest, sharing, rows, base, tokens, None, 0)


def fused_blocks(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, table: Blocks, tile: FusedTile, gate: int, dtype: torch.dtype
) -> torch.Tensor:
    """Padded rows of x, tile.tokens a block, through each block's expert -> rows in the same places, of `dtype`."""
    n = w.shape[-2]
    blocks = table.expert.numel()
    y = torch.empty((x.shape[0], n // 2 if gate else n), dtype=dtype, device=x.device)
    rows = triton.cdiv(n, 64 * tile.rows * tile.groups)
    _launch(x, w, bias, y, tile, min(_multiprocessors(w.device), rows * blocks), w.scales, 1, 1, rows, 0, blocks, table, gate)
    return y


def _weight_maps(w: CudaWeight, bn: int, groups: int, width: int) -> tuple[Any, ...]:
    """Maps of words, scales and addends for blocks of bn rows; `groups` and `width` are a unit's. A stack is one tall weight."""
    tiles = w.planes[4].numel() // (w.units * 128)
    scales = w.scales.view(torch.int16).reshape(tiles, -1)
    addend = scales if w.addend is None else w.addend.view(torch.int16).reshape(tiles, -1)
    return (
        _map(w.planes[4].reshape(tiles, 4 * w.units, 32), [bn // 16, 4, 32]), _map(scales, [max(bn // 16, 8), width]),
        _map(addend, [max(bn // 16, 8), 16 * groups if w.addend is not None else width]),
    )  # fmt: skip


def _launch(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, y: torch.Tensor, tile: FusedTile, programs: int,
    partial: torch.Tensor, rest: int, sharing: int, rows: int, base: int, tokens: int, table: Blocks | None, gate: int,
) -> None:  # fmt: skip
    half, c = x.dtype == torch.float16, _constants(w, True)
    n, bn, groups = w.shape[-2], 64 * tile.rows * tile.groups, max(1, 64 // c["GROUP"])
    width = groups * 8 * w.scales.element_size()
    held = (bn, w.planes[4].data_ptr(), w.scales.data_ptr())
    maps = w.maps.get(held)
    if maps is None:
        maps = w.maps[held] = _weight_maps(w, bn, groups, width)
    e8m0, e2m1 = w.format.scale == "e8m0", w.format.element == "e2m1"
    shift = w.top - 128 if e8m0 and half else 0
    unit = 2.0**shift if e8m0 else 256.0 if half and e2m1 and w.format.scale in ("e4m3", "ue4m3") else 1.0
    engine = y.dtype == x.dtype and y.shape[1] % 8 == 0
    x_map = _map(x, [tile.tokens, 64])
    none = w.scales
    routing = (none,) * 4 if table is None else (table.count, table.expert, table.first, table.last)
    with _on(w.device):
        wgmma_kernel[(programs,)](
            _map(y, [tile.tokens, 32 * tile.rows if gate else 64 * tile.rows]) if engine else x_map, y, x_map,
            *maps, none if bias is None else bias, none if w.global_scale is None else w.global_scale, *routing, partial,
            _counter(x.device, rest * tile.groups), x.shape[0], n, rows * tokens, sharing, rows, tokens, base, w.units, shift,
            unit, float(w.format.divisor),
            BT=tile.tokens, R=tile.rows, WGS=tile.groups, WGK=tile.deep, STAGES=tile.stages, GROUP=c["GROUP"], GROUPS=groups,
            SW=width,
            KIND=ELEMENTS[w.format.element],
            SCALE=E8M0_NORMAL.value if e8m0 and w.normal_scales else SCALES[w.format.scale], ADD=c["ADD"], WAY=way(w, half),
            GLOBAL_OP=c["GLOBAL_OP"], DIVIDE=c["DIVIDE"], HAS_BIAS=bias is not None, HALF=half, TOGETHER=tile.together,
            STORE=2 if engine else 1, ROUTED=table is not None, GATE=gate,
            AHEAD=not e8m0 if tile.ahead == 2 else bool(tile.ahead), **_overlap(w.device), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
