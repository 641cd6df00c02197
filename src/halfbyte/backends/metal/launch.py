"""Host side of the kernels, the same for both runtimes: which kernel, which buffers, how many
threads.

Grids round up: ceil(n / rows of a threadgroup) groups, never a floor, and kernels drop what lies
beyond m and n.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import BackendError
from . import kernels
from .kernels import GEMM_GROUP, MATVEC_ROWS, MATVEC_SIMDGROUPS, SIMDGROUP, TILE
from .runtime import Runtime
from .weight import FEWEST_ELEMENTS, MetalWeight, fused_refusal, size_of

MATVEC_M = 8
"""Tokens up to which the matrix-vector kernel serves; computed, not measured: past 8 a 64-token
tile does less work a weight.
"""
STRIPES = 64
"""Stripes of the striped schedule: a few for each of 8 to 40 GPU cores."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def weight_arrays(runtime: Runtime, w: MetalWeight) -> list[Any]:
    """Codes, scales, addends, as every kernel takes them."""
    return [runtime.aligned(w.codes, w.word_bytes), w.scales, w.scales if w.addends is None else w.addends]


def dequantize(runtime: Runtime, w: MetalWeight, dtype: str, ids: Any | None = None) -> Any:
    """Dense (n, k), or the rows `ids` (one axis) of it."""
    n, k = w.shape
    rows = n if ids is None else int(ids.shape[0])
    if rows == 0 or k == 0 or n == 0:
        return runtime.zeros((rows, k), dtype)
    index = runtime.zeros((FEWEST_ELEMENTS,), "int32") if ids is None else runtime.cast(ids, "int32")
    kernel = kernels.dequantize(w.format, dtype, gather=ids is not None)
    across, down, _ = kernel.group
    threads = (ceil_div(w.units, across) * across, ceil_div(rows, down) * down, 1)
    (y,) = runtime.run(
        kernel,
        [*weight_arrays(runtime, w), index, w.factors],
        [w.units, w.groups, k, rows],
        [w.format.divisor],
        [(rows, k)],
        threads,
    )
    return y if w.order is None else runtime.take_columns(y, w.order)


class Product:
    """Arguments every product takes."""

    def __init__(self, runtime: Runtime, x: Any, w: MetalWeight, bias: Any | None) -> None:
        self.runtime, self.w = runtime, w
        self.dtype = runtime.dtype_of(x)
        self.m, self.n = int(x.shape[0]), w.shape[0]
        self.x, self.stride = runtime.rows(x, 8 * w.units, w.order)
        self.has_bias = int(bias is not None)
        self.bias = w.factors if bias is None else runtime.cast(bias, "float32")

    def run(self, kernel: Any, extra: list[int], groups: tuple[int, int]) -> Any:
        """A kernel with the usual buffers over `groups` threadgroups; `extra` stands between units
        and m.
        """
        ints = [self.w.units, *extra, self.m, self.n, self.stride, self.has_bias]
        threads = (groups[0] * kernel.group[0], groups[1], 1)
        (y,) = self.runtime.run(
            kernel,
            [*weight_arrays(self.runtime, self.w), self.x, self.bias, self.w.factors],
            ints,
            [self.w.format.divisor],
            [(self.m, self.n)],
            threads,
        )
        return y


