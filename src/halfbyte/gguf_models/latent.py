"""Architectures with latent attention: keys and values of all heads from one short vector.

    LATENT["deepseek2"].names["attn_k_b"]      "self_attn.kv_b_proj+0"

Newer files have the second projection as two tensors, keys transposed (llama.cpp absorbs them into
queries and outputs); older ones whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import BIASED_ROUTING, MOE, PART, Architecture, expert_counts, shared
from .keys import Keys

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that score experts; 0 is none stated."""


def _heads_together(config: Any, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """(heads, latent, keys) and (heads, values, latent) as rows of keys and values of each head."""
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])


def _latent(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the attention. Files with split projections state the lengths of a head separately."""
    heads, rotated = keys.size("attention.head_count"), keys.size("rope.dimension_count")
    key = keys.get("attention.key_length_mla", "integer", 0) or keys.size("attention.key_length")
    value = keys.get("attention.value_length_mla", "integer", 0) or keys.size("attention.value_length")
    if key <= rotated or rotated % 2:
        raise keys.error(f"keys of {key}, {rotated} of them rotated; more keys, and an even number of rotated ones, are needed")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": keys.get("attention.q_lora_rank", "integer") if keys.any_layer("attn_q_a") else None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": _mscale(keys, config["rope_parameters"]),
    }


def _mscale(keys: Keys, rope: dict[str, Any]) -> dict[str, Any]:
    """The file has a tenth of what scales the logarithm of a stretched context."""
    scale = keys.get("rope.scaling.yarn_log_multiplier", "float", 0.0)
    if rope["rope_type"] != "yarn" or not scale:
        return rope
    return rope | {"mscale": round(scale * 10, 6), "mscale_all_dim": round(scale * 10, 6)}


def _deepseek2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    groups = keys.size("expert_group_count", 1)
    used = keys.size("expert_group_used_count", groups)
    dense = int(keys.get("leading_dense_block_count", "integer", 0))
    if not keys.get("expert_count", "integer", 0):
        return _latent(keys, config) | {"first_k_dense_replace": config["num_hidden_layers"]}
    return {
        **_latent(keys, config),
        **expert_counts(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "first_k_dense_replace": dense,
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", "bool", False),
        "n_group": groups,
        "topk_group": used,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "num_nextn_predict_layers": 0,
    }


def _deepseek_v2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("expert_weights_norm", "bool", False):
        raise keys.refuse("that normalizes softmax weights of experts, which transformers' DeepSeek V2 does not")
    return _deepseek2(keys, config)


_DEEPSEEK2 = MOE | shared("mlp.shared_experts") | BIASED_ROUTING | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": f"self_attn.kv_b_proj{PART}0", "attn_v_b": f"self_attn.kv_b_proj{PART}1",
}  # fmt: skip
DEEPSEEK_V2 = Architecture(
    "deepseek_v2", _DEEPSEEK2, heads=False, experts=None, joins={"self_attn.kv_b_proj": _heads_together}, extra=_deepseek_v2
)
"""What a file of architecture deepseek2 becomes that scores experts by a softmax."""

LATENT: dict[str, Architecture] = {
    "deepseek2": Architecture(
        "deepseek_v3", _DEEPSEEK2, heads=False, experts=None, joins={"self_attn.kv_b_proj": _heads_together}, extra=_deepseek2
    ),
}
"""GGUF architectures with latent attention."""
