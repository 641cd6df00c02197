"""Gemma's architectures: scaled embeddings, norms of w + 1 or w, local and global layers, per-layer
embeddings, and Gemma 4's experts.

    GEMMA["gemma4"].names["layer_output_scale"]      "#layer_scalar"
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .architecture import EACH, GEMMA2, LLAMA, PARAMETER, QK_NORM, TOP, Architecture, expert_counts, routed
from .keys import Keys, MissingError

_SHARED_KEYS = ("attn_k", "attn_v", "attn_k_norm")
"""Tensors that a layer with another's keys and values does not use."""


def _query(keys: Keys, config: dict[str, Any], largest: int) -> int:
    """The query scale is one over the root of this: the head's length, but hidden/heads in the 27B
    models, known by depth.
    """
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query(keys, config, 46),
        "sliding_window": keys.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
    }


def _kinds(keys: Keys, period: int) -> list[str]:
    """Local layers with a global one at the end of each period, or what the file states of each."""
    return ["sliding_attention" if flag else "full_attention" for flag in keys.local_layers(period)]


def gemma3_sizes(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Five local layers, then a global one. Local layers rotate with base 10000 and are never
    stretched.
    """
    local = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10000.0)}
    return {
        "query_pre_attn_scalar": _query(keys, config, 62),
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": _kinds(keys, 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", "float"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", "float"),
    }


def _gemma3n(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The file has the number of standard deviations that cut activations off, transformers the
    share that is cut.
    """
    cut = [0.0] * keys.layers
    if f"{keys.arch}.activation_sparsity_scale" in keys.metadata:
        scales = np.asarray(keys.metadata[f"{keys.arch}.activation_sparsity_scale"], np.float64)[: keys.layers]
        cut = [round(0.5 * (1 + math.erf(s / math.sqrt(2))), 6) for s in scales]
    local = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10000.0)}
    return {
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": _kinds(keys, 5),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", "float"),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", "integer", 0),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": keys.rows("per_layer_token_embd"),
        "altup_num_inputs": keys.size("altup.num_inputs", 4),
        "altup_active_idx": keys.get("altup.active_idx", "integer", 0),
        "laurel_rank": keys.rows("blk.0.laurel_l"),
        "activation_sparsity_pattern": cut,
        "intermediate_size": keys.sizes("feed_forward_length", keys.layers),
    }


def _gemma4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Global layers rotate the first part of each head: the file's factors are 1 there and huge
    after it. They have heads of another length than local ones.
    """
    kinds = _kinds(keys, 6)
    kv = keys.sizes("attention.head_count_kv", keys.layers, config["num_attention_heads"])
    by_kind = {
        kind: sorted({n for n, k in zip(kv, kinds, strict=True) if k == kind}) for kind in ("sliding_attention", "full_attention")
    }
    if any(len(counts) > 1 for counts in by_kind.values()) or kinds[-1] != "full_attention":
        raise keys.refuse(
            f"whose layers are {kinds} with {kv} heads for keys; transformers takes one number a kind, a global layer last"
        )
    widths, sharing = keys.sizes("feed_forward_length", keys.layers), int(keys.get("attention.shared_kv_layers", "integer", 0))
    if not 0 <= sharing < keys.layers:
        raise keys.error(f"'{keys.arch}.attention.shared_kv_layers' is {sharing}; there are {keys.layers} layers")
    double = len(set(widths)) > 1
    if double and widths != [widths[0]] * (keys.layers - sharing) + [2 * widths[0]] * sharing:
        raise keys.refuse(
            f"whose feed-forward layers are {widths} wide; transformers takes one width, doubled where keys are shared"
        )
    length = keys.size("attention.key_length")
    if not keys.has("rope_freqs"):
        raise MissingError(keys.checkpoint.path, "tensor", "rope_freqs.weight", "; the model needs it")
    factors = keys.checkpoint["rope_freqs.weight"]
    local = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10000.0)}
    rotated = {"rope_type": "proportional", "partial_rotary_factor": float((np.asarray(factors) < 1e20).mean())}
    per_layer = int(keys.get("embedding_length_per_layer_input", "integer", 0))
    experts = bool(keys.get("expert_count", "integer", 0))
    counts = expert_counts(keys, "num_experts") if experts else {"num_experts": None, "num_experts_per_tok": None}
    same = [
        k
        for k, kind in enumerate(kinds)
        if kind == "full_attention" and k < keys.layers - sharing and not keys.has(f"blk.{k}.attn_v")
    ]
    counts_kv = sorted({n for numbers in by_kind.values() for n in numbers})
    if not same and len(counts_kv) > 1:
        raise keys.refuse(
            f"with values of their own in global layers and {counts_kv} heads for keys; transformers takes one number"
        )
    return {
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": kinds,
        "head_dim": keys.size("attention.key_length_swa", length),
        "global_head_dim": length,
        "num_key_value_heads": (by_kind["sliding_attention"] or by_kind["full_attention"])[0],
        "num_global_key_value_heads": by_kind["full_attention"][0],
        "attention_k_eq_v": bool(same),
        "num_kv_shared_layers": sharing,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": double,
        "rope_parameters": {"full_attention": config["rope_parameters"] | rotated, "sliding_attention": local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", "float"),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": keys.rows("per_layer_token_embd") if per_layer else config["vocab_size"],
        "enable_moe_block": experts,
        "num_experts": counts["num_experts"],
        "top_k_experts": counts["num_experts_per_tok"],
        "moe_intermediate_size": keys.size("expert_feed_forward_length") if experts else None,
    }


def _shares(config: Any, layer: int, stem: str) -> bool:
    """Whether a layer has another's keys and values, and the tensor is one of its own."""
    return layer >= config.num_hidden_layers - config.num_kv_shared_layers and stem in _SHARED_KEYS


_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_PER_LAYER_TOP = TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N = GEMMA2 | QK_NORM | _PER_LAYER | {
    "altup_correct_coef": "altup.correction_coefs", "altup_correct_scale": f"altup{PARAMETER}correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
_GEMMA4 = (
    GEMMA2
    | QK_NORM
    | _PER_LAYER
    | routed("experts", "router.proj")
    | {
        "layer_output_scale": f"{PARAMETER}layer_scalar",
        "ffn_gate_inp.scale": f"router{PARAMETER}scale",
        "ffn_down_exps.scale": f"router{PARAMETER}per_expert_scale",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    }
)

GEMMA: dict[str, Architecture] = {
    "gemma": Architecture("gemma", LLAMA, norm_offset=True),
    "gemma2": Architecture("gemma2", GEMMA2, norm_offset=True, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", GEMMA2 | QK_NORM, norm_offset=True, extra=gemma3_sizes),
    "gemma3n": Architecture(
        "gemma3n_text",
        _GEMMA3N,
        top=_PER_LAYER_TOP
        | {
            "altup_proj": f"model.altup_projections.{EACH}",
            "altup_unembd_proj": f"model.altup_unembed_projections.{EACH}",
        },
        varying=True,
        absent=_shares,
        extra=_gemma3n,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _GEMMA4,
        top=_PER_LAYER_TOP,
        varying=True,
        experts=None,
        absent=lambda config, layer, stem: stem == "rope_freqs" or _shares(config, layer, stem),
        extra=_gemma4,
    ),
}
"""Gemma's GGUF architectures."""
