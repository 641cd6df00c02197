"""Launches of the products with rounded activations: which kernel, which tile, how x is rounded.

As elsewhere (relaunch.py), what does not change from call to call is kept with the weight.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import triton

import torch

from ....errors import BackendError
from ....numerics.activations import INTEGRAL_TABLES, activation_span, segment_length
from ....numerics.activations import refusal as format_refusal
from ....spec import Format
from .. import device as gpu
from ..decode import E8M0_NORMAL, SCALES
from ..decoders import BYTES, FOLDED, FOLDED_SPREAD
from ..launch import GLOBAL_OPS, addend_kind, format_of, fragments, pointers_of
from ..relaunch import KeptMaps, Relaunch, TensorMap, cached
from ..tuning.wgmma_tiles import LEAST_TOKENS
from ..weight import CudaWeight, by_16, group_elements, scale_groups
from ..wgmma.schedule import fused
from ..wgmma.schedule import refusal as fused_refusal
from ..wgmma.schedule import warming_tokens as fused_tokens
from .product import Rounded, RoundedTile, Sizes, rounded_kernel
from .quantize import BY_16, BY_BYTES, BY_E2M1, BY_NIBBLES, FP8, INT8, STRAIGHT, WHOLE_TOKENS, Rounding, quantize_kernel
from .wgmma import UNIT, Config, Folded, Pointers, rounded_wgmma_kernel

MODES = {"int8": INT8.value, "fp8": FP8.value}
WHOLE = UNIT.value
"""Inputs of which rounded rows are whole multiples."""
FEW_TOKENS = 16
"""Tokens up to which E4M3 values in 16 bits are multiplied by the kernel for few tokens."""
SEGMENTS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Segments:
    """Inputs of one sum, of one scale of the activations (int8), and of a padded row."""

    segment: int
    span: int
    padded: int


@dataclass(frozen=True)
class PortableTile:
    """Tokens and rows of a tile, warps of a program, steps whose loads are in flight."""

    tokens: int
    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WgmmaTile:
    """Tokens of a tile, blocks of 64 rows of a warpgroup, warpgroups along the rows, stages at
    most, tokens of a product, warpgroups on the same rows, whether words are decoded while products
    run, and token blocks that are adjacent in the order of tiles.
    """

    tokens: int
    rows: int
    groups: int
    stages: int
    product: int
    deep: int = 1
    ahead: int = 1
    together: int = 8

    def fitted(self, bits: int, scale_words: int, ordered: bool) -> int:
        """Stages that fit into shared memory for codes of so many bits; `ordered`: sums of int8."""
        rows = 64 * self.rows * self.groups
        stage = self.tokens * WHOLE + rows * 16 * bits + 2 * max(rows // 16, 8) * scale_words
        sums = self.groups * (1 if ordered else self.deep - 1) * self.tokens * 256 if self.deep > 1 else 0
        outputs = self.groups * self.deep * self.product * 128
        return min(self.stages, (SHARED_BYTES - self.rows * (sums + outputs)) // stage // self.deep * self.deep)


SHARED_BYTES = 232448 - 2048
"""Shared memory of a program on Hopper less what barriers and Triton's own state take."""
TILES = {
    "fp8": (
        (WgmmaTile(16, 1, 2, 8, 16), 0.37), (WgmmaTile(64, 1, 2, 6, 64), 0.46), (WgmmaTile(64, 1, 2, 8, 64, 2, 0), 0.39),
        (WgmmaTile(64, 1, 1, 8, 64, 2), 0.24), (WgmmaTile(128, 1, 2, 4, 64), 0.63), (WgmmaTile(192, 1, 2, 5, 64), 0.81),
        (WgmmaTile(256, 1, 2, 4, 32), 1.08),
    ),
    "int8": (
        (WgmmaTile(16, 1, 2, 8, 16), 0.25), (WgmmaTile(16, 1, 1, 8, 16, 4), 0.19), (WgmmaTile(64, 1, 2, 6, 64), 0.43),
        (WgmmaTile(128, 1, 2, 4, 128, 1, 0), 0.64),
    ),
}  # fmt: skip
"""Tiles of wgmma.py, and the microseconds of a unit of 128 inputs (H200, 4-bit weights)."""


