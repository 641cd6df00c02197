"""torch operators over packed weights: one opaque call in a graph that torch traces.

    halfbyte::linear(x, bias, handle, n)      halfbyte::embedding(ids, handle, k, dtype)      halfbyte::experts(...)

An operator's arguments are tensors and numbers, so a module is passed as an integer handle from `register`. In eager mode modules
compute without the dispatcher. linear is differentiable with respect to x and bias, as `functional.linear` is.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError

_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def _operator(name: str, schema: str) -> Any:
    return torch.library.custom_op(name, mutates_args=(), schema=schema)


def register(module: Any) -> int:
    """A handle of `module`, valid while the module exists."""
    handle = next(_handles)
    _modules[handle] = module
    return handle


@_operator("halfbyte::linear", "(Tensor x, Tensor? bias, int handle, int n) -> Tensor")  # type: ignore[untyped-decorator]
def _linear(x: Tensor, bias: Tensor | None, handle: int, n: int) -> Tensor:
    return _modules[handle].compute(x, bias)


@_linear.register_fake  # type: ignore[untyped-decorator]
def _linear_shape(x: Tensor, bias: Tensor | None, handle: int, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


@_operator("halfbyte::linear_gradient", "(Tensor g, int handle, int k) -> Tensor")  # type: ignore[untyped-decorator]
def _linear_gradient(g: Tensor, handle: int, k: int) -> Tensor:
    return _modules[handle].gradient(g)


@_linear_gradient.register_fake  # type: ignore[untyped-decorator]
def _linear_gradient_shape(g: Tensor, handle: int, k: int) -> Tensor:
    return g.new_empty((*g.shape[:-1], k))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.handle, _ = inputs
    ctx.k = x.shape[-1]


def _back(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    wants_x, wants_bias = ctx.needs_input_grad[:2]
    back = linear_gradient(g, ctx.handle, ctx.k) if wants_x else None
    return back, g.reshape(-1, g.shape[-1]).sum(0) if wants_bias else None, None, None


_linear.register_autograd(_back, setup_context=_keep)


@_operator("halfbyte::embedding", "(Tensor ids, int handle, int k, ScalarType dtype) -> Tensor")  # type: ignore[untyped-decorator]
def _embedding(ids: Tensor, handle: int, k: int, dtype: torch.dtype) -> Tensor:
    return _modules[handle].compute(ids)


@_embedding.register_fake  # type: ignore[untyped-decorator]
def _embedding_shape(ids: Tensor, handle: int, k: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, k), dtype=dtype)


@_operator("halfbyte::experts", "(Tensor x, Tensor topk_ids, Tensor topk_weights, int handle) -> Tensor")  # type: ignore[untyped-decorator]
def _experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: int) -> Tensor:
    return _modules[handle].compute(x, topk_ids, topk_weights)


@_experts.register_fake  # type: ignore[untyped-decorator]
def _experts_shape(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: int) -> Tensor:
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
