"""Host side of the CUDA kernels: arguments, grids, and which schedule serves which m."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton

import torch

from .decode import BF16_PAIR, E4M3_NORMAL, E8M0_NORMAL, ELEMENTS, F16_PAIR, SCALES, TABLE
from .lookups import LANES
from .mma.kernel import fragment_kernel
from .portable.dequantize import dequantize_kernel
from .portable.matmul import matmul_kernel
from .portable.matvec import matvec_kernel
from .portable.tiled import striped_kernel, tile_kernel
from .tuning.mma_tiles import (
    BlockTile,
    FragmentTile,
    Tile,
    block_tile,
    expert_tile,
    fragment_tile,
    matmul_tile,
    matvec_tile,
    steps,
)
from .weight import CudaWeight, group_elements, scale_groups, super_per

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PAIRS = {torch.float16: F16_PAIR.value, torch.bfloat16: BF16_PAIR.value}
_counters: dict[Any, Any] = {}


def _on(device: torch.device) -> Any:
    """Device guard; none where the device is the current one already, or the interpreter's CPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _constants(w: CudaWeight, packed: bool) -> dict[str, Any]:
    """The compile-time description of a weight."""
    f = w.format
    add = 1 if f.zero == "int" else 2 if f.bias else 3 if f.minimum else 0
    kind = ELEMENTS[f.element]
    if packed and kind == TABLE.value and f.bits == 4:
        kind = LANES.value  # a table in a warp's lanes is 2.6 times as fast as one in memory at m = 1 (docs/design/cuda.md)
    return {
        "WORDS": w.words, "GROUP": group_elements(w), "KIND": kind, "BITS": f.bits, "SCALE": SCALES[f.scale],
        "ADD": add, "PER": super_per(w), "GLOBAL_OP": {"": 0, "multiply": 1, "divide": 2}[f.global_op], "PACKED": packed,
        "UNITS": w.tiled,
        "DIVIDE": f.divisor != 1.0,
    }  # fmt: skip


def _pointers(w: CudaWeight) -> list[Any]:
    """Planes, scales, super scales, addend, super minimums, global scale, table; what is absent points at the scales and is
    never read."""
    s = w.scales
    return [*(w.planes.get(b, s) for b in (8, 4, 2, 1)), s, *(s if t is None else t
            for t in (w.super_scales, w.addend, w.super_mins, w.global_scale, w.table))]  # fmt: skip


