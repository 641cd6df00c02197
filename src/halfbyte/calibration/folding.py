"""Fold AWQ's input scales s into the preceding operation, inside one layer of a model.

| inputs of | come from | which yields x / s by |
|---|---|---|
| q, k, v; gate and up | a norm | dividing its weight by s (Gemma stores w − 1: (1 + w) / s − 1) |
| down, an expert's too | up, times an activation of gate | dividing rows of up by s |
| all experts' gate and up | a norm, read by the router too | dividing its weight by s, router columns times s (`routed`) |

The output projection is not scaled: with grouped heads one value row is several of its inputs. Nor
is a clamped up (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor, nn

from ..quantizers import awq_scales
from ..tensor.qtensor import QTensor
from ..transformers.compat import DEFAULT_GATE
from ..transformers.fill.module_paths import is_experts
from .matrices import expert_matrix, gated_input, half
from .statistics import InputStatistics

Round = Callable[[NDArray[Any]], QTensor]
NO_UPSTREAM = "no operation before it can take the scales"


@dataclass(frozen=True, eq=False)
class Upstream:
    """The operation whose output an input is.

    path    its module
    weight  [k, …], a view: row j, or element j of a norm, yields input j
    bias    [k] or None
    offset  added to the stored weight: 1 for norms that store w − 1
    """

    path: str
    weight: Tensor
    bias: Tensor | None = None
    offset: float = 0.0


def fold(group: InputStatistics, readers: Sequence[Tensor], before: Upstream, rounding: Round) -> float:
    """Multiply the columns of all readers of an input by s, and divide its source by s, in place.
    Returns α.

    readers   weights [n, k], views
    rounding  how they will be rounded
    """
    assert group.hessian is not None
    hessian = group.hessian.double()
    scales, alpha = awq_scales([m.float().cpu().numpy() for m in readers], hessian, rounding)
    if alpha == 0:
        return alpha
    s = torch.from_numpy(scales).to(group.hessian.device)
    for matrix in readers:
        matrix.copy_(matrix.double() * s)
    column = s[:, None] if before.weight.ndim == 2 else s
    before.weight.copy_((before.weight.double() + before.offset) / column - before.offset)
    if before.bias is not None:
        before.bias.copy_(before.bias.double() / s)
    group.hessian = group.hessian / (s[:, None] * s).to(group.hessian.dtype)
    return alpha


def upstream_of(layer: nn.Module, group: InputStatistics) -> Upstream | str:
    """The operation that yields a group's input, or the reason why scales cannot be folded."""
    if group.hessian is None:
        return "no token came"
    k = group.hessian.shape[0]
    if group.norm:
        norm: Any = layer.get_submodule(group.norm)
        if getattr(norm, "weight", None) is None or norm.weight.shape[0] != k:
            return "its norm has no weight for each input"
        bias = getattr(norm, "bias", None)
        return Upstream(group.norm, norm.weight.data, None if bias is None else bias.data, 1.0 if has_unit_offset(norm) else 0.0)
    for path, module in layer.named_modules():
        if is_experts(module):
            for expert in range(int(module.gate_up_proj.shape[0])):
                if group.names == [gated_input(path, expert)]:
                    return _expert_up(path, module, expert)
    parent, _, last = group.names[0].rpartition(".")
    if last != "down_proj":
        return NO_UPSTREAM
    beside = {n.rpartition(".")[2]: m for n, m in layer.named_modules() if n.rpartition(".")[0] == parent}
    for name, start in (("up_proj", 0), ("gate_up_proj", k)):
        up = beside.get(name)
        if isinstance(up, nn.Linear) and up.out_features == start + k:
            bias = None if up.bias is None else up.bias.data[start:]
            return Upstream(f"{parent}.{name}" if parent else name, up.weight.data[start:], bias)
    return NO_UPSTREAM


def _expert_up(path: str, module: Any, expert: int) -> Upstream | str:
    if getattr(type(module)._apply_gate, "__module__", "") != DEFAULT_GATE:
        return "its experts' gate is no product with up"
    bias = half(module.gate_up_proj_bias.data[expert], module, "up_proj") if getattr(module, "has_bias", False) else None
    return Upstream(path, expert_matrix(module, "up_proj", expert), bias)


def has_unit_offset(norm: nn.Module) -> bool:
    """True for a norm that multiplies by 1 + weight, determined by calling it with zero weights."""
    x = torch.ones(1, norm.weight.shape[0], dtype=torch.float32, device=norm.weight.device)
    original = norm.weight.data
    norm.weight.data = torch.zeros_like(original)
    out = norm(x)
    norm.weight.data = original
    return bool(np.asarray(out.float().abs().max().cpu()) > 0.5)
