"""Mixtures of experts whose first layers are dense, and layers with a window, gates or sinks of
attention.

    MIXTURES["laguna"].names["attn_gate"]      "self_attn.g_proj"

transformers states the kind of every layer as a list; a file has a number of dense layers and a
period, or a flag for each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .architecture import (
    ATTENTION,
    BIASED_ROUTING,
    FUSED_QKV,
    LLAMA,
    MLP,
    MOE,
    PARAMETER,
    PART,
    QK_NORM,
    RMS_EPS,
    Architecture,
    Field,
    expert_counts,
    layer_eps,
    routed,
    shared,
)
from .keys import Keys, MissingError
from .latent import SIGMOID, SOFTMAX
from .recurrent import GRANITE_SCALES, granite_attention


def scores_of(keys: Keys, default: int = SIGMOID, allowed: tuple[int, ...] = (SIGMOID,)) -> int:
    """llama.cpp's number of the function that scores experts. UnsupportedError for one that
    transformers' model does not have.
    """
    function = int(keys.get("expert_gating_func", "integer", 0)) or default
    if function not in allowed:
        names = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
        raise keys.refuse(
            f"that scores experts by function {function}; {' and '.join(f'{n} ({names[n]})' for n in allowed)} can be read"
        )
    return function


def need_normalized(keys: Keys) -> None:
    """UnsupportedError where the weights of the chosen experts do not add up to one."""
    if not keys.get("expert_weights_norm", "bool", False):
        raise keys.refuse("whose weights of experts do not add up to one, which transformers' model always makes them do")


def _leading(keys: Keys) -> list[str]:
    """The kinds of feed-forward layers, of which the first are dense."""
    dense = int(keys.get("leading_dense_block_count", "integer", 0))
    if not 0 <= dense <= keys.layers:
        raise keys.error(f"'{keys.arch}.leading_dense_block_count' is {dense}; there are {keys.layers} layers")
    return ["dense"] * dense + ["sparse"] * (keys.layers - dense)


def _with_experts(keys: Keys) -> list[str]:
    return ["sparse" if flag else "dense" for flag in keys.expert_layers()]


def _attention_kinds(local: list[bool]) -> list[str]:
    return ["sliding_attention" if flag else "full_attention" for flag in local]


def _shared_count(keys: Keys, width: int) -> int:
    """How many experts of a width the shared one is as wide as."""
    whole = keys.size("expert_shared_feed_forward_length", width * keys.size("expert_shared_count", 1))
    if whole % width:
        raise keys.refuse(f"whose shared expert is {whole} wide and the others {width}; transformers takes a multiple")
    return whole // width


def _afmoe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    scores_of(keys)
    need_normalized(keys)
    window = keys.get("attention.sliding_window", "integer", 0)
    return {
        **expert_counts(keys, "num_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_shared_experts": keys.size("expert_shared_count"),
        "num_dense_layers": keys.get("leading_dense_block_count", "integer", 0),
        "route_scale": keys.positive("expert_weights_scale", 1.0),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _attention_kinds(keys.local_layers(4)),
        "mup_enabled": True,
    }


def _cohere2_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Dense layers rotate whatever their kind; a shared expert is averaged with the others."""
    function = scores_of(keys, allowed=(SOFTMAX, SIGMOID))
    if function == SOFTMAX:
        need_normalized(keys)
    if (scale := keys.get("expert_weights_scale", "float", 0.0)) not in (0.0, 1.0):
        raise keys.refuse(f"that multiplies the weights of experts by {scale}")
    width = keys.size("expert_feed_forward_length")
    return {
        **expert_counts(keys, "num_experts"),
        "intermediate_size": width,
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "num_shared_experts": _shared_count(keys, width) if keys.get("expert_shared_count", "integer", 0) else 0,
        "expert_selection_fn": "softmax" if function == SOFTMAX else "sigmoid",
        "norm_topk_prob": keys.get("expert_weights_norm", "bool", False),
        "layer_types": _attention_kinds(keys.local_layers(4, global_first=True)),
        "mlp_layer_types": _leading(keys),
        "prefix_dense_sliding_window_pattern": 1,
    }


