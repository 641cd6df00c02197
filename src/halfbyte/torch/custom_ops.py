"""torch operators over packed weights, so that `torch.compile` sees one opaque call where a module multiplies.

    halfbyte::linear(x, bias, module, n)      halfbyte::embedding(ids, module, k, dtype)      halfbyte::experts(...)

A packed weight is no tensor, so an operator is given its module's number; `register` hands one out. Outside a compiled graph
modules compute by themselves and pay nothing for this. linear passes a gradient on to x and bias, as `products.linear` does.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError

_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _operator(name: str, schema: str) -> Any:
    return torch.library.custom_op(name, mutates_args=(), schema=schema)


def register(module: Any) -> int:
    """A number that stands for `module` while it lives."""
    number = next(_numbers)
    _modules[number] = module
    return number


@_operator("halfbyte::linear", "(Tensor x, Tensor? bias, int module, int n) -> Tensor")  # type: ignore[untyped-decorator]
def _linear(x: Tensor, bias: Tensor | None, module: int, n: int) -> Tensor:
    return _modules[module].compute(x, bias)


@_linear.register_fake  # type: ignore[untyped-decorator]
def _linear_shape(x: Tensor, bias: Tensor | None, module: int, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


@_operator("halfbyte::linear_gradient", "(Tensor g, int module, int k) -> Tensor")  # type: ignore[untyped-decorator]
def _linear_gradient(g: Tensor, module: int, k: int) -> Tensor:
    return _modules[module].gradient(g)


@_linear_gradient.register_fake  # type: ignore[untyped-decorator]
def _linear_gradient_shape(g: Tensor, module: int, k: int) -> Tensor:
    return g.new_empty((*g.shape[:-1], k))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.module, _ = inputs
    ctx.k = x.shape[-1]


def _back(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    wants_x, wants_bias = ctx.needs_input_grad[:2]
    back = linear_gradient(g, ctx.module, ctx.k) if wants_x else None
    return back, g.reshape(-1, g.shape[-1]).sum(0) if wants_bias else None, None, None


_linear.register_autograd(_back, setup_context=_keep)


@_operator("halfbyte::embedding", "(Tensor ids, int module, int k, ScalarType dtype) -> Tensor")  # type: ignore[untyped-decorator]
def _embedding(ids: Tensor, module: int, k: int, dtype: torch.dtype) -> Tensor:
    return _modules[module].compute(ids)


@_embedding.register_fake  # type: ignore[untyped-decorator]
def _embedding_shape(ids: Tensor, module: int, k: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, k), dtype=dtype)


@_operator("halfbyte::experts", "(Tensor x, Tensor index, Tensor share, int module) -> Tensor")  # type: ignore[untyped-decorator]
def _experts(x: Tensor, index: Tensor, share: Tensor, module: int) -> Tensor:
    return _modules[module].compute(x, index, share)


@_experts.register_fake  # type: ignore[untyped-decorator]
def _experts_shape(x: Tensor, index: Tensor, share: Tensor, module: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _refuse(ctx: Any, g: Tensor) -> None:
    raise BackendError(
        "[experts] a compiled graph passes no gradient through packed experts; call the model without torch.compile, or let the "
        "experts' inputs record none"
    )


_experts.register_autograd(_refuse)

linear: Any = torch.ops.halfbyte.linear
linear_gradient: Any = torch.ops.halfbyte.linear_gradient
embedding: Any = torch.ops.halfbyte.embedding
experts: Any = torch.ops.halfbyte.experts
