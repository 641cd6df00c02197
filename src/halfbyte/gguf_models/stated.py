"""Key-values that a file of an architecture states beside its sizes, and the fields of the
configuration that they come from: what `Architecture.extra` reads, in the other direction.

    STATED["qwen3moe"]      expert_count <- num_experts, ...

`to_gguf.py` reads its own header back and compares it with the configuration, so a missing row
shows as an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .architecture import Field
from .latent import SIGMOID, SOFTMAX
from .streams import COMPRESSED_TOKENS, SQRT_SOFTPLUS, TABLE

_SIGMOID_SCORES = ("expert_gating_func", "uint32", SIGMOID)
_NORMALIZED = ("expert_weights_norm", "bool", 1)
_BOTH_SIDES: tuple[tuple[str, str, Any], ...] = (("attention.causal", "bool", 0), ("pooling_type", "uint32", 0))
"""Tokens of an encoder see those on both sides, and it gives a vector of each."""
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

_RANKS = (
    Field("attention.q_lora_rank", "q_lora_rank"), Field("attention.kv_lora_rank", "kv_lora_rank"),
    Field("rope.dimension_count", "qk_rope_head_dim"),
)  # fmt: skip
_LATENT = (*_SIGMOID_ROUTING, *_RANKS)
_INDEXER = (
    Field("attention.indexer.head_count", "index_n_heads"), Field("attention.indexer.key_length", "index_head_dim"),
    Field("attention.indexer.top_k", "index_topk"),
)  # fmt: skip
_DELTA = (
    Field("ssm.conv_kernel", "linear_conv_kernel_dim"), Field("ssm.state_size", "linear_key_head_dim"),
    Field("ssm.time_step_rank", "linear_num_value_heads"), Field("ssm.group_count", "linear_num_key_heads"),
)  # fmt: skip
_DELTA_EXPERTS = (
    *_DELTA, Field("expert_count", "num_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
    Field("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)  # fmt: skip
_HYBRID = (
    Field("ssm.conv_kernel", "mamba_d_conv"), Field("ssm.state_size", "mamba_d_state"),
    Field("ssm.time_step_rank", "mamba_n_heads"), Field("ssm.group_count", "mamba_n_groups"),
)  # fmt: skip
_NEMOTRON_H = (
    Field("ssm.conv_kernel", "conv_kernel"), Field("ssm.state_size", "ssm_state_size"),
    Field("ssm.time_step_rank", "mamba_num_heads"), Field("ssm.group_count", "n_groups"),
)  # fmt: skip
_T5 = (
    Field("attention.relative_buckets_count", "relative_attention_num_buckets"), Field("attention.key_length", "d_kv"),
    Field("attention.value_length", "d_kv"), Field("rope.dimension_count", "d_kv"), Field("feed_forward_length", "d_ff"),
)  # fmt: skip

STATED: dict[str, tuple[Field, ...]] = {
    "bailingmoe2": (
        *_SIGMOID_ROUTING, Field("expert_group_count", "n_group"), Field("expert_group_used_count", "topk_group"),
    ),
    "bailingmoe3": (
        *_RANKS, Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("expert_shared_count", "n_shared_experts"), Field("expert_weights_scale", "routed_scaling_factor", "positive"),
        Field("expert_weights_norm", "norm_topk_prob", "bool"), Field("kda.head_dim", "linear_head_dim"),
        Field("kda.gate_lower_bound", "kda_lower_bound", "float"), Field("kda.safe_gate", "kda_safe_gate", "bool"),
        Field("ssm.conv_kernel", "linear_conv_kernel_dim"), Field("expert_group_count", "n_group"),
        Field("expert_group_used_count", "topk_group"),
    ),
    "deepseek2": _LATENT,
    "deepseek32": (*_LATENT, *_INDEXER),
    "deepseek4": (
        _WINDOW, Field("expert_count", "n_routed_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("expert_shared_count", "n_shared_experts"), Field("expert_weights_scale", "routed_scaling_factor", "positive"),
        Field("attention.q_lora_rank", "q_lora_rank"), Field("attention.output_group_count", "o_groups"),
        Field("attention.output_lora_rank", "o_lora_rank"), Field("hyper_connection.count", "hc_mult"),
        Field("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
        Field("hyper_connection.epsilon", "hc_eps", "positive"), *_INDEXER,
    ),
    "dots3note": (_WINDOW, *_LATENT, *_INDEXER),
    "falcon-h1": (*_HYBRID, Field("ssm.inner_size", "mamba_d_ssm")),
    "gemma-embedding": (_WINDOW, *_SOFTCAPS),
    "gemma3n": (
        _WINDOW, _SOFTCAPS[1], Field("altup.num_inputs", "altup_num_inputs"),
        Field("altup.active_idx", "altup_active_idx", "integer"),
        Field("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        Field("attention.shared_kv_layers", "num_kv_shared_layers", "integer"),
    ),
    "gemma4": (
        _WINDOW, _SOFTCAPS[1], Field("embedding_length_per_layer_input", "hidden_size_per_layer_input", "integer"),
        Field("attention.shared_kv_layers", "num_kv_shared_layers", "integer"), Field("expert_count", "num_experts"),
        Field("expert_used_count", "top_k_experts"), Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("attention.key_length", "global_head_dim"), Field("attention.value_length", "global_head_dim"),
        Field("rope.dimension_count", "global_head_dim"), Field("attention.key_length_swa", "head_dim"),
        Field("attention.value_length_swa", "head_dim"), Field("rope.dimension_count_swa", "head_dim"),
    ),
    "glm-dsa": (*_LATENT, *_INDEXER),
    "granitehybrid": (
        *_HYBRID, Field("attention.scale", "attention_multiplier", "float"), Field("expert_count", "num_local_experts"), _USED,
        Field("expert_shared_feed_forward_length", "shared_intermediate_size"),
    ),
    "hy_v4": (
        *_LATENT, *_INDEXER, Field("hyper_connection.count", "hc_mult"),
        Field("hyper_connection.epsilon", "hc_eps", "positive"), Field("hyper_connection.magnitude", "hc_magnitude", "positive"),
    ),
    "jamba": (
        Field("expert_count", "num_experts"), _USED, Field("ssm.conv_kernel", "mamba_d_conv"),
        Field("ssm.state_size", "mamba_d_state"), Field("ssm.time_step_rank", "mamba_dt_rank"),
    ),
    "kimi-linear": (
        *_RANKS, Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("expert_shared_count", "n_shared_experts"), Field("expert_weights_scale", "routed_scaling_factor", "positive"),
        Field("kda.head_dim", "linear_head_dim"), Field("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ),
    "lfm2moe": (
        Field("expert_count", "num_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("leading_dense_block_count", "num_dense_layers", "integer"),
        Field("expert_weights_scale", "routed_scaling_factor", "positive"),
    ),
    "llama4": (
        Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "intermediate_size"),
        Field("feed_forward_length", "intermediate_size_mlp"), Field("interleave_moe_layer_step", "interleave_moe_layer_step"),
    ),
    "mamba": (Field("ssm.inner_size", "intermediate_size"), Field("ssm.time_step_rank", "time_step_rank")),
    "mamba2": (Field("ssm.time_step_rank", "num_heads"), Field("ssm.group_count", "n_groups")),
    "mimo2": (
        Field("expert_count", "n_routed_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("attention.value_length", "v_head_dim"), Field("expert_weights_scale", "routed_scaling_factor", "positive"),
        Field("attention.value_scale", "attention_value_scale", "float"),
    ),
    "minimax-m2": (
        Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "intermediate_size"),
    ),
    "minimax-m3": (
        Field("expert_count", "num_local_experts"), _USED, Field("expert_feed_forward_length", "intermediate_size"),
        Field("feed_forward_length", "dense_intermediate_size"),
        Field("expert_weights_scale", "routed_scaling_factor", "positive"), Field("rope.dimension_count", "rotary_dim"),
        Field("attention.indexer.head_count", "index_n_heads"), Field("attention.indexer.key_length", "index_head_dim"),
        Field("attention.indexer.block_size", "index_block_size"), Field("attention.indexer.top_k", "index_topk_blocks"),
        Field("attention.indexer.local_blocks", "index_local_blocks"),
    ),
    "mistral4": _LATENT,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": (
        *_NEMOTRON_H, Field("expert_count", "n_routed_experts"), _USED,
        Field("expert_feed_forward_length", "moe_intermediate_size"),
        Field("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
        Field("expert_shared_count", "n_shared_experts"), Field("expert_weights_norm", "norm_topk_prob", "bool"),
        Field("expert_weights_scale", "routed_scaling_factor", "positive"), Field("moe_latent_size", "moe_latent_size"),
    ),
    "phimoe": (_WINDOW, Field("expert_count", "num_local_experts"), _USED),
    "qwen35": _DELTA,
    "qwen35moe": _DELTA_EXPERTS,
    "qwen3next": _DELTA_EXPERTS,
    "qwen4exp": (
        *_DELTA_EXPERTS, Field("hyper_connection.count", "hc_count"), Field("hyper_connection.low_rank", "hc_lowrank"),
        Field("attention.indexer.head_count", "indexer_n_heads"), Field("attention.indexer.key_length", "indexer_head_dim"),
        Field("attention.indexer.top_k", "indexer_budget"),
    ),
    "smallthinker": (
        _WINDOW, Field("expert_count", "num_experts"), _USED, Field("expert_feed_forward_length", "moe_intermediate_size"),
    ),
    "t5": (
        *_T5, Field("decoder_block_count", "num_decoder_layers"),
    ),
    "t5encoder": _T5,
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
    "granite_swa": (Field("attention.scale", "attention_multiplier", "float"), Field("expert_count", "num_local_experts"), _USED),
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
Shapes = Mapping[str, tuple[int, ...]]
"""Tensor of the file -> its shape."""


def _local(config: Any, shapes: Shapes) -> Stated:
    """A flag for each layer that has a window."""
    return [("attention.sliding_window_pattern", "array[bool]", [kind == "sliding_attention" for kind in config.layer_types])]


def _local_rotation(config: Any, shapes: Shapes) -> Stated:
    """The same, and the base of the rotation of layers with a window."""
    theta = config.rope_parameters["sliding_attention"]["rope_theta"]
    return [*_local(config, shapes), ("rope.freq_base_swa", "float32", theta)]


def _dense_first(config: Any, shapes: Shapes) -> Stated:
    """How many layers are dense; the header is read back, so others than the first would show."""
    return [("leading_dense_block_count", "uint32", sum(kind == "dense" for kind in config.mlp_layer_types))]


def _cohere2moe(config: Any, shapes: Shapes) -> Stated:
    scores = {"softmax": SOFTMAX, "sigmoid": SIGMOID}
    gating = ("expert_gating_func", "uint32", scores[config.expert_selection_fn])
    return [*_local(config, shapes), *_dense_first(config, shapes), gating]


def _laguna(config: Any, shapes: Shapes) -> Stated:
    parts = {kind: rope.get("partial_rotary_factor", 1.0) for kind, rope in config.rope_parameters.items()}
    rotated = {
        end: int(config.head_dim * parts.get(f"{kind}_attention", 1.0)) for kind, end in (("full", ""), ("sliding", "_swa"))
    }
    return [
        *_local(config, shapes),
        *_dense_first(config, shapes),
        ("attention.head_count", "array[int32]", list(config.num_attention_heads_per_layer)),
        *((f"rope.dimension_count{end}", "uint32", size) for end, size in rotated.items()),
    ]


def _lengths(config: Any, whole: bool, end: str = "") -> Stated:
    """Lengths of latent attention: those of its heads, and with split projections those of the
    vector that is kept.
    """
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    if whole:
        return [(f"attention.key_length{end}", "uint32", key), (f"attention.value_length{end}", "uint32", config.v_head_dim)]
    kept = config.kv_lora_rank
    return [
        (f"attention.key_length{end}", "uint32", kept + config.qk_rope_head_dim),
        (f"attention.value_length{end}", "uint32", kept),
        (f"attention.key_length_mla{end}", "uint32", key),
        (f"attention.value_length_mla{end}", "uint32", config.v_head_dim),
    ]


def _keeps_whole(shapes: Shapes) -> bool:
    """Whether the file has the matrix of keys and values of latent attention whole, as older ones."""
    return any(".attn_kv_b" in name for name in shapes)


def _temperature(rope: Mapping[str, Any]) -> tuple[str, str, Any]:
    """How fast attention sharpens with the position: Llama 4's β, under Mistral's key."""
    return "attention.temperature_scale", "float32", rope.get("llama_4_scaling_beta")


def _latent(config: Any, shapes: Shapes) -> Stated:
    """Lengths, groups of experts, and a tenth of what scales the logarithm of a stretched context."""
    whole = _keeps_whole(shapes)
    stated = _lengths(config, whole)
    stated += [] if whole else [("attention.head_count_kv", "uint32", 1)]
    if (getattr(config, "n_group", 1) or 1) > 1:
        stated += [("expert_group_count", "uint32", config.n_group), ("expert_group_used_count", "uint32", config.topk_group)]
    if config.model_type == "deepseek_v2":
        stated.append(("expert_gating_func", "uint32", SOFTMAX))
    elif config.model_type != "mistral4":
        stated.append(_SIGMOID_SCORES)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("mscale_all_dim"):
        stated.append(("rope.scaling.yarn_log_multiplier", "float32", rope["mscale_all_dim"] / 10))
    return stated


def _mistral4(config: Any, shapes: Shapes) -> Stated:
    rope = config.rope_parameters
    return [
        *_latent(config, shapes),
        _temperature(rope),
        ("attention.temperature_length", "uint32", rope.get("original_max_position_embeddings")),
    ]


def _kda(config: Any, shapes: Shapes) -> Stated:
    """Layers of latent attention are those with heads for keys."""
    whole = _keeps_whole(shapes)
    heads = [(config.num_attention_heads if whole else 1) if kind == "full_attention" else 0 for kind in config.layer_types]
    return [
        *(pair for pair in _latent(config, shapes) if not pair[0].startswith("expert_group")),
        *_dense_first(config, shapes),
        ("attention.head_count_kv", "array[int32]", heads),
    ]


def _indexed(config: Any, shapes: Shapes) -> Stated:
    """Layers without an indexer use the choice of the one before."""
    return [
        *_latent(config, shapes),
        ("attention.indexer.types", "array[bool]", [kind == "full" for kind in config.indexer_types]),
    ]


def _hy_v4(config: Any, shapes: Shapes) -> Stated:
    limits = [float(config.swiglu_limit)] * config.num_hidden_layers
    return [*_indexed(config, shapes), *_dense_first(config, shapes), ("swiglu_clamp_exp", "array[float32]", limits)]


def _dots3note(config: Any, shapes: Shapes) -> Stated:
    """Layers with a window have sizes of their own."""
    local = [kind == "sliding_attention" for kind in config.layer_types]
    stated = [*_latent(config, shapes), *_dense_first(config, shapes), *_local(config, shapes), _NORMALIZED]
    each = [config.per_layer_config[i] for i in range(len(local))]
    windowed = next((c for c, flag in zip(each, local, strict=True) if flag), None)
    ropes = config.rope_parameters
    stated += [
        ("attention.head_count", "array[int32]", [c.num_attention_heads for c in each]),
        ("attention.indexer.types", "array[bool]", [not flag for flag in local]),
        ("rope.freq_base", "float32", next(iter(ropes.values()))["rope_theta"]),
    ]
    if "indexed_attention" in ropes:
        stated.append(("rope.freq_base", "float32", ropes["indexed_attention"]["rope_theta"]))
    if windowed is not None:
        stated += [
            *_lengths(windowed, _keeps_whole(shapes), "_swa"),
            ("attention.kv_lora_rank_swa", "uint32", windowed.kv_lora_rank),
            ("rope.freq_base_swa", "float32", ropes["sliding_attention"]["rope_theta"]),
        ]
    return stated


def _mimo2(config: Any, shapes: Shapes) -> Stated:
    """The file does not count the token itself in its window."""
    heads = [config.num_key_value_heads * (2 if kind == "sliding_attention" else 1) for kind in config.layer_types]
    rope = config.rope_parameters["full_attention"]
    return [
        *_local_rotation(config, shapes),
        *_dense_first(config, shapes),
        ("attention.sliding_window", "uint32", config.sliding_window - 1),
        ("attention.head_count_kv", "array[int32]", heads),
        ("rope.dimension_count", "uint32", int(config.head_dim * rope.get("partial_rotary_factor", 1.0))),
    ]


def _deepseek4(config: Any, shapes: Shapes) -> Stated:
    main, scaled = config.rope_parameters["main"], config.rope_parameters["compress"]
    limits = [float(config.swiglu_limit)] * config.num_hidden_layers
    stated: Stated = [
        ("expert_gating_func", "uint32", SQRT_SOFTPLUS),
        _NORMALIZED,
        ("swiglu_clamp_exp", "array[float32]", limits),
        ("attention.compress_ratios", "array[int32]", [COMPRESSED_TOKENS[kind] for kind in config.layer_types]),
        ("hash_layer_count", "uint32", sum(kind == "hash_moe" for kind in config.mlp_layer_types)),
        ("rope.freq_base", "float32", main["rope_theta"]),
        ("attention.compress_rope_freq_base", "float32", scaled["rope_theta"]),
        ("rope.dimension_count", "uint32", int(config.head_dim * main.get("partial_rotary_factor", 1.0))),
        ("feed_forward_length", "uint32", config.moe_intermediate_size),
    ]
    if scaled.get("rope_type") == "yarn":
        stated += [
            ("rope.scaling.type", "string", "yarn"),
            ("rope.scaling.factor", "float32", scaled["factor"]),
            ("rope.scaling.original_context_length", "uint32", scaled["original_max_position_embeddings"]),
        ]
    return stated


def _hybrid(config: Any, shapes: Shapes) -> Stated:
    """Layers of attention are those with heads for keys."""
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]
    return [("attention.head_count_kv", "array[int32]", heads)]


def _jamba(config: Any, shapes: Shapes) -> Stated:
    kinds = [i % config.attn_layer_period == config.attn_layer_offset for i in range(config.num_hidden_layers)]
    return [
        ("attention.head_count_kv", "array[int32]", [config.num_key_value_heads if kind else 0 for kind in kinds]),
        ("ssm.inner_size", "uint32", config.mamba_expand * config.hidden_size),
        *([("expert_count", "uint32", 0), ("expert_used_count", "uint32", 0)] if config.num_experts < 2 else []),
    ]


def _granitehybrid(config: Any, shapes: Shapes) -> Stated:
    return [
        *_hybrid(config, shapes),
        ("ssm.inner_size", "uint32", config.mamba_n_heads * config.mamba_d_head),
        ("rope.scaling.finetuned", "bool", config.position_embedding_type == "rope"),
        *([("expert_count", "uint32", 0), ("expert_used_count", "uint32", 0)] if not config.num_local_experts else []),
        *([("feed_forward_length", "uint32", config.shared_intermediate_size)] if not config.num_local_experts else []),
    ]


def _nemotron_h(config: Any, shapes: Shapes) -> Stated:
    """Feed-forward layers are those with a width."""
    kinds = config.layers_block_type
    width = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    return [
        *_hybrid(config, shapes),
        ("feed_forward_length", "array[int32]", [width if kind in ("mlp", "moe") else 0 for kind in kinds]),
        ("ssm.inner_size", "uint32", config.mamba_num_heads * config.mamba_head_dim),
    ]


def _recurrent(config: Any, shapes: Shapes) -> Stated:
    """A model without attention and feed-forward layers."""
    return [("attention.head_count", "uint32", 0), ("feed_forward_length", "uint32", 0)]


def _mamba(config: Any, shapes: Shapes) -> Stated:
    normed = config.model_type == "falcon_mamba"
    return [*_recurrent(config, shapes), *([("ssm.dt_b_c_rms", "bool", True)] if normed else [])]


def _delta(config: Any, shapes: Shapes) -> Stated:
    """Every n-th layer is of attention, or each is stated."""
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    interval = recurrent.index(False) + 1 if False in recurrent else len(recurrent) + 1
    periodic = recurrent == [(i + 1) % interval != 0 for i in range(len(recurrent))]
    sections = (config.rope_parameters or {}).get("mrope_section")
    return [
        ("ssm.inner_size", "uint32", config.linear_num_value_heads * config.linear_value_head_dim),
        ("full_attention_interval", "uint32", interval) if periodic else ("attention.recurrent_layers", "array[bool]", recurrent),
        *([("rope.dimension_sections", "array[int32]", [*sections, 0])] if sections else []),
    ]


def _qwen4(config: Any, shapes: Shapes) -> Stated:
    ratios = [0 if kind == "linear_attention" else config.indexer_compress_ratio for kind in config.layer_types]
    stated = [*_delta(config, shapes), ("attention.compress_ratios", "array[int32]", ratios)]
    if getattr(config, "ple_layer_ids", None):
        heads = (config.ngram_size - 1) * config.heads_per_ngram
        stated += [
            ("ple.layers", "array[int32]", [layer - 1 for layer in config.ple_layer_ids]),
            ("ple.ngram_size", "uint32", config.ngram_size),
            ("ple.heads_per_ngram", "uint32", config.heads_per_ngram),
            ("ple.conv_kernel", "uint32", config.ple_conv_kernel_size),
            ("ple.eos_token_id", "uint32", config.eos_token_id),
            ("embedding_length_per_layer_input", "uint32", config.ple_embed_dim // heads),
        ]
    return stated


def _gemma3n(config: Any, shapes: Shapes) -> Stated:
    """A share that is cut off as a number of standard deviations: the inverse of the normal
    distribution, by Newton's method.
    """
    return [
        *_local_rotation(config, shapes),
        ("activation_sparsity_scale", "array[float32]", [_deviations(share) for share in config.activation_sparsity_pattern]),
        ("feed_forward_length", "array[int32]", list(config.intermediate_size)),
    ]


def _deviations(share: float) -> float:
    """x with a share of the normal distribution below it, −∞ for none."""
    if share <= 0:
        return -math.inf
    low, high = -40.0, 40.0
    for _ in range(200):
        x = (low + high) / 2
        low, high = (x, high) if 0.5 * math.erfc(-x / math.sqrt(2)) < share else (low, x)
    return high


def _gemma4(config: Any, shapes: Shapes) -> Stated:
    """Layers that share keys may be twice as wide."""
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    double = 2 if config.use_double_wide_mlp else 1
    width = config.intermediate_size
    wide = config.num_global_key_value_heads
    kv = [config.num_key_value_heads if kind == "sliding_attention" else wide for kind in config.layer_types]
    widths = [width] * (layers - shared) + [width * double] * shared
    return [
        *_local_rotation(config, shapes),
        ("attention.head_count_kv", "array[int32]", kv),
        ("feed_forward_length", "array[int32]", widths) if len(set(widths)) > 1 else ("feed_forward_length", "uint32", width),
    ]


def _modern_bert(config: Any, shapes: Shapes) -> Stated:
    return [
        *_local_rotation(config, shapes),
        *_BOTH_SIDES,
        ("attention.sliding_window", "uint32", config.local_attention),
        ("hidden_activation", "string", config.hidden_activation),
    ]


def _smallthinker(config: Any, shapes: Shapes) -> Stated:
    scores = SIGMOID if config.router_scores == "sigmoid" else SOFTMAX
    window = config.sliding_window if config.use_sliding_window else None
    return [("expert_gating_func", "uint32", scores), ("attention.sliding_window", "uint32", window or 0)]


def _ministral3(config: Any, shapes: Shapes) -> Stated:
    rope = config.rope_parameters
    return [
        ("rope.scaling.yarn_log_multiplier", "float32", rope.get("mscale_all_dim")),
        _temperature(rope),
    ]


def _t5_layers(config: Any, shapes: Shapes) -> Stated:
    first = getattr(config, "decoder_start_token_id", None)
    return [
        ("block_count", "uint32", config.num_layers),
        ("attention.head_count_kv", "uint32", config.num_heads),
        ("decoder_start_token_id", "uint32", config.pad_token_id or 0 if first is None else first),
    ]


def _bert(config: Any, shapes: Shapes) -> Stated:
    """How many types of tokens there are has no architecture in its key."""
    types = shapes.get("token_types.weight", (1,))[0]
    return [*_BOTH_SIDES, ("/tokenizer.ggml.token_type_count", "uint32", types)]


def nothing(config: Any, shapes: Shapes) -> Stated:
    """No key-values."""
    return []


DERIVED: dict[str, Callable[[Any, Shapes], Stated]] = {
    "afmoe": _local,
    "bailingmoe3": _kda,
    "bert": _bert,
    "cohere2moe": _cohere2moe,
    "dbrx": lambda config, shapes: [
        ("feed_forward_length", "uint32", config.ffn_config.ffn_hidden_size),
        ("expert_count", "uint32", config.ffn_config.moe_num_experts),
        ("expert_used_count", "uint32", config.ffn_config.moe_top_k),
        ("attention.clamp_kqv", "float32", config.attn_config.clip_qkv),
        ("attention.head_count_kv", "uint32", config.attn_config.kv_n_heads),
        ("attention.layer_norm_epsilon", "float32", 1e-5),
        ("rope.freq_base", "float32", config.attn_config.rope_theta),
    ],
    "deepseek2": _latent,
    "deepseek32": _latent,
    "deepseek4": _deepseek4,
    "dots3note": _dots3note,
    "eurobert": lambda config, shapes: list(_BOTH_SIDES),
    "exaone-moe": lambda config, shapes: [*_local(config, shapes), *_dense_first(config, shapes)],
    "falcon": lambda config, shapes: [
        ("feed_forward_length", "uint32", config.ffn_hidden_size),
        ("attention.head_count_kv", "uint32", config.num_kv_heads),
    ],
    "gemma-embedding": lambda config, shapes: [*_local_rotation(config, shapes), *_BOTH_SIDES],
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "glm-dsa": _indexed,
    "granite_swa": lambda config, shapes: [
        *_local(config, shapes),
        ("attention.rope_pattern", "array[bool]", [bool(theta) for theta in config.layer_rope_theta]),
        ("rope.freq_base", "float32", max(config.layer_rope_theta)),
    ],
    "granitehybrid": _granitehybrid,
    "hy_v4": _hy_v4,
    "jamba": _jamba,
    "jina-bert-v3": _bert,
    "kimi-linear": _kda,
    "laguna": _laguna,
    "lfm2": _hybrid,
    "lfm2moe": _hybrid,
    "llama-embed": lambda config, shapes: list(_BOTH_SIDES),
    "llama4": lambda config, shapes: [("attention.sliding_window", "uint32", config.attention_chunk_size or 0)],
    "mamba": _mamba,
    "mamba2": lambda config, shapes: [
        *_recurrent(config, shapes),
        ("ssm.inner_size", "uint32", config.num_heads * config.head_dim),
    ],
    "mellum": _local,
    "mimo2": _mimo2,
    "minicpm3": lambda config, shapes: [
        ("attention.key_length", "uint32", config.qk_nope_head_dim + config.qk_rope_head_dim),
    ],
    "minimax-m3": _dense_first,
    "mistral3": _ministral3,
    "mistral4": _mistral4,
    "modern-bert": _modern_bert,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "nomic-bert": _bert,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "qwen3next": _delta,
    "qwen4exp": _qwen4,
    "smallthinker": _smallthinker,
    "t5": _t5_layers,
    "t5encoder": lambda config, shapes: [*_t5_layers(config, shapes)[:2], *_BOTH_SIDES],
}
"""general.architecture -> key-values that follow from several fields, from lists of one value a
layer, or from the tensors. A key that begins with "/" has no architecture before it.
"""


@dataclass(frozen=True)
class Keyed:
    """A key-value that is a parameter of transformers' model.

    key      after `ARCH.`, or the whole key where it begins with "/"
    kind     type of the array
    default  of a layer without the parameter; None where it must be there
    """

    key: str
    kind: str
    default: float | None = None


KEYED: dict[str, dict[str, Keyed]] = {
    "apertus": {
        f"mlp.act_fn.{name}": Keyed(f"/xielu.{name}", "array[float32]", default)
        for name, default in (("alpha_p", None), ("alpha_n", None), ("beta", 0.5), ("eps", -1e-6))
    },
    "qwen4exp": {
        f"{TABLE}.{name}": Keyed(f"ple.{key}", "array[uint64]")
        for name, key in (
            ("layer_multipliers", "layer_multipliers"),
            ("ngram_heads_offsets", "head_offsets"),
            ("ngram_heads_vocab_sizes", "head_vocab_sizes"),
        )
    },
}
"""general.architecture -> parameter within a layer -> the key-value that a file has in its place:
one number of each layer, or the numbers of the one layer that has it.
"""

BARE: dict[str, tuple[str, ...]] = {
    "": ("ssm_a", "ssm_d", "ffn_gate_inp.scale", "ffn_down_exps.scale", "hrm.z_l_init"),
    "falcon-h1": ("ffn_norm",),
    "hy_v3": ("exp_probs_b",),
}
"""general.architecture, "" for all of them -> stems of tensors whose names end with them."""

WHOLE_LATENT = ("deepseek2", "mistral4")
"""Architectures whose second projection of latent attention llama.cpp also reads undivided."""
SHARED_WIDTHS = {
    "cohere2moe": ("intermediate_size", "num_shared_experts"),
    "ernie4_5-moe": ("moe_intermediate_size", "moe_num_shared_experts"),
    "afmoe": ("moe_intermediate_size", "num_shared_experts"),
    "exaone-moe": ("moe_intermediate_size", "num_shared_experts"),
    "granite_swa": ("shared_intermediate_size", ""),
    "hy_v3": ("moe_intermediate_size", "num_shared_experts"),
    "hunyuan-moe": ("intermediate_size", "num_shared_expert"),
}
"""general.architecture -> fields for the width of one shared expert and their number, whose product
the file states.
"""

CONSTANT: dict[str, tuple[tuple[str, str, float], ...]] = {
    "afmoe": (_SIGMOID_SCORES, _NORMALIZED),
    "bailingmoe2": (_SIGMOID_SCORES,),
    "dots1": (_SIGMOID_SCORES,),
    "exaone-moe": (_SIGMOID_SCORES,),
    "glm4moe": (_SIGMOID_SCORES,),
    "hy_v3": (_SIGMOID_SCORES, _NORMALIZED),
    "kimi-linear": (_NORMALIZED,),
    "laguna": (_SIGMOID_SCORES, _NORMALIZED),
    "lfm2moe": (_SIGMOID_SCORES,),
    "olmo": (("attention.layer_norm_epsilon", "float32", 1e-5),),
    "minimax-m2": (_SIGMOID_SCORES,),
    "minimax-m3": (_SIGMOID_SCORES, _NORMALIZED, ("expert_shared_count", "uint32", 1)),
}
"""(key, type, value) that every file of an architecture has."""
