"""Names that mlx-lm's models give to modules, where transformers and published checkpoints have
others: those of which mlx-lm does not rename packed words as it loads them.

    mlx_name("lfm2_moe", "model.layers.0.feed_forward.w1.weight")       "….feed_forward.gate_proj.weight"
    usual_name("lfm2_moe", "model.layers.0.feed_forward.gate_proj")     "….feed_forward.w1"
    stack_module("gemma4_text")                                         "experts.switch_glu"
"""

from __future__ import annotations

import re

_STACKS = {
    "afmoe": "experts", "dots1": "experts", "gpt_oss": "experts", "gemma4": "experts.switch_glu",
    "gemma4_text": "experts.switch_glu",
}  # fmt: skip
_LFM2 = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "kimi_linear": ((r"\.block_sparse_moe\.(?=shared_experts\.|switch_mlp\.)", ".mlp."),),
    "lfm2_moe": tuple((rf"\.feed_forward\.{word}(?=\.|$)", f".feed_forward.{name}") for word, name in _LFM2.items()),
    "nemotron_h": (
        (r"\.switch_mlp\.up_proj(?=\.|$)", ".switch_mlp.fc1"),
        (r"\.switch_mlp\.down_proj(?=\.|$)", ".switch_mlp.fc2"),
    ),
}
_USUAL: dict[str, tuple[tuple[str, str], ...]] = {
    "lfm2_moe": tuple((rf"\.feed_forward\.{name}(?=\.|$)", f".feed_forward.{word}") for word, name in _LFM2.items()),
}
"""The way back, of what neither transformers nor `expert_names` knows."""


def stack_module(model_type: str) -> str:
    """The module of stacked experts, in the place of transformers' `experts`."""
    return _STACKS.get(model_type, "switch_mlp")


def mlx_name(model_type: str, name: str) -> str:
    """A tensor or packed module of a published checkpoint, its experts under `stack_module`."""
    return _renamed(_NAMES.get(model_type, ()), name)


def usual_name(model_type: str, name: str) -> str:
    """A tensor or packed module of mlx-lm's under a name that transformers knows."""
    return _renamed(_USUAL.get(model_type, ()), name)


def _renamed(rules: tuple[tuple[str, str], ...], name: str) -> str:
    for pattern, other in rules:
        name = re.sub(pattern, other, name)
    return name
