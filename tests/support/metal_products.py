"""Products by one Metal schedule on the CPU build, the weights and activations they are tested
with, and what must come out.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import torch
from halfbyte.backends.metal import kernels, launch
from halfbyte.formats import format_named
from halfbyte.tensor.qtensor import QTensor
from support import metal_bounds as bounds
from support.metal_formats import TORCH, backend
from support.random_tensors import finite_tensor

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TILED = ("single-stage", "double-buffered", "striped")
FUSED = ("fused plain", "fused wide")
MAKERS = {
    "single-stage": kernels.gemm_single_stage,
    "double-buffered": kernels.gemm_double_buffered,
    "striped": kernels.gemm_striped,
    "fused plain": kernels.gemm_fused,
    "fused wide": lambda f, t: kernels.gemm_fused(f, t, "wide"),
    "matvec": kernels.matvec,
}


def product(schedule, x, q, bias=None, flush=True):
    """x · wᵀ by one schedule."""
    b = backend(flush)
    p = b.prepare(q)
    if schedule in FUSED:
        variant = schedule.removeprefix("fused ").replace("plain", "")
        return launch.fused(launch.Product(b.runtime, x, p.data, bias), variant)
    if schedule == "matvec":
        return launch.matvec(launch.Product(b.runtime, x, p.data, bias))
    return b.linear(x, p, bias, schedule=schedule)


def tokens(m, k, dtype="float16", seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(m, k, generator=g)).to(TORCH[dtype])


def numbers(fmt, shape, seed):
    """A weight whose codes are all numbers: 0 · NaN and 0 · ∞ would fill a one-hot product with
    NaN, as they must.
    """
    q = finite_tensor(fmt, shape, seed)
    if fmt.element in ("e4m3", "e5m2"):
        q = QTensor(q.format, q.shape, {**q.parts, "codes": q.parts["codes"] & np.uint8(0xBF)})
    return q


def one_hot(q, dtype):
    """The weight's exact values, rounded once: what x = identity must give, (k, n)."""
    return q.dequantize(dtype).astype(np.float32).T


def assert_one_hot(y, q, dtype, rows=slice(None)):
    """y is one_hot(q, dtype)[rows]. A value that float32 does not hold may be rounded to float32
    first: there the other neighbour is right too where the exact value is within float32's
    rounding, 2^−24, of the middle of both.
    """
    once = one_hot(q, dtype)[rows]
    exact = q.dequantize("float64").T[rows]
    with np.errstate(invalid="ignore", over="ignore"):
        middle = (y.astype(np.float64) + once) / 2
        seam = (exact != exact.astype(np.float32)) & (np.abs(exact - middle) <= 2.0**-24 * np.abs(exact))
    np.testing.assert_array_equal(np.where(seam, once, y), once)


def assert_product(y, x, q, dtype, bias=None):
    """|y − x·wᵀ| per element: one rounding of y's dtype and k of float32 on the row's absolute sum."""
    exact, bound = bounds.product(x.double().numpy(), q, None if bias is None else bias.double().numpy())
    bounds.assert_within(y.double().numpy(), exact, bound, dtype, q.shape[1])


def whole_numbers(k, n=7):
    """A weight of small integers: every float32 sum of its products with integers is exact, in any
    order.
    """
    q = finite_tensor(format_named("int4", -1), (n, k), 2)
    return QTensor(q.format, q.shape, {**q.parts, "scales": np.ones_like(q.parts["scales"])})
