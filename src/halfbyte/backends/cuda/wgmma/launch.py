"""Launches of the wgmma kernel (the schedule `fused`).

What does not change from call to call is kept with the weight (relaunch.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from triton.runtime.errors import OutOfResources

import torch

from .. import decoders
from .. import device as gpu
from ..decode import E4M3S, E8M0, E8M0_NORMAL, ELEMENTS, SCALES, SMALL, TABLE, UE4M3
from ..launch import GLOBAL_OPS, addend_kind
from ..mma.plan import TokenBlocks
from ..order import PLANES
from ..relaunch import KeptMaps, Relaunch, Repeat, TensorMap, addresses, hooked
from ..tuning.wgmma_tiles import FusedTile, WorkSplit, second_tokens, stages
from ..weight import CudaWeight, group_elements
from .kernel import Config, Factors, Numbers, Pointers, wgmma_kernel

HALF, BFLOAT, FLOAT32, FLOAT32_BFLOAT = 0, 1, 2, 3
"""The arithmetics of operand.py."""
ROWS_BY_ARITHMETIC = (decoders.HALF, decoders.BFLOAT, decoders.FLOAT32, decoders.FLOAT32)
"""What `decoders.PAIRS` calls them."""
ARITHMETIC = {
    "e8m0": (HALF, BFLOAT), "e4m3": (HALF, BFLOAT), "ue4m3": (HALF, BFLOAT), "float16": (HALF, FLOAT32),
    "bfloat16": (FLOAT32_BFLOAT, BFLOAT),
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
    f, scale = w.format, w.format.scale
    if not w.tiled:
        return None
    if f.bits == 4 and w.lanes:
        return FLOAT32 if SCALES[scale] == SMALL.value or scale in ("float16", "float32") else FLOAT32_BFLOAT
    if SCALES[scale] == SMALL.value or (scale == "float32" and not f.bias):
        return FLOAT32
    if f.element in ("e2m3", "e3m2"):
        return FLOAT32 if w.exact_half or not half else None
    if scale not in ARITHMETIC:
        return None
    if scale == "e8m0" and half and w.top < 0:
        return None
    finished = ARITHMETIC[scale][0 if half else 1]
    if w.format.bits == 8 and finished == BFLOAT:  # eight bits and a power of two do not fit a bfloat16 on the way
        return FLOAT32 if scale == "e8m0" else FLOAT32_BFLOAT
    return finished


POWERS = (E8M0.value, E4M3S.value, UE4M3.value)
"""Kinds of 8-bit scales that may bring the power of two that codes lack."""


@dataclass
class CachedKernel:
    """The kernel for one weight, tile and kind of call: the weight's tensor maps, the arguments
    that never change, and how it is launched again, once it has run.
    """

    maps: KeptMaps
    units: int
    factors: Factors
    config: Config
    again: Relaunch | None = None


class Again(NamedTuple):
    """A launch for other addresses: pointers that stay, those of scratch memory that is not used,
    and how much of it cut tiles need.
    """

    repeat: Repeat
    fixed: tuple[int | None, ...]
    no_scratch: tuple[int, int]
    partials: int
    counters: int


class FusedCall:
    """A product that was made before: its launches, and the bytes of y and x before the tokens of
    each.
    """

    __slots__ = ("_launches", "_shape")

    def __init__(self, shape: tuple[int, int], launches: list[tuple[int, int, Again]]) -> None:
        self._shape, self._launches = shape, launches

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """y; None where a profiler wants Triton's own launch."""
        if hooked():
            return None
        device = x.device
        y = torch.empty(self._shape, dtype=x.dtype, device=device)
        from_y, from_x, of_bias = y.data_ptr(), x.data_ptr(), None if bias is None else bias.data_ptr()
        with gpu.use(device):
            stream = gpu.stream_of(device)
            for before_y, before_x, (repeat, fixed, scratch, partials, counters) in self._launches:
                if partials:
                    partial = torch.empty(partials, dtype=torch.float32, device=device)
                    arrived = gpu.arrival_counters(device, counters, stream)
                    scratch = partial.data_ptr(), arrived.data_ptr()
                out = from_y + before_y
                repeat(stream, out, from_x + before_x, (out, of_bias, *fixed, *scratch))
        return y


