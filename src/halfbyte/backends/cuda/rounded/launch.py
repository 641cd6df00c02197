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
from ..launch import GLOBAL_OPS, addend_kind, format_of, pointers_of
from ..relaunch import Relaunch, TensorMap, cached
from ..weight import CudaWeight, by_16, group_elements, scale_groups
from .product import Rounded, RoundedTile, Sizes, rounded_kernel
from .quantize import BY_16, BY_BYTES, BY_E2M1, BY_NIBBLES, FP8, INT8, STRAIGHT, Rounding, quantize_kernel
from .wgmma import UNIT, Config, Pointers, rounded_wgmma_kernel

MODES = {"int8": INT8.value, "fp8": FP8.value}
WHOLE = UNIT.value
"""Inputs of which rounded rows are whole multiples."""
WHOLE_TOKENS = 256
"""Tokens of which the scales of x are whole multiples where those of a span are adjacent."""
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
    """Tokens of a tile, blocks of 64 rows of a warpgroup, warpgroups, stages, and token blocks that
    are adjacent in the order of tiles.
    """

    tokens: int
    rows: int
    groups: int
    stages: int
    together: int = 8


WGMMA_TILES = (WgmmaTile(16, 1, 2, 8), WgmmaTile(32, 1, 2, 8), WgmmaTile(64, 1, 2, 6), WgmmaTile(128, 1, 2, 4))


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
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, mode: str, tile: PortableTile | WgmmaTile | None = None,
    half: bool | None = None, invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """y (m, n) = x wᵀ + bias with x rounded to 8 bits, m ≥ 1. `half`: E4M3 is multiplied in
    float16; None where the GPU has no other product.
    """
    s = segments_of(mode, w.format, w.shape[1])
    if isinstance(s, str):
        raise BackendError(f"[linear] {s}")
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


def tile_for(x: torch.Tensor, w: CudaWeight, mode: str, s: Segments, invariant: bool) -> PortableTile | WgmmaTile:
    """The kernel and tile for x (m, k). int8 sums have the same bits in all; E4M3 sums are made in
    an order of each kernel's own, which `invariant` fixes.
    """
    m = x.shape[0]
    if gpu.capability(x.device)[0] == 9 and serves_wgmma(w, mode, s):
        few = mode == "int8" and s.segment <= 32  # more sums than registers hold beside them
        return wgmma_tile(m, w.shape[0], gpu.multiprocessors(x.device), few)
    if invariant and mode == "fp8":
        return PortableTile(16, 64, 4, 3)
    if m <= 16:
        return PortableTile(16, 16, 2, 4)
    return PortableTile(32, 64, 4, 3) if m <= 64 else PortableTile(128, 128, 8, 3)


