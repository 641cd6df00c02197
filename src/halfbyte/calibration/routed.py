"""AWQ's scales for a norm whose output an MoE layer's experts and router read.

One s for all experts, of least Σ tr(D H Dᵀ), each with the Hessian of its own tokens. Gate's and
up's columns, a shared expert's too, are multiplied by s, the norm's weight is divided by it, and
the router's columns are multiplied by it so that routing does not change. s are powers of two: norm
and router stay exact in any dtype and the router's logits are equal. The layer's output is compared
on one sequence; where it changes, another module reads the norm, and the scales are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..quantizers import awq_scales
from ..transformers.fill.module_paths import is_experts
from .folding import Round, has_unit_offset
from .matrices import Matrix, expert_input
from .statistics import InputCollector, InputStatistics

TOLERANCE = 1e-4
"""Relative to the largest output: reordered sums differ far less, a missed reader far more."""


def fold_routed(
    layer: nn.Module,
    norm: str,
    inputs: InputCollector,
    matrices: Sequence[Matrix],
    wanted: Collection[str],
    dense: Callable[[str], bool],
    rounding: Round,
    output: Callable[[], Tensor],
) -> list[str] | str:
    """Modules whose dense weights have changed, none where α is 0; or why nothing could be scaled.

    norm      its path in the layer
    matrices  of the layer
    wanted    keys of those that will be rounded
    dense     whether a module's weight is a dense tensor of the checkpoint
    output    runs the layer on a sequence
    """
    module: Any = layer.get_submodule(norm)
    if getattr(module, "weight", None) is None or not dense(norm):
        return "its norm has no weight of its own"
    if has_unit_offset(module):
        return "its norm holds w - 1, which a power of two does not scale exactly"
    k = module.weight.shape[0]
    scaled: list[Matrix] = []
    beside: list[str] = []
    for path in inputs.readers.get(norm, ()):
        reader: Any = layer.get_submodule(path)
        if is_experts(reader):
            names = {expert_input(path, e) for e in range(int(reader.gate_up_proj.shape[0]))}
            mine = [m for m in matrices if m.input in names]
        else:
            mine = [m for m in matrices if m.input == path and m.key in wanted]
            if not mine:
                weight = getattr(reader, "weight", None)
                if not isinstance(weight, nn.Parameter) or weight.shape[-1] != k or not dense(path):
                    return f"{path} reads its norm and has no dense weight for each input"
                beside.append(path)
        if any(m.key not in wanted or m.view.shape[1] != k for m in mine):
            return f"weights of {path} are kept"
        scaled += mine
    seen = [(m, g) for m in scaled if (g := inputs.of(m.input)) is not None and g.hessian is not None]
    if not seen:
        return "no token came"
    groups: list[InputStatistics] = list({id(g): g for _, g in seen}.values())
    hessians = {id(g): g.hessian.double() for g in groups if g.hessian is not None}
    weights = [m.view.float().cpu().numpy() for m, _ in seen]
    scales, alpha = awq_scales(weights, [hessians[id(g)] for _, g in seen], rounding, powers=True)
    if alpha == 0:
        return []
    s = torch.from_numpy(scales).to(module.weight)
    columns = [m.view for m in scaled] + [layer.get_submodule(path).weight.data for path in beside]
    before = output()
    _scale(module, columns, s)
    after = output()
    if not bool((after - before).abs().max() <= TOLERANCE * before.abs().max()):
        _scale(module, columns, 1 / s)
        return "more than its experts and their router reads its norm"
    for group in groups:
        assert group.hessian is not None
        group.hessian = group.hessian / (s[:, None] * s).to(group.hessian.dtype)
    return [norm, *beside]


def _scale(norm: Any, columns: Sequence[Tensor], s: Tensor) -> None:
    """s are powers of two, so 1 / s undoes it exactly."""
    for matrix in columns:
        matrix.mul_(s.to(matrix.dtype))
    norm.weight.data.div_(s)
    if getattr(norm, "bias", None) is not None:
        norm.bias.data.div_(s)
