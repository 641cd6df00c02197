"""Architectures whose hidden states are several streams, which learned gates mix before and after
each half of a layer, beside `hy_v4` of `latent.py`.

    STREAMS["deepseek4"].names["attn_compressor_kv"]      "self_attn.compressor.kv_proj"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import plural
from .architecture import (
    BIASED_ROUTING,
    CONVOLUTION,
    MOE,
    ONE_MORE,
    PARAMETER,
    PART,
    TOP,
    Architecture,
    Change,
    expert_counts,
    shared,
)
from .keys import Keys, MissingError
from .recurrent import DELTA, DELTA_EXPERTS, DELTA_ORDERS, MAMBA_CHANGES, delta_moe, values_of

SQRT_SOFTPLUS = 4
"""llama.cpp's number of the function √(ln(1 + eˣ)) that scores experts."""
COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""How many tokens one compressed key stands for -> the kind of layer."""
COMPRESSED_TOKENS = {kind: tokens for tokens, kind in COMPRESSED.items()}


def _deepseek4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Layers attend to a window and to compressed keys of all that is before it. The first layers
    choose experts by the token alone.
    """
    if (function := int(keys.get("expert_gating_func", "integer", 0))) != SQRT_SOFTPLUS:
        raise keys.refuse(f"that scores experts by function {function}; {SQRT_SOFTPLUS} (sqrtsoftplus) is read")
    if not keys.get("expert_weights_norm", "bool", False):
        raise keys.refuse("whose weights of experts do not add up to one, which transformers' model always makes them do")
    if (count := keys.size("expert_shared_count", 1)) != 1:
        raise keys.refuse(f"with {count} shared experts; transformers' model has one")
    limits = {
        limit
        for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
        for limit in (keys.numbers(f"{keys.arch}.{name}", keys.layers) if f"{keys.arch}.{name}" in keys.metadata else ())
    }
    if len(limits) != 1 or not max(limits) > 1e-6:
        raise keys.refuse(f"whose experts are limited to {sorted(limits)}; transformers takes one limit above 0")
    ratios = keys.sizes("attention.compress_ratios", keys.layers)
    if unknown := sorted(set(ratios) - set(COMPRESSED)):
        raise keys.refuse(f"that compresses {unknown} tokens into one; {', '.join(map(str, COMPRESSED))} are read")
    hashed = int(keys.get("hash_layer_count", "integer", 0))
    rope, size = config["rope_parameters"], config["head_dim"]
    partial = {"partial_rotary_factor": keys.rotated("rope.dimension_count", size) / size}
    scaled = rope | partial | {"rope_theta": keys.positive("attention.compress_rope_freq_base")}
    if rope["rope_type"] == "yarn":
        scaled["attention_factor"] = 1.0
    return {
        **expert_counts(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": count,
        "num_key_value_heads": 1,
        "routed_scaling_factor": keys.positive("expert_weights_scale"),
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": max(limits),
        "sliding_window": keys.size("attention.sliding_window"),
        "q_lora_rank": keys.size("attention.q_lora_rank"),
        "o_groups": keys.size("attention.output_group_count"),
        "o_lora_rank": keys.size("attention.output_lora_rank"),
        "index_n_heads": keys.size("attention.indexer.head_count"),
        "index_head_dim": keys.size("attention.indexer.key_length"),
        "index_topk": keys.size("attention.indexer.top_k"),
        "hc_mult": keys.size("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.size("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.positive("hyper_connection.epsilon"),
        "num_nextn_predict_layers": 0,
        "layer_types": [COMPRESSED[ratio] for ratio in ratios],
        "mlp_layer_types": ["hash_moe" if i < hashed else "moe" for i in range(keys.layers)],
        "rope_theta": rope["rope_theta"],
        "compress_rope_theta": scaled["rope_theta"],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": rope["rope_theta"]} | partial,
            "compress": scaled,
        },
    }


TABLE = "ple.ple_embedding"
"""The module, within a layer, of Qwen 4's embeddings of pairs and triples of tokens."""


def _qwen4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Qwen 3.5's layers, whose attention chooses whole blocks of tokens by an indexer; a layer adds
    embeddings of the last few tokens together.
    """
    out = delta_moe(keys, config)
    kinds = out.pop("layer_types")
    ratios = keys.sizes("attention.compress_ratios", keys.layers)
    chosen = {ratio for ratio, kind in zip(ratios, kinds, strict=True) if kind == "full_attention"}
    if len(chosen) != 1 or not min(chosen):
        raise keys.refuse(
            f"whose layers of attention choose among blocks of {sorted(chosen)} tokens; transformers takes one size"
        )
    layer = embedding_layer(keys)
    more: dict[str, Any] = {}
    if layer is not None:
        offsets, sizes = (_integers(keys, f"ple.head_{name}") for name in ("offsets", "vocab_sizes"))
        ngram, heads, rows = keys.size("ple.ngram_size"), keys.size("ple.heads_per_ngram"), keys.rows("per_layer_token_embd")
        count = (ngram - 1) * heads
        if not count or len(sizes) != count or len(offsets) != count:
            raise keys.error(
                f"'{keys.arch}.ple.head_vocab_sizes' has {plural(len(sizes), 'size')} and 'ple.head_offsets' {len(offsets)}; "
                f"up to {ngram} tokens in {heads} heads make {count}, and 1 or more are needed"
            )
        more = {
            "ple_layer_ids": [layer + 1],
            "ple_embed_dim": len(sizes) * keys.size("embedding_length_per_layer_input"),
            "ple_conv_kernel_size": keys.size("ple.conv_kernel"),
            "ngram_size": ngram,
            "heads_per_ngram": heads,
            "ngram_vocab_size_base": int(sizes[0]),
            "make_ngram_vocab_size_divisible_by": rows,
            "eos_token_id": keys.need("ple.eos_token_id", "integer"),
        }
    return out | more | {
        "layer_types": ["indexed_attention" if kind == "full_attention" else kind for kind in kinds],
        "output_gate_type": "sigmoid",
        "hc_count": keys.size("hyper_connection.count"),
        "hc_lowrank": keys.size("hyper_connection.low_rank"),
        "indexer_n_heads": keys.size("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys.size("attention.indexer.key_length"),
        "indexer_budget": keys.size("attention.indexer.top_k"),
        "indexer_compress_ratio": min(chosen),
    }  # fmt: skip


def _integers(keys: Keys, key: str) -> NDArray[np.int64]:
    name = f"{keys.arch}.{key}"
    if name not in keys.metadata:
        raise MissingError(keys.checkpoint.path, "key", name, "; the model needs it")
    if "int" not in keys.metadata.type_name(name) or not keys.metadata.type_name(name).startswith("array"):
        raise keys.error(f"key '{name}' is {keys.metadata.type_name(name)}; an array of integers is needed")
    return np.asarray(keys.metadata[name], np.int64)


def embedding_layer(keys: Keys) -> int | None:
    """The layer that adds embeddings of several tokens, None where none does."""
    if f"{keys.arch}.ple.layers" not in keys.metadata:
        return None
    found = _integers(keys, "ple.layers")
    if len(found) != 1 or not 0 <= found[0] < keys.layers:
        raise keys.refuse(
            f"with embeddings of several tokens in layers {found.tolist()}; one of its {keys.layers} layers is read"
        )
    return int(found[0])


def _hashes(keys: Keys, config: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The numbers that make a row of the table of several tokens, which the file has as keys."""
    layer = embedding_layer(keys)
    if layer is None:
        return {}
    names = {
        "layer_multipliers": "layer_multipliers",
        "head_offsets": "ngram_heads_offsets",
        "head_vocab_sizes": "ngram_heads_vocab_sizes",
    }
    return {f"model.layers.{layer}.{TABLE}.{buffer}": _integers(keys, f"ple.{key}") for key, buffer in names.items()}


def qwen4(layer: int | None) -> Architecture:
    """The table of a file, which has the embeddings of several tokens outside the layer that adds
    them.
    """
    architecture = STREAMS["qwen4exp"]
    if layer is None:
        return architecture
    table = {"per_layer_token_embd": f"model.layers.{layer}.{TABLE}.ngram_embedding"}
    return replace(architecture, top=dict(architecture.top) | table)


_NORM = Change(lambda config, a: ONE_MORE.read(config, a.reshape(-1)), ONE_MORE.write)


def _mixer(path: str) -> dict[str, str]:
    """What mixes the streams, by the end of its stem."""
    return {
        "norm": f"{path}.hc_norm",
        "down": f"{path}.input_mix_weight_down",
        "up": f"{path}.input_mix_weight_up",
        "inject": f"{path}.block_inject_weight",
    }


_QWEN4 = {k: v for k, v in DELTA.items() if k not in ("attn_norm", "post_attention_norm")} | DELTA_EXPERTS | {
    **{f"hc_attn_{end}": path for end, path in _mixer("attn_hyper_connection").items()},
    **{f"hc_ffn_{end}": path for end, path in _mixer("mlp_hyper_connection").items()},
    "indexer.q_proj": f"self_attn.indexer.index_qk_proj{PART}0", "indexer.k_proj": f"self_attn.indexer.index_qk_proj{PART}1",
    "indexer.q_norm": "self_attn.indexer.q_layernorm", "indexer.k_norm": "self_attn.indexer.k_layernorm",
    "ple_key": "ple.key_proj", "ple_value": "ple.value_proj", "ple_conv1d": "ple.conv1d",
    **{f"ple_norm_{w}": f"ple.norm_{w}" for w in ("key", "query", "conv")},
}  # fmt: skip


def _compressor(path: str) -> dict[str, str]:
    """What makes one key of several tokens, by the end of its stem."""
    return {
        "kv": f"{path}.kv_proj",
        "gate": f"{path}.gate_proj",
        "ape": f"{path}{PARAMETER}position_bias",
        "norm": f"{path}.kv_norm",
    }


_ATTENTION = "self_attn.compressor"
_INDEXER = f"{_ATTENTION}.indexer"

STREAMS: dict[str, Architecture] = {
    "deepseek4": Architecture(
        "deepseek_v4",
        {k: v for k, v in MOE.items() if not k.startswith(("attn_q", "attn_k", "attn_v", "attn_output"))}
        | shared("mlp.shared_experts")
        | BIASED_ROUTING
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_norm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv": "self_attn.kv_proj",
            "attn_kv_a_norm": "self_attn.kv_norm",
            "attn_output_a": "self_attn.o_a_proj",
            "attn_output_b": "self_attn.o_b_proj",
            "attn_sinks": f"self_attn{PARAMETER}sinks",
            "ffn_gate_tid2eid": f"mlp.gate{PARAMETER}tid2eid",
            **{f"attn_compressor_{end}": path for end, path in _compressor(_ATTENTION).items()},
            **{f"indexer_compressor_{end}": path for end, path in _compressor(_INDEXER).items()},
            "indexer.attn_q_b": f"{_INDEXER}.q_b_proj",
            "indexer.proj": f"{_INDEXER}.scorer.weights_proj",
            **{f"hc_{half}_{w}": f"{half}_hc{PARAMETER}{w}" for half in ("attn", "ffn") for w in ("fn", "base", "scale")},
        },
        top=TOP | {f"output_hc_{w}": f"model.hc_head{PARAMETER}hc_{w}" for w in ("fn", "base", "scale")},
        experts=True,
        partial=True,
        varying=True,
        computed=("intermediate_size",),
        extra=_deepseek4,
    ),
    "qwen4exp": Architecture(
        "qwen4_exp_text",
        _QWEN4,
        top={
            "token_embd": "model.embed_tokens",
            "output": "lm_head",
            **{f"output_hc_{end}": path for end, path in _mixer("model.hyper_connection_mixer").items() if end != "inject"},
        },
        norm_offset=True,
        plain_norms=("ssm_norm",),
        partial=True,
        varying=True,
        experts=True,
        changes=MAMBA_CHANGES | {"ple_conv1d": CONVOLUTION} | {f"ple_norm_{w}": _NORM for w in ("key", "query", "conv")},
        cuts={"self_attn.indexer.index_qk_proj": lambda config, rows: [config.indexer_n_heads * config.indexer_head_dim]},
        orders=DELTA_ORDERS,
        columns={"ssm_out": values_of("linear_value_head_dim")},
        parameters=_hashes,
        extra=_qwen4,
    ),
}
"""GGUF architectures of such models."""
