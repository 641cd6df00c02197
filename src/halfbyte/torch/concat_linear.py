"""A linear layer whose rows are several packed weights that cannot be joined into one: their formats or global scales differ.

    y = [x · w₀ᵀ, x · w₁ᵀ, ...] + bias

What a fused projection (q·k·v, gate·up) is made of keeps its own numbers; joined under one of two global scales, the other's rows
would come out wrong by their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import ShapeError
from . import functional as products
from .modules import PackedLinear, Weight
from .packed_weight import Held


class QRows(PackedLinear):
    """Packed weights (nᵢ, k) side by side, as one layer of n = Σ nᵢ outputs; arguments as for `QLinear`."""

    def __init__(
        self,
        weights: Sequence[Weight],
        bias: Tensor | None = None,
        *,
        activations: str = "exact",
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        held = [Held.of(w, device=device, backend=backend, activations=activations) for w in weights]
        super().__init__({str(i): h for i, h in enumerate(held)}, activations, backend)
        if not held or len({h.shape[1] for h in held}) != 1:
            raise ShapeError(f"[QRows] weights {[h.shape for h in held]}; one or more with the same k are allowed")
        self.out_features, self.in_features = sum(h.shape[0] for h in held), held[0].shape[1]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The products side by side, now."""
        ends = [0]
        for held in self.packed.values():
            ends.append(ends[-1] + held.shape[0])
        parts = [
            products.linear(x, h.prepared, None if bias is None else bias[a:b], self.activations)
            for h, a, b in zip(self.packed.values(), ends, ends[1:], strict=False)
        ]
        return torch.cat(parts, dim=-1)

    def gradient(self, g: Tensor) -> Tensor:
        """g · w: what `compute` passes back to x."""
        held = list(self.packed.values())
        parts = g.split([h.shape[0] for h in held], dim=-1)
        return torch.stack([products.gradient(p, h.prepared) for p, h in zip(parts, held, strict=True)]).sum(0)
