"""A linear layer over several packed weights that cannot be joined into one, because their formats
or global scales differ.

    y = [x · w₀ᵀ, x · w₁ᵀ, ...] + bias

The parts of a fused projection (q·k·v, gate·up) keep their own codes and scales. Under one common
global scale the rows of the other parts would be wrong by the ratio of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import ShapeError
from . import functional
from .modules import PackedLinear, Weight
from .packed_weight import PackedWeight


class ConcatLinear(PackedLinear):
    """Packed weights (nᵢ, k) concatenated to one layer of n = Σ nᵢ outputs; arguments as for
    `QLinear`.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        bias: Tensor | None = None,
        *,
        activations: str = "exact",
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        packed = [PackedWeight.of(w, device=device, backend=backend, activations=activations) for w in weights]
        super().__init__({str(i): w for i, w in enumerate(packed)}, activations, backend)
        if not packed or len({w.shape[1] for w in packed}) != 1:
            raise ShapeError(f"[ConcatLinear] weights {[w.shape for w in packed]}; one or more with the same k are allowed")
        self.out_features, self.in_features = sum(w.shape[0] for w in packed), packed[0].shape[1]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The concatenated products."""
        ends = [0]
        for weight in self.packed.values():
            ends.append(ends[-1] + weight.shape[0])
        parts = [
            functional.compute(x, w.prepared, None if bias is None else bias[a:b], self.activations)
            for w, a, b in zip(self.packed.values(), ends, ends[1:], strict=False)
        ]
        return torch.cat(parts, dim=-1)

    def gradient(self, g: Tensor) -> Tensor:
        """g · w, the gradient of `compute` with respect to x."""
        weights = list(self.packed.values())
        parts = g.split([w.shape[0] for w in weights], dim=-1)
        return torch.stack([functional.gradient(p, w.prepared) for p, w in zip(parts, weights, strict=True)]).sum(0)
