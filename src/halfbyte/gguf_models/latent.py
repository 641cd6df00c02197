"""Architectures with latent attention: keys and values of all heads from one short vector.

    LATENT["deepseek2"].names["attn_k_b"]      "self_attn.kv_b_proj+0"

Newer files have the second projection as two tensors, keys transposed (llama.cpp absorbs them into
queries and outputs); older ones whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import (
    BIASED_ROUTING,
    MOE,
    PARAMETER,
    PART,
    TOP,
    Architecture,
    Change,
    Join,
    Order,
    expert_counts,
    shared,
)
from .keys import Keys

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that score experts; 0 is none stated."""


def _scores(keys: Keys) -> int:
    return int(keys.get("expert_gating_func", "integer", 0))


def _heads_together(config: Any, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """(heads, latent, keys) and (heads, values, latent) as rows of keys and values of each head."""
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])


def _keys_and_values(config: Any, rows: NDArray[Any]) -> list[NDArray[Any]]:
    """The inverse of `_heads_together`."""
    values = int(config.v_head_dim)
    heads = rows.reshape(-1, config.qk_nope_head_dim + values, rows.shape[-1])
    return [heads[:, :-values].swapaxes(1, 2), heads[:, -values:]]


def _not_rotated(keys: Keys, length: int, rotated: int) -> int:
    """Channels of a key of a length that are not rotated."""
    if length <= rotated or rotated % 2:
        raise keys.error(
            f"keys of {length}, {rotated} of them rotated; more keys, and an even number of rotated ones, are needed"
        )
    return length - rotated


def latent_sizes(keys: Keys, config: dict[str, Any], values: int | None = None) -> dict[str, Any]:
    """Sizes of the attention. Files with split projections state the lengths of a head separately."""
    heads, rotated = max(keys.sizes("attention.head_count", keys.layers)), keys.size("rope.dimension_count")
    if not heads:
        raise keys.error(f"key '{keys.arch}.attention.head_count' is 0; 1 or more is allowed")
    key = keys.get("attention.key_length_mla", "integer", 0) or keys.size("attention.key_length")
    value = values or keys.get("attention.value_length_mla", "integer", 0) or keys.size("attention.value_length")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": keys.get("attention.q_lora_rank", "integer") if keys.any_layer("attn_q_a") else None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": _not_rotated(keys, key, rotated),
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
    if keys.arch == "deepseek2" and keys.get("attention.temperature_scale", "float", 0.0) and _scores(keys) == SIGMOID:
        raise keys.refuse("whose queries grow with their position and whose experts are scored by a sigmoid")
    dense = int(keys.get("leading_dense_block_count", "integer", 0))
    if not keys.get("expert_count", "integer", 0):
        return latent_sizes(keys, config) | {"first_k_dense_replace": config["num_hidden_layers"]}
    groups = keys.expert_groups()
    return {
        **latent_sizes(keys, config),
        **expert_counts(keys, "n_routed_experts"),
        **groups,
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "first_k_dense_replace": dense,
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", "bool", False),
        "num_nextn_predict_layers": 0,
    }


def _deepseek_v2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("expert_weights_norm", "bool", False):
        raise keys.refuse("that normalizes softmax weights of experts, which transformers' DeepSeek V2 does not")
    out = _deepseek2(keys, config)
    groups = out.get("n_group")
    return out if groups is None else out | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _minicpm3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Its values are as long as the width over the heads where the file does not say how long."""
    heads = keys.size("attention.head_count")
    value = keys.size("attention.value_length", config["hidden_size"] // heads)
    sizes = latent_sizes(keys, config, value)
    return sizes | {"head_dim": sizes["qk_rope_head_dim"]}


def _mistral4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Queries grow with the logarithm of their position past the original context."""
    if (function := _scores(keys)) not in (0, SOFTMAX):
        raise keys.refuse(f"that scores experts by function {function}; {SOFTMAX} (softmax) is read")
    out = _deepseek2(keys, config)
    rope, beta = out["rope_parameters"], keys.get("attention.temperature_scale", "float", 0.0)
    if rope["rope_type"] != "yarn":
        raise keys.refuse("without yarn, in whose original context it counts positions")
    original = rope["original_max_position_embeddings"]
    if (length := keys.get("attention.temperature_length", "integer", original)) != original:
        raise keys.refuse(f"whose queries grow with every {length} positions; transformers takes yarn's {original}")
    part = out["qk_rope_head_dim"] / (out["qk_nope_head_dim"] + out["qk_rope_head_dim"])
    more = {"llama_4_scaling_beta": beta, "partial_rotary_factor": part}
    return out | {"rope_interleave": True, "rope_parameters": rope | more}


