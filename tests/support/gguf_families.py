"""Small random models of every architecture whose tensors are named by a table, and GGUF files of
them.

The names are the inverse of the library's own table; that they are llama.cpp's is shown where
llama.cpp itself loads these files and gives the same logits (test_families.py).

More than 800 lines: one table of architectures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import torch
from halfbyte.gguf_models.architecture import DBRX_EXPERTS, EXPERTS, PARAMETER, PART, RMS_EPS, Architecture
from halfbyte.gguf_models.architectures import ARCHITECTURES, MISTRAL
from halfbyte.gguf_models.classic import FALCON_40B
from halfbyte.gguf_models.config import register
from halfbyte.gguf_models.cycles import hrm_text
from halfbyte.gguf_models.encoders import T5_PLAIN, T5_PLAIN_ENCODER
from halfbyte.gguf_models.latent import DEEPSEEK_V2
from halfbyte.gguf_models.mixtures import COHERE2_MOE_RMS, GRANITE_MOE_SWA
from halfbyte.gguf_models.recurrent import FALCON_MAMBA
from halfbyte.gguf_models.streams import qwen4
from halfbyte.transformers.build import POOLED
from support.gguf_writer import F32, GGUF, I32, Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

Family = tuple[dict[str, Any], list[tuple[str, str, Any]]]
HEADS, KV, VOCABULARY = 4, 2, 48
IDS = [1, 5, 9, 13, 40, 22, 7, 7, 30, 11, 3, 46]
EXPERT_KEYS = [("expert_count", "uint32", 4), ("expert_used_count", "uint32", 2)]
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SIGMOID = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "sliding_window": None, "use_qk_norm": True,
}  # fmt: skip
SIGMOID_KEYS = [
    *EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("expert_shared_count", "uint32", 1),
    ("leading_dense_block_count", "uint32", 1), ("expert_weights_scale", "float32", 1.5), ("expert_weights_norm", "bool", 1),
    ("expert_gating_func", "uint32", 2),
]  # fmt: skip
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.2}
GRANITE_KEYS = [
    ("embedding_scale", "float32", 3.0), ("residual_scale", "float32", 0.7), ("logit_scale", "float32", 2.0),
    ("attention.scale", "float32", 0.2),
]  # fmt: skip
MROPE = [("rope.dimension_sections", "array[int32]", [4, 2, 2, 0])]
HALF = {"partial_rotary_factor": 0.5}


def ssm(hidden: int, state: int, rank: int, groups: int | None = None, inner: int = 2) -> list[tuple[str, str, Any]]:
    """Keys of a recurrent layer."""
    sizes = {"conv_kernel": 4, "inner_size": inner * hidden, "state_size": state, "time_step_rank": rank}
    sizes |= {} if groups is None else {"group_count": groups}
    return [(f"ssm.{k}", "uint32", v) for k, v in sizes.items()]


def delta(hidden: int, **changes: Any) -> dict[str, Any]:
    """A gated delta network of two key heads and four value heads, with attention in every second
    layer.
    """
    head = hidden // 4
    return (
        UNTIED
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
            "layer_types": ["linear_attention", "full_attention"],
            "partial_rotary_factor": 0.25,
        }
        | changes
    )


def delta_keys(hidden: int) -> list[tuple[str, str, Any]]:
    return [*ssm(hidden, hidden // 4, 4, 2, 1), ("full_attention_interval", "uint32", 2)]


DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
DELTA_EXPERT_KEYS = [
    *EXPERT_KEYS,
    ("expert_feed_forward_length", "uint32", 32),
    ("expert_shared_feed_forward_length", "uint32", 64),
]
MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
HYBRID_KV = [("attention.head_count_kv", "array[int32]", [0, KV])]


def latent(hidden: int, **changes: Any) -> dict[str, Any]:
    """Latent attention of a width, with experts after a dense layer."""
    head = hidden // 4
    return (
        UNTIED
        | SIGMOID
        | {
            "num_key_value_heads": HEADS,
            "q_lora_rank": hidden,
            "kv_lora_rank": hidden,
            "qk_rope_head_dim": head // 2,
            "qk_nope_head_dim": head,
            "v_head_dim": head,
            "num_nextn_predict_layers": 0,
        }
        | changes
    )


def latent_keys(hidden: int) -> list[tuple[str, str, Any]]:
    head = hidden // 4
    sizes = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": hidden, "attention.q_lora_rank": hidden,
        "attention.key_length": hidden + head // 2, "attention.value_length": hidden,
        "attention.key_length_mla": head + head // 2, "attention.value_length_mla": head, "rope.dimension_count": head // 2,
    }  # fmt: skip
    return [(k, "uint32", v) for k, v in sizes.items()]


def indexer(hidden: int) -> dict[str, Any]:
    """Heads of their own choose the four tokens that each one attends to. They are so many that no
    two scores are equal.
    """
    return {"index_n_heads": 16, "index_head_dim": max(64, hidden // 2), "index_topk": 4}


def indexer_keys(hidden: int) -> list[tuple[str, str, Any]]:
    sizes = {"head_count": 16, "key_length": max(64, hidden // 2), "top_k": 4}
    return [(f"attention.indexer.{k}", "uint32", v) for k, v in sizes.items()]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0}
YARN_KEYS = [
    ("rope.scaling.type", "string", "yarn"), ("rope.scaling.factor", "float32", 4.0),
    ("rope.scaling.original_context_length", "uint32", 8),
]  # fmt: skip


def longrope(hidden: int, original: int) -> Family:
    """Long and short rotation factors; the text is longer than `original` or not."""
    half = hidden // HEADS // 2
    factors = {"long_factor": [1.0 + i / 4 for i in range(half)], "short_factor": [1.0 + i / 32 for i in range(half)]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original, "attention_factor": 1.25} | factors
    keys = [
        ("rope.scaling.original_context_length", "uint32", original), ("rope.scaling.attn_factor", "float32", 1.25),
        ("context_length", "uint32", 1024),
    ]  # fmt: skip
    lengths = {"original_max_position_embeddings": original, "max_position_embeddings": 1024}
    return UNTIED | {"rope": rope, "sliding_window": None} | lengths, keys


def gemma4(hidden: int, **changes: Any) -> Family:
    """Local and global layers with heads of two lengths, the last two with keys of the first two."""
    head, wide = hidden // 4, hidden // 2
    kinds = ["sliding_attention", "full_attention"] * 2
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e4, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = TIED | {
        "num_hidden_layers": 4, "layer_types": kinds, "global_head_dim": wide, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "num_kv_shared_layers": 2, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32, "hidden_size_per_layer_input": hidden, "vocab_size_per_layer_input": VOCABULARY,
        "use_double_wide_mlp": True, "sliding_window": 4, "rope_parameters": ropes, "final_logit_softcapping": 30.0,
    } | changes  # fmt: skip
    width = 96 if hidden == 64 else hidden
    keys = [
        *EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("attention.sliding_window", "uint32", 4),
        ("attention.sliding_window_pattern", "array[bool]", [1, 0, 1, 0]), ("attention.key_length", "uint32", wide),
        ("attention.value_length", "uint32", wide), ("attention.key_length_swa", "uint32", head),
        ("attention.value_length_swa", "uint32", head), ("attention.shared_kv_layers", "uint32", 2),
        ("attention.head_count_kv", "array[int32]", [KV, 1, KV, 1]), ("embedding_length_per_layer_input", "uint32", hidden),
        ("rope.dimension_count", "uint32", wide), ("rope.dimension_count_swa", "uint32", head),
        ("rope.freq_base_swa", "float32", 1e4), ("feed_forward_length", "array[int32]", [width, width, 2 * width, 2 * width]),
        ("final_logit_softcapping", "float32", 30.0),
    ]  # fmt: skip
    return config, keys


def gemma3n(hidden: int) -> Family:
    """llama.cpp's sizes of this family: keys of layer 20 and later are those of two before it, and
    the first ten are sparse.
    """
    layers = 22
    kinds = ["full_attention" if (i + 1) % 5 == 0 else "sliding_attention" for i in range(layers)]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = TIED | {
        "num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 64, "sliding_window": 4, "rope_parameters": ropes,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    keys = [
        ("attention.sliding_window", "uint32", 4), ("rope.freq_base_swa", "float32", 1e4), ("altup.num_inputs", "uint32", 4),
        ("attention.sliding_window_pattern", "array[bool]", [k == "sliding_attention" for k in kinds]),
        ("altup.active_idx", "uint32", 0), ("embedding_length_per_layer_input", "uint32", 256),
        ("attention.shared_kv_layers", "uint32", 2), ("final_logit_softcapping", "float32", 30.0),
        ("feed_forward_length", "array[int32]", [96 if hidden == 64 else hidden] * layers),
        ("activation_sparsity_scale", "array[float32]", [1.6448536] * 10 + [float("-inf")] * 12),
    ]  # fmt: skip
    return config, keys


def nemotron_h_moe(hidden: int, **changes: Any) -> Family:
    """Mamba 2, experts without gates, attention."""
    width = 96 if hidden == 64 else hidden
    config = UNTIED | {
        "layers_block_type": ["linear_attention", "moe", "full_attention"], "mamba_num_heads": 8, "n_groups": 2,
        "mamba_head_dim": hidden // 4, "ssm_state_size": 16, "use_bias": False, "mlp_bias": False, "num_hidden_layers": 3,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": width, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    keys = [
        *EXPERT_KEYS, ("expert_shared_feed_forward_length", "uint32", width), ("expert_weights_scale", "float32", 1.5),
        ("expert_feed_forward_length", "uint32", width), ("expert_weights_norm", "bool", 1),
        ("expert_shared_count", "uint32", 1), *ssm(hidden, 16, 8, 2), ("attention.head_count_kv", "array[int32]", [0, 0, KV]),
        ("feed_forward_length", "array[int32]", [0, width, 0]),
    ]  # fmt: skip
    if "moe_latent_size" in changes:
        keys.append(("moe_latent_size", "uint32", changes["moe_latent_size"]))
    return config | changes, keys


def smallthinker(hidden: int, scores: str, window: int) -> Family:
    """Experts chosen before the attention. llama.cpp takes a window of 4096 whatever the file has,
    and rotates every layer of a model of four.
    """
    config = TIED | {
        "num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_act": "relu",
        "router_scores": scores, "use_sliding_window": bool(window), "sliding_window": window or None,
        "layer_types": ["sliding_attention" if window and i % 4 else "full_attention" for i in range(5)],
        "no_rope_layers": [int(not window or i % 4 != 0) for i in range(5)],
    }  # fmt: skip
    keys = [
        *EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("attention.sliding_window", "uint32", window),
        ("expert_gating_func", "uint32", 2 if scores == "sigmoid" else 1),
    ]  # fmt: skip
    return config, keys


def mrope(hidden: int) -> list[tuple[str, str, Any]]:
    return [("rope.dimension_sections", "array[int32]", [max(1, hidden // 128), max(1, hidden // 128), hidden // 64 - 1, 0])]


def t5(hidden: int, gated: bool) -> Family:
    """An encoder and a decoder."""
    config = {
        "d_model": hidden, "d_kv": hidden // HEADS, "d_ff": 96 if hidden == 64 else hidden, "num_layers": 2,
        "num_decoder_layers": 2, "num_heads": HEADS, "feed_forward_proj": "gated-gelu" if gated else "relu",
        "num_key_value_heads": HEADS, "decoder_start_token_id": 0, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": not gated,
    }  # fmt: skip
    keys = [
        ("attention.relative_buckets_count", "uint32", 32), ("decoder_block_count", "uint32", 2),
        ("decoder_start_token_id", "uint32", 0),
    ]  # fmt: skip
    return config, keys


def t5_encoder(hidden: int, gated: bool) -> Family:
    config, keys = t5(hidden, gated)
    changes = {"is_encoder_decoder": False, "tie_word_embeddings": False}
    return config | changes, [*keys[:1], ("attention.causal", "bool", 0), ("pooling_type", "uint32", 0)]


MINICPM3 = {"num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NOT_LING = {"n_routed_experts", "use_qk_norm", "sliding_window", "first_k_dense_replace"}
ENCODER_KEYS = [("attention.causal", "bool", 0), ("pooling_type", "uint32", 0)]
ROUTED_KEYS = [
    *EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("expert_shared_feed_forward_length", "uint32", 32),
    ("expert_weights_scale", "float32", 1.5), ("expert_weights_norm", "bool", 1), ("expert_gating_func", "uint32", 2),
]  # fmt: skip


def kinds(local: list[int]) -> dict[str, Any]:
    """A window of four tokens in the marked layers; the first layer is dense."""
    return {
        "num_hidden_layers": len(local),
        "sliding_window": 4,
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in local],
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(local) - 1),
    }


def kind_keys(local: list[int]) -> list[tuple[str, str, Any]]:
    return [
        ("attention.sliding_window", "uint32", 4), ("attention.sliding_window_pattern", "array[bool]", local),
        ("leading_dense_block_count", "uint32", 1),
    ]  # fmt: skip


def cohere2moe(hidden: int, norm: str) -> Family:
    """Four layers, the first of them global; the shared expert is averaged with the others."""
    dense, width = (96, 32) if hidden == 64 else (hidden, hidden)
    config = (
        TIED
        | ROUTED
        | kinds([0, 1, 1, 1])
        | {
            "logit_scale": 0.25,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": True,
            "num_shared_experts": 1,
            "intermediate_size": width,
            "prefix_dense_intermediate_size": dense,
            "prefix_dense_sliding_window_pattern": 1,
        }
    )
    config |= {"rms_norm_eps": None} if norm == "layer" else {}
    keys = [k for k in ROUTED_KEYS if k[0] != "expert_weights_scale"] + kind_keys([0, 1, 1, 1])
    keys += [("logit_scale", "float32", 0.25), ("expert_shared_count", "uint32", 1)]
    return config, [*keys, ("feed_forward_length", "uint32", dense)]


def laguna(hidden: int, gating: str, rope: dict[str, Any]) -> Family:
    """Local layers rotate whole heads, the global one the first half."""
    ropes = {
        "full_attention": rope | {"rope_theta": 5e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
    config = (
        UNTIED
        | ROUTED
        | kinds([0, 1, 1, 1])
        | {
            "gating": gating,
            "shared_expert_intermediate_size": 32,
            "moe_routed_scaling_factor": 1.5,
            "rope_parameters": ropes,
            "num_attention_heads_per_layer": [HEADS, 2 * HEADS, 2 * HEADS, 2 * HEADS],
        }
    )
    return config, [
        *ROUTED_KEYS, *kind_keys([0, 1, 1, 1]), *(YARN_KEYS if rope is YARN else []), ("rope.freq_base_swa", "float32", 1e4),
        ("attention.head_count", "array[int32]", config["num_attention_heads_per_layer"]),
        ("rope.dimension_count", "uint32", hidden // HEADS // 2), ("rope.dimension_count_swa", "uint32", hidden // HEADS),
    ]  # fmt: skip


def mimo2(hidden: int) -> Family:
    """Local layers have sinks and twice the heads for keys. llama.cpp's window is one shorter than
    the model's, so it is longer than the text.
    """
    local, size = [0, 1, 1], hidden // HEADS
    ropes = {
        name: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
        for name, base in (("full_attention", 5e4), ("sliding_attention", 1e4))
    }
    config = (
        UNTIED
        | SIGMOID
        | kinds(local)
        | {
            "sliding_window": 65,
            "routed_scaling_factor": 1.0,
            "v_head_dim": size // 2,
            "attention_value_scale": 0.7,
            "num_key_value_heads": 1,
            "rope_parameters": ropes,
        }
    )
    for name in ("first_k_dense_replace", "n_shared_experts", "use_qk_norm"):
        del config[name]
    keys = [
        *EXPERT_KEYS, *kind_keys(local)[1:], ("expert_feed_forward_length", "uint32", 32),
        ("attention.sliding_window", "uint32", 64), ("attention.head_count_kv", "array[int32]", [1, 2, 2]),
        ("attention.value_length", "uint32", size // 2), ("rope.dimension_count", "uint32", size // 2),
        ("rope.freq_base_swa", "float32", 1e4), ("attention.value_scale", "float32", 0.7),
    ]  # fmt: skip
    return config, keys


def dbrx(hidden: int) -> Family:
    """Numbers of its own for everything; queries, keys and values are clamped."""
    width = 96 if hidden == 64 else hidden
    config = {
        "d_model": hidden, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 256, "tie_word_embeddings": False,
        "attn_config": {"kv_n_heads": KV, "clip_qkv": 1.5, "rope_theta": 5e4},
        "ffn_config": {"hidden_size": hidden, "ffn_hidden_size": width, "moe_num_experts": 4, "moe_top_k": 2},
    }  # fmt: skip
    return config, [*EXPERT_KEYS, ("attention.clamp_kqv", "float32", 1.5)]


def deepseek4(hidden: int) -> Family:
    """Layers with a window alone, with keys of four tokens of which two are chosen, and with keys
    of 128, which the text has none of. Experts of the first layer go by the token.
    """
    width, index = (32 if hidden == 64 else hidden), max(64, hidden // 2)
    base = {"partial_rotary_factor": 0.5}
    config = UNTIED | {
        "num_hidden_layers": 4, "num_key_value_heads": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": width, "q_lora_rank": hidden, "o_groups": 2, "o_lora_rank": hidden // 4, "swiglu_limit": 0.5,
        "sliding_window": 4, "index_n_heads": 16, "index_head_dim": index, "index_topk": 2, "hc_mult": 4, "hc_eps": 1e-3,
        "hc_sinkhorn_iters": 3, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                        "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 5e4} | base,
            "compress": YARN | {"rope_theta": 2e4, "attention_factor": 1.0} | base,
        },
    }  # fmt: skip
    sizes = {
        "expert_feed_forward_length": width, "expert_shared_count": 1, "expert_gating_func": 4, "attention.q_lora_rank": hidden,
        "attention.sliding_window": 4, "attention.output_group_count": 2, "attention.output_lora_rank": hidden // 4,
        "attention.indexer.head_count": 16, "attention.indexer.key_length": index, "attention.indexer.top_k": 2,
        "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3, "hash_layer_count": 1,
        "rope.dimension_count": hidden // HEADS // 2,
    }  # fmt: skip
    keys = [
        *EXPERT_KEYS, *((k, "uint32", v) for k, v in sizes.items()), *YARN_KEYS, ("expert_weights_scale", "float32", 1.5),
        ("expert_weights_norm", "bool", 1), ("swiglu_clamp_exp", "array[float32]", [0.5] * 4),
        ("attention.compress_ratios", "array[int32]", [0, 4, 128, 4]), ("hyper_connection.epsilon", "float32", 1e-3),
        ("attention.compress_rope_freq_base", "float32", 2e4),
    ]  # fmt: skip
    return config, keys


def dots3note(hidden: int) -> Family:
    """A layer with a window has half the heads and a latent vector of another length; the latent
    vectors of the others are a quarter of the width, so that their norms are doubled.
    """
    head, rank = hidden // 4, hidden // 4
    rotated = head // 2
    swa = {
        "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": hidden, "head_dim": 2 * head,
        "qk_nope_head_dim": 2 * head - rotated, "v_head_dim": 2 * head,
    }  # fmt: skip
    config = latent(hidden, **indexer(hidden)) | {
        "num_hidden_layers": 3, "q_lora_rank": rank, "kv_lora_rank": rank, "head_dim": head + rotated,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "sliding_window": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "per_layer_config": {1: swa},
        "shared_experts_intermediate_size": 32 if hidden == 64 else hidden,
        "rope_parameters": {
            "indexed_attention": {"rope_type": "default", "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    for name in ("first_k_dense_replace", "use_qk_norm", "num_nextn_predict_layers"):
        del config[name]
    sizes = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": rank, "attention.q_lora_rank": rank,
        "attention.key_length": rank + rotated, "attention.value_length": rank, "attention.key_length_mla": head + rotated,
        "attention.value_length_mla": head, "rope.dimension_count": rotated, "attention.kv_lora_rank_swa": hidden,
        "attention.key_length_swa": hidden + rotated, "attention.value_length_swa": hidden,
        "attention.key_length_mla_swa": 2 * head, "attention.value_length_mla_swa": 2 * head, "attention.sliding_window": 4,
    }  # fmt: skip
    keys = [
        *SIGMOID_KEYS, *((k, "uint32", v) for k, v in sizes.items()), *indexer_keys(hidden),
        ("attention.head_count", "array[int32]", [HEADS, 2, HEADS]), ("rope.freq_base_swa", "float32", 1e4),
        ("attention.sliding_window_pattern", "array[bool]", [0, 1, 0]), ("attention.indexer.types", "array[bool]", [1, 0, 1]),
    ]  # fmt: skip
    return config, keys


def minimax_m3(hidden: int, layers: list[str], block: int, blocks: int) -> Family:
    """Dense layers, and those with experts whose heads of keys choose blocks."""
    dense, width = (96, 32) if hidden == 64 else (hidden, hidden)
    index = max(64, hidden // 2)
    config = UNTIED | HALF | {
        "num_hidden_layers": len(layers), "mlp_layer_types": layers,
        "layer_types": ["full_attention" if kind == "dense" else "minimax_m3_sparse" for kind in layers],
        "dense_intermediate_size": dense,
        "intermediate_size": width, "shared_intermediate_size": width, "num_local_experts": 4, "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5, "rotary_dim": hidden // HEADS // 2, "index_n_heads": KV, "index_head_dim": index,
        "index_block_size": block, "index_topk_blocks": blocks, "index_local_blocks": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    sizes = {"head_count": KV, "key_length": index, "top_k": blocks, "block_size": block, "local_blocks": 1}
    routing = [k for k in SIGMOID_KEYS if k[0] != "leading_dense_block_count"]
    keys = [*routing, *((f"attention.indexer.{k}", "uint32", v) for k, v in sizes.items())]
    return config, [
        *keys,
        ("feed_forward_length", "uint32", dense),
        ("leading_dense_block_count", "uint32", layers.count("dense")),
    ]


def qwen4exp(hidden: int, ratio: int, budget: int) -> Family:
    """A delta network that adds embeddings of pairs and triples of tokens, and attention to the
    tokens of chosen blocks. No pair or triple goes over token 9.
    """
    head = hidden // 4
    config, index = delta(hidden, **DELTA_EXPERTS, mrope_section=mrope(hidden)[0][2][:3]), max(64, hidden // 2)
    config |= {
        "layer_types": ["linear_attention", "indexed_attention"], "output_gate_type": "sigmoid", "hc_count": 2, "hc_lowrank": 32,
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": index, "indexer_budget": budget,
        "indexer_compress_ratio": ratio, "ple_layer_ids": [1], "ple_embed_dim": hidden, "ple_conv_kernel_size": 3,
        "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 11, "make_ngram_vocab_size_divisible_by": 60,
        "eos_token_id": 9,
    }  # fmt: skip
    for name in ("mlp_only_layers", "decoder_sparse_step"):
        del config[name]
    if hidden != 64:
        config |= {"hc_lowrank": hidden}
    keys = [
        *delta_keys(hidden), *mrope(hidden), *DELTA_EXPERT_KEYS, ("hyper_connection.count", "uint32", 2),
        ("hyper_connection.low_rank", "uint32", config["hc_lowrank"]), ("attention.indexer.head_count", "uint32", 4),
        ("attention.indexer.key_length", "uint32", index), ("attention.indexer.top_k", "uint32", budget),
        ("attention.compress_ratios", "array[int32]", [0, ratio]), ("ple.layers", "array[int32]", [0]),
        ("ple.ngram_size", "uint32", 3), ("ple.heads_per_ngram", "uint32", 2), ("ple.conv_kernel", "uint32", 3),
        ("ple.eos_token_id", "uint32", 9), ("embedding_length_per_layer_input", "uint32", head),
    ]  # fmt: skip
    return config, keys


# architecture, or architecture:variant -> (changes of the configuration, keys of the file), or a
# function of the width that gives them
FAMILIES: dict[str, Family | Callable[[int], Family]] = {
    "afmoe": (
        UNTIED | ROUTED | kinds([1, 1, 1, 0])
        | {"num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 1.5, "mup_enabled": True, "mlp_layer_types": None},
        [*ROUTED_KEYS, *kind_keys([1, 1, 1, 0]), ("expert_shared_count", "uint32", 1)],
    ),
    "arcee": (UNTIED, []),
    "codeshell": (UNTIED | {"use_bias": True}, []),
    "cohere2moe": lambda h: cohere2moe(h, "layer"),
    "cohere2moe:rms": lambda h: cohere2moe(h, "rms"),
    "exaone-moe": (
        UNTIED | ROUTED | kinds([1, 1, 1, 0]) | {"num_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
        [*ROUTED_KEYS, *kind_keys([1, 1, 1, 0]), ("expert_shared_count", "uint32", 1)],
    ),
    "granite_swa": (
        UNTIED | GRANITE | kinds([0, 1, 1, 1]) | {"layer_rope_theta": [0.0, 5e4, 5e4, 5e4]},
        [*GRANITE_KEYS, *kind_keys([0, 1, 1, 1])[:2], ("attention.rope_pattern", "array[bool]", [0, 1, 1, 1])],
    ),
    "granite_swa:moe": lambda h: (
        UNTIED | GRANITE | kinds([0, 1, 1, 1])
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": h},
        [*GRANITE_KEYS, *kind_keys([0, 1, 1, 1])[:2], *EXPERT_KEYS, ("expert_shared_feed_forward_length", "uint32", 64)],
    ),
    "hy_v3": (
        UNTIED | ROUTED | {"num_shared_experts": 1, "router_scaling_factor": 1.5, "mlp_layer_types": ["dense", "sparse"]},
        ROUTED_KEYS,
    ),
    "laguna": lambda h: laguna(h, "per-head", YARN),
    "laguna:element": lambda h: laguna(h, "per-element", {"rope_type": "default"}),
    "bailingmoe3": lambda h: (
        {k: v for k, v in latent(h, q_lora_rank=None, topk_group=2, n_group=4).items() if k not in NOT_LING} | {
            "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
            "head_dim": h // HEADS, "num_local_experts": 8, "kda_lower_bound": -3.0, "num_nextn_predict_layers": 0,
        },
        [*SIGMOID_KEYS[1:], ("expert_count", "uint32", 8), ("expert_group_count", "uint32", 4),
         *(k for k in latent_keys(h) if "q_lora" not in k[0] and "head_count" not in k[0]),
         ("attention.head_count_kv", "array[int32]", [0, 1]), ("kda.head_dim", "uint32", h // HEADS),
         ("kda.safe_gate", "bool", 1), ("kda.gate_lower_bound", "float32", -3.0), ("ssm.conv_kernel", "uint32", 4),
         ("expert_group_used_count", "uint32", 2)],
    ),
    "dbrx": dbrx,
    "kimi-linear": lambda h: (
        latent(h, q_lora_rank=None, topk_group=1, n_group=1) | {
            "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
            "linear_head_dim": h // HEADS, "linear_num_heads": HEADS, "linear_conv_kernel_dim": 4, "num_local_experts": 4,
        },
        [*SIGMOID_KEYS, *(k for k in latent_keys(h) if "q_lora" not in k[0] and "head_count" not in k[0]),
         ("attention.head_count_kv", "array[int32]", [0, 1]), ("kda.head_dim", "uint32", h // HEADS),
         ("ssm.conv_kernel", "uint32", 4)],
    ),
    "maincoder": (TIED, []),
    "deepseek4": deepseek4,
    "dots3note": dots3note,
    "hrm_text": (
        UNTIED | {"num_key_value_heads": HEADS, "H_cycles": 2, "L_cycles": 2, "embedding_scale": 3.0, "prefix_lm": True},
        [("hrm.layers_per_stack", "uint32", 2), ("hrm.h_cycles", "uint32", 2), ("hrm.l_cycles", "uint32", 2),
         ("embedding_scale", "float32", 3.0), ("hrm.prefix_lm", "bool", 1)],
    ),
    "minimax-m3": lambda h: minimax_m3(h, ["dense", "sparse"], 128, 16),
    "minimax-m3:blocks": lambda h: minimax_m3(h, ["sparse", "sparse"], 2, 3),
    "qwen4exp": lambda h: qwen4exp(h, 1, 4),
    "qwen4exp:blocks": lambda h: qwen4exp(h, 4, 12),
    "mimo2": mimo2,
    "minicpm3": lambda h: (
        {k: v for k, v in latent(h, q_lora_rank=h, v_head_dim=h // HEADS).items() if k in MINICPM3} | TIED,
        [*(k for k in latent_keys(h) if "_length" not in k[0] and "head_count" not in k[0]),
         ("attention.key_length", "uint32", h // 4 + h // 8)],
    ),
    "mistral4": lambda h: (
        latent(h, norm_topk_prob=True, rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}),
        [*(k for k in SIGMOID_KEYS if k[0] != "expert_gating_func"), *latent_keys(h), *YARN_KEYS,
         ("rope.scaling.yarn_log_multiplier", "float32", 0.1), ("attention.temperature_scale", "float32", 0.1),
         ("attention.temperature_length", "uint32", 8)],
    ),
    "bloom": lambda h: (TIED | {"num_key_value_heads": HEADS, "intermediate_size": 4 * h, "n_layer": 2, "n_head": HEADS}, []),
    "chatglm": (UNTIED | {"attention_bias": True} | HALF, []),
    "falcon": (TIED | {"num_key_value_heads": 1, "ffn_hidden_size": 128}, [("attention.head_count_kv", "uint32", 1)]),
    "falcon:40b": (
        TIED | {"new_decoder_architecture": True, "num_kv_heads": KV, "ffn_hidden_size": 128, "bias": False, "alibi": False}, []
    ),
    "jais2": (UNTIED | {"attention_bias": True, "mlp_bias": True}, []),
    "mpt": lambda h: (
        TIED | {"num_key_value_heads": HEADS, "d_model": h, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 256}
        | {"intermediate_size": 4 * h, "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 1.5}},
        [("attention.max_alibi_bias", "float32", 8.0), ("attention.clamp_kqv", "float32", 1.5)],
    ),
    "orion": (UNTIED | {"partial_rotary_factor": 1.0}, []),
    "pangu-embedded": (UNTIED | {"attention_bias": True}, []),
    "qwen": (UNTIED | {"num_key_value_heads": HEADS}, []),
    "starcoder": lambda h: (TIED | {"num_key_value_heads": 1, "n_inner": 96 if h == 64 else h, "n_positions": 256}, []),
    "eurobert": ({}, ENCODER_KEYS),
    "gemma-embedding": lambda h: (
        TIED | {
            "query_pre_attn_scalar": h // HEADS, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6, "use_bidirectional_attention": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        [*ENCODER_KEYS, ("attention.sliding_window", "uint32", 6), ("rope.freq_base_swa", "float32", 1e4),
         ("attention.sliding_window_pattern", "array[bool]", [1, 1, 0])],
    ),
    "jina-bert-v3": ({"num_key_value_heads": HEADS, "type_vocab_size": 1, "layer_norm_eps": 1e-5}, ENCODER_KEYS),
    "llama-embed": ({"is_causal": False}, ENCODER_KEYS),
    "nomic-bert": ({"num_key_value_heads": HEADS, "type_vocab_size": 2, "layer_norm_eps": 1e-5}, ENCODER_KEYS),
    "t5encoder": lambda h: t5_encoder(h, True),
    "t5encoder:plain": lambda h: t5_encoder(h, False),
    "bert": (
        {"num_key_value_heads": HEADS, "type_vocab_size": 2, "layer_norm_eps": 1e-5},
        ENCODER_KEYS,
    ),
    "modern-bert": (
        {
            "num_key_value_heads": HEADS, "num_hidden_layers": 4, "local_attention": 8, "norm_eps": 1e-5,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        [("attention.causal", "bool", 0), ("attention.sliding_window", "uint32", 8), ("rope.freq_base_swa", "float32", 1e4),
         ("attention.sliding_window_pattern", "array[bool]", [0, 1, 1, 0]), ("pooling_type", "uint32", 0)],
    ),
    "t5": lambda h: t5(h, True),
    "t5:plain": lambda h: t5(h, False),
    "bailingmoe2": (
        UNTIED | SIGMOID | HALF | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        [*SIGMOID_KEYS[1:], ("expert_count", "uint32", 8), ("expert_group_count", "uint32", 4),
         ("expert_group_used_count", "uint32", 2)],
    ),
    "bitnet": (TIED | {"hidden_act": "silu"}, []),
    "baichuan": (UNTIED | {"num_key_value_heads": HEADS, "num_hidden_layers": 32}, []),
    "cohere2": (
        TIED | {"num_hidden_layers": 4, "logit_scale": 0.25, "sliding_window": 4}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
        [("logit_scale", "float32", 0.25), ("attention.sliding_window", "uint32", 4)],
    ),
    "command-r": (TIED | {"logit_scale": 0.25}, [("logit_scale", "float32", 0.25)]),
    "dots1": (UNTIED | SIGMOID | {"num_key_value_heads": HEADS}, SIGMOID_KEYS),
    "ernie4_5": (TIED, []),
    "exaone4": (UNTIED | {"sliding_window": None, "layer_types": ["full_attention"] * 2}, []),
    "gemma": (TIED, []),
    "glm4": (UNTIED | {"attention_bias": True} | HALF, []),
    "glm4moe": (UNTIED | SIGMOID | HALF, SIGMOID_KEYS),
    "gpt2": (TIED | {"num_key_value_heads": HEADS}, []),
    "gptneox": (UNTIED | {"num_key_value_heads": HEADS} | HALF, [("use_parallel_residual", "bool", 1)]),
    "granite": (UNTIED | GRANITE, GRANITE_KEYS),
    "granitemoe": (UNTIED | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}, GRANITE_KEYS + EXPERT_KEYS),
    "hunyuan-dense": (TIED, []),
    "hunyuan-moe": (
        UNTIED | {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1},
        [*EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 96), ("expert_shared_feed_forward_length", "uint32", 96)],
    ),
    "hunyuan_vl": (TIED | {"rope": {"rope_theta": 5e4 * 2.0 ** (16 / 14)}}, [*MROPE, ("rope.scaling.alpha", "float32", 2.0)]),
    "internlm2": (UNTIED, []),
    "mellum": (
        UNTIED | {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"], "sliding_window": 4}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e4}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}}},
        [*EXPERT_KEYS, *YARN_KEYS, ("expert_feed_forward_length", "uint32", 32), ("attention.sliding_window", "uint32", 4),
         ("attention.sliding_window_pattern", "array[bool]", [1, 1, 1, 0])],
    ),
    "minicpm": (TIED | GRANITE | {"attention_multiplier": None}, GRANITE_KEYS[:3]),
    "nemotron": (UNTIED | HALF, []),
    "olmo2": (UNTIED, []),
    "olmoe": (UNTIED | {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": HEADS}, EXPERT_KEYS),
    "paddleocr": (UNTIED, MROPE),
    "phi2": (UNTIED | HALF, []),
    "phimoe": (
        UNTIED | {"attention_bias": True, "lm_head_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2}, EXPERT_KEYS,
    ),
    "qwen2moe": (
        UNTIED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
        | {"mlp_only_layers": [], "norm_topk_prob": False},
        [*EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("expert_shared_feed_forward_length", "uint32", 64)],
    ),
    "qwen2vl": (TIED, MROPE),
    "qwen3vl": (TIED, MROPE),
    "seed_oss": (UNTIED | {"attention_bias": True, "attention_out_bias": False}, []),
    "smallthinker": lambda h: smallthinker(h, "sigmoid", 4096),
    "smallthinker:global": lambda h: smallthinker(h, "softmax", 0),
    "smollm3": (TIED | {"num_hidden_layers": 4, "no_rope_layer_interval": 4}, []),
    "stablelm": (UNTIED | HALF, []),
    "starcoder2": (TIED, []),
    "xverse": (UNTIED, []),
    "apertus": (UNTIED, []),
    "deepseek2": lambda h: (
        latent(h, n_routed_experts=8, n_group=4, topk_group=2, rope=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}),
        [*SIGMOID_KEYS[1:], ("expert_count", "uint32", 8), ("expert_group_count", "uint32", 4),
         ("expert_group_used_count", "uint32", 2), *latent_keys(h), *YARN_KEYS,
         ("rope.scaling.yarn_log_multiplier", "float32", 0.07)],
    ),
    "deepseek2:v2": lambda h: (
        latent(h, q_lora_rank=h, norm_topk_prob=False, topk_method="greedy"),
        [*EXPERT_KEYS, *SIGMOID_KEYS[2:6], ("expert_gating_func", "uint32", 1), *latent_keys(h)],
    ),
    "deepseek2:temperature": lambda h: FAMILIES["mistral4"](h),  # type: ignore[operator]
    "deepseek2:whole": lambda h: (
        latent(h), [*SIGMOID_KEYS, *(k for k in latent_keys(h) if "_length" not in k[0] and "head_count" not in k[0]),
                    ("attention.key_length", "uint32", h // 4 + h // 8), ("attention.value_length", "uint32", h // 4)],
    ),
    "deepseek32": lambda h: (
        latent(h, **indexer(h), norm_topk_prob=True, rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        [*SIGMOID_KEYS, *latent_keys(h), *indexer_keys(h), *YARN_KEYS, ("rope.scaling.yarn_log_multiplier", "float32", 0.1)],
    ),
    "glm-dsa": lambda h: (
        latent(h, **indexer(h), indexer_types=["full", "shared", "full"], num_hidden_layers=3),
        [*SIGMOID_KEYS, *latent_keys(h), *indexer_keys(h), ("attention.indexer.types", "array[bool]", [1, 0, 1])],
    ),
    "hy_v4": lambda h: (
        latent(h, **indexer(h), indexer_types=["full", "shared", "full"], num_hidden_layers=3, hc_mult=3, hc_magnitude=1.5)
        | {"hc_eps": 1e-3, "swiglu_limit": 0.5, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        [*SIGMOID_KEYS, *latent_keys(h), *indexer_keys(h), ("attention.indexer.types", "array[bool]", [1, 0, 1]),
         ("hyper_connection.count", "uint32", 3), ("hyper_connection.epsilon", "float32", 1e-3),
         ("hyper_connection.magnitude", "float32", 1.5), ("swiglu_clamp_exp", "array[float32]", [0.5] * 3)],
    ),
    "ernie4_5-moe": (
        UNTIED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1},
        [*EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("expert_shared_count", "uint32", 1),
         ("expert_shared_feed_forward_length", "uint32", 32), ("leading_dense_block_count", "uint32", 1),
         ("interleave_moe_layer_step", "uint32", 1)],
    ),
    "exaone": (UNTIED, []),
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "gemma4:dense": lambda h: (
        gemma4(h, enable_moe_block=False, num_experts=None, top_k_experts=None, num_kv_shared_layers=0,
               use_double_wide_mlp=False, hidden_size_per_layer_input=0)[0],
        [(k, t, 0 if "per_layer" in k or "shared_kv" in k else v) for k, t, v in gemma4(h)[1]
         if not k.startswith("expert") and "feed_forward" not in k],
    ),
    "llama4": (
        UNTIED | {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1}
        | {"intermediate_size_mlp": 96},
        [*EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 96), ("interleave_moe_layer_step", "uint32", 1)],
    ),
    "mamba:falcon": lambda h: (
        TIED | {"state_size": 16, "time_step_rank": 8, "expand": 2, "conv_kernel": 4, "intermediate_size": 2 * h}
        | {"mixer_rms_eps": 1e-5, "layer_norm_epsilon": 1e-5},
        [*ssm(h, 16, 8), ("attention.head_count", "uint32", 0), ("feed_forward_length", "uint32", 0),
         ("ssm.dt_b_c_rms", "bool", 1)],
    ),
    "minimax-m2": (
        UNTIED | HALF | {"num_local_experts": 4, "num_experts_per_tok": 2},
        [*EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 96), ("expert_gating_func", "uint32", 2)],
    ),
    "mistral3": (
        UNTIED | {"rope": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        [*YARN_KEYS, ("rope.scaling.yarn_log_multiplier", "float32", 1.0), ("attention.temperature_scale", "float32", 0.1)],
    ),
    "mistral3:plain": (UNTIED | {"sliding_window": None}, []),
    "olmo": (UNTIED | {"clip_qkv": 1.5}, [("attention.clamp_kqv", "float32", 1.5)]),
    "phi3:long": lambda h: longrope(h, 8),
    "phi3:short": lambda h: longrope(h, 512),
    "qwen3:yarn": (UNTIED | {"rope": YARN}, YARN_KEYS),
    "falcon-h1": lambda h: (
        UNTIED | MAMBA_2
        | {"mamba_d_ssm": 2 * h, "mamba_d_head": h // 4, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        ssm(h, 16, 8, 2),
    ),
    "granitehybrid": lambda h: (
        UNTIED | GRANITE | MAMBA_2 | {"mamba_d_head": h // 4, "layer_types": ["linear_attention", "full_attention"]}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": h, "position_embedding_type": "nope"},
        [*GRANITE_KEYS, *EXPERT_KEYS, ("expert_shared_feed_forward_length", "uint32", h), ("rope.scaling.finetuned", "bool", 0),
         *ssm(h, 16, 8, 2), *HYBRID_KV],
    ),
    "jamba": lambda h: (
        UNTIED | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 8},
        [*EXPERT_KEYS, *ssm(h, 16, 8), *HYBRID_KV],
    ),
    "lfm2": lambda h: (
        TIED | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
        [("shortconv.l_cache", "uint32", 3), *HYBRID_KV],
    ),
    "lfm2moe": lambda h: (
        TIED | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "use_expert_bias": True},
        [*EXPERT_KEYS, ("shortconv.l_cache", "uint32", 3), ("expert_feed_forward_length", "uint32", 32),
         ("leading_dense_block_count", "uint32", 1), ("expert_gating_func", "uint32", 2), *HYBRID_KV],
    ),
    "mamba": lambda h: (
        TIED | {"state_size": 16, "time_step_rank": 8, "expand": 2, "conv_kernel": 4, "intermediate_size": 2 * h},
        [*ssm(h, 16, 8), ("attention.head_count", "uint32", 0), ("feed_forward_length", "uint32", 0)],
    ),
    "mamba2": lambda h: (
        TIED | {"state_size": 16, "num_heads": 8, "head_dim": h // 4, "expand": 2, "conv_kernel": 4, "n_groups": 2},
        [*ssm(h, 16, 8, 2), ("attention.head_count", "uint32", 0), ("feed_forward_length", "uint32", 0)],
    ),
    "nemotron_h": lambda h: (
        UNTIED | {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 8, "n_groups": 2}
        | {"mamba_head_dim": h // 4, "ssm_state_size": 16, "use_bias": False, "mlp_bias": False, "num_hidden_layers": 3},
        [*ssm(h, 16, 8, 2), ("attention.head_count_kv", "array[int32]", [0, 0, KV]),
         ("feed_forward_length", "array[int32]", [0, 96 if h == 64 else h, 0])],
    ),
    "nemotron_h_moe": nemotron_h_moe,
    "nemotron_h_moe:latent": lambda h: nemotron_h_moe(h, moe_latent_size=h // 2 if h == 64 else h),
    "qwen35": lambda h: (delta(h, mrope_section=mrope(h)[0][2][:3]), [*delta_keys(h), *mrope(h)]),
    "qwen35moe": lambda h: (
        delta(h, **DELTA_EXPERTS, mrope_section=mrope(h)[0][2][:3]), [*delta_keys(h), *mrope(h), *DELTA_EXPERT_KEYS],
    ),
    "qwen3next": lambda h: (delta(h, **DELTA_EXPERTS), [*delta_keys(h), *DELTA_EXPERT_KEYS]),
}  # fmt: skip


def family(arch: str, hidden: int = 64) -> Family:
    """The changes of the configuration and the keys of a family of a width."""
    entry = FAMILIES[arch]
    return entry(hidden) if callable(entry) else entry


VARIANTS = {
    "cohere2moe:rms": COHERE2_MOE_RMS, "granite_swa:moe": GRANITE_MOE_SWA,
    "deepseek2:temperature": ARCHITECTURES["mistral4"], "deepseek2:v2": DEEPSEEK_V2,
    "falcon:40b": FALCON_40B, "hrm_text": hrm_text(2), "qwen4exp": qwen4(0), "qwen4exp:blocks": qwen4(0),
    "mamba:falcon": FALCON_MAMBA, "mistral3:plain": MISTRAL,
    "t5:plain": T5_PLAIN, "t5encoder:plain": T5_PLAIN_ENCODER,
}  # fmt: skip
"""Variants of an architecture that become another model."""


def architecture(case: str) -> Architecture:
    """The table of a case."""
    return VARIANTS.get(case) or ARCHITECTURES[case.partition(":")[0]]


def family_model(arch: str, hidden: int = 64) -> Any:
    """The transformers model itself, random. `hidden` is the width; feed-forward layers of 96
    become as wide for 256.
    """
    changes = dict(family(arch, hidden)[0])
    head = hidden // HEADS
    base = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 96 if hidden == 64 else hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": head, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 5e4}
    changes = {k: head**-0.5 if k == "attention_multiplier" and v is None else v for k, v in changes.items()}
    if "partial_rotary_factor" in changes:
        rope["partial_rotary_factor"] = changes["partial_rotary_factor"]
    if "mrope_section" in changes:
        rope["mrope_section"] = changes.pop("mrope_section")
    if hidden != 64 and "moe_intermediate_size" in changes:
        changes |= {"moe_intermediate_size": hidden}
        changes |= {"shared_expert_intermediate_size": hidden} if "shared_expert_intermediate_size" in changes else {}
    if arch == "gpt2":
        changes |= {"n_inner": base["intermediate_size"]}
    rope |= changes.pop("rope", {})
    if arch == "llama4" and hidden != 64:
        changes["intermediate_size_mlp"] = hidden
    if "layer_types" in changes and isinstance(changes.get("rope_parameters"), dict):
        rope = changes.pop("rope_parameters")
    if architecture(arch) is FALCON_MAMBA:
        base.pop("rms_norm_eps")
    if "qk_rope_head_dim" in changes:
        base.pop("head_dim")
    for name in architecture(arch).computed:
        base.pop(name, None)
    register(architecture(arch).model_type)
    config = AutoConfig.for_model(architecture(arch).model_type, **(base | {"rope_parameters": rope} | changes))
    torch.manual_seed(sum(map(ord, arch)))
    tasks = {"encoder": AutoModel, "encoder-decoder": AutoModelForSeq2SeqLM}
    builder = (
        AutoModelForTextEncoding if arch.startswith("t5encoder") else tasks.get(architecture(arch).task, AutoModelForCausalLM)
    )
    options = {"add_pooling_layer": False} if architecture(arch).model_type in POOLED else {}
    model = builder.from_config(config, dtype=torch.float32, **options).eval()
    if arch == "t5":  # transformers shares the head with the embedding until a checkpoint has one
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for key, p in named_tensors(model):
            if not p.is_floating_point():
                p.copy_(torch.stack([torch.randperm(4)[: p.shape[1]] for _ in range(len(p))]))
                continue
            norm = key.endswith("weight") and "norm" in key.split(".")[-2]
            scale = 0.3 if p.ndim == 1 else 1.0 / p.shape[-1] ** 0.5
            scale *= 0.1 if arch == "gemma3n" else 1.0  # errors grow with every sparse layer
            p.copy_(torch.randn_like(p) * scale + (1.0 if norm or key.endswith("scalar") else 0.0))
            if architecture(arch).norm_offset and norm and "linear_attn" not in key:
                p.sub_(1.0)
            if key.endswith("A_log"):
                for _ in range(4):  # until the logarithm of what the file has is the same number
                    p.copy_(torch.from_numpy(np.log(decay(p.numpy()).astype(np.float64)).astype(np.float32)))
    return model


def logits(model: Any) -> torch.Tensor:
    """Of `IDS`; an encoder's vectors."""
    ids = torch.tensor([IDS])
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model(input_ids=ids, **more)
    return out.logits if "logits" in out else out.last_hidden_state


