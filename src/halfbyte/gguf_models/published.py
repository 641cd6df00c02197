"""Fields of a published config.json and names of its tensors that transformers has otherwise, or as
constants of its code, and that engines read there: mlx-lm, vLLM, llama.cpp's converter.

    published(config)                  {"n_embd": 768, ...} of a GPT-2
    published_name(config, name)       "model.layers.1.mlp.shared_expert.up_proj" of a Laguna
    JOINED["hrm_text"]                 modules whose rows follow one another in one matrix
    REPLACED["deepseek_v4"]            fields of transformers that the published ones stand for

Names and values are those of the models' own repositories; transformers renames them as it reads
them (its `conversion_mapping`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoints.architecture import is_longrope_factor
from .streams import COMPRESSED_TOKENS

Config = Mapping[str, Any]
PUBLISHED_VALUES = ("architectures", "layer_types")
"""Fields whose values too are other ones in transformers."""


def published(config: Config) -> dict[str, Any]:
    """The fields of a configuration's model type; none where it lacks those that they are made of,
    or has null there, as one with the published names does.
    """
    fields = _FIELDS.get(str(config.get("model_type", "")))
    try:
        return fields(config) if fields is not None else {}
    except (KeyError, TypeError):
        return {}


def published_name(config: Config, name: str) -> str:
    """The name of a tensor, or of a packed module, in a published checkpoint of a model."""
    kind = str(config.get("model_type", ""))
    for pattern, other in _NAMES.get(kind, ()):
        name = re.sub(pattern, other, name)
    if kind == "bailing_hybrid" and (layer := re.match(r"model\.layers\.(\d+)\.attention\.o_proj", name)):
        latent = config["layer_types"][int(layer[1])] == "full_attention"
        name = name.replace(".o_proj", ".dense") if latent else name
    return name


def published_parts(model_type: str, path: str) -> tuple[str, ...]:
    """Modules of published checkpoints that are one of transformers', rows one after another; none
    for a module that is one in both.
    """
    if path.endswith(".conv1d") and model_type in ("bailing_hybrid", "kimi_linear"):
        return tuple(f"{path.removesuffix('conv1d')}{part}_conv1d" for part in "qkv")
    return ()


def _theta(config: Config) -> Any:
    return (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))


def _sparse(config: Config) -> list[bool]:
    """Which layers are mixtures of experts."""
    return [kind == "sparse" for kind in config["mlp_layer_types"]]


def _first_sparse(config: Config) -> int:
    return (*_sparse(config), True).index(True)


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "n_embd": config["hidden_size"], "n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"], "n_ctx": config["max_position_embeddings"],
        "n_inner": config.get("intermediate_size"),
    }  # fmt: skip


def _routing(config: Config) -> dict[str, Any]:
    """Sigmoid scores and a bias that only chooses: DeepSeek V3's."""
    return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def _bailing_hybrid(config: Config) -> dict[str, Any]:
    """Ling 3: the last layer of every group has latent attention."""
    return {
        "architectures": ["BailingMoeV3ForCausalLM"], "num_experts": config["num_local_experts"],
        "num_shared_experts": config["n_shared_experts"], "first_k_dense_replace": _first_sparse(config),
        "layer_group_size": (*config["layer_types"], "full_attention").index("full_attention") + 1, "no_kda_lora": True,
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
        "score_function": "sigmoid", "rope_interleave": True,
    }  # fmt: skip


def _deepseek_v4(config: Config) -> dict[str, Any]:
    """Kinds of layers by how many tokens one compressed key stands for, and how many choose experts
    by the token alone.
    """
    rotated = config["rope_parameters"]["main"].get("partial_rotary_factor", 1.0)
    return {
        "compress_ratios": [COMPRESSED_TOKENS[kind] for kind in config["layer_types"]],
        "num_hash_layers": sum(kind == "hash_moe" for kind in config["mlp_layer_types"]),
        "qk_rope_head_dim": int(config["head_dim"] * rotated),
        "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu",
    }  # fmt: skip