@functools.cache
def _no_scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and counters of launches that cut no tile."""
    return torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(1, dtype=torch.int32, device=device)


def _kernel(
    w: CudaWeight, tile: FusedTile, half: bool, bias: bool, store: int, routed: bool, gate: int, x_scaled: bool = False
) -> CachedKernel:
    """The arguments that depend on no token."""
    f, bits, group = w.format, w.format.bits, group_elements(w)
    bn, groups = 64 * tile.rows * tile.groups, max(1, 64 // group)
    width, each = groups * 8 * w.scales.element_size(), max(bn // 16, 8)
    widths = PLANES[bits] if w.lanes else (bits,)
    planes = [w.planes[plane].view(torch.int32) for plane in widths]
    tiles = planes[0].numel() // (w.tiled * 32 * widths[0])  # a stack is one tall weight

    def terms(t: torch.Tensor | None, words: int) -> TensorMap:
        """16-bit words of terms of 16 rows; what a format lacks is the scales, never read."""
        part, box = (w.scales, width) if t is None else (t, words)
        return TensorMap(part.view(torch.int16).reshape(tiles, -1), (each, box))

    addend_words = 0 if w.addend is None else 8 * groups * w.addend.element_size()
    words = [
        TensorMap(p.reshape(tiles, b * w.tiled, 32), (each if b == 1 else bn // 16, b, 32))
        for p, b in zip(planes, widths, strict=True)
    ]
    maps = (
        words[0], words[-1], terms(w.scales, width), terms(w.addend, addend_words), terms(w.super_scales, 16),
        terms(w.super_mins, 16),
    )  # fmt: skip
    e8m0, e2m1 = f.scale == "e8m0", f.element == "e2m1"
    shift, unit = 0, 1.0
    if half and e8m0 and not w.lanes:
        shift = w.top - LARGEST[f.element]
        unit = 2.0 ** (shift if e2m1 else shift - 14)
    elif half and e2m1 and f.scale in ("e4m3", "ue4m3"):
        unit = 256.0
    arithmetic = arithmetic_of(w, half)
    assert arithmetic is not None  # `schedule.refusal` is None
    table = ELEMENTS[f.element] == TABLE.value
    addends, named, units, zero = addend_kind(w), ROWS_BY_ARITHMETIC[arithmetic], (1.0, 1.0), 0.0
    if table:
        named = decoders.TABLE
    elif SCALES[f.scale] == SMALL.value:
        named, units = decoders.SUBNORMAL, decoders.SUBNORMAL_UNITS[w.lanes]
        zero = units[0] * 2.0 ** (bits - 1) if f.element == "int" else 0.0
    inputs = decoders.BIASES if zero else addends
    row = (decoders.LANES if w.lanes else decoders.PAIRS)[bits, f.element, named]
    power = bool(row.power) and SCALES[f.scale] in POWERS and (half or not e8m0 or w.top >= 0)
    if power and arithmetic == BFLOAT:
        shift = w.top - 127 if e8m0 else 0
        unit = 2.0**shift if e8m0 else 256.0
    supers = sum(t is not None for t in (w.super_scales, w.super_mins))
    count = stages(tile, bits, groups, w.scales.element_size(), 0 if w.addend is None else w.addend.element_size(), supers)
    if count < 2 * tile.deep:
        raise OutOfResources(2 * tile.deep, count, "stages of shared memory")
    config = Config(
        tokens=tile.tokens,
        second=second_tokens(tile.tokens),
        row_blocks=tile.rows,
        row_groups=tile.groups,
        input_groups=tile.deep,
        stages=count,
        group=group,
        groups=groups,
        scale_words=width,
        addend_words=addend_words,
        plane=widths[0] if w.lanes else 0,
        more=widths[1] if len(widths) == 2 else 0,
        super_units=f.super_size // 64,
        signed=f.scale in ("i6", "i8"),
        kind=ELEMENTS[f.element],
        bits=bits,
        scale=E8M0_NORMAL.value if e8m0 and w.normal_scales else SCALES[f.scale],
        addend=addends,
        unit_low=units[0],
        unit_high=units[1],
        zero=zero,
        arithmetic=arithmetic,
        power=power,
        decoder=decoders.pair_assembly(bits, f.element, named, inputs, power, half, w.lanes),
        registers=decoders.pair_constraints(bits, f.element, inputs, w.lanes),
        positions=row.positions,
        global_op=GLOBAL_OPS[f.global_op],
        divide=f.divisor != 1.0,
        has_bias=bias,
        has_table=table,
        half=half,
        x_scaled=x_scaled,
        adjacent=tile.together,
        store=store,
        routed=routed,
        gate=gate,
        ahead=not e8m0 if tile.ahead == 2 else bool(tile.ahead),
        pdl=gpu.supports_pdl(w.device),
    )
    return CachedKernel(KeptMaps(maps), w.tiled, Factors(float(shift), unit, float(f.divisor)), config)


def launch(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, y: torch.Tensor, tile: FusedTile, split: WorkSplit,
    blocks: TokenBlocks | None = None, gate: int = 0, x_scales: torch.Tensor | None = None,
) -> Again | None:  # fmt: skip
    """One launch over the tiles of `split`; `x_scales` float32 (m) multiply the sums of tokens.
    What a later one needs, from the second on.
    """
    device, engine = x.device, y.dtype == x.dtype and y.shape[1] % 8 == 0
    table = (None, None, None, None) if blocks is None else blocks[:4]
    # Triton specializes the pointers of a record by their alignment.
    aligned = bias is None or bias.data_ptr() % 16 == 0, blocks is None or tuple([t.data_ptr() % 16 == 0 for t in blocks[:4]])
    key = (tile, x.dtype, y.dtype, bias is not None and bias.dtype, engine, blocks is None, gate, aligned, x_scales is None,
           w.scales.data_ptr(), next(iter(w.planes.values())).data_ptr())  # fmt: skip
    kernel = w.launches.get(key)
    if kernel is None:
        store = 2 if engine else 1
        kernel = w.launches[key] = _kernel(
            w, tile, x.dtype == torch.float16, bias is not None, store, blocks is not None, gate, x_scales is not None
        )
    box = second_tokens(tile.tokens) or tile.tokens
    x_map = TensorMap(x, (box, 64))
    y_map = TensorMap(y, (box, 32 * tile.rows if gate else 64 * tile.rows)) if engine else x_map
    with gpu.use(device):
        scratch = _no_scratch(device)
        if split.partials:
            partial = torch.empty(split.partials, dtype=torch.float32, device=device)
            scratch = (partial, gpu.arrival_counters(device, 2 * split.rest * tile.groups))
        pointers = Pointers._make((y, bias, w.global_scale, w.table, x_scales, *table, *scratch))
        numbers = Numbers(float(x.shape[0]), float(w.shape[-2]), float(split.sharing), float(kernel.units), *kernel.factors)
        if kernel.again is not None:
            grid, rest = (split.programs, 1, 1), (numbers, kernel.config)
            kernel.again(grid, (y_map, x_map, kernel.maps, pointers), rest)
            repeat = kernel.again.repeat(grid, (y_map, x_map, kernel.maps), rest)
            fixed = (*addresses((w.global_scale, w.table)), None, None, None, None, None)
            if repeat is not None:
                return Again(repeat, fixed, addresses(scratch), split.partials, 2 * split.rest * tile.groups)
            return None
        compiled = wgmma_kernel[(split.programs,)](
            *(map.descriptor() for map in (y_map, x_map, *kernel.maps)),
            pointers,
            numbers,
            config=kernel.config,
            **gpu.launch_options(device),
            num_warps=4,
            enable_fp_fusion=False,
        )
        if compiled is not None:
            kernel.again = Relaunch(compiled, maps=8)
    return None
