"""One element a lane from canonical parts, whatever its groups: the kernel of weight.py and its
launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import torch

from .. import device as gpu
from ..decode import SCALES, scale_f32
from ..launch import GLOBAL_OPS, Multiply, blockwise_matmul, cublas
from ..relaunch import cached
from .weight import GROUPINGS, CanonicalWeight

NESTED = tl.constexpr(7)
UNSCALED = tl.constexpr(8)
_SCALES = {**SCALES, "nested": 7, "none": 8}
_BLOCK = 1024


class Parts(NamedTuple):
    """Pointers to a weight's canonical parts and its element table. What is absent points at the
    codes and is never read.
    """

    codes: Any
    table: Any
    scales: Any
    zeros: Any
    biases: Any
    nested_map: Any
    nested_absmax: Any
    nested_offset: Any
    global_scale: Any
    group_index: Any


class Extent(NamedTuple):
    """Inputs, groups and bytes of codes in a row; groups in all (strided) or along the rows
    (blocks); the tensor's row that begins the matrix, and the matrix's number; inputs and rows that
    share a scale; the format's divisor; rows of the matrix before the first that is decoded.
    """

    k: Any
    row_groups: Any
    row_bytes: Any
    groups: Any
    first: Any
    matrix: Any
    group_size: Any
    group_rows: Any
    divisor: Any
    skipped: Any


class Layout(NamedTuple):
    """What the kernel is compiled for: width of a code, kinds of grouping and scale, which parts
    there are (zero points, biases, act-order), scales that divide, the tensor's factor (0 none, 1
    multiplies, 2 divides).
    """

    bits: int
    grouping: int
    scale: int
    zeros: bool
    biases: bool
    inverse: bool
    global_op: int
    indexed: bool

    def constants(self) -> Layout:
        """Itself; called in a kernel, the record whose fields are compile-time constants."""
        return self


@triton.jit
def group_of(parts, extent, row, j, live, F: tl.constexpr):
    """The group of inputs j of a row."""
    if F.grouping == 0:
        if F.indexed:
            return row * extent.row_groups + tl.load(parts.group_index + j, mask=live, other=0)
        else:
            return row * extent.row_groups + j // extent.group_size
    elif F.grouping == 1:
        return (row * extent.k + j) // extent.group_size
    elif F.grouping == 2:
        return (row * extent.k + j) % extent.groups
    else:
        block_row = extent.matrix * extent.groups + (row - extent.first) // extent.group_rows
        return block_row * extent.row_groups + j // extent.group_size


@triton.jit
def decode_kernel(OUT, IDS, parts, extent, layout: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[i, :] = row extent.skipped + i (or IDS[i]) of the matrix. Grid (rows, k / BLOCK)."""
    F: tl.constexpr = layout.constants()
    i = tl.program_id(0).to(tl.int64)
    row = extent.first + (tl.load(IDS + i) if GATHER else extent.skipped + i)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = j < extent.k
    bit = j * F.bits
    at = parts.codes + row * extent.row_bytes + bit // 8
    raw = tl.load(at, mask=live, other=0).to(tl.int32)
    if 8 % F.bits != 0:
        raw |= tl.load(at + 1, mask=live & (bit // 8 + 1 < extent.row_bytes), other=0).to(tl.int32) << 8
    v = tl.load(parts.table + ((raw >> (bit % 8)) & ((1 << F.bits) - 1)), mask=live, other=0).to(tl.float64)
    g = group_of(parts, extent, row, j, live, F)
    if F.zeros:
        v -= tl.load(parts.zeros + g, mask=live, other=0).to(tl.float64)
    if F.scale == NESTED:
        code = tl.load(parts.scales + g, mask=live, other=0).to(tl.int32)
        s = tl.load(parts.nested_map + code, mask=live, other=0).to(tl.float64)
        second = tl.load(parts.nested_absmax + g // 256, mask=live, other=1).to(tl.float64)
        s = (s / second if F.inverse else s * second) + tl.load(parts.nested_offset).to(tl.float64)
    elif F.scale != UNSCALED:
        s = scale_f32(tl.load(parts.scales + g, mask=live, other=1), F.scale).to(tl.float64)
    else:
        s = v * 0 + 1.0
    if F.inverse and F.scale != NESTED:
        v = v / s
    else:
        v = v * s
    if F.global_op == 1:
        v = v * tl.load(parts.global_scale + extent.matrix).to(tl.float64)
    elif F.global_op == 2:
        v = v / tl.load(parts.global_scale + extent.matrix).to(tl.float64)
    v = v / extent.divisor
    if F.biases:
        v += tl.load(parts.biases + g, mask=live, other=0).to(tl.float64)
    tl.store(OUT + i * extent.k + j, v.to(tl.float32).to(OUT.dtype.element_ty), mask=live)


def dequantize(
    w: CanonicalWeight, dtype: torch.dtype, ids: torch.Tensor | None = None, first: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Dense (n, k), or the rows `ids` of it, or as many as `out` has from `first` on."""
    f = w.format
    n, k = w.shape
    if out is None:
        out = torch.empty((n if ids is None else ids.numel(), k), dtype=dtype, device=w.device)
    rows = len(out)
    if not rows or not k:
        return out
    codes = w.parts["codes"]
    key = None if ids is not None else ("decode", dtype, rows, first, codes.data_ptr(), out.data_ptr() % 16)
    again = w.launches.get(key)
    if again is not None:
        with gpu.use(w.device):
            again(out)
        return out
    parts = Parts(codes, w.table, *(w.parts.get(name, codes) for name in Parts._fields[2:]))
    size = k if f.group_size == -1 else f.group_size
    block_rows = n if f.group_rows == -1 else f.group_rows
    groups = -(-w.lead * n * k // size) if f.grouping == "strided" else -(-n // block_rows)
    extent = Extent(k, max(1, f.groups(k)), codes.shape[-1], groups, w.at * n, w.at, size, block_rows, float(f.divisor), first)
    layout = Layout(
        f.bits,
        GROUPINGS[f.grouping],
        _SCALES[f.scale],
        f.zero != "none",
        bool(f.bias),
        f.inverse,
        GLOBAL_OPS[f.global_op],
        "group_index" in w.parts,
    )
    grid, rest = (rows, triton.cdiv(k, _BLOCK)), (codes if ids is None else ids, parts, extent)
    constants = {"layout": layout, "GATHER": ids is not None, "BLOCK": _BLOCK}
    with gpu.use(w.device):
        compiled = decode_kernel[grid](out, *rest, **constants, num_warps=4, enable_fp_fusion=False)
        if key is not None and compiled is not None:
            w.launches[key] = cached(compiled, grid, (*rest, *constants.values()))
    return out


def linear(x: torch.Tensor, w: CanonicalWeight, bias: torch.Tensor | None, multiply: Multiply = cublas) -> torch.Tensor:
    """Rows decoded to x's dtype, a block at a time, then `multiply`; float32 where MX exponents
    leave float16's range.
    """
    dtype = torch.float32 if x.dtype == torch.float16 and w.format.scale == "e8m0" else x.dtype
    return blockwise_matmul(x, w.shape, dtype, bias, lambda first, _, out: dequantize(w, dtype, first=first, out=out), multiply)
