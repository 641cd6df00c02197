"""Launches of the products with rounded activations."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

import torch

from ....errors import BackendError
from ....numerics.activations import INTEGRAL_TABLES, activation_span, segment_length
from ....numerics.activations import refusal as format_refusal
from .. import device as gpu
from ..decode import E8M0_NORMAL, ELEMENTS, SCALES
from ..decoders import BYTES
from ..launch import GLOBAL_OPS, addend_kind, format_of, pointers_of
from ..relaunch import TensorMap
from ..weight import CudaWeight, group_elements, scale_groups
from .product import Rounded, RoundedTile, Sizes, rounded_kernel
from .quantize import BY_BYTES, BY_E2M1, BY_NIBBLES, FP8, INT8, STRAIGHT, Rounding, quantize_kernel
from .wgmma import Config, Pointers, rounded_wgmma_kernel

MODES = {"int8": INT8.value, "fp8": FP8.value}
WHOLE = 128
"""Inputs of which rounded rows are whole multiples."""
SEGMENTS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Segments:
    """Inputs of one sum, of one scale of the activations (int8), and of a padded row."""

    segment: int
    span: int
    padded: int


@functools.cache
def segments_of(mode: str, fmt, k: int) -> Segments | str:
    """How a row of k inputs is summed, or the sentence why it cannot be."""
    why = format_refusal(fmt, mode)
    if why:
        return why
    size = k if fmt.groups(k) == 1 else fmt.group_size
    segment = segment_length(size)
    if fmt.groups(k) == 1:
        segment = max(16, triton.next_power_of_2(segment))
    elif segment not in SEGMENTS or size % segment:
        return f"{fmt} has groups of {size}; rounded activations take groups of 16, 32, 64 and multiples of 32 from 128 on"
    span = activation_span(fmt, segment) if mode == "int8" else segment
    return Segments(segment, span, -(-k // WHOLE) * WHOLE)


def quantized(x: torch.Tensor, mode: str, s: Segments, sums: bool, order: int = STRAIGHT.value, by_token: bool = True) -> Rounded:
    """x (m, k), inner stride 1, to codes, scales and sums of codes."""
    m, k = x.shape
    spans, segments = -(-k // s.span), -(-k // s.segment)
    q = torch.empty((m, s.padded), dtype=torch.int8, device=x.device)
    shapes = ((m, spans), (m, segments)) if by_token else ((spans, m), (segments, m))
    scales = torch.empty(shapes[0] if mode == "int8" else (m,), dtype=torch.float32, device=x.device)
    total = torch.empty(shapes[1], dtype=torch.float32, device=x.device) if sums else scales
    block = min(1024 if mode == "int8" else 4096, triton.next_power_of_2(s.padded))
    grid = (m, triton.cdiv(s.padded, block)) if mode == "int8" else (m,)
    rounding = Rounding(MODES[mode], s.span, s.segment, block, sums, order, by_token)
    with gpu.use(x.device):
        quantize_kernel[grid](
            q, scales, total, x, k, s.padded, x.stride(0), spans, segments, m, rounding=rounding, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return Rounded(q, scales, total)


@dataclass(frozen=True)
class WgmmaTile:
    """Tokens, blocks of 64 rows of a warpgroup, warpgroups, stages."""

    tokens: int
    rows: int
    groups: int
    stages: int
    together: int = 8


def on_wgmma(w: CudaWeight, mode: str, s: Segments) -> bool:
    """True where the kernel of wgmma.py takes the weight."""
    f = w.format
    if (f.bits, f.element, mode) not in BYTES or s.segment < 32 or w.super_scales is not None or f.minimum:
        return False
    return bool(w.fragments) and not (f.group_size == 16 and f.groups(w.shape[1]) > 1)


def wgmma(x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, mode: str, s: Segments, tile: WgmmaTile) -> torch.Tensor:
    """y (m, n) on Hopper; x in the weight's order of inputs."""
    m, n, f = x.shape[0], w.shape[0], w.format
    row = BYTES[f.bits, f.element, mode]
    order = BY_BYTES if f.bits == 8 else BY_E2M1 if f.element == "e2m1" else BY_NIBBLES
    rounded = quantized(x, mode, s, needs_sums(w), order.value, False)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    engine = n % 8 == 0 and x.element_size() == 2
    codes = rounded.codes if mode == "int8" else rounded.codes.view(torch.float8_e4m3fn)
    bn = 64 * tile.rows * tile.groups
    words = w.planes[f.bits].view(torch.int32)
    tiles = words.numel() // (w.tiled * 32 * f.bits)
    x_map = TensorMap(codes, (tile.tokens, s.segment))
    w_map = TensorMap(words.reshape(tiles, f.bits * w.tiled, 32), (bn // 16, 2 * f.bits, 32))
    y_map = TensorMap(y, (tile.tokens, 64 * tile.rows)) if engine else x_map
    config = Config(
        mode=MODES[mode], tokens=tile.tokens, row_blocks=tile.rows, row_groups=tile.groups, stages=tile.stages, segment=s.segment,
        group=group_elements(w), spans=mode == "int8" and s.span != s.segment, bits=f.bits, kind=ELEMENTS[f.element],
        scale=E8M0_NORMAL.value if w.normal_scales else SCALES[f.scale], addend=addend_kind(w), unit=row.unit,
        plus=128.0 if f.bits == 8 and f.element == "uint" else 0.0, decoder=row.code,
        registers="=&r,=&r,r,r,r,r,r,r,r,r", global_op=GLOBAL_OPS[f.global_op], divide=f.divisor != 1.0, divisor=float(f.divisor),
        has_bias=bias is not None, half=x.dtype == torch.float16, adjacent=tile.together, store=2 if engine else 1,
    )  # fmt: skip
    pointers = Pointers(
        y, w.scales, w.scales if w.addend is None else w.addend, y if bias is None else bias,
        y if w.global_scale is None else w.global_scale, rounded.scales, rounded.sums,
    )  # fmt: skip
    programs = min(gpu.multiprocessors(x.device), triton.cdiv(n, bn) * triton.cdiv(m, tile.tokens))
    with gpu.use(x.device):
        rounded_wgmma_kernel[(programs,)](
            y_map.descriptor(), x_map.descriptor(), w_map.descriptor(), pointers, m, n, s.padded // WHOLE, scale_groups(w), m,
            config=config, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def linear(
    x: torch.Tensor, w: CudaWeight, bias: torch.Tensor | None, activations: str, tile: tuple[int, int, int, int] | WgmmaTile | None = None,
    half: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """y (m, n) = x wᵀ + bias with x rounded to 8 bits, m ≥ 1. `tile`: tokens, rows, warps, stages."""
    m, n = x.shape[0], w.shape[0]
    f = w.format
    s = segments_of(activations, f, w.shape[1])
    if isinstance(s, str):
        raise BackendError(f"[linear] {s}")
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if w.order is not None:
        x = x.index_select(1, w.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    if isinstance(tile, WgmmaTile):
        return wgmma(x, w, bias, activations, s, tile)
    sums = needs_sums(w)
    rounded = quantized(x, activations, s, sums)
    k = w.shape[1]
    if half is None:
        half = activations == "fp8" and not gpu.converts_fp8(x.device)
    tokens, rows, warps, stages = tile or tile_for(m, n)
    unit = INTEGRAL_TABLES.get(f.element, (2.0 ** (2 - f.bits) if f.element == "mxint" else 1.0, 0))[0] if activations == "int8" else 1.0
    config = RoundedTile(
        MODES[activations], half, bias is not None, tokens, rows, s.segment, s.span // s.segment, unit, stages
    )  # fmt: skip
    grid = (triton.cdiv(n, rows) * triton.cdiv(m, tokens),)
    sizes = Sizes(s.padded, -(-k // s.span), -(-k // s.segment))
    with gpu.use(x.device):
        rounded_kernel[grid](
            y, rounded, w.scales if bias is None else bias, pointers_of(w), m, n, sizes, scale_groups(w), float(f.divisor),
            format=format_of(w, False), tile=config, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def needs_sums(w: CudaWeight) -> bool:
    """True where a product needs the sums of the codes of x: zero points, biases, minima, and bytes
    that are multiplied less 128.
    """
    return w.addend is not None or (w.format.element == "uint" and w.format.bits == 8)


def tile_for(m: int, n: int) -> tuple[int, int, int, int]:
    """Tokens, rows, warps and stages."""
    if m <= 16:
        return 16, 32, 4, 3
    if m <= 64:
        return 32, 64, 4, 3
    return 128, 128, 8, 3
