"""Modules that hold a packed weight and multiply by it in place of `nn.Linear` and `nn.Embedding`.

    QLinear     y = x · wᵀ + bias         through ops.linear
    QEmbedding  y = w[ids] · scale        through ops.embedding

The weight is no parameter: it has no gradient and no dense copy. Two modules may hold one weight (a tied head).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..backends import Prepared
from ..qtensor import QTensor


class Packed(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """What both have: `weight`, a QTensor or what `ops.prepare` made of it."""

    weight: QTensor | Prepared

    def __init__(self, weight: QTensor | Prepared, backend: str | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.backend = backend

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        return f"n={n}, k={k}, {self.weight.format}, {self.weight.bits_per_weight:.3g} bits/weight"


class QLinear(Packed):
    """A linear layer over a packed (n, k) weight.

    bias         (n,) or None
    activations  "exact" or "int8", as in `ops.linear`
    backend      None picks by the device of x
    """

    def __init__(
        self,
        weight: QTensor | Prepared,
        bias: Tensor | None = None,
        *,
        activations: str = "exact",
        backend: str | None = None,
    ) -> None:
        super().__init__(weight, backend)
        self.out_features, self.in_features = weight.shape
        self.activations = activations
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = ops.linear(x, self.weight, self.bias, activations=self.activations, backend=self.backend)
        return y


class QEmbedding(Packed):
    """Rows of a packed (n, k) table, decoded exactly to `dtype` and multiplied by `scale` (Gemma's √k), in that dtype."""

    def __init__(
        self,
        weight: QTensor | Prepared,
        *,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(weight, backend)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype
        self.scale = None if scale is None else torch.tensor(scale, dtype=torch.float32, device="cpu").to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = ops.embedding(ids, self.weight, dtype=self.dtype, backend=self.backend)
        return y if self.scale is None else y * self.scale


def packed_modules(model: nn.Module) -> dict[str, Any]:
    """Name -> module of every packed module of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
