"""RMSNorm in one call of torch, where that is bit-identical to the model's own module.

A model's norm is six to eight small calls, and a decoding step has a hundred norms.
`replace_rmsnorms(model)` replaces each norm whose output and whose replacement's output on random
rows are equal bit for bit; others stay. That is tested on the CPU only; on other devices the
model's own module is called, so that a model moved there and one loaded there give equal results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """x / sqrt(mean(x²) + eps) · scale in float32, rounded once; scale is `weight`, or 1 + `weight`
    (Gemma).
    """

    def __init__(self, plain: nn.Module, eps: float, plus_one: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.plus_one = plain.weight, eps, plus_one
        object.__setattr__(self, "plain", plain)  # not a submodule: state dict names must not change
        self._refresh()

    def _refresh(self) -> None:
        self.plain.weight = self.weight
        weight = self.weight.detach().float()
        self.scale, self.seen = (1.0 + weight if self.plus_one else weight), self.weight._version

    def _apply(self, fn: Any, recurse: bool = True) -> RMSNorm:
        super()._apply(fn, recurse)
        self._refresh()
        return self

    def current_scale(self) -> Tensor:
        """The factor of each column, float32."""
        if torch.compiler.is_compiling():  # a graph has no `_version`; it computes the factor itself
            weight = self.weight.float()
            return 1.0 + weight if self.plus_one else weight
        if self.weight._version != self.seen:  # written in place: a checkpoint loaded into the module
            self._refresh()
        return self.scale

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            other: Tensor = self.plain(x)
            return other
        scale = self.current_scale()
        if x.dtype == torch.float32:
            y: Tensor = torch.rms_norm(x, scale.shape, scale, self.eps)
            return y
        return torch.rms_norm(x.float(), scale.shape, scale, self.eps).type_as(x)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}{', 1 + weight' if self.plus_one else ''}"


def replace_rmsnorms(model: nn.Module) -> int:
    """Replace norms in place; returns their number. float32 on the CPU only."""
    count = 0
    for parent in list(model.modules()):
        for name, module in list(parent._modules.items()):
            new = replacement(module)
            if new is not None:
                setattr(parent, name, new)
                count += 1
    return count


def replacement(module: Any) -> RMSNorm | None:
    """An `RMSNorm` with the same output as `module`; None for any other module."""
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, RMSNorm) or not isinstance(eps, float):
        return None
    named = dict(module.named_parameters())
    if list(named) != ["weight"] or list(module.buffers()):
        return None
    weight = named["weight"]
    if weight.ndim != 1 or weight.requires_grad or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    rows = torch.randn(2, 3, weight.shape[0], generator=torch.Generator().manual_seed(0)) * torch.tensor([[[1.0]], [[30.0]]])
    with torch.no_grad():
        wanted = module(rows)
        for plus_one in (False, True):
            new = RMSNorm(module, eps, plus_one)
            if torch.equal(new(rows), wanted):
                new.training = module.training
                return new
    return None