@functools.cache
def segments_of(mode: str, fmt: Format, k: int) -> Segments | str:
    """How a row of k inputs is summed, or the sentence why it cannot be."""
    why = format_refusal(fmt, mode)
    if why:
        return why
    whole = fmt.groups(k) == 1
    size = k if whole else fmt.group_size
    segment = segment_length(size)
    if whole:
        segment = max(16, triton.next_power_of_2(segment))
    elif segment not in SEGMENTS or size % segment:
        return f"{fmt} has groups of {size}; rounded activations take groups of 16, 32, 64, 128 and larger multiples of 32"
    span = activation_span(fmt, segment) if mode == "int8" else segment
    return Segments(segment, span, -(-k // WHOLE) * WHOLE)


def linear(
    x: torch.Tensor,
    w: CudaWeight,
    bias: torch.Tensor | None,
    mode: str,
    tile: PortableTile | WgmmaTile | None = None,
    half: bool | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """y (m, n) = x wᵀ + bias with x rounded to 8 bits, m ≥ 1. `half`: E4M3 is multiplied in
    float16; None where the GPU has no other product.
    """
    s = segments_of(mode, w.format, w.shape[1])
    if isinstance(s, str):
        raise BackendError(f"[linear] {s}")
    chosen = schedule_of(x, w, mode, s) if tile is None and not invariant else None
    if chosen is not None:
        rounded = quantized(x if x.stride(1) == 1 else x.contiguous(), mode, s, False, launches=w.launches, values=True)
        if chosen == "fused":
            return fused(rounded.codes, w, bias, x_scales=rounded.scales)
        return fragments(rounded.codes, w, bias, x_scales=rounded.scales)
    if w.order is not None:
        x = x.index_select(1, w.order)
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = tile or tile_for(x, w, mode, s, invariant)
    if isinstance(tile, WgmmaTile):
        return _on_wgmma(x, w, bias, mode, s, tile)
    if half is None:
        half = mode == "fp8" and not gpu.converts_fp8(x.device)
    return _portable(x, w, bias, mode, s, tile, half)


def schedule_of(x: torch.Tensor, w: CudaWeight, mode: str, s: Segments) -> str | None:
    """The schedule for exact activations that multiplies E4M3 values kept in x's type: "fragments"
    for few tokens, "fused" for E2M1 under 8-bit scales in groups of 16, whose products with a scale
    need six bits. None: a kernel of 8 bits.
    """
    if mode != "fp8" or x.element_size() != 2:
        return None
    if x.shape[0] <= FEW_TOKENS and w.fragments and not w.lanes:
        return "fragments"
    fine = w.format.element == "e2m1" and w.scales.element_size() == 1 and s.segment == 16
    return "fused" if fine and x.shape[0] >= LEAST_TOKENS and fused_refusal(x, w) is None else None


def tile_for(x: torch.Tensor, w: CudaWeight, mode: str, s: Segments, invariant: bool) -> PortableTile | WgmmaTile:
    """The kernel and tile for x (m, k). int8 sums have the same bits in all; E4M3 sums are made in
    an order of each kernel's own, which `invariant` fixes.
    """
    m = x.shape[0]
    if gpu.capability(x.device)[0] == 9 and serves_wgmma(w, mode, s):
        parts = s.segment < WHOLE and not folds(w, mode)  # their terms need registers beside the sums
        most = 64 if parts and mode == "int8" else 128 if parts or w.addend is not None else 256
        return wgmma_tile(m, w.shape[0], gpu.multiprocessors(x.device), mode, most, invariant)
    if invariant and mode == "fp8":
        return PortableTile(16, 64, 4, 3)
    if m <= 16:
        return PortableTile(16, 16, 2, 4)
    return PortableTile(32, 64, 4, 3) if m <= 64 else PortableTile(128, 128, 8, 3)


def warming_tokens(tokens: tuple[int, ...], x: torch.Tensor, w: CudaWeight, mode: str, invariant: bool) -> list[int]:
    """Numbers of tokens in the range of `tokens` whose kernels are all those of the range, for x of
    this type and device.
    """
    s = segments_of(mode, w.format, w.shape[1])
    if isinstance(s, str):
        return []
    first: dict[Any, int] = {}
    for m in range(min(tokens), max(tokens) + 1):
        rows = x[:1].expand(m, x.shape[1])
        schedule = None if invariant else schedule_of(rows, w, mode, s)
        first.setdefault(schedule or tile_for(rows, w, mode, s, invariant), m)
    more = fused_tokens(tokens, w, x.dtype == torch.float16) if "fused" in first else []
    return [*first.values(), *more]


@functools.lru_cache(maxsize=1 << 14)
def wgmma_tile(m: int, n: int, programs: int, mode: str, most: int, invariant: bool) -> WgmmaTile:
    """The tile of at most `most` tokens with the least rounds of programs times the time of a unit.
    Where warpgroups share rows, sums of FP8 are made in another order: not with `invariant`.
    """

    def time(tile: WgmmaTile, unit: float) -> float:
        return -(-(-(-m // tile.tokens) * -(-n // (64 * tile.groups))) // programs) * unit

    tiles = [t for t in TILES[mode] if t[0].tokens <= most and not (invariant and mode == "fp8" and t[0].deep > 1)]
    return min(tiles, key=lambda t: time(*t))[0]


def needs_sums(w: CudaWeight) -> bool:
    """True where a product needs the sums of the codes of x: zero points, biases, minima, and bytes
    that are multiplied less 128.
    """
    return w.addend is not None or (w.format.element == "uint" and w.format.bits == 8)


def around_zero(w: CudaWeight, mode: str) -> tuple[float, float]:
    """What is added to a sum for each unit of x's sum, and what zero points are lessened by.

    Bytes of UINT are multiplied less 128, which is added again. Of int8, unsigned codes with
    integer zero points are summed as (c − h) − (z − h) with h half of the codes, as on the CPU,
    whose bits the result has.
    """
    f = w.format
    eight = f.element == "uint" and f.bits == 8
    if mode != "int8" or f.element != "uint" or f.zero != "int":
        return 128.0 if eight else 0.0, 0.0
    half = float(1 << (f.bits - 1))
    return 0.0 if eight else -half, half


def unit_of(w: CudaWeight) -> float:
    """What the whole elements of a weight are multiples of."""
    f = w.format
    return 2.0 ** (2 - f.bits) if f.element == "mxint" else INTEGRAL_TABLES.get(f.element, (1.0, 0))[0]


def quantized(
    x: torch.Tensor, mode: str, s: Segments, sums: bool, order: int = STRAIGHT.value, by_token: bool = True,
    launches: dict[Any, Any] | None = None, values: bool = False,
) -> Rounded:  # fmt: skip
    """x (m, k), inner stride 1, to codes, scales and sums of codes (quantize.py); `values`: codes
    of FP8 as numbers of x's type.
    """
    m, k = x.shape
    spans, segments = s.padded // s.span, s.padded // s.segment
    q = torch.empty((m, s.padded), dtype=x.dtype if values else torch.int8, device=x.device)
    stride = -(-m // WHOLE_TOKENS.value) * WHOLE_TOKENS.value
    shapes = ((m, spans), (m, segments)) if by_token else ((spans, stride), (segments, stride))
    scales = torch.empty(shapes[0] if mode == "int8" else (stride,), dtype=torch.float32, device=x.device)
    total = torch.empty(shapes[1], dtype=torch.float32, device=x.device) if sums else scales
    key = "rounded x", mode, m, x.stride(0), x.dtype, x.data_ptr() % 16, order, by_token, values
    again = None if launches is None else launches.get(key)
    with gpu.use(x.device):
        if again is not None:
            again(q, scales, total, x)
            return Rounded(q, scales, total)
        block = min(1024 if mode == "int8" else 4096, triton.next_power_of_2(s.padded))
        grid = (m, triton.cdiv(s.padded, block)) if mode == "int8" else (m,)
        rounding = Rounding(MODES[mode], s.span, s.segment, block, sums, order, by_token, values)
        rest = k, s.padded, x.stride(0), spans, segments, stride
        overlap = gpu.overlap_options(x.device)
        compiled = quantize_kernel[grid](
            q, scales, total, x, *rest, rounding=rounding, **overlap, num_warps=4, enable_fp_fusion=False
        )
        if launches is not None and compiled is not None:
            launches[key] = cached(compiled, grid, (*rest, rounding, overlap["PDL"]))
    return Rounded(q, scales, total)


def _key(name: str, dtype: torch.dtype, w: CudaWeight, bias: torch.Tensor | None, *rest: Any) -> tuple[Any, ...]:
    """What a cached launch depends on."""
    of_bias = None if bias is None else (bias.dtype, bias.data_ptr() % 16)
    planes = next(iter(w.planes.values()))
    return name, dtype, of_bias, planes.data_ptr(), w.scales.data_ptr(), *rest


def _portable(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, mode: str, s: Segments, tile: PortableTile, half: bool
) -> torch.Tensor:
    """y (m, n) by product.py."""
    m, n = x.shape[0], w.shape[0]
    rounded = quantized(x, mode, s, needs_sums(w), launches=w.launches)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    first = y, rounded, w.scales if bias is None else bias
    key = _key("rounded", x.dtype, w, bias, m, mode, tile, half)
    again = w.launches.get(key)
    with gpu.use(x.device):
        if again is not None:
            again(*first)
            return y
        plus, less = around_zero(w, mode)
        config = RoundedTile(
            mode=MODES[mode],
            half=half,
            has_bias=bias is not None,
            tokens=tile.tokens,
            rows=tile.rows,
            segment=s.segment,
            each=s.span // s.segment,
            unit=unit_of(w) if mode == "int8" else 1.0,
            plus=plus,
            less=less,
            stages=tile.stages,
        )
        grid = (triton.cdiv(n, tile.rows) * triton.cdiv(m, tile.tokens),)
        sizes = Sizes(s.padded, s.padded // s.span, s.padded // s.segment)
        rest = pointers_of(w), m, n, sizes, scale_groups(w), float(w.format.divisor)
        constants = {"format": format_of(w, False), "tile": config}
        compiled = rounded_kernel[grid](*first, *rest, **constants, num_warps=tile.warps, enable_fp_fusion=False)
        if compiled is not None:
            w.launches[key] = cached(compiled, grid, (*rest, *constants.values()))
    return y


def serves_wgmma(w: CudaWeight, mode: str, s: Segments) -> bool:
    """True where the kernel of wgmma.py takes the weight: fragment order, a decoder to bytes,
    groups of 16 (of 4 bits), 32 and more, one level of scales.
    """
    f = w.format
    if (f.bits, f.element, mode) not in BYTES or w.super_scales is not None or f.minimum:
        return False
    return bool(w.fragments) and not w.lanes and (s.segment >= 32 or (f.bits == 4 and by_16(f, w.shape[-1])))


def folds(w: CudaWeight, mode: str) -> bool:
    """True where E2M1 · scale is an E5M2 value for every group of 32: scales near each other."""
    f = w.format
    near = f.scale == "e8m0" and w.normal_scales and w.spread <= FOLDED_SPREAD
    return mode == "fp8" and f.element == "e2m1" and f.group_size == 32 and near and f.groups(w.shape[-1]) > 1


def order_of(bits: int, element: str, mode: str, sixteen: bool = False) -> int:
    """The order of x's codes that words of fragment order meet (`quantize.stored_at`)."""
    by_bytes = bits == 8 or BYTES[bits, element, mode].e5m2
    return (BY_BYTES if by_bytes else BY_E2M1 if element == "e2m1" else BY_NIBBLES).value + (BY_16.value if sixteen else 0)


@dataclass
class CachedProduct:
    """A kernel of wgmma.py for one weight and kind of call."""

    maps: KeptMaps
    config: Config
    folded: Folded
    again: Relaunch | None = None


def _on_wgmma(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, mode: str, s: Segments, tile: WgmmaTile) -> torch.Tensor:
    """y (m, n) by wgmma.py."""
    m, n, f = x.shape[0], w.shape[0], w.format
    if folds(w, mode):
        s = Segments(WHOLE, WHOLE, s.padded)
    rounded = quantized(x, mode, s, needs_sums(w), order_of(f.bits, f.element, mode, s.segment == 16), False, w.launches)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    engine = n % 8 == 0 and x.element_size() == 2
    rows = 64 * tile.rows * tile.groups
    key = _key("rounded wgmma", x.dtype, w, bias, mode, tile, engine)
    kernel = w.launches.get(key)
    if kernel is None:
        kernel = w.launches[key] = _product(w, bias is not None, x.dtype, mode, s, tile, engine)
    codes = rounded.codes if mode == "int8" else rounded.codes.view(torch.float8_e4m3fn)
    x_map = TensorMap(codes, (tile.product, max(s.segment, 32)))
    y_map = TensorMap(y, (tile.product, 64 * tile.rows)) if engine else x_map
    pointers = Pointers(
        y,
        w.scales,
        w.scales if w.addend is None else w.addend,
        y if bias is None else bias,
        y if w.global_scale is None else w.global_scale,
        rounded.scales,
        rounded.sums,
    )
    programs = min(gpu.multiprocessors(x.device), triton.cdiv(n, rows) * triton.cdiv(m, tile.tokens))
    rest = m, n, s.padded // WHOLE, scale_groups(w), -(-m // WHOLE_TOKENS.value) * WHOLE_TOKENS.value, kernel.folded
    with gpu.use(x.device):
        if kernel.again is not None:
            kernel.again((programs, 1, 1), (y_map, x_map, kernel.maps, pointers), (*rest, kernel.config))
            return y
        compiled = rounded_wgmma_kernel[(programs,)](
            *(map.descriptor() for map in (y_map, x_map, *kernel.maps)),
            pointers,
            *rest,
            config=kernel.config,
            **gpu.launch_options(x.device),
            num_warps=4,
            enable_fp_fusion=False,
        )
        if compiled is not None:
            kernel.again = Relaunch(compiled, maps=4)
    return y


def _product(
    w: CudaWeight, has_bias: bool, dtype: torch.dtype, mode: str, s: Segments, tile: WgmmaTile, engine: bool
) -> CachedProduct:
    """The arguments that depend on no token."""
    f, rows = w.format, 64 * tile.rows * tile.groups
    fold = folds(w, mode)
    decoder = BYTES[f.bits, f.element, FOLDED if fold else mode]
    words = w.planes[f.bits].view(torch.int32)
    tiles = words.numel() // (w.tiled * 32 * f.bits)
    words_map = TensorMap(words.reshape(tiles, f.bits * w.tiled, 32), (rows // 16, 2 * f.bits, 32))
    width = staged_words(w)
    scales_map = TensorMap(w.scales.view(torch.int16).reshape(tiles, -1), (max(rows // 16, 8), width)) if width else words_map
    plus, less = around_zero(w, mode)
    config = Config(
        mode=MODES[mode],
        tokens=tile.tokens,
        row_blocks=tile.rows,
        row_groups=tile.groups,
        input_groups=tile.deep,
        product=tile.product,
        stages=tile.fitted(f.bits, width, mode == "int8"),
        segment=s.segment,
        group=group_elements(w),
        spans=mode == "int8" and s.span != s.segment,
        fold=fold,
        e5m2=decoder.e5m2,
        bits=f.bits,
        scale=E8M0_NORMAL.value if w.normal_scales else SCALES[f.scale],
        addend=addend_kind(w),
        scale_words=width,
        scale_bfloat=w.scales.dtype == torch.bfloat16,
        unit=decoder.unit,
        plus=plus,
        less=less,
        decoder=decoder.code,
        registers=decoder.registers,
        global_op=GLOBAL_OPS[f.global_op],
        divide=f.divisor != 1.0,
        divisor=float(f.divisor),
        has_bias=has_bias,
        half=dtype == torch.float16,
        adjacent=tile.together,
        store=2 if engine else 1,
        ahead=bool(tile.ahead),
        pdl=gpu.supports_pdl(w.device),
    )
    folded = Folded(float(fold_shift(w.top)), 2.0 ** (w.top - 128)) if fold else Folded(0.0, 1.0)
    return CachedProduct(KeptMaps((words_map, scales_map)), config, folded)


def fold_shift(top: int) -> int:
    """What makes the exponent field of 2^15 in float16 of the largest E8M0 byte: sums then lack
    2^(top − 128), of which the decoder's values have 2^-14.
    """
    return 30 - top


def staged_words(w: CudaWeight) -> int:
    """16-bit words of the scales of 16 rows and 128 inputs where the copy engine brings them to a
    stage: whole groups, rows of 32 to 128 bytes. Else 0.
    """
    group, each = group_elements(w), 8 * w.scales.element_size()
    words = max(1, WHOLE // group) * each
    return words if max(group, WHOLE) % min(group, WHOLE) == 0 and each <= 16 <= words <= 64 else 0
