"""Key-values that a file of an architecture states beside its sizes, and the fields of the
configuration that they come from: what `Architecture.extra` reads, in the other direction.

    STATED["qwen3moe"]      expert_count <- num_experts, ...

`to_gguf.py` reads its own header back and compares it with the configuration, so a missing row
shows as an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .architecture import Field
from .latent import SIGMOID, SOFTMAX

_USED = Field("expert_used_count", "num_experts_per_tok")
_SIGMOID_ROUTING = (
    Field("expert_count", "n_routed_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
    Field("expert_shared_count", "n_shared_experts"), Field("leading_dense_block_count", "first_k_dense_replace", "integer"),
    Field("expert_weights_scale", "routed_scaling_factor", "positive"), Field("expert_weights_norm", "norm_topk_prob", "bool"),
)  # fmt: skip
_WINDOW = Field("attention.sliding_window", "sliding_window")
_SOFTCAPS = (
    Field("attn_logit_softcapping", "attn_logit_softcapping", "float"),
    Field("final_logit_softcapping", "final_logit_softcapping", "float"),
)

_ROUTED = (
    Field("expert_count", "num_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
    Field("expert_shared_count", "num_shared_experts"),
)  # fmt: skip

STATED: dict[str, tuple[Field, ...]] = {
    "afmoe": (
        _WINDOW, *_ROUTED, Field("leading_dense_block_count", "num_dense_layers", "integer"),
        Field("expert_weights_scale", "route_scale", "positive"),
    ),
    "cohere2moe": (
        Field("feed_forward_length", "prefix_dense_intermediate_size"), Field("expert_count", "num_experts"), _USED,
        Field("expert_feed_forward_length", "intermediate_size"), Field("expert_shared_count", "num_shared_experts"),
        Field("expert_weights_norm", "norm_topk_prob", "bool"),
    ),
    "dots1": _SIGMOID_ROUTING,
    "ernie4_5-moe": (
        Field("expert_count", "moe_num_experts"), Field("expert_used_count", "moe_k"),
        Field("expert_feed_forward_length", "moe_intermediate_size"), Field("expert_shared_count", "moe_num_shared_experts"),
        Field("leading_dense_block_count", "moe_layer_start_index", "integer"),
        Field("interleave_moe_layer_step", "moe_layer_interval"),
    ),
    "exaone-moe": (
        *_ROUTED, Field("expert_weights_norm", "norm_topk_prob", "bool"),
        Field("expert_weights_scale", "routed_scaling_factor", "positive"),
    ),
    "exaone4": (_WINDOW,),
    "gemma2": (_WINDOW, *_SOFTCAPS),
    "gemma3": (_WINDOW, *_SOFTCAPS),
    "glm4moe": _SIGMOID_ROUTING,
    "gpt-oss": (
        _WINDOW, Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "intermediate_size"),
    ),
    "granite": (Field("attention.scale", "attention_multiplier", "float"),),
    "granite_swa": (Field("attention.scale", "attention_multiplier", "float"),),
    "granitemoe": (Field("attention.scale", "attention_multiplier", "float"), Field("expert_count", "num_local_experts"), _USED),
    "hrm_text": (
        Field("hrm.layers_per_stack", "num_layers_per_stack"), Field("hrm.h_cycles", "H_cycles"),
        Field("hrm.l_cycles", "L_cycles"),
    ),
    "hunyuan-moe": (
        Field("expert_count", "num_experts"), Field("expert_used_count", "moe_topk"),
        Field("expert_feed_forward_length", "intermediate_size"),
    ),
    "hy_v3": (*_ROUTED, Field("expert_weights_scale", "router_scaling_factor", "positive")),
    "laguna": (
        _WINDOW, Field("expert_count", "num_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        Field("expert_weights_scale", "moe_routed_scaling_factor", "positive"),
    ),
    "llama": (Field("expert_count", "num_local_experts"), _USED),
    "mellum": (
        _WINDOW, Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
    ),
    "minicpm3": (
        Field("attention.q_lora_rank", "q_lora_rank"), Field("attention.kv_lora_rank", "kv_lora_rank"),
        Field("attention.value_length", "v_head_dim"), Field("rope.dimension_count", "qk_rope_head_dim"),
    ),
    "mpt": (
        Field("attention.max_alibi_bias", "attn_config.alibi_bias_max", "float"),
        Field("attention.clamp_kqv", "attn_config.clip_qkv", "float"),
    ),
    "olmo": (Field("attention.clamp_kqv", "clip_qkv", "float"),),
    "olmoe": (Field("expert_count", "num_experts"), _USED),
    "phi3": (_WINDOW,),
    "qwen2moe": (Field("expert_count", "num_experts"), _USED),
    "qwen3moe": (Field("expert_count", "num_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size")),
}  # fmt: skip
"""general.architecture -> fields; one that the configuration lacks, or has as None, is not stated.
"""

Stated = list[tuple[str, str, Any]]
"""(key, type, value) of key-values."""


def _local(config: Any) -> Stated:
    """A flag for each layer that has a window."""
    return [("attention.sliding_window_pattern", "array[bool]", [kind == "sliding_attention" for kind in config.layer_types])]


def _dense_first(config: Any) -> Stated:
    """How many layers are dense; the header is read back, so others than the first would show."""
    return [("leading_dense_block_count", "uint32", sum(kind == "dense" for kind in config.mlp_layer_types))]


def _cohere2moe(config: Any) -> Stated:
    scores = {"softmax": SOFTMAX, "sigmoid": SIGMOID}
    return [*_local(config), *_dense_first(config), ("expert_gating_func", "uint32", scores[config.expert_selection_fn])]


def _laguna(config: Any) -> Stated:
    parts = {kind: rope.get("partial_rotary_factor", 1.0) for kind, rope in config.rope_parameters.items()}
    rotated = {
        end: int(config.head_dim * parts.get(f"{kind}_attention", 1.0)) for kind, end in (("full", ""), ("sliding", "_swa"))
    }
    return [
        *_local(config),
        *_dense_first(config),
        ("attention.head_count", "array[int32]", list(config.num_attention_heads_per_layer)),
        *((f"rope.dimension_count{end}", "uint32", size) for end, size in rotated.items()),
    ]


DERIVED: dict[str, Callable[[Any], Stated]] = {
    "afmoe": _local,
    "cohere2moe": _cohere2moe,
    "exaone-moe": lambda config: [*_local(config), *_dense_first(config)],
    "granite_swa": lambda config: [
        *_local(config),
        ("attention.rope_pattern", "array[bool]", [bool(theta) for theta in config.layer_rope_theta]),
        ("rope.freq_base", "float32", max(config.layer_rope_theta)),
    ],
    "laguna": _laguna,
    "minicpm3": lambda config: [
        ("attention.key_length", "uint32", config.qk_nope_head_dim + config.qk_rope_head_dim),
    ],
}
"""general.architecture -> key-values that follow from several fields, or from lists of one value a
layer.
"""

BARE = {"hy_v3": ("exp_probs_b",)}
"""general.architecture -> stems of tensors whose names end with them."""

SHARED_WIDTHS = {
    "cohere2moe": ("intermediate_size", "num_shared_experts"),
    "ernie4_5-moe": ("moe_intermediate_size", "moe_num_shared_experts"),
    "hunyuan-moe": ("intermediate_size", "num_shared_expert"),
}
"""general.architecture -> fields for the width of one shared expert and their number, whose product
the file states.
"""

_SIGMOID_SCORES = ("expert_gating_func", "uint32", SIGMOID)
_NORMALIZED = ("expert_weights_norm", "bool", 1)
CONSTANT: dict[str, tuple[tuple[str, str, int], ...]] = {
    "afmoe": (_SIGMOID_SCORES, _NORMALIZED),
    "dots1": (_SIGMOID_SCORES,),
    "exaone-moe": (_SIGMOID_SCORES,),
    "glm4moe": (_SIGMOID_SCORES,),
    "hy_v3": (_SIGMOID_SCORES, _NORMALIZED),
    "laguna": (_SIGMOID_SCORES, _NORMALIZED),
}
"""(key, type, value) that every file of an architecture has."""

SAME_MODEL = {"mistral": "llama"}
"""Model types whose computation is another one's: transformers reads the file back as that."""