def _indexed(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Each token attends to the `top_k` that an indexer of a few heads scores highest."""
    if (function := _scores(keys)) != SIGMOID:
        raise keys.refuse(f"that scores experts by function {function}; {SIGMOID} (sigmoid) is read")
    return _deepseek2(keys, config) | {
        "index_n_heads": keys.size("attention.indexer.head_count"),
        "index_head_dim": keys.size("attention.indexer.key_length"),
        "index_topk": keys.size("attention.indexer.top_k"),
    }


def _glm_dsa(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Layers without an indexer use the choice of the one before."""
    full = keys.flags("attention.indexer.types", keys.layers)
    if full is None:
        full = [keys.has(f"blk.{i}.indexer.attn_k") for i in range(keys.layers)]
    return _indexed(keys, config) | {"indexer_types": ["full" if flag else "shared" for flag in full]}


def _dots3_note(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Local layers, which have a window, have sizes of their own; the others have an indexer. The
    file has the root of width over rank in the norms' weights, where transformers multiplies by it.
    """
    local = keys.local_layers()
    if not keys.get("expert_weights_norm", "bool", False):
        raise keys.refuse("whose weights of experts do not add up to one")
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default":
        raise keys.refuse("with a stretched rotation")
    heads = keys.sizes("attention.head_count", keys.layers)
    rotated = keys.size("rope.dimension_count")

    def kind(flag: bool) -> dict[str, int]:
        """Sizes of the attention of local layers, or of the others."""
        end = "_swa" if flag else ""
        counts = {n for n, one in zip(heads, local, strict=True) if one == flag}
        if len(counts) > 1:
            raise keys.refuse(
                f"whose {'local' if flag else 'global'} layers have {sorted(counts)} heads; transformers takes one number"
            )
        key = keys.size(f"attention.key_length_mla{end}")
        return {
            "num_attention_heads": max(counts, default=1),
            "num_key_value_heads": max(counts, default=1),
            "kv_lora_rank": keys.size(f"attention.kv_lora_rank{end}"),
            "head_dim": key,
            "qk_nope_head_dim": _not_rotated(keys, key, rotated),
            "v_head_dim": keys.size(f"attention.value_length_mla{end}"),
        }

    whole, width = kind(False), keys.size("expert_feed_forward_length")
    dense, types = int(keys.get("leading_dense_block_count", "integer", 0)), ("indexed_attention", "sliding_attention")
    thetas = (rope["rope_theta"], keys.positive("rope.freq_base_swa"))
    return {
        **_indexed(keys, config | whole),
        **whole,
        "q_lora_rank": keys.size("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "layer_types": [types[flag] for flag in local],
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(keys.layers)],
        "sliding_window": keys.size("attention.sliding_window"),
        "moe_intermediate_size": width,
        "shared_experts_intermediate_size": width,
        "per_layer_config": {i: kind(True) for i, flag in enumerate(local) if flag},
        "rope_parameters": {
            types[flag]: {"rope_type": "default", "rope_theta": thetas[flag]} for flag in sorted(set(local))
        },
    }  # fmt: skip


def _hy_v4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Hidden states are several streams, which gates mix before and after each half of a layer."""
    if not keys.get("attention.indexer.top_k", "integer", 0):
        raise keys.refuse("without an indexer, which transformers' model always has")
    if config["rope_parameters"]["rope_type"] != "default":
        raise keys.refuse("with a stretched rotation")
    out = _glm_dsa(keys, config)
    dense = out["first_k_dense_replace"]
    stated = f"{keys.arch}.swiglu_clamp_exp"
    limits = set(keys.numbers(stated, keys.layers)[dense:] if stated in keys.metadata else [0.0])
    if len(limits) != 1 or not max(limits) > 1e-6:
        raise keys.refuse(f"whose experts are limited to {sorted(limits)}; transformers takes one limit above 0")
    return out | {
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(keys.layers)],
        "swiglu_limit": max(limits),
        "hc_mult": keys.size("hyper_connection.count"),
        "hc_eps": keys.positive("hyper_connection.epsilon"),
        "hc_magnitude": keys.positive("hyper_connection.magnitude"),
    }


# Hy4's checkpoint has rotated channels in pairs: llama.cpp, vLLM and SGLang rotate pairs, of rows
# as they are; transformers renames the same rows and rotates halves. So the original is
# transformers' model with its rows in the order of halves.
def _rotated_last(length: Callable[[Any], int]) -> Order:
    """Heads of a length whose last channels rotate: by pairs in the file, by halves here."""

    def order(config: Any, rows: int) -> NDArray[np.int64]:
        head, rotated = np.arange(length(config)), config.qk_rope_head_dim
        head[-rotated:] = head[-rotated:].reshape(-1, 2).T.reshape(-1)
        return (np.arange(0, rows, len(head))[:, None] + head).reshape(-1)

    return order


def _halves_first(config: Any, rows: int) -> NDArray[np.int64]:
    """Heads of the indexer whose first channels rotate: by halves in the file, by pairs here."""
    head, rotated = np.arange(int(config.index_head_dim)), config.qk_rope_head_dim
    head[:rotated] = head[:rotated].reshape(2, -1).T.reshape(-1)
    return (np.arange(0, rows, len(head))[:, None] + head).reshape(-1)


def _root(config: Any, a: NDArray[Any]) -> np.float32:
    return np.float32((config.hidden_size / a.shape[-1]) ** 0.5)


_ROOT = Change(
    lambda config, a: np.asarray(a / _root(config, a), np.float32), lambda config, a: np.asarray(a * _root(config, a), np.float32)
)
"""Weights of a norm of a latent vector, which the file has times √(width / rank)."""


DEEPSEEK = MOE | shared("mlp.shared_experts") | BIASED_ROUTING | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": f"self_attn.kv_b_proj{PART}0", "attn_v_b": f"self_attn.kv_b_proj{PART}1",
}  # fmt: skip
"""Tensors of DeepSeek's layers."""
_INDEXED = DEEPSEEK | {
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_HY_V4 = _INDEXED | {
    "attn_gate": "self_attn.gate_proj",
    "attn_sinks": f"self_attn{PARAMETER}sinks",
    **{f"hc_{half}_{w}": f"{half}_hc{PARAMETER}{w}" for half in ("attn", "ffn") for w in ("fn", "base", "scale")},
}
_DOTS3_NOTE = _INDEXED | {
    "attn_gate": "self_attn.g_proj",
    "attn_k_norm": "self_attn.k_rope_only_layernorm",
}
_HY_V4_INDEXER = _rotated_last(lambda config: int(config.index_head_dim))
LATENT_JOINS = {"self_attn.kv_b_proj": Join(_heads_together, _keys_and_values)}
DEEPSEEK_V2 = Architecture("deepseek_v2", DEEPSEEK, heads=False, experts=None, joins=LATENT_JOINS, extra=_deepseek_v2)
"""What a file of architecture deepseek2 becomes that scores experts by a softmax."""

_PLAIN = {stem: path for stem, path in DEEPSEEK.items() if stem != "exp_probs_b"}

LATENT: dict[str, Architecture] = {
    "deepseek2": Architecture("deepseek_v3", DEEPSEEK, heads=False, experts=None, joins=LATENT_JOINS, extra=_deepseek2),
    "deepseek32": Architecture("deepseek_v32", _INDEXED, heads=False, experts=True, joins=LATENT_JOINS, extra=_indexed),
    "dots3note": Architecture(
        "dots3_note_text",
        _DOTS3_NOTE,
        heads=False,
        experts=True,
        varying=True,
        joins=LATENT_JOINS,
        orders={f"indexer.{stem}": _halves_first for stem in ("attn_q_b", "attn_k", "k_norm")},
        changes={"attn_q_a_norm": _ROOT, "attn_kv_a_norm": _ROOT},
        extra=_dots3_note,
    ),
    "glm-dsa": Architecture("glm_moe_dsa", _INDEXED, heads=False, experts=True, joins=LATENT_JOINS, extra=_glm_dsa),
    "hy_v4": Architecture(
        "hy_v4",
        _HY_V4,
        top=TOP | {f"output_hc_{w}": f"model.hc_head{PARAMETER}hc_{w}" for w in ("fn", "base", "scale")},
        heads=False,
        experts=True,
        joins=LATENT_JOINS,
        orders={
            "attn_q_b": _rotated_last(lambda config: int(config.qk_nope_head_dim + config.qk_rope_head_dim)),
            "attn_kv_a_mqa": _rotated_last(lambda config: int(config.kv_lora_rank + config.qk_rope_head_dim)),
            **{f"indexer.{stem}": _HY_V4_INDEXER for stem in ("attn_q_b", "attn_k", "k_norm")},
        },
        extra=_hy_v4,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        {k: v for k, v in _PLAIN.items() if PART not in v},
        heads=False,
        constants={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        extra=_minicpm3,
    ),
    "mistral4": Architecture("mistral4", _PLAIN, heads=False, experts=None, joins=LATENT_JOINS, extra=_mistral4),
}
"""GGUF architectures with latent attention."""