def _exaone_moe(config: Config) -> dict[str, Any]:
    return {
        "is_moe_layer": _sparse(config), "first_k_dense_replace": _first_sparse(config), "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }  # fmt: skip


def _falcon_h1(config: Config) -> dict[str, Any]:
    """A GGUF has the multipliers in its weights; engines have other defaults than 1."""
    one = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    many = {"mlp_multipliers": 2, "ssm_multipliers": 5}
    plain = {f"{name}_multiplier": 1.0 for name in one} | {name: [1.0] * count for name, count in many.items()}
    return {name: config.get(name) or value for name, value in plain.items()}


def _hy_v3(config: Config) -> dict[str, Any]:
    return {
        "expert_hidden_dim": config["moe_intermediate_size"], "first_k_dense_replace": _first_sparse(config),
        "route_norm": True, "qk_norm": True,
    }  # fmt: skip


def _kimi_linear(config: Config) -> dict[str, Any]:
    """Layers are counted from 1."""
    kinds = config["layer_types"]
    return {
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "head_dim": config["linear_head_dim"], "num_heads": config["linear_num_heads"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        },
        "mla_use_nope": True, "rope_theta": 10000.0, "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "model_max_length": config["max_position_embeddings"], "num_experts": config["num_local_experts"],
        "num_experts_per_token": config["num_experts_per_tok"], "num_shared_experts": config["n_shared_experts"],
        "moe_renormalize": config["norm_topk_prob"], "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
        "num_expert_group": config["n_group"], "use_grouped_topk": True, "first_k_dense_replace": _first_sparse(config),
    }  # fmt: skip


def _mamba2(config: Config) -> dict[str, Any]:
    return {
        "intermediate_size": config["expand"] * config["hidden_size"], "use_bias": False, "use_conv_bias": True,
        "time_step_limit": [0.0, math.inf], "time_step_rank": math.ceil(config["hidden_size"] / 16),
    }  # fmt: skip


def _minimax(config: Config) -> dict[str, Any]:
    rotated = int(config["head_dim"] * (config.get("partial_rotary_factor") or 1.0))
    return {
        "rotary_dim": rotated, "shared_intermediate_size": 0, "use_qk_norm": True, "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }  # fmt: skip


def _mimo(config: Config) -> dict[str, Any]:
    """Windowed layers have twice as many heads for keys, and sinks."""
    rope = config["rope_parameters"]
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config["layer_types"]],
        "moe_layer_freq": [int(sparse) for sparse in _sparse(config)], "sliding_window_size": config["sliding_window"],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "layernorm_epsilon": config["rms_norm_eps"],
        "rope_theta": rope["full_attention"]["rope_theta"], "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"].get("partial_rotary_factor", 1.0),
        "swa_num_attention_heads": config["num_attention_heads"], "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"], "swa_v_head_dim": config["v_head_dim"],
    }  # fmt: skip


def _phi3_rotation(config: Config) -> dict[str, Any] | None:
    """LongRoPE under its published name. vLLM takes the factor of its cosines and sines from the
    lengths (`attention_factor`) unless two numbers say another.
    """
    if not config.get("rope_scaling"):
        return None
    scaled: dict[str, Any] = config["rope_scaling"] | {"type": "longrope"}
    factor, original = scaled.get("attention_factor"), scaled.get("original_max_position_embeddings", 0)
    if factor is None or not original > 1 or is_longrope_factor(factor, config["max_position_embeddings"], original):
        return scaled
    return scaled | {"short_mscale": factor, "long_mscale": factor}


