"""Encoders, which turn a text into vectors, and T5, whose decoder attends to an encoder.

    ENCODERS["bert"].names["attn_output_norm"]      "attention.output.LayerNorm"

llama.cpp's converter drops BERT's pooler and subtracts the offset of RoBERTa's positions. T5's
tensors begin with `enc.` or `dec.`, whose names differ only there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import ATTENTION, FUSED_QKV, GEMMA2, LLAMA, MLP, QK_NORM, Architecture, layer_eps
from .gemma import gemma3_sizes
from .keys import Keys


def _token_types(keys: Keys) -> int:
    """How many types of tokens there are; llama.cpp's quantizer writes a matrix of one row as a
    vector.
    """
    for name in ("token_types", "token_types.weight"):
        if name in keys.checkpoint and len(keys.checkpoint.info(name).shape) == 1:
            return 1
    return keys.rows("token_types", 1)


def _bert(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "type_vocab_size": _token_types(keys),
        "max_position_embeddings": keys.rows("position_embd", 1),
        "tie_word_embeddings": False,
        "rope_parameters": None,
    }


def _no_token_types(keys: Keys, config: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """A model without types of tokens adds nothing for them."""
    if keys.has("token_types"):
        return {}
    return {"embeddings.token_type_embeddings.weight": np.zeros((1, config["hidden_size"]), np.float32)}


def _modern_bert(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A global layer, then local ones, in periods; the window is what both sides have together."""
    window = keys.get("attention.sliding_window", "integer", 0)
    local = keys.local_layers(3, global_first=True) if window else [False] * keys.layers
    act = keys.get("hidden_activation", "string", "gelu")
    if act not in ("gelu", "silu"):
        raise keys.refuse(f"with activation {act!r}; gelu and silu are read")
    theta = config["rope_parameters"]["rope_theta"]
    return {
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in local],
        "local_attention": window or 128,
        "hidden_activation": act,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", theta)},
        },
        "cls_token_id": config["bos_token_id"],
        "sep_token_id": config["eos_token_id"],
        "tie_word_embeddings": False,
    }


