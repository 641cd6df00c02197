"""Older families: Bloom, Falcon, MPT, StarCoder, whose queries, keys and values are one tensor, and
models whose layers are another family's.

    CLASSIC["falcon"].names["attn_qkv"]      "self_attention.query_key_value"

llama.cpp stores all queries, then keys, then values; transformers those of each head (Bloom) or
group of heads (Falcon) together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import (
    FUSED_QKV,
    FUSED_UP,
    GPT2,
    GPT2_TOP,
    LLAMA,
    STARCODER2,
    Architecture,
    Field,
    layer_eps,
)
from .keys import Keys


def _falcon(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Newer models have a norm for each branch, older ones one head for keys."""
    newer = keys.any_layer("attn_norm_2")
    if not newer and config["num_key_value_heads"] not in (1, config["num_attention_heads"]):
        raise keys.refuse(f"with {config['num_key_value_heads']} heads for keys and one norm; transformers takes 1 or all")
    return {
        "new_decoder_architecture": newer,
        "num_kv_heads": config["num_key_value_heads"],
        "multi_query": config["num_key_value_heads"] == 1,
        "ffn_hidden_size": config["intermediate_size"],
        "num_ln_in_parallel_attn": 2 if newer else None,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    }


def _by_group(config: Any, rows: int) -> NDArray[np.int64] | None:
    """Queries, key and value of each group of heads, from all queries, all keys, all values."""
    heads, groups = config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1
    if not config.new_decoder_architecture and not config.multi_query:
        groups = heads
    size = rows // (heads + 2 * groups)
    if size * (heads + 2 * groups) != rows or heads % groups:
        return None
    at = np.arange(rows).reshape(-1, size)
    queries, keys, values = np.split(at, [heads, heads + groups])
    together = [queries.reshape(groups, -1, size), keys[:, None], values[:, None]]
    return np.concatenate(together, axis=1).reshape(-1)


def _bloom(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if config["intermediate_size"] != 4 * config["hidden_size"]:
        raise keys.refuse(
            f"whose feed-forward layers are {config['intermediate_size']} wide; 4 times {config['hidden_size']} is read"
        )
    return {"n_layer": keys.layers, "n_head": config["num_attention_heads"]}


def _mpt(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if config["num_key_value_heads"] != heads or config["intermediate_size"] != 4 * width or keys.has("position_embd"):
        raise keys.refuse(
            "with fewer heads for keys, learned positions, or feed-forward layers of another width than 4 times its own"
        )
    alibi = keys.get("attention.max_alibi_bias", "float", 0.0)
    attention = {"alibi": bool(alibi), "softmax_scale": None, "clip_qkv": keys.get("attention.clamp_kqv", "float", 0.0) or None}
    return {
        "d_model": width,
        "n_heads": heads,
        "n_layers": keys.layers,
        "max_seq_len": config["max_position_embeddings"],
        "attn_config": attention | ({"alibi_bias_max": int(alibi)} if alibi else {}),
    }


def _starcoder(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if config["num_key_value_heads"] != 1:
        raise keys.refuse(f"with {config['num_key_value_heads']} heads for keys; one is read")
    return {"multi_query": True, "n_inner": config["intermediate_size"]}


def _qwen(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The file states the width of gate and up together."""
    return {"intermediate_size": config["intermediate_size"] // 2}


_FALCON = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_TOP = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}
FALCON_40B = Architecture(
    "falcon",
    _FALCON | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    top=_FALCON_TOP,
    layers="transformer.h",
    eps=layer_eps("layer_norm_epsilon"),
    orders={"attn_qkv": _by_group},
    computed=("head_dim",),
    extra=_falcon,
)
"""What a file of architecture falcon with a norm for each branch becomes."""

CLASSIC: dict[str, Architecture] = {
    "bloom": Architecture(
        "bloom",
        _FALCON | {"ffn_norm": "post_attention_layernorm"},
        top=_FALCON_TOP | {"token_embd_norm": "transformer.word_embeddings_layernorm"},
        layers="transformer.h",
        eps=layer_eps("layer_norm_epsilon"),
        fused_heads=True,
        extra=_bloom,
    ),
    "chatglm": Architecture("glm", LLAMA | FUSED_UP, partial=True, splits=FUSED_QKV, whole=("attn_qkv",)),
    "codeshell": Architecture(
        "starcoder2",
        STARCODER2,
        eps=layer_eps("norm_epsilon"),
        splits=FUSED_QKV,
        whole=("attn_qkv",),
        constants={"sliding_window": None},
    ),
    "falcon": replace(FALCON_40B, names=_FALCON),
    "jais2": Architecture("jais2", LLAMA, eps=layer_eps("layer_norm_eps")),
    "mpt": Architecture(
        "mpt",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        layers="transformer.blocks",
        eps=layer_eps("layer_norm_epsilon"),
        extra=_mpt,
    ),
    "orion": Architecture(
        "stablelm",
        LLAMA,
        eps=layer_eps("layer_norm_eps"),
        partial=True,
        constants={"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
    ),
    "pangu-embedded": Architecture("llama", LLAMA),
    "qwen": Architecture("qwen2", LLAMA, splits=FUSED_QKV, whole=("attn_qkv",), extra=_qwen),
    "starcoder": Architecture(
        "gpt_bigcode",
        GPT2,
        top=GPT2_TOP,
        layers="transformer.h",
        eps=layer_eps("layer_norm_epsilon"),
        fields=(Field("feed_forward_length", "n_inner"),),
        extra=_starcoder,
    ),
}
"""GGUF architectures of older families, and of models that are another family's."""