@functools.lru_cache(maxsize=4096)
def wgmma_tile(m: int, n: int, most: int, few: bool) -> WgmmaTile:
    """The tile with the least rounds of programs times the time of one, 200 + tokens (H200)."""
    tiles = WGMMA_TILES[:3] if few else WGMMA_TILES
    return min(tiles, key=lambda t: -(-(-(-m // t.tokens) * -(-n // 128)) // most) * (200 + t.tokens))


def needs_sums(w: CudaWeight) -> bool:
    """True where a product needs the sums of the codes of x: zero points, biases, minima, and bytes
    that are multiplied less 128.
    """
    return w.addend is not None or (w.format.element == "uint" and w.format.bits == 8)


def unit_of(w: CudaWeight) -> float:
    """What the whole elements of a weight are multiples of."""
    f = w.format
    return 2.0 ** (2 - f.bits) if f.element == "mxint" else INTEGRAL_TABLES.get(f.element, (1.0, 0))[0]


def quantized(
    x: torch.Tensor, mode: str, s: Segments, sums: bool, order: int = STRAIGHT.value, by_token: bool = True,
    launches: dict[Any, Any] | None = None,
) -> Rounded:  # fmt: skip
    """x (m, k), inner stride 1, to codes, scales and sums of codes (quantize.py)."""
    m, k = x.shape
    spans, segments = s.padded // s.span, s.padded // s.segment
    q = torch.empty((m, s.padded), dtype=torch.int8, device=x.device)
    stride = -(-m // WHOLE_TOKENS) * WHOLE_TOKENS
    shapes = ((m, spans), (m, segments)) if by_token else ((spans, stride), (segments, stride))
    scales = torch.empty(shapes[0] if mode == "int8" else (stride,), dtype=torch.float32, device=x.device)
    total = torch.empty(shapes[1], dtype=torch.float32, device=x.device) if sums else scales
    key = "rounded x", mode, m, x.stride(0), x.dtype, x.data_ptr() % 16, order, by_token
    again = None if launches is None else launches.get(key)
    with gpu.use(x.device):
        if again is not None:
            again(q, scales, total, x)
            return Rounded(q, scales, total)
        block = min(1024 if mode == "int8" else 4096, triton.next_power_of_2(s.padded))
        grid = (m, triton.cdiv(s.padded, block)) if mode == "int8" else (m,)
        rounding = Rounding(MODES[mode], s.span, s.segment, block, sums, order, by_token)
        rest = k, s.padded, x.stride(0), spans, segments, stride
        compiled = quantize_kernel[grid](q, scales, total, x, *rest, rounding=rounding, num_warps=4, enable_fp_fusion=False)
        if launches is not None and compiled is not None:
            launches[key] = cached(compiled, grid, (*rest, rounding))
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
        config = RoundedTile(
            mode=MODES[mode], half=half, has_bias=bias is not None, tokens=tile.tokens, rows=tile.rows, segment=s.segment,
            each=s.span // s.segment, unit=unit_of(w) if mode == "int8" else 1.0, stages=tile.stages,
        )  # fmt: skip
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
    """True where E2M1 · scale is an E4M3 value for every group of 32: scales near each other."""
    f = w.format
    near = f.scale == "e8m0" and w.normal_scales and w.spread <= FOLDED_SPREAD
    return mode == "fp8" and f.element == "e2m1" and f.group_size == 32 and near and f.groups(w.shape[-1]) > 1


def order_of(bits: int, element: str, sixteen: bool = False) -> int:
    """The order of x's codes that words of fragment order meet (`quantize.stored_at`)."""
    return (BY_BYTES if bits == 8 else BY_E2M1 if element == "e2m1" else BY_NIBBLES).value + (BY_16.value if sixteen else 0)


@dataclass
class CachedProduct:
    """A kernel of wgmma.py for one weight and kind of call."""

    words: TensorMap
    config: Config
    folded: tuple[int, float]
    again: Relaunch | None = None


def _on_wgmma(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, mode: str, s: Segments, tile: WgmmaTile) -> torch.Tensor:
    """y (m, n) by wgmma.py."""
    m, n, f = x.shape[0], w.shape[0], w.format
    if folds(w, mode):
        s = Segments(WHOLE, WHOLE, s.padded)
    rounded = quantized(x, mode, s, needs_sums(w), order_of(f.bits, f.element, s.segment == 16), False, w.launches)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    engine = n % 8 == 0 and x.element_size() == 2
    rows = 64 * tile.rows * tile.groups
    key = _key("rounded wgmma", x.dtype, w, bias, mode, tile, engine)
    kernel = w.launches.get(key)
    if kernel is None:
        kernel = w.launches[key] = _product(w, bias is not None, x.dtype, mode, s, tile, engine)
    codes = rounded.codes if mode == "int8" else rounded.codes.view(torch.float8_e4m3fn)
    x_map = TensorMap(codes, (tile.tokens, max(s.segment, 32)))
    y_map = TensorMap(y, (tile.tokens, 64 * tile.rows)) if engine else x_map
    pointers = Pointers(
        y, w.scales, w.scales if w.addend is None else w.addend, y if bias is None else bias,
        y if w.global_scale is None else w.global_scale, rounded.scales, rounded.sums,
    )  # fmt: skip
    programs = min(gpu.multiprocessors(x.device), triton.cdiv(n, rows) * triton.cdiv(m, tile.tokens))
    rest = m, n, s.padded // WHOLE, scale_groups(w), -(-m // WHOLE_TOKENS) * WHOLE_TOKENS, *kernel.folded
    with gpu.use(x.device):
        if kernel.again is not None:
            kernel.again((programs, 1, 1), (y_map, x_map, kernel.words, pointers), (*rest, kernel.config))
            return y
        compiled = rounded_wgmma_kernel[(programs,)](
            y_map.descriptor(), x_map.descriptor(), kernel.words.descriptor(), pointers, *rest, config=kernel.config,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        if compiled is not None:
            kernel.again = Relaunch(compiled, maps=3)
            kernel.again.keep((kernel.words,))
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
    config = Config(
        mode=MODES[mode], tokens=tile.tokens, row_blocks=tile.rows, row_groups=tile.groups, stages=tile.stages, segment=s.segment,
        group=group_elements(w), spans=mode == "int8" and s.span != s.segment, fold=fold, bits=f.bits,
        scale=E8M0_NORMAL.value if w.normal_scales else SCALES[f.scale], addend=addend_kind(w), unit=decoder.unit,
        plus=128.0 if f.bits == 8 and f.element == "uint" else 0.0, decoder=decoder.code, registers=decoder.registers,
        global_op=GLOBAL_OPS[f.global_op], divide=f.divisor != 1.0, divisor=float(f.divisor), has_bias=has_bias,
        half=dtype == torch.float16, adjacent=tile.together, store=2 if engine else 1,
    )  # fmt: skip
    folded = (w.top - 6, 2.0 ** (w.top - 6 - 127)) if fold else (0, 1.0)
    return CachedProduct(TensorMap(words.reshape(tiles, f.bits * w.tiled, 32), (rows // 16, 2 * f.bits, 32)), config, folded)