def _without_pooler(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    pad = config["pad_token_id"] or 0
    return {"type_vocab_size": _token_types(keys), "tie_word_embeddings": False, "pad_token_id": pad}


def _eurobert(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The token that stands for a hidden one, which transformers otherwise takes from one model."""
    index = keys.metadata.typed("tokenizer.ggml.mask_token_id", "integer")
    return {"mask_token_id": index} if index is not None and 0 <= index < config["vocab_size"] else {}


def _gemma_embedding(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3 whose tokens see those on both sides; the window is what both sides have together."""
    return gemma3_sizes(keys, config) | {"use_bidirectional_attention": True, "tie_word_embeddings": False}


def _t5(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Sizes under T5's names. The first version shares the head with the embedding and scales its
    inputs, newer ones have a gate.
    """
    gated = keys.any_layer("ffn_gate")
    return {
        "d_model": config["hidden_size"],
        "d_kv": keys.size("attention.key_length"),
        "d_ff": config["intermediate_size"],
        "num_layers": keys.layers,
        "num_decoder_layers": keys.size("decoder_block_count", keys.layers),
        "num_heads": keys.size("attention.head_count"),
        "relative_attention_num_buckets": keys.size("attention.relative_buckets_count"),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "decoder_start_token_id": keys.get("decoder_start_token_id", "integer", 0),
        "rope_parameters": None,
    }


def _t5_encoder(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _t5(keys, config) | {"is_encoder_decoder": False, "tie_word_embeddings": False}


_BERT = {
    **{f"attn_{word[0]}": f"attention.self.{word}" for word in ("query", "key", "value")},
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_ROTATED_BERT = ATTENTION | {
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_MODEL_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_ROTATED_TOP = {stem: path for stem, path in _BERT_TOP.items() if stem != "position_embd"}
_MODERN_BERT = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
_MODERN_BERT_TOP = {"token_embd": "embeddings.tok_embeddings", "token_embd_norm": "embeddings.norm", "output_norm": "final_norm"}


def _t5_names(gated: bool) -> dict[str, str]:
    """T5's tensors of a layer, those of the decoder's attention to the encoder among them."""
    out = {}
    for side, feed_forward in (("enc", 1), ("dec", 2)):
        for word in "qkvo":
            out[f"{side}.attn_{word}"] = f"layer.0.SelfAttention.{word}"
        out |= {
            f"{side}.attn_norm": "layer.0.layer_norm",
            f"{side}.attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
            f"{side}.ffn_norm": f"layer.{feed_forward}.layer_norm",
            f"{side}.ffn_up": f"layer.{feed_forward}.DenseReluDense.{'wi_1' if gated else 'wi'}",
            f"{side}.ffn_down": f"layer.{feed_forward}.DenseReluDense.wo",
        }
        if gated:
            out[f"{side}.ffn_gate"] = f"layer.{feed_forward}.DenseReluDense.wi_0"
    for word in "qkvo":
        out[f"dec.cross_attn_{word}"] = f"layer.1.EncDecAttention.{word}"
    return out | {"dec.cross_attn_norm": "layer.1.layer_norm"}


_T5_TOP = {
    "token_embd": "shared",
    "enc.output_norm": "encoder.final_layer_norm",
    "dec.output_norm": "decoder.final_layer_norm",
    "output": "lm_head",
}
_T5_EPS = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
_T5 = Architecture(
    "t5",
    _t5_names(True),
    top=_T5_TOP,
    layers="block",
    eps=_T5_EPS,
    heads=False,
    task="encoder-decoder",
    extra=_t5,
    absent=lambda config, layer, stem: stem == "cross_attn_rel_b",
)
T5_PLAIN = replace(_T5, names=_t5_names(False))
"""What a file of architecture t5 without gates becomes."""

T5_PLAIN_ENCODER = replace(T5_PLAIN, task="encoder", extra=_t5_encoder)
"""The same for its encoder alone."""

ENCODERS: dict[str, Architecture] = {
    "bert": Architecture(
        "bert",
        _BERT,
        top=_BERT_TOP,
        layers="encoder.layer",
        eps=layer_eps("layer_norm_eps"),
        task="encoder",
        splits=FUSED_QKV,
        extra=_bert,
        parameters=_no_token_types,
    ),
    "eurobert": Architecture(
        "eurobert",
        LLAMA,
        top=_MODEL_TOP,
        layers="layers",
        task="encoder",
        splits=FUSED_QKV,
        constants={"tie_word_embeddings": False},
        extra=_eurobert,
    ),
    "llama-embed": Architecture(
        "llama",
        LLAMA,
        top=_MODEL_TOP,
        layers="layers",
        task="encoder",
        interleaved=True,
        splits=FUSED_QKV,
        constants={"is_causal": False, "tie_word_embeddings": False},
    ),
    "modern-bert": Architecture(
        "modernbert",
        _MODERN_BERT,
        top=_MODERN_BERT_TOP,
        layers="layers",
        eps=layer_eps("norm_eps"),
        task="encoder",
        extra=_modern_bert,
    ),
    "gemma-embedding": Architecture(
        "gemma3_text",
        GEMMA2 | QK_NORM,
        top=_MODEL_TOP,
        layers="layers",
        norm_offset=True,
        task="encoder",
        absent=lambda config, layer, stem: stem in ("dense_2", "dense_3"),
        extra=_gemma_embedding,
    ),
    "jina-bert-v3": Architecture(
        "jina_embeddings_v3",
        _ROTATED_BERT | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top=_ROTATED_TOP,
        layers="layers",
        eps=layer_eps("layer_norm_eps"),
        task="encoder",
        splits=FUSED_QKV,
        extra=_without_pooler,
        parameters=_no_token_types,
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        _ROTATED_BERT | MLP,
        top=_ROTATED_TOP,
        layers="layers",
        eps=layer_eps("layer_norm_eps"),
        task="encoder",
        splits=FUSED_QKV,
        extra=_without_pooler,
        parameters=_no_token_types,
    ),
    "t5": _T5,
    "t5encoder": Architecture(
        "t5",
        _t5_names(True),
        top=_T5_TOP,
        layers="block",
        eps=_T5_EPS,
        heads=False,
        task="encoder",
        extra=_t5_encoder,
    ),
}
"""GGUF architectures that have an encoder."""
