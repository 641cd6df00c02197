"""A decoder layer of the LLaMA kind as operations of the native core: what one token goes through.

    append_layer(operations, index, layer, x, row)

    h = norm(x);  q, k, v = h·Wqᵀ, h·Wkᵀ, h·Wvᵀ, normed by head, rotated;  x += norm(attention·Woᵀ)
    h = norm(x);  x += norm((f(h·Wgᵀ) ∘ h·Wuᵀ)·Wdᵀ)

Norms that a model does not have are left out. The arrays may be NumPy's or torch's: the operations
keep their addresses, and the objects alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..backends.cpu import native


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x²) + eps) · scale, a float32 scale for each column."""

    scale: Any
    eps: float


@dataclass(frozen=True)
class Product:
    """x · wᵀ + bias.

    weight       the core's packed weight (`PackedWeight.native`)
    outputs      n
    bias         float32 (n,), or None
    activations  the core's member, as `activations_named` returns it
    """

    weight: Any
    outputs: int
    bias: Any
    activations: Any


@dataclass(frozen=True)
class DecoderLayer:
    """The parts of one layer.

    before, after          norms around attention; `after` is None where there is none
    before_mlp, after_mlp  norms around the feed-forward part
    q_norm, k_norm         norms of each head's query and key, or None
    head_dim               d
    scaling                factor of the scores
    gate_function          a member of the native `Gate`: "silu" or "gelu_tanh"
    rotation               index of the layer's table of angles
    """

    q: Product
    k: Product
    v: Product
    o: Product
    gate: Product
    up: Product
    down: Product
    before: Norm
    before_mlp: Norm
    after: Norm | None
    after_mlp: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    head_dim: int
    scaling: float
    gate_function: str
    rotation: int


def append_layer(operations: Any, index: int, layer: DecoderLayer, x: Any, row: Callable[[str, int], Any]) -> None:
    """Append what layer number `index` does to x (hidden,), in place.

    operations  the core's `Step`
    row         (name, width) -> a float32 buffer; layers of one width share it, so that it stays in
                the first-level cache
    """
    d, hidden = layer.head_dim, int(x.shape[0])
    q, k, v = (row(name, p.outputs) for name, p in (("q", layer.q), ("k", layer.k), ("v", layer.v)))
    gate, up = row("gate", layer.gate.outputs), row("up", layer.up.outputs)
    h, y = row("h", hidden), row("y", hidden)

    append_norm(operations, layer.before, x, h)
    for product, to in ((layer.q, q), (layer.k, k), (layer.v, v)):
        append_product(operations, product, h, to)
    for norm, part in ((layer.q_norm, q), (layer.k_norm, k)):
        if norm is not None:
            append_norm(operations, norm, part, part)
    operations.rotate(q, d, layer.rotation)
    operations.rotate(k, d, layer.rotation)
    operations.attend(index, q, k, v, d, layer.scaling, q)
    append_product(operations, layer.o, q, y)
    _append_residual(operations, layer.after, y, x)

    append_norm(operations, layer.before_mlp, x, h)
    append_product(operations, layer.gate, h, gate)
    append_product(operations, layer.up, h, up)
    operations.gate(native().Gate[layer.gate_function], gate, up, gate)
    append_product(operations, layer.down, gate, y)
    _append_residual(operations, layer.after_mlp, y, x)


def append_norm(operations: Any, norm: Norm, x: Any, y: Any) -> None:
    """y = norm(x); y may be x."""
    operations.norm(x, norm.scale, norm.eps, y)


def append_product(operations: Any, product: Product, x: Any, y: Any) -> None:
    """y = x · wᵀ + bias"""
    operations.product(product.weight, x, product.bias, product.activations, y)


def _append_residual(operations: Any, norm: Norm | None, y: Any, x: Any) -> None:
    """x = x + norm(y)"""
    if norm is not None:
        append_norm(operations, norm, y, y)
    operations.add(y, x)
