"""Map a checkpoint's key to the parameter of a transformers model that it fills.

    model.layers.0.self_attn.q_proj          -> Slot("model.layers.0.self_attn.q_proj", "weight")
    ...block_sparse_moe.experts.3.w1         -> Slot("...mlp.experts", "weight", "gate_proj",
                                             expert=3)
    ...mlp.switch_mlp.up_proj                -> Slot("...mlp.experts", "weight", "up_proj")
    ...self_attn.k_proj, model has qkv_proj  -> Slot("...self_attn.qkv_proj", "weight", part=1)
    ...attention.query_key_value of a model that has q_proj, k_proj and v_proj
                                             -> Slot("...self_attn.q_proj", "weight",
                                             divided=("...self_attn.k_proj", "...self_attn.v_proj"))

A name is tried unchanged, then under transformers' own renamings for the model, then under the one
that mlx-lm's stands for, each with the prefixes that exporters add or drop, then under the
conversions of transformers that divide or join rows. The first name that the model has is used;
names are never matched approximately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...checkpoints import expert_names
from ...checkpoints.mlx_names import usual_name
from ...gguf_models.architecture import DBRX_EXPERTS
from ...layouts.quant_config.module_rules import FUSED, aliases


@dataclass(frozen=True)
class Slot:
    """A parameter of a module, or a part of it.

    path        module
    leaf        "weight", "bias" or the parameter's own name
    projection  projection of an experts module, "" elsewhere
    expert      which expert; None is all of them, or no experts module
    part        which of the modules that a fused one was made of; None when the key is the whole
    divided     the modules that take the rows after those of `path`, each as many as it has outputs
    """

    path: str
    leaf: str
    projection: str = ""
    expert: int | None = None
    part: int | None = None
    divided: tuple[str, ...] = ()


class SlotResolver:
    """Resolves keys for one empty model."""

    def __init__(self, model: Any) -> None:
        self.model_type = str(model.config.model_type)
        self.modules = dict(model.named_modules())
        self.renamings, self.divisions, self.joins = _rules(model)

    def resolve(self, key: str, quantized: bool) -> Slot | None:
        """The parameter that a key of a checkpoint fills, None when the model has none."""
        name = f"{key}.weight" if quantized else key
        renamed = name
        for rule in self.renamings:
            renamed = rule.rename_source_key(renamed)[0]
        for start in dict.fromkeys((name, renamed, usual_name(self.model_type, name))):
            for alias in aliases(start):
                if slot := self._slot(alias):
                    return slot
        return self._converted(renamed)

    def _converted(self, name: str) -> Slot | None:
        """The parameter under transformers' conversions that divide or join rows."""
        for rule in self.divisions:
            first, matched = rule.rename_source_key(name)
            if matched is not None:
                start, *others = (first.replace(rule.target_patterns[0], target, 1) for target in rule.target_patterns)
                ends = [".weight" if name.endswith(".weight") and not n.endswith(".weight") else "" for n in (start, *others)]
                slots = [self._slot(n + end) for n, end in zip((start, *others), ends, strict=True)]
                if slots[0] is not None and all(slots):
                    return Slot(slots[0].path, slots[0].leaf, divided=tuple(s.path for s in slots[1:] if s is not None))
        for rule in self.joins:
            joined, matched = rule.rename_source_key(name)
            if matched is not None and (slot := self._slot(joined)) is not None:
                return Slot(slot.path, slot.leaf, part=rule.source_patterns.index(matched))
        return None

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
    does, DBRX in three matrices.
    """
    if hasattr(getattr(module, "mlp", None), DBRX_EXPERTS["gate_proj"].partition(".")[2]):
        return True
    first = "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in (first, "down_proj"))


def _rules(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """transformers' conversions of this model's checkpoints: those that change names only, those
    that divide the rows of one tensor among modules, and those that join rows of several.
    """
    from ..compat import DIVIDING_ROWS, Concatenate, WeightConverter, WeightRenaming, get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    divisions, joins = [], []
    for rule in rules:
        if not isinstance(rule, WeightConverter) or len(rule.operations) != 1:
            continue
        operation = rule.operations[0]
        # The number of tensors of the others is in the configuration.
        if getattr(operation, "num_shards_attribute", None) or getattr(operation, "dim", 0):
            continue
        if isinstance(operation, DIVIDING_ROWS) and len(rule.target_patterns) > 1:
            divisions.append(rule)
        elif isinstance(operation, Concatenate) and len(rule.source_patterns) > 1:
            joins.append(rule)
    return [rule for rule in rules if isinstance(rule, WeightRenaming)], divisions, joins
