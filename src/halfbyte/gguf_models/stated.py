"""Key-values that a file of an architecture states beside its sizes, and the fields of the
configuration that they come from: what `Architecture.extra` reads, in the other direction.

    STATED["qwen3moe"]      expert_count <- num_experts, ...

`to_gguf.py` reads its own header back and compares it with the configuration, so a missing row
shows as an error.
"""

from __future__ import annotations

from .architecture import Field

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

STATED: dict[str, tuple[Field, ...]] = {
    "dots1": _SIGMOID_ROUTING,
    "ernie4_5-moe": (
        Field("expert_count", "moe_num_experts"), Field("expert_used_count", "moe_k"),
        Field("expert_feed_forward_length", "moe_intermediate_size"), Field("expert_shared_count", "moe_num_shared_experts"),
        Field("leading_dense_block_count", "moe_layer_start_index", "integer"),
        Field("interleave_moe_layer_step", "moe_layer_interval"),
    ),
    "exaone4": (_WINDOW,),
    "gemma2": (_WINDOW, *_SOFTCAPS),
    "gemma3": (_WINDOW, *_SOFTCAPS),
    "glm4moe": _SIGMOID_ROUTING,
    "gpt-oss": (
        _WINDOW, Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "intermediate_size"),
    ),
    "granite": (Field("attention.scale", "attention_multiplier", "float"),),
    "granitemoe": (Field("attention.scale", "attention_multiplier", "float"), Field("expert_count", "num_local_experts"), _USED),
    "hunyuan-moe": (
        Field("expert_count", "num_experts"), Field("expert_used_count", "moe_topk"),
        Field("expert_feed_forward_length", "intermediate_size"),
    ),
    "llama": (Field("expert_count", "num_local_experts"), _USED),
    "mellum": (
        _WINDOW, Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
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

UNSTATED = frozenset({"afmoe", "cohere2moe", "exaone-moe", "granite_swa", "hy_v3", "laguna", "minicpm3"})
"""Architectures that are read, and whose key-values no row here has yet: no such file is written."""

SHARED_WIDTHS = {
    "ernie4_5-moe": ("moe_intermediate_size", "moe_num_shared_experts"),
    "hunyuan-moe": ("intermediate_size", "num_shared_expert"),
}
"""general.architecture -> fields for the width of one shared expert and their number, whose product
the file states.
"""

CONSTANT: dict[str, tuple[tuple[str, str, int], ...]] = {
    "dots1": (("expert_gating_func", "uint32", 2),),
    "glm4moe": (("expert_gating_func", "uint32", 2),),
}
"""(key, type, value) that every file of an architecture has: 2 is a sigmoid."""

SAME_MODEL = {"mistral": "llama"}
"""Model types whose computation is another one's: transformers reads the file back as that."""
