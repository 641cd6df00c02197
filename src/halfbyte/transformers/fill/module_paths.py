"""Map a checkpoint's key to the parameter of a transformers model that it fills.

    model.layers.0.self_attn.q_proj          -> Slot("model.layers.0.self_attn.q_proj", "weight")
    ...block_sparse_moe.experts.3.w1         -> Slot("...mlp.experts", "weight", "gate_proj",
                                             expert=3)
    ...mlp.switch_mlp.up_proj                -> Slot("...mlp.experts", "weight", "up_proj")
    ...self_attn.k_proj, model has qkv_proj  -> Slot("...self_attn.qkv_proj", "weight", part=1)

A name is tried unchanged, then under transformers' own renamings for the model, then with the
prefixes that exporters add or drop. The first name that the model has is used; names are never
matched approximately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...checkpoints import expert_names
from ...layouts.quant_config.module_rules import FUSED, aliases


@dataclass(frozen=True)
class Slot:
    """A parameter of a module, or a part of it.

    path        module
    leaf        "weight", "bias" or the parameter's own name
    projection  projection of an experts module, "" elsewhere
    expert      which expert; None is all of them, or no experts module
    part        which of the modules that a fused one was made of; None when the key is the whole
    """

    path: str
    leaf: str
    projection: str = ""
    expert: int | None = None
    part: int | None = None


class SlotResolver:
    """Resolves keys for one empty model."""

    def __init__(self, model: Any) -> None:
        self.modules = dict(model.named_modules())
        self.renamings = _renamings(model)

    def resolve(self, key: str, quantized: bool) -> Slot | None:
        """The parameter that a key of a checkpoint fills, None when the model has none."""
        for name in self._names(f"{key}.weight" if quantized else key):
            slot = self._slot(name)
            if slot is not None:
                return slot
        return None

    def _names(self, name: str) -> Iterator[str]:
        renamed = name
        for rule in self.renamings:
            renamed = rule.rename_source_key(renamed)[0]
        for start in dict.fromkeys((name, renamed)):
            yield from aliases(start)

    def _slot(self, name: str) -> Slot | None:
        if found := expert_names.parse(name):
            experts = self.modules.get(found.path)
            # A parameter whose gate and up rows alternate cannot be filled from w13.
            fits = found.word != "w13" or getattr(experts, "is_concatenated", True)
            if is_experts(experts) and fits:
                return Slot(found.path, found.leaf or "weight", found.projection, found.expert)
        path, _, leaf = name.rpartition(".")
        module = self.modules.get(path)
        if module is not None and isinstance(getattr(module, leaf, None), torch.Tensor):
            return Slot(path, leaf)
        # GPTQ writes a bias for every layer, zero where the model has none.
        if isinstance(module, nn.Linear) and leaf == "bias":
            return Slot(path, leaf)
        parent, _, last = path.rpartition(".")
        for fused, parts in FUSED.items():
            if last in parts and isinstance(self.modules.get(f"{parent}.{fused}"), nn.Linear):
                return Slot(f"{parent}.{fused}", leaf, part=parts.index(last))
        return None


def is_experts(module: nn.Module | None) -> bool:
    """True for a module that keeps all its experts in two stacked parameters, as transformers 5
    does.
    """
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in ("gate_up_proj", "down_proj"))


def _renamings(model: Any) -> list[Any]:
    """transformers' renamings of this model's checkpoints that change names only."""
    from ..compat import WeightRenaming, get_model_conversion_mapping

    return [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
