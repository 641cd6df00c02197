"""Packed layers whose weight is a packed matrix and dense parts beside it (`formats/composite.py`).

    low-rank    y = x · Wᵀ + (x · Aᵀ) · Bᵀ + bias
    transform   y = ((x · V) · Wᵀ) · U / √(norms) + bias

W stays packed, on whichever backend serves its format; the dense parts are multiplied by torch in
their own dtype or the activations', the wider of the two. `canonical` and the state dict have all
parts as one weight.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import EXTRA_PARTS
from ..tensor.qtensor import QTensor
from . import custom_ops
from .modules import QLinear
from .packed_weight import PackedWeight
from .state import tensor


class CompositeLinear(QLinear):
    """A `QLinear` of the packed part, with the dense parts as buffers.

    weight            a composite QTensor
    pre_quant_scale   what the input is multiplied by first, None for nothing (`scaled_linear`)
    """

    def __init__(
        self, weight: QTensor, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        base, beside = _split(weight)
        super().__init__(
            PackedWeight.of(base, **options),
            bias,
            activations=options.get("activations", "exact"),
            backend=options.get("backend"),
        )
        self.weight.dtype = dtype
        self.register_parameter("pre_quant_scale", None)
        self._describe(weight, beside)

    def _describe(self, weight: QTensor, beside: dict[str, Any]) -> None:
        self.extra = weight.format.extra
        self.norms = tuple(int(n) for n in beside.pop("transform_norms", (1, 1)))
        for part in EXTRA_PARTS[self.extra]:
            if part != "transform_norms":
                value = tensor(beside[part]).to(self.weight.device) if part in beside else None
                self.register_buffer(part, value, persistent=False)
        self._stored = {part: array for part, array in weight.parts.items() if part in EXTRA_PARTS[self.extra]}

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would round the dense parts, and no packed one.
        for kind in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return self.forward(x)
        custom_ops.check_activations("linear", x, self.in_features, self.pre_quant_scale, *self._buffers.values())
        x = x if self.pre_quant_scale is None else x * self.pre_quant_scale
        if self.extra == "low-rank":
            wide = torch.promote_types(x.dtype, self.lora_a.dtype)
            low = nn.functional.linear(x.to(wide), self.lora_a.to(wide))
            y = self.product(x, self.bias)
            return (y + nn.functional.linear(low, self.lora_b.to(wide))).to(x.dtype)
        y = self.product(_blockwise(x, self.input_transform, self.norms[0]), None)
        y = _blockwise(y, self.output_transform, self.norms[1])
        return y if self.bias is None else y + self.bias

    def canonical(self, piece: str = "") -> QTensor:
        base = super().canonical(piece)
        fmt = base.format.with_(extra=self.extra)
        return QTensor(fmt, base.shape, {**base.parts, **self._stored}, origin=base.origin, details=base.details)

    def replace(self, piece: str, weight: PackedWeight) -> None:
        q = weight.canonical()
        base, beside = _split(q)
        new = weight.of_same_kind(base)
        new.dtype = self.weight.dtype
        super().replace(piece, new)
        self._describe(q, beside)


def _split(weight: QTensor) -> tuple[QTensor, dict[str, Any]]:
    """The packed part of a composite weight, and its dense parts."""
    names = EXTRA_PARTS[weight.format.extra]
    own = {p: a for p, a in weight.parts.items() if p not in names}
    base = QTensor(weight.format.with_(extra=""), weight.shape, own, origin=weight.origin, details=weight.details)
    return base, {p: a for p, a in weight.parts.items() if p in names}


def _blockwise(x: Tensor, square: Tensor | None, norm: int) -> Tensor:
    """x times a block-diagonal matrix of `square`, over √norm; x itself for None."""
    if square is None:
        return x
    wide = torch.promote_types(torch.promote_types(x.dtype, square.dtype), torch.float32)
    blocks = x.to(wide).unflatten(-1, (-1, square.shape[0])) @ square.to(wide)
    return (blocks.flatten(-2) / math.sqrt(norm)).to(x.dtype)