def named_tensors(model: Any) -> list[tuple[str, Any]]:
    """Parameters, and the buffers that a file has."""
    ends = ("e_score_correction_bias", "expert_bias", "layer_scalar", "tid2eid")
    extra = [(k, b) for k, b in model.named_buffers() if k.endswith(ends)]
    return [*model.named_parameters(), *extra]


def inverse(order: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    """Rows in the order of the file, from those in transformers'."""
    if order is None:
        return x
    out = np.empty_like(x)
    out[order] = x
    return out


def decay(x: np.ndarray) -> np.ndarray:
    """exp(x), rounded once."""
    return np.exp(x.astype(np.float64)).astype(np.float32)


def stored(stem: str, x: np.ndarray, config: Any, second: bool) -> np.ndarray:
    """A recurrent layer's values as llama.cpp's converter writes them; `second` for Mamba 2."""
    if stem.startswith("ple_norm"):
        return x + np.float32(1)
    if stem in ("ssm_conv1d", "shortconv.conv", "ple_conv1d") and x.ndim == 3:
        return x[:, 0]
    if stem == "ssm_a" and config.model_type == "bailing_hybrid":
        return decay(x)[:, None]
    if stem == "ssm_a":
        x = -decay(x)
    if second and stem in ("ssm_a", "ssm_d"):
        return x[:, None]
    if second and stem == "ssm_norm":
        return x.reshape(2, -1)
    return x


def gguf_tensors(arch: str, model: Any) -> dict[str, np.ndarray]:
    """The model's tensors under the file's names, as llama.cpp's converter orders their rows."""
    a, config = architecture(arch), model.config
    names = {k: v for k, v in a.names.items() if not (arch == "granitehybrid" and k in ("ffn_gate", "ffn_up", "ffn_down"))}
    within = {path: stem for stem, path in names.items() if stem != "ffn_gate_up_exps"}
    top = {path: stem for stem, path in a.top.items()}
    second = "ssm_norm" in a.names and not {"ssm_alpha", "ssm_beta"} & set(a.names)
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    transposed = {n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    for key, p in named_tensors(model):
        if ".act_fn." in key:
            continue  # keys of the file
        x = (p.detach().float() if p.is_floating_point() else p.int()).numpy().copy()
        path, _, leaf = key.rpartition(".")
        if path in transposed and leaf == "weight":
            x = x.T
        plain = within.get(path.partition(f"{a.layers}.")[2].partition(".")[2]) in a.plain_norms
        if a.norm_offset and path.endswith("norm") and leaf == "weight" and not plain:
            x = x + np.float32(1)
        if (stem := top.get(re.sub(r"\.\d+$", ".*", path))) is not None and path not in top:
            stacks.setdefault(f"{stem}.weight", []).append(x)
            continue
        if a.model_type == "t5" and (match := re.match(r"(enc|dec)oder\.block\.(\d+)\.(.+)", path)):
            side = next(k for k, v in names.items() if v == match[3] and k.startswith(match[1]))
            out[f"{match[1]}.blk.{match[2]}.{side[4:]}.{leaf}"] = x
            continue
        if (stem := top.get(f"{path}{PARAMETER}{leaf}")) is not None:
            out[stem if stem.startswith("hrm.") else f"{stem}.weight"] = x
            continue
        if path in top or not path.startswith(f"{a.layers}."):
            out[f"{top[path]}.{leaf}"] = x
            continue
        number, _, inner = path.removeprefix(f"{a.layers}.").partition(".")
        prefix = f"blk.{number}."
        if leaf in ("w1", "v1", "w2"):
            projection = next(k for k, v in DBRX_EXPERTS.items() if v == f"mlp.{leaf}")
            x = x.reshape(config.ffn_config.moe_num_experts, -1, config.d_model)
            stem = within[f"{inner.removesuffix('.mlp')}{EXPERTS}{projection}"]
            out[f"{prefix}{stem}.weight"] = np.ascontiguousarray(x.swapaxes(1, 2)) if leaf == "w2" else x
            continue
        if leaf == "up_proj":
            out[f"{prefix}{within[f'{inner}{EXPERTS}{leaf}']}.weight"] = x
            continue
        if leaf in ("gate_up_proj", "down_proj"):
            x = x.swapaxes(1, 2) if arch == "llama4" else x
            parts = {"gate": x[:, : x.shape[1] // 2], "up": x[:, x.shape[1] // 2 :]} if leaf == "gate_up_proj" else {"down": x}
            for word, part in parts.items():
                out[f"{prefix}{within[f'{inner}{EXPERTS}{word}_proj']}.weight"] = np.ascontiguousarray(part)
            continue
        if (stem := within.get(f"{inner}{PARAMETER}{leaf}")) is not None:
            order = a.orders[stem](config, len(x)) if stem in a.orders else None
            x = stored(stem, inverse(order, x), config, second)
            ends = {
                "ssm_a": "",
                "ssm_d": "",
                "layer_output_scale": ".weight",
                "altup_correct_scale": ".weight",
                "ffn_gate_inp.scale": "",
                "ffn_down_exps.scale": "",
                "attn_sinks": ".weight",
                "attn_compressor_ape": ".weight",
                "indexer_compressor_ape": ".weight",
                "ffn_gate_tid2eid": ".weight",
            }
            if arch == "hy_v3":
                ends["exp_probs_b"] = ""
            out[f"{prefix}{stem}{ends.get(stem, '.weight' if stem.startswith('hc_') else '.bias')}"] = x
            continue
        if f"{inner}{PART}0" in within and arch != "deepseek2:whole":
            order = a.orders[inner](config, len(x)) if inner in a.orders else None
            stems = [within[f"{inner}{PART}{i}"] for i in range(sum(p.startswith(f"{inner}{PART}") for p in within))]
            for stem, part in zip(stems, pieces(inner, layer_config(config, int(number)), inverse(order, x)), strict=True):
                out[f"{prefix}{stem}.{leaf}"] = np.ascontiguousarray(part)
            continue
        stem = within[inner]
        if stem == "ssm_g_a" and arch == "bailingmoe3" and config.layer_types[int(number)] == "full_attention":
            stem = "attn_gate"
        if arch == "dots3note" and stem in ("attn_q_a_norm", "attn_kv_a_norm"):
            x = x * np.float32((config.hidden_size / len(x)) ** 0.5)
        if a.interleaved and stem in ("attn_q", "attn_k"):
            head = model.config.hidden_size // HEADS
            x = x.reshape(-1, 2, head // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if a.fused_heads and stem == "attn_qkv":
            x = x.reshape(HEADS, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        if stem in a.orders:
            x = inverse(a.orders[stem](config, len(x)), x)
        if stem in a.columns:
            x = np.ascontiguousarray(inverse(a.columns[stem](config, x.shape[1]), x.T).T)
        if stem == "ffn_gate_inp_shexp":
            x = x[0]
        leafless = arch == "falcon-h1" and stem == "ffn_norm"
        out[f"{prefix}{stem}" if leafless else f"{prefix}{stem}.{leaf}"] = stored(stem, x, config, second)
    if arch == "gemma3n":  # layers 20 and 21 use the keys of others; llama.cpp wants the tensors
        unused = {
            name: x
            for name, x in out.items()
            if name.startswith("blk.19.") and name.split(".")[2] in ("attn_k", "attn_v", "attn_k_norm")
        }
        out |= {name.replace("19", layer): np.ones_like(x) for layer in ("20", "21") for name, x in unused.items()}
    for whole, stems in a.splits.items() if arch in ("bailingmoe2", "chatglm", "codeshell", "qwen") else ():
        for name in [n for n in out if n.split(".")[2:3] == [stems[0]]]:
            fused = [out.pop(name.replace(f".{stems[0]}.", f".{stem}.")) for stem in stems]
            out[name.replace(f".{stems[0]}.", f".{whole}.")] = np.concatenate(fused)
    return out | {name: np.stack(matrices) for name, matrices in stacks.items()}


def layer_config(config: Any, layer: int) -> Any:
    """The configuration of a layer, where layers differ."""
    return config.per_layer_config[layer] if getattr(config, "per_layer_config", None) else config


def pieces(path: str, config: Any, x: np.ndarray) -> list[np.ndarray]:
    """The tensors that one parameter is stored as."""
    if path.endswith("in_proj_qkvz"):
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return np.split(x, [first + config.linear_num_value_heads * config.linear_value_head_dim])
    if path.endswith("kv_b_proj"):
        heads = x.reshape(config.num_attention_heads, -1, x.shape[1])
        return [heads[:, : config.qk_nope_head_dim].swapaxes(1, 2), heads[:, config.qk_nope_head_dim :]]
    if path.endswith("index_qk_proj"):
        return np.split(x, [config.indexer_n_heads * config.indexer_head_dim])
    if path.endswith("conv1d"):
        return [part[None] for part in np.split(x, 3)]
    return np.split(x, 2)


def rotation_tensors(arch: str, config: Any) -> dict[str, np.ndarray]:
    """Factors of the rotation that a file has as tensors."""
    if arch.startswith("phi3:"):
        words = ("long", "short")
        return {f"rope_factors_{w}.weight": np.asarray(config.rope_parameters[f"{w}_factor"], np.float32) for w in words}
    if arch.startswith("gemma4"):
        half = config.hidden_size // 4
        return {"rope_freqs.weight": np.where(np.arange(half) < half // 4, 1, 1e30).astype(np.float32)}
    return {}


def family_file(arch: str, model: Any) -> GGUF:
    """The model as a float32 file."""
    case = arch
    config, a = model.config, architecture(arch)
    head = config.hidden_size // HEADS
    tensors = gguf_tensors(arch, model) | rotation_tensors(arch, config)
    ff = next((v.shape[-2] for k, v in tensors.items() if k.endswith("blk.0.ffn_up.weight")), config.hidden_size)
    if arch.partition(":")[0] in ("chatglm", "glm4", "phi3"):
        ff //= 2
    changes, extra = family(arch, config.hidden_size)
    known = getattr(config, "intermediate_size", None)
    rotated = int(head * changes.get("partial_rotary_factor", 1.0))
    kv = getattr(layer_config(config, 0), "num_key_value_heads", HEADS)
    sizes = {
        "context_length": 256, "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": ff if known is None or arch.startswith("falcon") else known, "attention.head_count": HEADS,
        "attention.head_count_kv": KV if arch.startswith("gemma4") else kv,
        "attention.key_length": head,
        "attention.value_length": head, "rope.dimension_count": rotated,
    }  # fmt: skip
    if arch == "qwen":
        sizes["feed_forward_length"] *= 2
    keys = list(extra)
    if config.hidden_size != 64:
        width = config.hidden_size
        keys = [(k, kind, width if k.endswith("feed_forward_length") and kind == "uint32" and v else v) for k, kind, v in keys]
        wide = [head // 4, head // 8, head // 8, 0]
        keys = [(k, kind, wide if k.endswith("sections") and not callable(FAMILIES[case]) else v) for k, kind, v in keys]
    bare: list[tuple[str, str, Any]] = []  # keys without the architecture's name
    if "type_vocab_size" in changes:
        bare = [("tokenizer.ggml.token_type_count", "uint32", changes["type_vocab_size"])]
    if arch == "eurobert":
        bare = [("tokenizer.ggml.mask_token_id", "uint32", 2)]
    if arch == "apertus":
        layers = [layer.mlp.act_fn for layer in model.model.layers]
        words = ("alpha_p", "alpha_n", "beta", "eps")
        bare = [(f"xielu.{n}", "array[float32]", [getattr(a, n).item() for a in layers]) for n in words]
    if (table := next((m for m in model.modules() if hasattr(m, "layer_multipliers")), None)) is not None:
        buffers = {"layer_multipliers": table.layer_multipliers, "head_offsets": table.ngram_heads_offsets,
                   "head_vocab_sizes": table.ngram_heads_vocab_sizes}  # fmt: skip
        keys += [(f"ple.{name}", "array[uint64]", buffer.tolist()) for name, buffer in buffers.items()]
    arch = case.partition(":")[0]
    pairs: list[tuple[str, str, Any]] = [
        ("general.architecture", "string", arch),
        *((f"{arch}.{k}", "uint32", v) for k, v in sizes.items() if k not in {name for name, _, _ in keys}),
        *((f"{arch}.{k}", "float32", 1e-5) for k in sorted({a.eps[0], *(() if case == "cohere2moe" else RMS_EPS[:1])})),
        (f"{arch}.rope.freq_base", "float32", 5e4),
        *((f"{arch}.{k}", kind, v) for k, kind, v in keys),
        *bare,
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.tokens", "array[string]", ["<pad>", "<bos>", "<eos>", *map(chr, range(97, 97 + VOCABULARY - 3))]),
        ("tokenizer.ggml.scores", "array[float32]", [-float(i) for i in range(VOCABULARY)]),
        ("tokenizer.ggml.token_type", "array[int32]", [3, 3, 3] + [1] * (VOCABULARY - 3)),
        ("tokenizer.ggml.bos_token_id", "uint32", 1),
        ("tokenizer.ggml.eos_token_id", "uint32", 2),
    ]
    entries = [
        Tensor(k, tuple(reversed(v.shape)), I32 if v.dtype == np.int32 else F32, np.ascontiguousarray(v).tobytes())
        for k, v in tensors.items()
    ]
    return GGUF(pairs=pairs, tensors=entries)


def write_family(path: Path, arch: str, model: Any) -> Path:
    """`family_file` at a path."""
    path.write_bytes(family_file(arch, model).bytes())
    return path