def linear(runtime: Runtime, x: Any, w: MetalWeight, bias: Any | None = None, schedule: str | None = None) -> Any:
    """x (m, k) · wᵀ + bias -> (m, n) in x's dtype."""
    m, n = int(x.shape[0]), w.shape[0]
    dtype = runtime.dtype_of(x)
    if m == 0 or size_of(w.shape) == 0:
        y = runtime.zeros((m, n), dtype)
        return y if bias is None else y + runtime.cast(bias, dtype)
    if schedule == "dequantize_then_gemm":
        y = runtime.matmul(x, dequantize(runtime, w, dtype))
        return y if bias is None else runtime.cast(runtime.cast(y, "float32") + runtime.cast(bias, "float32"), dtype)
    p = Product(runtime, x, w, bias)
    if schedule is None:
        if m <= MATVEC_M:
            return matvec(p)
        schedule = "double-buffered" if fused_refusal(w.format) else "fused"
    tiles = (ceil_div(n, TILE), ceil_div(m, TILE))
    if schedule == "fused":
        return fused(p, "wide")
    if schedule == "striped":
        return striped(p)
    make = kernels.gemm_single_stage if schedule == "single-stage" else kernels.gemm_double_buffered
    return p.run(make(w.format, dtype), [w.groups], tiles)


def matvec(p: Product, decoder: str = "") -> Any:
    """The m ≤ 8 schedule: 1, 2 or 4 tokens a threadgroup."""
    tokens = 1 if p.m == 1 else 2 if p.m == 2 else 4
    kernel = kernels.matvec(p.w.format, p.dtype, tokens, decoder)
    return p.run(kernel, [p.w.groups], (ceil_div(p.n, MATVEC_ROWS), ceil_div(p.m, tokens)))


def fused(p: Product, variant: str, decoder: str = "") -> Any:
    """The fused schedule on weights in rows; variant "" is the plain design."""
    why = fused_refusal(p.w.format)
    if why:
        raise BackendError(f"[metal] {why}")
    kernel = kernels.gemm_fused(p.w.format, p.dtype, variant, decoder)
    p.w = replace(p.w, codes=p.runtime.words(p.runtime.aligned(p.w.codes, 4)))
    return p.run(kernel, [p.w.units, 1, p.w.groups, 1], (ceil_div(p.n, TILE), ceil_div(p.m, TILE)))


def striped(p: Product) -> Any:
    """The striped schedule: equal shares of all tiles' steps, then the pieces of each output in
    order.
    """
    w, runtime = p.w, p.runtime
    tiles, steps = ceil_div(p.n, TILE) * ceil_div(p.m, TILE), ceil_div(w.units, 4)
    per_stripe = ceil_div(tiles * steps, STRIPES)
    stripes = ceil_div(tiles * steps, per_stripe)
    first = kernels.gemm_striped(w.format, p.dtype)
    (pieces,) = runtime.run(
        first,
        [*weight_arrays(runtime, w), p.x],
        [w.units, w.groups, p.m, p.n, p.stride, per_stripe],
        [],
        [(stripes + tiles, TILE, TILE)],
        (stripes * GEMM_GROUP[0], 1, 1),
    )
    second = kernels.gemm_striped_reduce(w.format.global_op, p.dtype)
    across, down, _ = second.group
    (y,) = runtime.run(
        second,
        [pieces, p.bias, w.factors],
        [w.units, p.m, p.n, per_stripe, p.has_bias],
        [w.format.divisor],
        [(p.m, p.n)],
        (ceil_div(p.n, across) * across, ceil_div(p.m, down) * down, 1),
    )
    return y


def rmsnorm_matvec(runtime: Runtime, x: Any, gain: Any, w: MetalWeight, eps: float) -> Any:
    """W · rmsnorm(x, gain) for one token x (k,) -> (n,)."""
    n, k = w.shape
    row, _ = runtime.rows(x.reshape(1, k), 8 * w.units, w.order)
    gains, _ = runtime.rows(gain.reshape(1, k), 8 * w.units, w.order)
    kernel = kernels.rmsnorm_matvec(w.format, runtime.dtype_of(x))
    threads = (ceil_div(n, MATVEC_ROWS) * SIMDGROUP * MATVEC_SIMDGROUPS, 1, 1)
    (y,) = runtime.run(
        kernel,
        [*weight_arrays(runtime, w), row, gains, w.factors],
        [w.units, w.groups, n, k],
        [w.format.divisor, eps],
        [(n,)],
        threads,
    )
    return y
