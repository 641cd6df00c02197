"""x · wᵀ on a packed weight for torch modules: by address on the CPU, and differentiable with
respect to x.

    linear(x, w, bias, activations="exact")      the product; w is a result of `ops.prepare`
    embedding(ids, w, dtype)                     rows of w
    gradient(g, w)                               g · w, by slabs of decoded rows

A contiguous tensor on the CPU is passed to the native core as it is, which keeps the host time of a
decoding step low. A packed weight has no gradient: train an adapter beside it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..backends import Prepared
from ..backends.cpu import native
from ..numerics.array_interop import check_memory, check_storage, check_tensor
from ..numerics.opaque_call import name_of, recall, remember
from . import custom_ops  # noqa: F401 # defines the operators

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLAB_BYTES = 1 << 26
"""Decoded rows that `gradient` holds at a time."""


def linear(x: Tensor, w: Prepared, bias: Tensor | None = None, activations: str = "exact") -> Tensor:
    """y = x · wᵀ + bias, x (..., k) of any strides on w's device -> (..., n) in x's dtype.

    Differentiable with respect to x and bias; in the int8 mode the gradient is that of the exact
    product (the rounding of x passes it on unchanged). Raises what `ops.linear` raises.
    """
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = torch.ops.halfbyte.linear(x, bias, int(_handle(name_of(w), activations)), w.shape[0])
        return traced
    y: Tensor | None = ops.at_once(x, w, bias, activations)
    if y is not None:
        return y
    check_tensor("linear", "x", x)
    if bias is not None:
        check_tensor("linear", "bias", bias)
    check_memory("linear", x, bias)
    return compute(x, w, bias, activations)


def compute(x: Tensor, w: Prepared, bias: Tensor | None = None, activations: str = "exact") -> Tensor:
    """`linear` for a caller that has checked its tensors (`custom_ops.needs_dispatch`)."""
    if type(x) is not Tensor:
        check_tensor("linear", "x", x)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        y: Tensor = _Linear.apply(x, bias, w, activations)
        return y
    return _product(x, w, bias, activations)


def _product(x: Tensor, w: Prepared, bias: Tensor | None, activations: str) -> Tensor:
    y: Tensor | None = ops.at_once(x, w, bias, activations)
    return ops.product(x, w, bias, activations) if y is None else y


def embedding(ids: Tensor, w: Prepared, dtype: torch.dtype) -> Tensor:
    """Rows of w by index, decoded exactly: (*ids.shape, k) of `dtype` on ids' device. Raises what
    `ops.embedding` raises.

    A single index on the CPU, as in a decoding step, goes to the native core directly.
    """
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = ops.embedding(ids, w, dtype=dtype)
        return traced
    check_tensor("embedding", "ids", ids)
    check_memory("embedding", ids)
    return rows(ids, w, dtype)


def rows(ids: Tensor, w: Prepared, dtype: torch.dtype) -> Tensor:
    """`embedding` for a caller that has checked its tensors."""
    if type(ids) is not Tensor:
        check_tensor("embedding", "ids", ids)
    if w.backend == "cpu" and dtype in DTYPES and ids.dtype == torch.int64 and ids.is_cpu and ids.numel() == 1:
        n, k = w.shape
        check_storage("embedding", ids)
        if 0 <= int(ids) < n:
            row = torch.empty((*ids.shape, k), dtype=dtype)
            native().embedding(w.data.native, ids, row)
            return row
    y: Tensor = ops.embedding(ids, w, dtype=dtype)
    return y


def gradient(g: Tensor, w: Prepared, bounds: tuple[int, int] | None = None) -> Tensor:
    """g · w, (..., n) -> (..., k) in g's dtype, summed in float32: the gradient of x · wᵀ with
    respect to x.

    bounds  the rows of w that made the product, all of them when None
    Rows are decoded exactly, `SLAB_BYTES` of them at a time, in float32 on the CPU and in g's dtype
    elsewhere.
    """
    first, last = bounds or (0, w.shape[0])
    k = w.shape[1]
    dtype = torch.float32 if g.is_cpu else g.dtype
    flat = g.reshape(-1, last - first).to(dtype)
    total = torch.zeros((flat.shape[0], k), dtype=torch.float32, device=g.device)
    step = max(1, SLAB_BYTES // max(1, 4 * k))
    for start in range(first, last, step):
        stop = min(start + step, last)
        dense = ops.embedding(torch.arange(start, stop, device=g.device), w, dtype=dtype)
        total += flat[:, start - first : stop - first] @ dense
    return total.to(g.dtype).reshape(*g.shape[:-1], k)


class _Product:
    """What `halfbyte::linear` computes for a weight that is in no module."""

    def __init__(self, w: Prepared, activations: str) -> None:
        self.weight, self.activations = weakref.ref(w), activations

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        w = self.weight()
        assert w is not None  # the product is dropped with its weight
        return linear(x, w, bias, self.activations)

    def gradient(self, g: Tensor) -> Tensor:
        w = self.weight()
        assert w is not None
        return gradient(g, w)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _handle(name: str, activations: str) -> str:
    """The number of a product for the operators, as a string: torch.compile would make a number a
    symbol.
    """
    w: Prepared = recall(int(name))
    product = _Product(w, activations)
    return str(remember(lambda: product, w))


class _Linear(torch.autograd.Function):  # type: ignore[misc] # torch is not type-checked
    """The product on autograd's tape. The weight is no input of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, w: Prepared, activations: str) -> Tensor:
        ctx.weight = w
        return _product(x.detach(), w, bias if bias is None else bias.detach(), activations)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, wants_bias = ctx.needs_input_grad[:2]
        back = _Gradient.apply(g, ctx.weight) if wants_x else None
        return back, g.reshape(-1, g.shape[-1]).sum(0) if wants_bias else None, None, None


class _Gradient(torch.autograd.Function):  # type: ignore[misc]
    """`gradient` on the tape, for a derivative of a derivative: linear, and its own gradient is the
    exact product.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Prepared) -> Tensor:
        ctx.weight = w
        return gradient(g.detach(), w)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, None]:
        return _Linear.apply(h, None, ctx.weight, "exact"), None
