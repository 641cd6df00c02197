"""Sizes of a module's weight as the model's configuration implies them, for shapes that a file
leaves open.

    q_proj, gate_proj, lm_head, ...   k = hidden_size
    o_proj                            k = num_attention_heads · head_dim
    down_proj                         k = intermediate_size, or the experts' own

A guess from names: it decides what a file leaves open, and never overrides the file or its
quantization config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import text_config

_READS_HIDDEN = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "lm_head", "embed_tokens",
    "gate", "router",
}  # fmt: skip


def expected_shape(config: Mapping[str, Any], module: str) -> tuple[int | None, int | None]:
    """(n, k) of `module`'s weight as far as the configuration implies it, None where it does not."""
    text = text_config(config)
    if any(tower in module.split(".") for tower in ("visual", "vision_tower", "vision_model", "audio_tower", "audio_model")):
        return None, None

    def size(*names: str) -> int | None:
        return next((text[n] for n in names if type(text.get(n)) is int and text[n] > 0), None)

    path, _, last = module.rpartition(".")
    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    head = size("head_dim") or (hidden // heads if hidden and heads else None)
    kv = size("num_key_value_heads") or heads
    inner = size("intermediate_size", "n_inner")
    if "shared_expert" in path:
        inner = size("shared_expert_intermediate_size") if path.endswith("shared_expert") else None
    elif "experts" in path or "switch_mlp" in path:
        inner = size("moe_intermediate_size", "intermediate_size")
    elif size("moe_intermediate_size") and size("moe_intermediate_size") != inner:
        inner = None  # dense and expert layers differ, and which this one is the name does not say
    q_rows, kv_rows = (heads * head if heads and head else None), (kv * head if kv and head else None)
    n = {
        "q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows, "o_proj": hidden, "gate_proj": inner, "up_proj": inner,
        "w1": inner, "w3": inner,
        "down_proj": hidden, "w2": hidden, "lm_head": size("vocab_size"), "embed_tokens": size("vocab_size"),
    }.get(last)  # fmt: skip
    if last in _READS_HIDDEN:
        return n, hidden
    return n, {"o_proj": q_rows, "down_proj": inner, "w2": inner}.get(last)
