"""torch operators over packed weights: one opaque call in a graph that torch traces.

    halfbyte::linear(x, bias, handle, n)      halfbyte::embedding(ids, handle, k, dtype)      halfbyte::experts(...)

An operator's arguments are tensors and numbers, so a module is passed as an integer handle from
`register`. In eager mode modules compute without the dispatcher. linear is differentiable with
respect to x and bias, as `functional.linear` is, experts with respect to x and topk_weights.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.autograd import forward_ad
from torch.fx import Proxy

import torch
from torch import Tensor

from ..errors import BackendError, ShapeError
from ..numerics.array_interop import check_storage, check_tensor, torch_state
from ..numerics.opaque_call import recall, remember


class Handle:
    """The number of a module for the operators.

    number  for eager calls and for GPUs
    tensor  the same as a 0-dimensional tensor, which torch.compile passes to a graph that layers of
            one shape share; an integer of a module is a constant of the graph, so that every layer
            would be compiled separately
    """

    def __init__(self, number: int) -> None:
        self.number, self.tensor = number, torch.tensor(number, device="cpu")


_state = torch_state()


def needs_dispatch(*tensors: Tensor | None) -> bool:
    """True where a module must call its operator: torch traces or transforms, or a tensor has no
    memory of its own.
    """
    if torch.compiler.is_compiling() or _state.observed() or forward_ad._current_level >= 0:
        return True
    return not _state.readable(*tensors)  # torch.fx traces with proxies, which are no tensors


def _operator(name: str, schema: str) -> Any:
    return torch.library.custom_op(name, mutates_args=(), schema=schema)


def register(module: Any) -> Handle:
    """A handle of `module`, valid while the module exists."""
    return Handle(remember(weakref.ref(module), module))


@_operator("halfbyte::linear", "(Tensor x, Tensor? bias, SymInt handle, SymInt n) -> Tensor")  # type: ignore[untyped-decorator]
def _linear(x: Tensor, bias: Tensor | None, handle: int, n: int) -> Tensor:
    return recall(handle).compute(x, bias)


@_linear.register_fake  # type: ignore[untyped-decorator]
def _linear_shape(x: Tensor, bias: Tensor | None, handle: int, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


@_operator("halfbyte::linear_gradient", "(Tensor g, SymInt handle, SymInt k) -> Tensor")  # type: ignore[untyped-decorator]
def _linear_gradient(g: Tensor, handle: int, k: int) -> Tensor:
    return recall(handle).gradient(g)


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


@_operator("halfbyte::embedding", "(Tensor ids, SymInt handle, SymInt k, ScalarType dtype) -> Tensor")  # type: ignore[untyped-decorator]
def _embedding(ids: Tensor, handle: int, k: int, dtype: torch.dtype) -> Tensor:
    return recall(handle).compute(ids)


@_embedding.register_fake  # type: ignore[untyped-decorator]
def _embedding_shape(ids: Tensor, handle: int, k: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, k), dtype=dtype)


@_operator("halfbyte::experts", "(Tensor x, Tensor topk_ids, Tensor topk_weights, SymInt handle) -> Tensor")  # type: ignore[untyped-decorator]
def _experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: int) -> Tensor:
    return recall(handle).compute(x, topk_ids, topk_weights)


@_experts.register_fake  # type: ignore[untyped-decorator]
def _experts_shape(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_PAIR = "(Tensor g, Tensor x, Tensor topk_ids, Tensor topk_weights, {} handle) -> (Tensor, Tensor)"


@_operator("halfbyte::experts_gradient", _PAIR.format("SymInt"))  # type: ignore[untyped-decorator]
def _experts_gradient(g: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = recall(handle).gradient(g, x, topk_ids, topk_weights)
    return found


@_experts_gradient.register_fake  # type: ignore[untyped-decorator]
def _experts_gradient_shape(
    g: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: int | Tensor
) -> tuple[Tensor, Tensor]:
    plain = torch.contiguous_format
    return torch.empty_like(x, memory_format=plain), torch.empty_like(topk_weights, memory_format=plain)


def _keep_routing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, handle = inputs
    ctx.handle = None if isinstance(handle, Tensor) else handle
    ctx.save_for_backward(*tensors, *([handle] if ctx.handle is None else []))


def _experts_back(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.handle is None:
        back, share = torch.ops.halfbyte.experts_gradient_at(g, *ctx.saved_tensors)
    else:
        back, share = torch.ops.halfbyte.experts_gradient(g, *ctx.saved_tensors, ctx.handle)
    return back, None, share, None


_experts.register_autograd(_experts_back, setup_context=_keep_routing)


@_operator("halfbyte::linear_at", "(Tensor x, Tensor? bias, Tensor handle, SymInt n) -> Tensor")  # type: ignore[untyped-decorator]
def _linear_at(x: Tensor, bias: Tensor | None, handle: Tensor, n: int) -> Tensor:
    return recall(int(handle)).compute(x, bias)


@_operator("halfbyte::linear_gradient_at", "(Tensor g, Tensor handle, SymInt k) -> Tensor")  # type: ignore[untyped-decorator]
def _linear_gradient_at(g: Tensor, handle: Tensor, k: int) -> Tensor:
    return recall(int(handle)).gradient(g)


@_operator("halfbyte::experts_at", "(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle) -> Tensor")  # type: ignore[untyped-decorator]
def _experts_at(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor) -> Tensor:
    return recall(int(handle)).compute(x, topk_ids, topk_weights)


@_operator("halfbyte::experts_gradient_at", _PAIR.format("Tensor"))  # type: ignore[untyped-decorator]
def _experts_gradient_at(g: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = recall(int(handle)).gradient(g, x, topk_ids, topk_weights)
    return found


@_operator("halfbyte::embedding_at", "(Tensor ids, Tensor handle, SymInt k, ScalarType dtype) -> Tensor")  # type: ignore[untyped-decorator]
def _embedding_at(ids: Tensor, handle: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return recall(int(handle)).compute(ids)


_linear_at.register_fake(_linear_shape)
_embedding_at.register_fake(_embedding_shape)
_linear_gradient_at.register_fake(_linear_gradient_shape)
_experts_at.register_fake(_experts_shape)
_experts_gradient_at.register_fake(_experts_gradient_shape)
_experts_at.register_autograd(_experts_back, setup_context=_keep_routing)


def _keep_at(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, handle, _ = inputs
    ctx.save_for_backward(handle)
    ctx.k = x.shape[-1]


def _back_at(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    wants_x, wants_bias = ctx.needs_input_grad[:2]
    (handle,) = ctx.saved_tensors
    back = torch.ops.halfbyte.linear_gradient_at(g, handle, ctx.k) if wants_x else None
    return back, g.reshape(-1, g.shape[-1]).sum(0) if wants_bias else None, None, None


_linear_at.register_autograd(_back_at, setup_context=_keep_at)


def _front(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """x with its batch dimension first; a tensor without one is expanded."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