def dequantize(w: CudaWeight, dtype: torch.dtype, ids: torch.Tensor | None = None, packed: bool = True) -> torch.Tensor:
    """Dense (n, k), or the rows `ids` of it, on the weight's device. Two-dimensional weights only."""
    n, k = w.shape
    rows = n if ids is None else ids.numel()
    out = torch.empty((rows, k), dtype=dtype, device=w.device)
    if rows and k:
        bw = min(64, triton.next_power_of_2(w.words))
        bn = max(1, min(8, 512 // bw))
        with _on(w.device):
            dequantize_kernel[(triton.cdiv(rows, bn), triton.cdiv(w.words, bw))](
                out, w.scales if ids is None else ids, *_pointers(w), rows, k, scale_groups(w), float(w.format.divisor),
                **_constants(w, packed), GATHER=ids is not None, BN=bn, BW=bw, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    if w.order is not None:
        back = torch.empty_like(out)
        back[:, w.order] = out
        return back
    return out


def _inputs(x: torch.Tensor, w: CudaWeight, whole: int = 8) -> torch.Tensor:
    """x in the weight's input order, inner stride 1, padded with zeros to a multiple of `whole` inputs."""
    if w.order is not None:
        x = x.index_select(1, w.order)
    if x.shape[1] % whole:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % whole))
    return x if x.stride(1) == 1 else x.contiguous()


def matvec(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: Tile | None = None, packed: bool = True
) -> torch.Tensor:
    """The m = 1 … 8 schedule: the weight is read once a token, float32 products and sums for any dtype of x."""
    m, n = x.shape[0], w.shape[0]
    x = _inputs(x, w)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = tile or matvec_tile(w.words, n, m)
    with _on(w.device):
        matvec_kernel[(triton.cdiv(n, tile.rows), m)](
            y, x, w.scales if bias is None else bias, *_pointers(w), n, x.stride(0), scale_groups(w), float(w.format.divisor),
            **_constants(w, packed), HAS_BIAS=bias is not None, BN=tile.rows, BC=tile.words, num_warps=tile.warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return y


def matmul(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: Tile | None = None, packed: bool = True
) -> torch.Tensor:
    """The small-m schedule on the matrix unit; x float16 or bfloat16 (float32 runs through IEEE products, slowly)."""
    m, n = x.shape[0], w.shape[0]
    x = _inputs(x, w)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = tile or matmul_tile(w.words, n, m)
    grid = (triton.cdiv(n, tile.rows), triton.cdiv(m, tile.tokens), tile.split)
    partial, count = y, y
    if tile.split > 1:
        partial = torch.empty((tile.split, m, n), dtype=torch.float32, device=x.device)
        count = _counter(x.device, grid[0] * grid[1])
    with _on(w.device):
        matmul_kernel[grid](
            y, x, w.scales if bias is None else bias, *_pointers(w), partial, count, m, n, x.stride(0), scale_groups(w),
            float(w.format.divisor), **_constants(w, packed), HAS_BIAS=bias is not None, SPLIT=tile.split, BM=tile.tokens,
            BN=tile.rows, BW=tile.words, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def blocks(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, schedule: str, tile: BlockTile | None = None, packed: bool = True
) -> torch.Tensor:
    """The schedules of schedules.py by name, any m, any dtype of x (float32 and what float16 cannot hold: IEEE products)."""
    m, n = x.shape[0], w.shape[0]
    dtype = x.dtype
    x = _inputs(x.float() if too_wide(x, w) else x, w)
    tile = tile or block_tile(n, m, x.element_size(), schedule)
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    tiles = triton.cdiv(n, tile.rows) * triton.cdiv(m, tile.tokens)
    programs, pieces = tiles, []
    if schedule == "striped":
        programs = min(tiles * triton.cdiv(w.words, tile.words), tile.programs * _multiprocessors(w.device))
        partial = torch.empty((programs, 2, tile.tokens, tile.rows), dtype=torch.float32, device=x.device)
        pieces = [partial, _counter(x.device, tiles)]
    with _on(w.device):
        (striped_kernel if pieces else tile_kernel)[(programs,)](
            y, x, w.scales if bias is None else bias, *_pointers(w), *pieces, m, n, x.stride(0), scale_groups(w),
            float(w.format.divisor), **_constants(w, packed), HAS_BIAS=bias is not None, BM=tile.tokens, BN=tile.rows,
            BW=tile.words, STAGES=1 if schedule == "single-stage" else tile.stages, num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def too_wide(x: torch.Tensor, w: CudaWeight) -> bool:
    """True when decoded values do not fit x's dtype though the result may: MX exponents beyond float16's range."""
    return x.dtype == torch.float16 and w.format.scale == "e8m0" and not w.exact_half


@dataclass(frozen=True)
class Route:
    """Tokens of a stack of experts: how many blocks; each block's expert, first pair and end of pairs; each pair's rows of x and
    y; most tokens a block."""

    count: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    x_rows: torch.Tensor
    y_rows: torch.Tensor
    tokens: int


def family_of(w: CudaWeight) -> str:
    """Weights that share tiles: `wide` of 8 bits, `e2m1`, in groups of 16 `fine`, `int` without zero points, `affine` with them,
    `biased`."""
    if w.format.bits == 8:
        return "wide"
    if w.format.element == "e2m1":
        return "fine" if group_elements(w) == 16 else "e2m1"
    return "int" if w.addend is None else "affine" if w.format.zero == "int" else "biased"


def fragments(
    x: torch.Tensor,
    w: CudaWeight,
    bias: torch.Tensor | None,
    tile: FragmentTile | None = None,
    route: Route | None = None,
    dtype: torch.dtype | None = None,
    gate: int = 0,
) -> torch.Tensor:
    """The register-decode schedule for weights in fragment order; x float16 or bfloat16, any m. `route` for a stack of them, y
    of `dtype`; `gate` names the activation that makes one output of rows 2 j and 2 j + 1, 0 none."""
    n = w.shape[-2]
    m, count = (x.shape[0], x.shape[0]) if route is None else (route.tokens, route.y_rows.numel())
    x = _inputs(x, w, 64)
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # rows of x are read 16 bytes at a time
    pairs = x.view(torch.int32)
    y = torch.empty((count, n // 2 if gate else n), dtype=dtype or x.dtype, device=x.device)
    key = None
    if tile is None and route is None:
        of_bias = None if bias is None else (bias.dtype, bias.data_ptr() % 16)
        addresses = w.planes[w.format.bits].data_ptr(), w.scales.data_ptr()
        key = ("fragments", m, pairs.stride(0), x.dtype, y.dtype, of_bias, gate, addresses)
        held = w.maps.get(key)
        if held is not None:
            with _on(w.device):
                held.compiled[held.grid](y, pairs, held.arguments[1] if bias is None else bias, *held.arguments)
            return y
    c = _constants(w, True)
    if tile is None:
        family = family_of(w)
        choose = fragment_tile if route is None else expert_tile
        tile = choose(w.fragments, n, m, family, _card(w.device))
    step, groups, columns = steps(c["GROUP"], w.fragments, m, tile)
    s, half = w.scales, x.dtype == torch.float16
    finish = columns == 8 and w.format.bits == 4 and _finishes(w, half, tile.scaled)
    scale, unit = c["SCALE"], 1.0
    if w.plain_scales:
        s, scale = s.view(torch.int16), E4M3_NORMAL.value
        unit = 2.0**14 if finish and w.format.element == "e2m1" else 1.0
    elif w.normal_scales and (w.top >= 0 or not finish):
        s, scale = s.view(torch.int16), E8M0_NORMAL.value
        unit = 2.0 ** (w.top - 128) if finish else 1.0
    addend = w.addend
    if s.dtype in PAIRS and (addend is None or addend.element_size() == 2):
        s, scale, addend = s.view(torch.int32), PAIRS[s.dtype], None if addend is None else addend.view(torch.int32)
    absent = [s if t is None else t for t in (w.super_scales, addend, w.super_mins, w.global_scale)]
    routing = (s,) * 6 if route is None else (
        route.expert, route.first, route.last, route.count, route.x_rows, route.y_rows)  # fmt: skip
    tiles = triton.cdiv(n, 16)
    blocks = triton.cdiv(m, columns * tile.columns)
    programs = triton.cdiv(tiles, tile.rows * tile.row_warps)
    if route is not None:
        grid = (min(programs * route.expert.numel(), tile.programs * _multiprocessors(w.device)), 1)
    elif tile.programs:
        grid = (min(programs, triton.cdiv(tile.programs * _multiprocessors(w.device), blocks)), blocks)
    else:
        grid = (programs, blocks)
    arguments = (
        w.planes[w.format.bits], s, *absent, *routing, m, n, pairs.stride(0), float(w.format.divisor), unit, max(w.top, 0), tiles,
    )  # fmt: skip
    constants = {
        "UNITS": w.fragments, "GROUPS": scale_groups(w), "GROUP": c["GROUP"], "KIND": c["KIND"], "BITS": w.format.bits,
        "SCALE": scale, "ADD": c["ADD"], "PER": c["PER"], "GLOBAL_OP": c["GLOBAL_OP"], "DIVIDE": c["DIVIDE"],
        "HAS_BIAS": bias is not None, "HALF": half, "RT": tile.rows, "NB": tile.columns, "WK": tile.input_warps,
        "WN": tile.row_warps, "STEP": step, "SET": groups, "TOKENS": columns, "AHEAD": tile.ahead, "SCALED": finish,
        "ROUTED": route is not None, "GATE": gate, "FP8": _converts(w.device), "PDL": _overlap(w.device)["PDL"],
    }  # fmt: skip
    with _on(w.device):
        compiled = fragment_kernel[grid](
            y, pairs, s if bias is None else bias, *arguments, **constants, **_pdl(w.device),
            num_warps=tile.input_warps * tile.row_warps, enable_fp_fusion=False,
        )  # fmt: skip
    if key is not None and compiled is not None:
        w.maps[key] = Again((*grid, 1), (*arguments, *constants.values()), compiled)
    return y


class Again(NamedTuple):
    """A launch that differs from one before by x, bias and y alone. To look a kernel up by 47 arguments took the host longer than
    the GPU needs for a layer."""

    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    compiled: Any


def _finishes(w: CudaWeight, half: bool, wished: bool) -> bool:
    """Whether weights are finished in x's type before the product: in float16 where the tile wishes it and the data allows it, in
    bfloat16 where scales are powers of two, which costs nothing there."""
    if half:
        return wished and (w.scales_half or w.plain_scales or w.top >= 0)
    return w.top >= 0 and w.format.element == "e2m1"


def _overlap(device: torch.device) -> dict[str, Any]:
    """Launch before the previous kernel has ended, from compute capability 9 on. Weights are read early (nothing on the device
    writes them: `to_device` waits for its copies), x after the wait."""
    hopper = _hopper(device)
    return {"PDL": hopper, "launch_pdl": hopper} if device.type == "cuda" else {"PDL": hopper}


@functools.cache
def _pdl(device: torch.device) -> dict[str, Any]:
    """The launch's part of `launch._overlap`."""
    return {k: v for k, v in _overlap(device).items() if k != "PDL"}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors; a few for the interpreter's CPU."""
    return 5 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) for the interpreter's CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _hopper(device: torch.device) -> bool:
    return _capability(device)[0] >= 9


@functools.cache
def _card(device: torch.device) -> str:
    """The card's name; "" for the interpreter's CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _converts(device: torch.device) -> bool:
    """True where pairs of E4M3 have an instruction of their own: compute capability 8.9 and up."""
    return _capability(device) >= (8, 9)


def _counter(device: torch.device, tiles: int) -> torch.Tensor:
    """Arrival counters, zero between launches (the last program of a tile resets its own). One set a device and stream."""
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    held = _counters.get(key)
    if held is None or held.numel() < tiles:
        held = _counters[key] = torch.zeros(max(4096, tiles), dtype=torch.int32, device=device)
    return held


def dense_matmul(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """dequantize_then_gemm: the weight decoded once to x's dtype, then cuBLAS."""
    dtype = torch.float32 if too_wide(x, w) else x.dtype
    dense = dequantize(w, dtype)
    y = torch.nn.functional.linear(x.to(dtype), dense, None if bias is None else bias.to(dtype))
    return y.to(x.dtype)
