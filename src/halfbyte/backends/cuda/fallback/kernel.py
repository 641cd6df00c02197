"""One element a lane from canonical parts, whatever its groups: the kernel of weight.py and its
launch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import torch

from .. import device as gpu
from ..decode import SCALES, scale_f32
from .weight import GROUPINGS, PlainWeight

NESTED = tl.constexpr(7)
UNSCALED = tl.constexpr(8)
_SCALES = {**SCALES, "nested": 7, "none": 8}
_BLOCK = 1024


@triton.jit
def plain_kernel(
    OUT, IDS, CODES, TABLE, S, Z, B, MAP, ABSMAX, OFFSET, GLOBAL, INDEX,
    k, G, row_bytes, groups, first, matrix, group_size, group_rows, divisor,
    BITS: tl.constexpr, GROUPING: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    INVERSE: tl.constexpr, GLOBAL_OP: tl.constexpr, GATHER: tl.constexpr, INDEXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT[i, :] = row i (or IDS[i]) of matrix `matrix`, whose rows begin at `first` of the whole
    tensor. G groups a row; `groups` in all, for strided ones; group_rows rows share a scale in
    blocks.
    """
    i = tl.program_id(0).to(tl.int64)
    row = first + (tl.load(IDS + i) if GATHER else i)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = j < k
    bit = j * BITS
    at = CODES + row * row_bytes + bit // 8
    raw = tl.load(at, mask=live, other=0).to(tl.int32)
    if 8 % BITS != 0:
        raw |= tl.load(at + 1, mask=live & (bit // 8 + 1 < row_bytes), other=0).to(tl.int32) << 8
    v = tl.load(TABLE + ((raw >> (bit % 8)) & ((1 << BITS) - 1)), mask=live, other=0).to(tl.float64)
    if GROUPING == 0:
        g = row * G + (tl.load(INDEX + j, mask=live, other=0) if INDEXED else j // group_size)
    elif GROUPING == 1:
        g = (row * k + j) // group_size
    elif GROUPING == 2:
        g = (row * k + j) % groups
    else:
        g = (matrix * groups + (row - first) // group_rows) * G + j // group_size
    if ZERO:
        v -= tl.load(Z + g, mask=live, other=0).to(tl.float64)
    if SCALE == NESTED:
        s = tl.load(MAP + tl.load(S + g, mask=live, other=0).to(tl.int32), mask=live, other=0).to(tl.float64)
        second = tl.load(ABSMAX + g // 256, mask=live, other=1).to(tl.float64)
        s = (s / second if INVERSE else s * second) + tl.load(OFFSET).to(tl.float64)
    elif SCALE != UNSCALED:
        s = scale_f32(tl.load(S + g, mask=live, other=1), SCALE).to(tl.float64)
    else:
        s = v * 0 + 1.0
    if INVERSE and SCALE != NESTED:
        v = v / s
    else:
        v = v * s
    if GLOBAL_OP == 1:
        v = v * tl.load(GLOBAL + matrix).to(tl.float64)
    elif GLOBAL_OP == 2:
        v = v / tl.load(GLOBAL + matrix).to(tl.float64)
    v = v / divisor
    if BIAS:
        v += tl.load(B + g, mask=live, other=0).to(tl.float64)
    tl.store(OUT + i * k + j, v.to(tl.float32).to(OUT.dtype.element_ty), mask=live)


def dequantize(w: PlainWeight, dtype: torch.dtype, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Dense (n, k), or the rows `ids` of it."""
    f = w.format
    n, k = w.shape
    rows = n if ids is None else ids.numel()
    out = torch.empty((rows, k), dtype=dtype, device=w.device)
    if not rows or not k:
        return out
    codes = w.parts["codes"]

    def part(name: str) -> Any:
        return w.parts.get(name, codes)

    size = k if f.group_size == -1 else f.group_size
    block_rows = n if f.group_rows == -1 else f.group_rows
    groups = -(-w.lead * n * k // size) if f.grouping == "strided" else -(-n // block_rows)
    with gpu.use(w.device):
        plain_kernel[(rows, triton.cdiv(k, _BLOCK))](
            out, codes if ids is None else ids, codes, w.table, part("scales"), part("zeros"), part("biases"), part("nested_map"),
            part("nested_absmax"), part("nested_offset"), part("global_scale"), part("group_index"),
            k, max(1, f.groups(k)), codes.shape[-1], groups, w.at * n, w.at, size, block_rows, float(f.divisor),
            BITS=f.bits, GROUPING=GROUPINGS[f.grouping], SCALE=_SCALES[f.scale], ZERO=f.zero != "none", BIAS=bool(f.bias),
            INVERSE=f.inverse, GLOBAL_OP={"": 0, "multiply": 1, "divide": 2}[f.global_op], GATHER=ids is not None,
            INDEXED="group_index" in w.parts, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def linear(x: torch.Tensor, w: PlainWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The weight decoded to x's dtype, then cuBLAS; float32 where MX exponents leave float16's
    range.
    """
    dtype = torch.float32 if x.dtype == torch.float16 and w.format.scale == "e8m0" else x.dtype
    y = torch.nn.functional.linear(x.to(dtype), dequantize(w, dtype), None if bias is None else bias.to(dtype))
    return y.to(x.dtype)
