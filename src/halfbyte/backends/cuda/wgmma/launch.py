"""Launches of the fused kernel. What does not change from call to call is worked out once and kept
with the weight, the compiled kernel too: binding the arguments and describing five tensors again
takes the host longer than the GPU needs for a layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import torch

from .. import device as gpu
from ..decode import E8M0_NORMAL, ELEMENTS, SCALES
from ..launch import GLOBAL_OPS, addend_kind
from ..tuning.wgmma_tiles import FusedTile, stages
from ..weight import CudaWeight, group_elements
from .kernel import Blocks as BlockPointers
from .kernel import Config, Factors, Scratch, Values, Work, wgmma_kernel

HALF, BFLOAT, WIDE, WIDE_BFLOAT = 0, 1, 2, 3
"""The arithmetics of operand.py."""
ARITHMETIC = {
    "e8m0": (HALF, BFLOAT), "e4m3": (HALF, BFLOAT), "ue4m3": (HALF, BFLOAT), "float16": (HALF, WIDE),
    "bfloat16": (WIDE_BFLOAT, BFLOAT),
}  # fmt: skip
"""Scales: the arithmetic for x in float16, and in bfloat16."""
LARGEST = {"e2m1": 128, "e4m3": 120, "e5m2": 113}
"""Under E8M0 scales, x float16: the largest scale becomes 2^(LARGEST − 113), so that no product
overflows or loses bits while the scales lie as near to each other as `weight.NEAR` says (E2M1
patterns still lack 2^14).
"""


def arithmetic_of(w: CudaWeight, half: bool) -> int | None:
    """How a weight is finished for x in float16 (`half`) or bfloat16, or None where that would not
    be exact. (Values of 65520 and more overflow float16, as in `dequantize`.)
    """
    scale = w.format.scale
    if not w.tiled or w.format.minimum or w.super_scales is not None or scale not in ARITHMETIC:
        return None
    if scale == "e8m0" and half and w.top < 0:
        return None
    finished = ARITHMETIC[scale][0 if half else 1]
    if w.format.bits == 8 and finished == BFLOAT:  # eight bits and a power of two do not fit a bfloat16 on the way
        return WIDE if scale == "e8m0" else WIDE_BFLOAT
    return finished


@dataclass(frozen=True)
class Blocks:
    """Token blocks of a stack of experts, on the device: how many there are, and each one's expert
    and span of pairs.
    """

    count: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


@dataclass
class CachedKernel:
    """The kernel for one weight, tile and kind of call: the weight's tensor maps, the arguments
    that never change, and what was compiled, once it has run.
    """

    maps: tuple[Any, ...]
    units: int
    factors: Factors
    config: Config
    compiled: Any = None


@dataclass(frozen=True)
class WorkSplit:
    """How the tiles of a launch are divided: programs; tiles beyond whole rounds and programs that
    share them; blocks of rows and of tokens; float32 values of partial sums that cut tiles leave in
    memory.
    """

    programs: int
    rest: int
    sharing: int
    rows: int
    tokens: int
    partials: int = 0


@functools.cache
def _layout(width: int, rank: int, bits: int) -> Any:
    """Boxes whose rows are `width` elements, swizzled as far as they are wide."""
    return gl.NVMMASharedLayout(min(128, width * bits // 8), bits, rank=rank)


def _map(t: torch.Tensor, box: list[int]) -> Any:
    """A tensor map; `_activations` and `weight.to_device` have seen to what TensorDescriptor would
    check on every call.
    """
    d = object.__new__(TensorDescriptor)
    d.base, d.shape, d.strides, d.block_shape, d.padding = t, t.shape, t.stride(), box, "zero"
    d.layout = _layout(box[-1], len(box), 8 * t.element_size())
    return d


@functools.cache
def _no_scratch(device: torch.device) -> Scratch:
    """Partial sums and counters of launches that cut no tile."""
    return Scratch(torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(1, dtype=torch.int32, device=device))


def _kernel(w: CudaWeight, tile: FusedTile, half: bool, bias: bool, store: int, routed: bool, gate: int) -> CachedKernel:
    """The arguments that depend on no token."""
    f, bits, group = w.format, w.format.bits, group_elements(w)
    bn, groups = 64 * tile.rows * tile.groups, max(1, 64 // group)
    width, each = groups * 8 * w.scales.element_size(), max(bn // 16, 8)
    words = w.planes[bits].view(torch.int32)
    tiles = words.numel() // (w.tiled * 32 * bits)  # a stack is one tall weight
    scales = w.scales.view(torch.int16).reshape(tiles, -1)
    addend = scales if w.addend is None else w.addend.view(torch.int16).reshape(tiles, -1)
    maps = (
        _map(words.reshape(tiles, bits * w.tiled, 32), [bn // 16, bits, 32]), _map(scales, [each, width]),
        _map(addend, [each, 16 * groups if w.addend is not None else width]),
    )  # fmt: skip
    e8m0, e2m1 = f.scale == "e8m0", f.element == "e2m1"
    shift, unit = 0, 1.0
    if half and e8m0:
        shift = w.top - LARGEST[f.element]
        unit = 2.0 ** (shift if e2m1 else shift - 14)
    elif half and e2m1 and f.scale in ("e4m3", "ue4m3"):
        unit = 256.0
    arithmetic = arithmetic_of(w, half)
    assert arithmetic is not None  # `schedule.refusal` was asked
    config = Config(
        tokens=tile.tokens, row_blocks=tile.rows, row_groups=tile.groups, input_groups=tile.deep,
        stages=stages(tile, bits, groups, w.scales.element_size(), w.addend is not None), group=group, groups=groups,
        scale_words=width, kind=ELEMENTS[f.element], bits=bits,
        scale=E8M0_NORMAL.value if e8m0 and w.normal_scales else SCALES[f.scale], addend=addend_kind(w), arithmetic=arithmetic,
        global_op=GLOBAL_OPS[f.global_op], divide=f.divisor != 1.0, has_bias=bias, half=half, adjacent=tile.together,
        store=store, routed=routed, gate=gate, ahead=not e8m0 if tile.ahead == 2 else bool(tile.ahead),
        pdl=gpu.supports_pdl(w.device),
    )  # fmt: skip
    return CachedKernel(maps, w.tiled, Factors(shift, unit, float(f.divisor)), config)


def launch(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, y: torch.Tensor, tile: FusedTile, split: WorkSplit,
    blocks: Blocks | None = None, gate: int = 0,
) -> None:  # fmt: skip
    """One launch over the tiles of `split`."""
    engine = y.dtype == x.dtype and y.shape[1] % 8 == 0
    routed = blocks is not None
    key = (tile, x.dtype, y.dtype, None if bias is None else bias.dtype, engine, routed, gate, w.scales.data_ptr(),
           w.planes[w.format.bits].data_ptr())  # fmt: skip
    cached = w.launches.get(key)
    if cached is None:
        store = 2 if engine else 1
        cached = w.launches[key] = _kernel(w, tile, x.dtype == torch.float16, bias is not None, store, routed, gate)
    none, device = w.scales, x.device
    x_map = _map(x, [tile.tokens, 64])
    y_map = _map(y, [tile.tokens, 32 * tile.rows if gate else 64 * tile.rows]) if engine else x_map
    values = Values(none if bias is None else bias, none if w.global_scale is None else w.global_scale)
    routing = BlockPointers(none, none, none, none) if blocks is None else BlockPointers(
        blocks.count, blocks.expert, blocks.first, blocks.last)  # fmt: skip
    work = Work(x.shape[0], w.shape[-2], split.rows * split.tokens, split.sharing, split.rows, split.tokens, cached.units)
    with gpu.use(device):
        scratch = _no_scratch(device)
        if split.partials:
            partial = torch.empty(split.partials, dtype=torch.float32, device=device)
            scratch = Scratch(partial, gpu.arrival_counters(device, split.rest * tile.groups))
        arguments = (y_map, y, x_map, *cached.maps, *values, *routing, *scratch, *work, *cached.factors)
        if cached.compiled is None:
            cached.compiled = wgmma_kernel[(split.programs,)](
                *arguments, config=cached.config, **gpu.launch_options(device), num_warps=4, enable_fp_fusion=False
            )
        else:
            cached.compiled[(split.programs, 1, 1)](*arguments, cached.config)