def _dbrx(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if round(eps := config["layer_norm_eps"], 12) != 1e-5:
        raise keys.refuse(f"whose norms' epsilon is {eps:g}; transformers' model has 1e-5")
    if config["tie_word_embeddings"]:
        raise MissingError(keys.checkpoint.path, "tensor", "output.weight", "; the model needs it")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    counts = expert_counts(keys, "moe_num_experts")
    return {
        "d_model": width,
        "n_heads": heads,
        "n_layers": keys.layers,
        "max_seq_len": config["max_position_embeddings"],
        "attn_config": {
            "kv_n_heads": config["num_key_value_heads"],
            "clip_qkv": keys.positive("attention.clamp_kqv"),
            "rope_theta": config["rope_parameters"]["rope_theta"],
        },
        "ffn_config": {
            "hidden_size": width,
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": counts["moe_num_experts"],
            "moe_top_k": counts["num_experts_per_tok"],
            "moe_normalize_expert_weights": 1.0,
        },
    }


def _exaone_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Global layers do not rotate."""
    scores_of(keys)
    width = keys.size("expert_feed_forward_length")
    return {
        **expert_counts(keys, "num_experts"),
        "moe_intermediate_size": width,
        "num_shared_experts": _shared_count(keys, width),
        "norm_topk_prob": keys.get("expert_weights_norm", "bool", False),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "n_group": 1,
        "topk_group": 1,
        "layer_types": _attention_kinds(keys.local_layers(4)),
        "mlp_layer_types": _leading(keys),
    }


def _granite_swa(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A base of 0 is a layer without rotation."""
    if keys.has("rope_freqs"):
        raise keys.refuse("whose rotation is stretched by a factor for each frequency")
    rotating = keys.flags("attention.rope_pattern", keys.layers) or [True] * keys.layers
    theta = config["rope_parameters"]["rope_theta"]
    local = keys.local_layers()
    return granite_attention(keys, config) | {
        "layer_types": _attention_kinds(local),
        "layer_rope_theta": [theta if flag else 0.0 for flag in rotating],
    }


def _granite_moe_swa(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    counts = expert_counts(keys, "num_local_experts")
    width = keys.get("expert_shared_feed_forward_length", "integer", 0)
    return _granite_swa(keys, config) | counts | {"shared_intermediate_size": width}


def _hy_v3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A layer is dense where it has no tensors of experts."""
    scores_of(keys)
    need_normalized(keys)
    width = keys.size("expert_feed_forward_length")
    return {
        **expert_counts(keys, "num_experts"),
        "moe_intermediate_size": width,
        "num_shared_experts": _shared_count(keys, width),
        "router_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "mlp_layer_types": _with_experts(keys),
    }


def _laguna(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Kinds of layers differ in their number of heads and the part of a head that they rotate. The
    gate of attention is one number a head, or one a channel.
    """
    scores_of(keys)
    need_normalized(keys)
    heads, size = keys.sizes("attention.head_count", keys.layers), config["head_dim"]
    gate = keys.rows("blk.0.attn_gate")
    if gate not in (heads[0], heads[0] * size):
        raise keys.error(
            f"blk.0.attn_gate.weight has {gate} rows; {heads[0]} heads of {size} make {heads[0]} or {heads[0] * size}"
        )
    window = keys.get("attention.sliding_window", "integer", 0)
    rope = config["rope_parameters"]
    rotated = keys.size("rope.dimension_count", size)
    local = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", rope["rope_theta"])}
    width = keys.size("expert_feed_forward_length")
    return {
        **expert_counts(keys, "num_experts"),
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate == heads[0] else "per-element",
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", width),
        "moe_routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "mlp_layer_types": _leading(keys),
        "layer_types": _attention_kinds([bool(window) and flag for flag in keys.local_layers(4, global_first=True)]),
        "sliding_window": window or config["max_position_embeddings"],
        "rope_parameters": {
            "full_attention": rope | {"partial_rotary_factor": rotated / size},
            "sliding_attention": local | {
                "partial_rotary_factor": keys.rotated("rope.dimension_count_swa", size, rotated) / size,
            },
        },
    }  # fmt: skip


def _mimo2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Local layers have twice the heads for keys. The model's window has the token itself beside
    those that the file counts.
    """
    local = keys.local_layers()
    heads, size = keys.size("attention.head_count"), keys.size("attention.key_length")
    kv = keys.sizes("attention.head_count_kv", keys.layers)
    whole = min(n if not flag else n // 2 for n, flag in zip(kv, local, strict=True))
    if not whole or kv != [2 * whole if flag else whole for flag in local]:
        raise keys.refuse(f"whose layers have {kv} heads for keys; transformers takes twice as many in local layers")
    rope = config["rope_parameters"] | {"partial_rotary_factor": keys.rotated("rope.dimension_count", size) / size}
    base = keys.positive("rope.freq_base_swa", rope["rope_theta"])
    scale = keys.get("attention.value_scale", "float", 0.0)
    return {
        **expert_counts(keys, "n_routed_experts"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole,
        "head_dim": size,
        "v_head_dim": keys.size("attention.value_length"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "attention_value_scale": scale or 1.0,
        "sliding_window": keys.size("attention.sliding_window") + 1,
        "layer_types": _attention_kinds(local),
        "mlp_layer_types": _with_experts(keys),
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope | {"rope_type": "default", "rope_theta": base}},
    }


def _minimax_m3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Layers with experts choose blocks of keys for each head of keys by an indexer's largest score
    in a block; the activation's numbers are the model's, which no file states.
    """
    scores_of(keys)
    need_normalized(keys)
    width, layers = keys.size("expert_feed_forward_length"), _leading(keys)
    if (shared := keys.size("expert_shared_count", 1)) != 1:
        raise keys.refuse(f"with {shared} shared experts; transformers' model has one")
    index = keys.size("attention.indexer.head_count")
    if index != config["num_key_value_heads"]:
        raise keys.refuse(f"whose indexer has {index} heads and keys {config['num_key_value_heads']}; these are one number")
    rotated = keys.size("rope.dimension_count", config["head_dim"])
    return {
        **expert_counts(keys, "num_local_experts"),
        "intermediate_size": width,
        "shared_intermediate_size": width,
        "dense_intermediate_size": config["intermediate_size"],
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "rotary_dim": rotated,
        "index_n_heads": index,
        "index_head_dim": keys.size("attention.indexer.key_length"),
        "index_block_size": keys.size("attention.indexer.block_size"),
        "index_topk_blocks": keys.size("attention.indexer.top_k"),
        "index_local_blocks": keys.size("attention.indexer.local_blocks"),
        "mlp_layer_types": layers,
        "layer_types": ["full_attention" if kind == "dense" else "minimax_m3_sparse" for kind in layers],
    }


_SHARED = shared("mlp.shared_experts")
_SINKS = {"attn_sinks": f"self_attn{PARAMETER}sinks"}
_WINDOW = Field("attention.sliding_window", "sliding_window")
_COHERE2_MOE = Architecture(
    "cohere2_moe",
    MOE | _SHARED,
    eps=layer_eps("layer_norm_eps"),
    experts=True,
    fields=(Field("logit_scale", "logit_scale", "positive"), _WINDOW),
    extra=_cohere2_moe,
)
COHERE2_MOE_RMS = replace(_COHERE2_MOE, eps=RMS_EPS)
"""What a file of architecture cohere2moe becomes whose norms subtract no mean."""
_GRANITE_SWA = Architecture(
    "granite_swa", LLAMA | _SINKS, interleaved=True, fields=(*GRANITE_SCALES, _WINDOW), extra=_granite_swa
)
GRANITE_MOE_SWA = replace(
    _GRANITE_SWA,
    model_type="granitemoe_swa",
    experts=True,
    extra=_granite_moe_swa,
    names=LLAMA
    | _SINKS
    | routed("block_sparse_moe.experts", "block_sparse_moe.router")
    | {"ffn_up_shexp": "shared_mlp.input_linear", "ffn_down_shexp": "shared_mlp.output_linear"},
)
"""What a file of architecture granite_swa with experts becomes."""

MIXTURES: dict[str, Architecture] = {
    "afmoe": Architecture(
        "afmoe",
        ATTENTION
        | MLP
        | QK_NORM
        | routed("mlp.experts", "mlp.router.gate")
        | _SHARED
        | {
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "exp_probs_b": f"mlp{PARAMETER}expert_bias",
        },
        experts=True,
        extra=_afmoe,
    ),
    "cohere2moe": _COHERE2_MOE,
    "dbrx": Architecture(
        "dbrx",
        routed("ffn.experts", "ffn.router.layer")
        | {
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "attn_output_norm": "norm_attn_norm.norm_2",
        },
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        layers="transformer.blocks",
        eps=layer_eps("layer_norm_eps"),
        experts=True,
        computed=("layer_norm_eps",),
        extra=_dbrx,
    ),
    "exaone-moe": Architecture(
        "exaone_moe", MOE | QK_NORM | _SHARED | BIASED_ROUTING, experts=True, fields=(_WINDOW,), extra=_exaone_moe
    ),
    "granite_swa": _GRANITE_SWA,
    "hy_v3": Architecture(
        "hy_v3", MOE | QK_NORM | _SHARED | {"exp_probs_b": f"mlp{PARAMETER}e_score_correction_bias"}, experts=True, extra=_hy_v3
    ),
    "laguna": Architecture(
        "laguna",
        MOE | QK_NORM | _SHARED | BIASED_ROUTING | {"attn_gate": "self_attn.g_proj"},
        experts=True,
        partial=True,
        varying=True,
        extra=_laguna,
    ),
    "minimax-m3": Architecture(
        "minimax_m3_vl_text",
        ATTENTION
        | QK_NORM
        | routed("mlp.experts", "mlp.gate")
        | BIASED_ROUTING
        | {
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": f"mlp.gate_up_proj{PART}0",
            "ffn_up": f"mlp.gate_up_proj{PART}1",
            "ffn_down": "mlp.down_proj",
            "ffn_gate_shexp": f"mlp.shared_experts.gate_up_proj{PART}0",
            "ffn_up_shexp": f"mlp.shared_experts.gate_up_proj{PART}1",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
            **{f"indexer.{w}_{kind}": f"self_attn.indexer.{w}_{kind}" for w in "qk" for kind in ("proj", "norm")},
        },
        norm_offset=True,
        experts=True,
        partial=True,
        extra=_minimax_m3,
    ),
    "mimo2": Architecture(
        "mimo_v2_flash", MOE | _SINKS | BIASED_ROUTING, experts=True, heads=False, splits=FUSED_QKV, extra=_mimo2
    ),
}
"""GGUF architectures of such models."""
