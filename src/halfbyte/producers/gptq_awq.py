"""AutoGPTQ, GPTQModel and AutoAWQ: the scale times the shifted code, in the compute dtype, rounded
once.

    w = round_d( round_d(scale) · (code − zero) ),   d the compute dtype

code − zero is an integer of at most 9 bits, exact in float16; in bfloat16 it stays below 256 and is
exact too. The product of two numbers of d is exact in float32 where d is float16 or bfloat16, so
float32 arithmetic and one cast give d's own product.

d is the dtype of the scales; when another dtype is requested, the scales are cast to it first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.decode import element_values, group_expander
from ..numerics.bits import unpack
from ..numerics.exact import dtype_named
from ..spec import EncodedTensor


def decode_autogptq(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What AutoGPTQ 0.7's matrix product with the identity returns, transposed to (n, k).

    `qlinear_cuda` uses a stored zero point plus 1 as it is, so up to 16 at 4 bits; the older
    `qlinear_cuda_old`, selected by `details["variant"] == "cuda_old"`, masks the sum to `bits`
    bits, so that 16 becomes 0.
    """
    if q.details.get("variant") == "cuda_old" and q.format.zero == "int":
        return scaled_codes(q, dtype, q.parts["zeros"] & np.int16((1 << q.format.bits) - 1))
    return scaled_codes(q, dtype)


def decode_gptqmodel(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """GPTQModel's dequantized weight, as (n, k).

    Zero points are those of its v2 format: the subtraction of 1 in v1 files is undone, wrapping,
    before anything is decoded.
    """
    return scaled_codes(q, dtype)


def decode_autoawq(q: EncodedTensor, dtype: Any) -> NDArray[Any]:
    """What AutoAWQ's GEMM dequantization returns, transposed to (n, k); float16 by default.

    GEMV, GEMVFast and Marlin files have no decoder outside their CUDA kernels. The result for them
    is the weight that was quantized into them, by the same formula; for GEMVFast with the zero
    points from which −scale · zero was computed.
    """
    return scaled_codes(q, dtype)


def scaled_codes(q: EncodedTensor, dtype: Any, zeros: NDArray[np.integer] | None = None) -> NDArray[Any]:
    """The formula above for an integer weight in groups along rows.

    zeros  zero points [*lead, n, G] to use in place of the stored ones
    """
    fmt, k, out = q.format, q.shape[-1], dtype_named(dtype)
    expand = group_expander(fmt, q.shape, q.window, q.parts.get("group_index"))
    value = element_values(fmt, unpack(q.parts["codes"], fmt.bits, k), np.float32)
    if zeros is None and fmt.zero == "int":
        zeros = q.parts["zeros"]
    if zeros is not None:
        value -= expand(zeros.astype(np.float32))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        value *= expand(q.parts["scales"].astype(out).astype(np.float32))
        return value.astype(out)
