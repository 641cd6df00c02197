"""AWQ's scales folded into what comes before, inside one layer of a model.

| inputs of | come from | which gives x / s by |
|---|---|---|
| q, k, v; gate and up | a norm | its weight over s (Gemma's holds w − 1: (1 + w) / s − 1) |
| down | up, times an activation of gate | rows of up over s |

The output projection is left: with grouped heads one value row feeds several of its inputs. A layer with experts is left
too, since their router reads the norm as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..qtensor import QTensor
from ..quantizers import awq_scales
from .statistics import Shared

Round = Callable[[NDArray[Any]], QTensor]


def fold(layer: nn.Module, group: Shared, roundings: dict[str, Round], watched: set[str]) -> tuple[str, float] | str:
    """Scale the inputs of a group's modules, and what gives them. Weights change in place, still dense.

    roundings  how each module's weight will be rounded
    watched    paths of all linear modules of the layer
    Returns (path of what was changed, α), or a sentence that says why nothing was.
    """
    if group.hessian is None:
        return "no token came"
    if any(p.ndim == 3 for p in layer.parameters()):
        return "the layer has experts"
    modules = {name: layer.get_submodule(name) for name in group.names}
    before = _before(layer, group, watched)
    if isinstance(before, str):
        return before
    path, offset = before
    if any(name not in roundings for name in group.names):
        return "a module that shares the input is kept"
    hessian = group.hessian.double().cpu().numpy()
    weights = [m.weight.detach().float().cpu().numpy() for m in modules.values()]
    first = roundings[group.names[0]]
    scales, alpha = awq_scales(weights, hessian, first)
    if alpha == 0:
        return path, alpha
    s = torch.from_numpy(scales).to(group.hessian.device)
    for module in modules.values():
        module.weight.data = (module.weight.double() * s).to(module.weight.dtype)
    source = layer.get_submodule(path)
    weight = source.weight.double()
    column = s[:, None] if weight.ndim == 2 else s
    source.weight.data = ((weight + offset) / column - offset).to(source.weight.dtype)
    bias = getattr(source, "bias", None)
    if bias is not None:
        bias.data = (bias.double() / s).to(bias.dtype)
    group.hessian = group.hessian / (s[:, None] * s).to(group.hessian.dtype)
    return path, alpha


def _before(layer: nn.Module, group: Shared, watched: set[str]) -> tuple[str, float] | str:
    """(path, what its weight is short of) of what gives a group's input, or why there is nothing to fold into."""
    if group.norm:
        norm = layer.get_submodule(group.norm)
        if getattr(norm, "weight", None) is None or norm.weight.shape[0] != group.hessian.shape[0]:  # type: ignore[union-attr]
            return "its norm has no weight for each input"
        return group.norm, 1.0 if adds_one(norm) else 0.0
    name = group.names[0]
    parent, _, last = name.rpartition(".")
    up = f"{parent}.up_proj" if parent else "up_proj"
    if last == "down_proj" and up in watched and layer.get_submodule(up).out_features == layer.get_submodule(name).in_features:
        return up, 0.0
    return "nothing that scales stands before it"


def adds_one(norm: nn.Module) -> bool:
    """True for a norm that multiplies by 1 + weight: asked of the module itself."""
    x = torch.ones(1, norm.weight.shape[0], dtype=torch.float32, device=norm.weight.device)
    held = norm.weight.data
    norm.weight.data = torch.zeros_like(held)
    out = norm(x)
    norm.weight.data = held
    return bool(np.asarray(out.float().abs().max().cpu()) > 0.5)
