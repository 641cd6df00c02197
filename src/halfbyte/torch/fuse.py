"""Compute q·k·v and gate·up as one product where their weights share a format.

    fuse(model)      layers whose formats, group sizes and global scales agree share one joined
                     weight
    unfuse(model)    gives each layer its own weight again

Model code calls these layers one after another with the same input tensor. The first call computes
the joint product and the others return their rows of it, so the model's code is unchanged. A call
with another input computes a new product; results always equal those of separate layers. Layers
whose weights cannot be joined are left as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..backends import Prepared
from ..tensor.concat import concat_rows, incompatibility
from ..tensor.qtensor import QTensor
from . import functional
from .modules import PackedLinear, QLinear
from .packed_weight import PackedWeight

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that model code calls on one input."""


class SharedProduct:
    """The joint product of several layers, kept until each has taken its rows.

    bounds  rows of each layer
    """

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = tuple(bounds)
        self._made: tuple[Any, Prepared, Tensor, int] | None = None

    def part(self, index: int, x: Tensor, weight: Prepared, activations: str) -> Tensor:
        """x · wᵀ for the rows of layer `index`."""
        made = self._made  # read once: another thread may replace it
        if made is None or made[0]() is not x or made[1] is not weight:
            y = functional.compute(x, weight, activations=activations)
            made = (weakref.ref(x), weight, y, (1 << len(self.bounds)) - 1)
        product, left = made[2], made[3] & ~(1 << index)
        # The product is released when every layer has taken its rows, so that none outlives the
        # step.
        self._made = (*made[:3], left) if left else None
        start, stop = self.bounds[index]
        return product[..., start:stop]

    def __getstate__(self) -> dict[str, Any]:
        return {"bounds": self.bounds, "_made": None}


class FusedLinear(PackedLinear):
    """One layer of a shared weight; bias and options as for `QLinear`."""

    def __init__(
        self, weight: PackedWeight, shared: SharedProduct, index: int, bias: Tensor | None, activations: str, backend: str | None
    ) -> None:
        super().__init__({"": weight}, activations, backend)
        self.shared, self.index = shared, index
        start, stop = shared.bounds[index]
        self.out_features, self.in_features = stop - start, weight.shape[1]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def extra_repr(self) -> str:
        start, stop = self.shared.bounds[self.index]
        size = f"n={self.out_features}, k={self.in_features}, bias={self.bias is not None}"
        return f"{size}, rows {start}:{stop} of {super().extra_repr()}"

    def shape_of(self, piece: str) -> tuple[int, ...]:
        return (self.out_features, self.in_features)

    def canonical(self, piece: str = "") -> QTensor:
        return self.packed[""].canonical().rows(*self.shared.bounds[self.index])

    def replace(self, piece: str, weight: PackedWeight) -> None:
        """Replace the weight of this layer alone; it no longer shares the joint product."""
        self.packed = {"": weight}
        self.shared, self.index = SharedProduct([(0, self.out_features)]), 0

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's rows of the joint product."""
        y = self.shared.part(self.index, x, self.packed[""].prepared, self.activations)
        # A copy, because the product is shared: an in-place operation of the caller must not change
        # the other layers' rows.
        return y.clone() if bias is None else y + bias

    def gradient(self, g: Tensor) -> Tensor:
        """g · w for this layer's rows, the gradient of `compute` with respect to x."""
        return functional.gradient(g, self.packed[""].prepared, self.shared.bounds[self.index])


def fuse(model: nn.Module) -> int:
    """Fuse every group that can be joined, in place. Returns the number of groups."""
    count = 0
    for parent in list(model.modules()):
        for names in GROUPS:
            layers = [parent._modules.get(name) for name in names]
            if all(type(layer) is QLinear for layer in layers) and _join(
                parent, names, [m for m in layers if isinstance(m, QLinear)]
            ):
                count += 1
    return count


def _join(parent: nn.Module, names: Sequence[str], layers: Sequence[QLinear]) -> bool:
    first = layers[0]
    weights = [layer.canonical() for layer in layers]
    kinds = {(m.activations, m.backend, m.device, m.packed[""].invariant) for m in layers}
    if len(kinds) > 1 or incompatibility(weights) is not None:
        return False
    weight = first.packed[""].of_same_kind(concat_rows(weights))
    ends = [0]
    for w in weights:
        ends.append(ends[-1] + w.shape[0])
    shared = SharedProduct([(ends[i], ends[i + 1]) for i in range(len(weights))])
    for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, FusedLinear(weight, shared, i, layer.bias, layer.activations, layer.backend))
    return True


def unfuse(model: nn.Module) -> None:
    """Give every fused layer its own weight again, in place."""
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            if isinstance(layer, FusedLinear):
                options: dict[str, Any] = {"activations": layer.activations, "device": layer.device, "backend": layer.backend}
                own = PackedWeight.of(layer.canonical(), **options).batch_invariant(layer.packed[""].invariant)
                setattr(parent, name, QLinear(own, layer.bias, **options))
