"""Packed layers whose input is multiplied by a vector first: y = (x · s) · wᵀ + bias, s over the k
inputs.

AWQ as ModelOpt exports it: where a scale cannot be folded into the layer before, it is stored
beside the weight as `pre_quant_scale`, and a state dict has it under that name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import ShapeError
from . import custom_ops
from .composite_linear import CompositeLinear
from .concat_linear import ConcatLinear
from .modules import QLinear


class ScaledLinear(QLinear):
    """A `QLinear` with `pre_quant_scale`, (k,)."""

    def forward(self, x: Tensor) -> Tensor:
        custom_ops.check_activations("linear", x, self.in_features, self.pre_quant_scale)
        y: Tensor = super().forward(x * self.pre_quant_scale)
        return y


class ScaledConcatLinear(ConcatLinear):
    """A `ConcatLinear` with `pre_quant_scale`, (k,)."""

    def forward(self, x: Tensor) -> Tensor:
        custom_ops.check_activations("linear", x, self.in_features, self.pre_quant_scale)
        y: Tensor = super().forward(x * self.pre_quant_scale)
        return y


def scaled(layer: QLinear | ConcatLinear, scale: Tensor | None) -> QLinear | ConcatLinear:
    """The same layer with a scale for its input, which it must not have yet; itself for None.
    ShapeError for another length.
    """
    if scale is None:
        return layer
    if scale.shape != (layer.in_features,):
        raise ShapeError(f"[scaled] a scale of shape {tuple(scale.shape)}; the layer has {layer.in_features} inputs")
    if isinstance(layer, CompositeLinear):
        layer.pre_quant_scale = nn.Parameter(scale.detach(), requires_grad=False)
        return layer
    options: dict[str, Any] = {"activations": layer.activations, "backend": layer.backend}
    if isinstance(layer, ConcatLinear):
        made: QLinear | ConcatLinear = ScaledConcatLinear(list(layer.packed.values()), layer.bias, **options)
    else:
        made = ScaledLinear(layer.weight, layer.bias, **options)
    made.pre_quant_scale = nn.Parameter(scale.detach(), requires_grad=False)
    return made


def scale_of(layer: nn.Module) -> Tensor | None:
    """What the layer's input is multiplied by, None for nothing."""
    scale: Tensor | None = getattr(layer, "pre_quant_scale", None)
    return scale