_GRANITE_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}
_FIELDS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "afmoe": lambda config: {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "apertus": lambda config: {"post_norm": False, "qk_norm": True},
    "bailing_hybrid": _bailing_hybrid,
    "deepseek_v3": _routing,
    "deepseek_v32": _routing,
    "deepseek_v4": _deepseek_v4,
    "exaone4": lambda config: {
        "sliding_window_pattern": "LLLG" if config.get("sliding_window") else None, "rope_scaling": config.get("rope_scaling"),
    },
    "exaone_moe": _exaone_moe,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": lambda config: {"use_bias": False, "use_conv_bias": True},
    "glm4_moe": lambda config: {"rope_scaling": config.get("rope_scaling")},
    "glm_moe_dsa": _routing,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gpt_neox": lambda config: {
        "rotary_emb_base": _theta(config), "rotary_pct": (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0),
    },
    "granitemoehybrid": lambda config: {"layer_types": [_GRANITE_LAYERS.get(kind, kind) for kind in config["layer_types"]]},
    "hy_v3": _hy_v3,
    "hy_v4": lambda config: {
        "layer_types": config.get("layer_types") or ["deepseek_sparse_attention"] * config["num_hidden_layers"],
    },
    "kimi_linear": _kimi_linear,
    "lfm2": lambda config: {
        "conv_bias": False, "block_dim": config["hidden_size"], "block_ff_dim": config["intermediate_size"],
        "conv_dim": config["hidden_size"], "conv_dim_out": config["hidden_size"], "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": lambda config: {"conv_bias": False},
    "mamba": lambda config: {"use_bias": False, "use_conv_bias": True},
    "mamba2": _mamba2,
    "mellum": lambda config: {"num_experts": config["num_local_experts"]},
    "mimo_v2_flash": _mimo,
    "minimax_m2": _minimax,
    "nemotron": lambda config: {"hidden_act": "relu2"},
    "nemotron_h": lambda config: {
        "mamba_proj_bias": False, "use_conv_bias": True, **({"n_shared_experts": 1} if "n_routed_experts" in config else {}),
    },
    "phi3": lambda config: {"rope_scaling": _phi3_rotation(config)},
    "phimoe": lambda config: {"architectures": ["PhiMoEForCausalLM"]},
    "qwen3_next": lambda config: {
        "full_attention_interval": (*config["layer_types"], "full_attention").index("full_attention") + 1,
    },
}  # fmt: skip
"""transformers' model type -> fields."""
_GRANITE_MOE = (
    (r"\.experts\.gate_up_proj$", ".input_linear.weight"), (r"\.experts\.down_proj$", ".output_linear.weight"),
    (r"\.block_sparse_moe\.router(?=\.weight$|$)", ".block_sparse_moe.router.layer"),
)  # fmt: skip
_FORGETTING = (r"\.self_attn\.forget_gate\.", ".self_attn.")
_DEEPSEEK_V4 = (
    (r"^model\.(?=layers\.|norm\.)", ""), (r"^model\.embed_tokens(?=\.|$)", "embed"), (r"^lm_head(?=\.|$)", "head"),
    (r"^model\.hc_head\.hc_", "hc_head_"), (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."), (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"), (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."), (r"\.compressor\.indexer\.q_b_proj(?=\.|$)", ".indexer.wq_b"),
    (r"\.compressor\.indexer\.", ".indexer.compressor."), (r"(\.compressor\.)kv_norm\.", r"\1norm."),
    (r"\.position_bias$", ".ape"), (r"(\.compressor\.)gate_proj(?=\.|$)", r"\1wgate"),
    (r"\.(q|o)_(a|b)_proj(?=\.|$)", r".w\1_\2"), (r"\.kv_proj(?=\.|$)", ".wkv"), (r"\.q_a_norm\.", ".q_norm."),
    (r"(\.shared_experts\.)gate_proj(?=\.|$)", r"\1w1"), (r"(\.shared_experts\.)down_proj(?=\.|$)", r"\1w2"),
    (r"(\.shared_experts\.)up_proj(?=\.|$)", r"\1w3"),
)  # fmt: skip
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "bailing_hybrid": (
        _FORGETTING,
        (r"\.self_attn\.", ".attention."),
        (r"^model\.embed_tokens(?=\.|$)", "model.word_embeddings"),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.expert_bias"),
    ),
    "deepseek_v4": _DEEPSEEK_V4,
    "ernie4_5_moe": ((r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),),
    "exaone_moe": ((r"\.mlp\.gate\.(?=e_score_correction_bias$)", ".mlp."),),
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_MOE,
    "gpt2": ((r"^transformer\.", ""),),
    "gpt_neox": ((r"^lm_head(?=\.|$)", "embed_out"),),
    "hrm_text": ((r"\.self_attn\.(?=(?:gqkv|o)_proj(?:\.|$))", ".attn."),),
    "hy_v3": (
        (r"\.mlp\.gate(?=\.|$)", ".mlp.router.gate"),
        (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
    ),
    "kimi_linear": (_FORGETTING,),
    "hy_v4": (
        (r"\.self_attn\.sinks$", ".self_attn.learnable_sink_param"),
        (r"\.self_attn\.gate_proj(?=\.|$)", ".self_attn.linear_gate"),
        (r"\.attn_hc\.", ".hc_attn_layer.hc_pre.hc_"),
        (r"\.ffn_hc\.", ".hc_mlp_layer.hc_pre.hc_"),
        (r"\.hc_head\.hc_", ".hc_head.hc_head_"),
    ),
    "laguna": (
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        (r"\.mlp\.gate\.(?=e_score_correction_bias$)", ".mlp.experts."),
    ),
    "nemotron_h": ((r"^model\.", "backbone."),),
    "mimo_v2_flash": ((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),),
}
"""transformers' model type -> (expression in its names, what stands there in published ones)."""
JOINED: dict[str, dict[str, tuple[str, ...]]] = {
    "hrm_text": {
        "self_attn.gqkv_proj": tuple(f"self_attn.{name}_proj" for name in ("gate", "q", "k", "v")),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
}
"""transformers' model type -> module whose rows are those of others, one after another -> they."""
REPLACED = {"deepseek_v4": ("layer_types", "mlp_layer_types")}
"""transformers' model type -> fields that other readers refuse, where the published ones stand."""
