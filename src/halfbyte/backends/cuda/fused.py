"""Host side of the fused schedule: x in the order of the weight's units, descriptors, tiles and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .decode import E8M0_NORMAL, ELEMENTS, SCALES
from .launch import _constants, _counter, _inputs, _multiprocessors, _on
from .weight import CudaWeight, by_16, scale_groups
from .wgmma import wgmma_kernel


@triton.jit
def arrange_kernel(X, OUT, pairs, ldx, width, BY_16: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[r, 64 u + 16 w + 8 i + 2 t + p] = the input of unit u that word w, half i, lane t, place p stands for."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = c % 4
    i = c // 4 % 2
    b = c // 8 % 2
    s = c // 16 % 2
    if BY_16:
        source = c // 32 * 32 + 16 * s + 8 * b + 2 * t + i
    else:
        source = c // 32 * 32 + 16 * s + 4 * t + 2 * b + i
    v = tl.load(X + r * ldx + source, mask=source < pairs, other=0)
    tl.store(OUT + r * width + c, v, mask=c < width)


def arrange(x: torch.Tensor, w: CudaWeight) -> torch.Tensor:
    """x (m, k) with the inputs of each unit of 64 in the order in which the matrix unit takes them."""
    x = _inputs(x, w, 2)
    if x.stride(0) % 2 or x.data_ptr() % 4:
        x = x.contiguous()
    out = torch.empty((x.shape[0], 64 * w.units), dtype=x.dtype, device=x.device)
    pairs, wide = x.view(torch.int32), out.view(torch.int32)
    block = min(1024, triton.next_power_of_2(wide.shape[1]))
    arrange_kernel[(x.shape[0], triton.cdiv(wide.shape[1], block))](
        pairs, wide, pairs.shape[1], pairs.stride(0), wide.shape[1], by_16(w.format, w.shape[-1]), block, num_warps=4
    )
    return out


@dataclass(frozen=True)
class FusedTile:
    """Tokens; tiles of 64 rows a warpgroup; warpgroups; stages; programs a multiprocessor; token blocks side by side."""

    tokens: int
    rows: int = 1
    groups: int = 2
    stages: int = 4
    programs: int = 1
    together: int = 8


def _layout(shape: list[int], bits: int) -> Any:
    return gl.NVMMASharedLayout(min(128, shape[-1] * bits // 8), bits, rank=len(shape))


def fused(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, tile: FusedTile) -> torch.Tensor:
    """y (m, n) = x wᵀ."""
    m, n = x.shape[0], w.shape[-2]
    c = _constants(w, True)
    group = c["GROUP"]
    bn = 64 * tile.rows * tile.groups
    gs = max(1, 64 // group)
    scales = w.scales.view(torch.int16) if w.scales.element_size() == 2 else w.scales.view(torch.int16)
    tiles16 = triton.cdiv(n, 16)
    scales = scales.reshape(tiles16, -1)
    sw = gs * 16 * w.scales.element_size() // 2
    xa = arrange(x, w)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    words = w.planes[4].reshape(tiles16, w.units * 4, 32)
    store = 1 if n % 8 == 0 else 0
    rows, tokens = triton.cdiv(n, bn), triton.cdiv(m, tile.tokens)
    ks = triton.cdiv(w.units, 2)
    programs = min(tile.programs * _multiprocessors(w.device), rows * tokens * ks)
    partial = torch.empty(2 * programs * bn * tile.tokens, dtype=torch.float32, device=x.device)
    e8m0 = w.format.scale == "e8m0"
    fold = 14 if e8m0 else 0
    descriptors = [
        TensorDescriptor.from_tensor(t, shape, _layout(shape, 8 * t.element_size()))
        for t, shape in ((xa, [tile.tokens, 64]), (words, [bn // 16, 4, 32]), (scales, [bn // 16, sw]))
    ]
    shape = [tile.tokens, bn]
    y_desc = TensorDescriptor.from_tensor(y, shape, _layout(shape, 16)) if store else descriptors[0]
    with _on(w.device):
        wgmma_kernel[(programs,)](
            y_desc, y, *descriptors, partial, _counter(x.device, rows * tokens), m, n, rows * tokens, rows, tokens, ks, 1.0,
            BT=tile.tokens, R=tile.rows, WGS=tile.groups, U=1, STAGES=tile.stages, GROUP=group, GS=gs, SW=sw,
            KIND=ELEMENTS[w.format.element], SCALE=E8M0_NORMAL.value if e8m0 else SCALES[w.format.scale], ADD=c["ADD"], FOLD=fold,
            TOGETHER=tile.together, STORE=store, num_warps=4 * tile.groups, enable_fp_fusion=False,
        )  # fmt: skip
    return y