@_linear.register_vmap  # type: ignore[untyped-decorator]
def _linear_batched(info: Any, dims: Any, x: Tensor, bias: Tensor | None, handle: int, n: int) -> tuple[Tensor, int]:
    rows = _front(x, dims[0], info.batch_size)
    assert rows is not None
    if dims[1] is None:
        return torch.ops.halfbyte.linear(rows, bias, handle, n), 0
    y = torch.ops.halfbyte.linear(rows, None, handle, n)
    each = _front(bias, dims[1], info.batch_size)
    assert each is not None
    return y + each.reshape(info.batch_size, *(1,) * (y.ndim - 2), n).to(y.dtype), 0


@_linear_gradient.register_vmap  # type: ignore[untyped-decorator]
def _linear_gradient_batched(info: Any, dims: Any, g: Tensor, handle: int, k: int) -> tuple[Tensor, int]:
    return torch.ops.halfbyte.linear_gradient(_front(g, dims[0], info.batch_size), handle, k), 0


@_embedding.register_vmap  # type: ignore[untyped-decorator]
def _embedding_batched(info: Any, dims: Any, ids: Tensor, handle: int, k: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    return torch.ops.halfbyte.embedding(_front(ids, dims[0], info.batch_size), handle, k, dtype), 0


@_experts.register_vmap  # type: ignore[untyped-decorator]
def _experts_batched(info: Any, dims: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: int) -> tuple[Tensor, int]:
    flat = [_front(t, dim, info.batch_size) for t, dim in zip((x, topk_ids, topk_weights), dims, strict=False)]
    y = torch.ops.halfbyte.experts(*(t.flatten(0, 1) for t in flat if t is not None), handle)
    return y.unflatten(0, (info.batch_size, -1)), 0


class _TransformedLinear(torch.autograd.Function):  # type: ignore[misc] # torch is not type-checked
    """`halfbyte::linear` under torch.func's transforms and forward-mode differentiation, which an
    operator's own rules lack.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, handle: int, n: int) -> Tensor:
        y: Tensor = torch.ops.halfbyte.linear(x, bias, handle, n)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.handle, ctx.n = inputs
        ctx.k = x.shape[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, wants_bias = ctx.needs_input_grad[:2]
        back = _TransformedGradient.apply(g, ctx.handle, ctx.k) if wants_x else None
        return back, g.reshape(-1, g.shape[-1]).sum(0) if wants_bias else None, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor | None:
        if x is None:
            return bias
        y: Tensor = torch.ops.halfbyte.linear(x, bias, ctx.handle, ctx.n)
        return y


class _TransformedGradient(torch.autograd.Function):  # type: ignore[misc]
    """`halfbyte::linear_gradient` under the same transforms; it is linear too, with the product as
    its gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, handle: int, k: int) -> Tensor:
        y: Tensor = torch.ops.halfbyte.linear_gradient(g, handle, k)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, ctx.handle, ctx.k = inputs
        ctx.n = g.shape[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _TransformedLinear.apply(g, None, ctx.handle, ctx.n), None, None

    @staticmethod
    def jvp(ctx: Any, g: Tensor, *rest: Any) -> Tensor:
        y: Tensor = torch.ops.halfbyte.linear_gradient(g, ctx.handle, ctx.k)
        return y


def _strided(op: str, *tensors: Tensor | None) -> None:
    """ShapeError for what is no tensor, and for layouts that no rule of an operator covers."""
    for x in tensors:
        if x is None:
            continue
        check_tensor(op, "an argument", x)
        if x.is_nested or x.layout is not torch.strided or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
            raise ShapeError(f"[{op}] a {kind} {type(x).__name__}; allowed: strided tensors. Make it dense first")


def check_activations(op: str, x: Tensor, k: int, *dense: Tensor | None) -> None:
    """ShapeError for an x that no packed product over k inputs takes, or that is on another device
    than the `dense` parts of a layer, before the layer computes with it; proxies of torch.fx and
    graphs that are compiled pass.
    """
    if isinstance(x, Proxy) or torch.compiler.is_compiling():
        return
    check_tensor(op, "x", x)
    _strided(op, x)
    if x.dtype not in _state.floats:
        allowed = ", ".join(str(kind).removeprefix("torch.") for kind in _state.floats)
        raise ShapeError(f"[{op}] x is {str(x.dtype).removeprefix('torch.')}; allowed: {allowed}; convert it, as x.float() does")
    if x.ndim == 0 or x.shape[-1] != k:
        raise ShapeError(f"[{op}] x has shape {tuple(x.shape)}; its last axis must be k = {k} of the weight")
    for part in dense:
        if part is not None and part.device != x.device:
            raise ShapeError(f"[{op}] x is on {x.device}, a dense part of the layer on {part.device}; move one of them")
    if _state.readable(x):
        check_storage(op, x)


def linear(x: Tensor, bias: Tensor | None, module: Handle, n: int) -> Tensor:
    """x · wᵀ + bias of a module, as an operation that torch can trace, transform and differentiate."""
    if torch.compiler.is_dynamo_compiling() and x.device.type == "cpu":
        return torch.ops.halfbyte.linear_at(x, bias, module.tensor, n)
    handle = module.number
    if isinstance(x, Proxy):
        node: Tensor = _traced(torch.ops.halfbyte.linear.default, x, bias, handle, n)
        return node
    if not torch.compiler.is_compiling():
        _strided("linear", x, bias)
        if _transforming():
            y: Tensor = _TransformedLinear.apply(x, bias, handle, n)
            return y
    out: Tensor = torch.ops.halfbyte.linear(_resolved(x), _resolved(bias), handle, n)
    return out


def embedding(ids: Tensor, module: Handle, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of a module's table, as an operation that torch can trace and transform."""
    handle = module.number
    if isinstance(ids, Proxy):
        node: Tensor = _traced(torch.ops.halfbyte.embedding.default, ids, handle, k, dtype)
        return node
    if not torch.compiler.is_compiling():
        _strided("embedding", ids)
    out: Tensor = torch.ops.halfbyte.embedding(_resolved(ids), handle, k, dtype)
    return out


def experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, module: Handle) -> Tensor:
    """The mixture of a module's experts. BackendError under forward-mode differentiation, which has
    no rule for it.
    """
    if torch.compiler.is_dynamo_compiling() and x.device.type == "cpu":
        return torch.ops.halfbyte.experts_at(x, topk_ids, topk_weights, module.tensor)
    handle = module.number
    if isinstance(x, Proxy):
        node: Tensor = _traced(torch.ops.halfbyte.experts.default, x, topk_ids, topk_weights, handle)
        return node
    if not torch.compiler.is_compiling():
        _strided("experts", x, topk_ids, topk_weights)
        if forward_ad._current_level >= 0:
            raise BackendError("[experts] packed experts have no forward-mode derivative; use reverse mode")
        if _differentiating():
            raise BackendError(
                "[experts] packed experts have no derivative under torch.func (grad, vjp, jacrev); use backward() or "
                "torch.autograd.grad on what the module returns"
            )
    out: Tensor = torch.ops.halfbyte.experts(_resolved(x), topk_ids, _resolved(topk_weights), handle)
    return out


def _traced(operator: Any, *args: Any) -> Any:
    """The call of an operator as a node of the graph that torch.fx records."""
    return args[0].tracer.create_proxy("call_function", operator, args, {})


def _transforming() -> bool:
    """True where `torch.func` differentiates or batches, or forward-mode differentiation is on."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    if innermost is not None:
        return bool(innermost.key() != torch._C._functorch.TransformType.Functionalize)
    return bool(forward_ad._current_level >= 0)


def _differentiating() -> bool:
    """True inside a `torch.func` transform that differentiates, at any level."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    kind = torch._C._functorch.TransformType
    return any(level.key() in (kind.Grad, kind.Jvp) for level in levels)


def _resolved(x: Tensor | None) -> Tensor | None:
    """x without a lazy negation or a lazy zero, whose memory does not hold its values."""
    if x is None or torch.compiler.is_compiling():
        return x
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


linear_gradient: Any = torch.ops.halfbyte.linear_gradient
