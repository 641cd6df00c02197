"""Which GGUF architecture a transformers configuration becomes where its model type alone does not
say, and the sizes that its model computes from what it states.

    VARIANTS["nemotron_h"](config, "text")      ("nemotron_h_moe", its table)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import Architecture, Change
from .architectures import ARCHITECTURES, MIXTRAL
from .classic import FALCON_40B
from .cycles import hrm_text
from .encoders import T5_PLAIN, T5_PLAIN_ENCODER
from .latent import DEEPSEEK_V2
from .mixtures import COHERE2_MOE_RMS, GRANITE_MOE_SWA
from .recurrent import FALCON_MAMBA
from .streams import qwen4

SAME_MODEL = {"mistral": "llama"}
"""Model types whose computation is another one's: transformers reads the file back as that."""


def _falcon(config: Any, task: str) -> tuple[str, Architecture]:
    return "falcon", FALCON_40B if config.new_decoder_architecture else ARCHITECTURES["falcon"]


def _t5(config: Any, task: str) -> tuple[str, Architecture]:
    if config.is_gated_act:
        return ("t5encoder", ARCHITECTURES["t5encoder"]) if task == "encoder" else ("t5", ARCHITECTURES["t5"])
    return ("t5encoder", T5_PLAIN_ENCODER) if task == "encoder" else ("t5", T5_PLAIN)


def _falcon_h1(config: Any, task: str) -> tuple[str, Architecture]:
    """A file has the model's multipliers in its weights."""
    architecture = ARCHITECTURES["falcon-h1"]
    changes = {stem: _times(factor) for stem, factor in getattr(config, IN_WEIGHTS, {}).items()}
    return "falcon-h1", replace(architecture, changes={**architecture.changes, **changes}) if changes else architecture


def _times(factor: NDArray[np.float32]) -> Change:
    """Rows times a number, or each times its own; files are read as they are."""
    return Change(lambda config, a: a, lambda config, a: a * (factor[:, None] if factor.ndim else factor), reshapes=False)


def _gguf(name: str) -> tuple[str, Architecture]:
    return name, ARCHITECTURES[name]


VARIANTS: dict[str, Callable[[Any, str], tuple[str, Architecture]]] = {
    "cohere2_moe": lambda c, task: ("cohere2moe", COHERE2_MOE_RMS) if getattr(c, "rms_norm_eps", None) else _gguf("cohere2moe"),
    "deepseek_v2": lambda c, task: ("deepseek2", DEEPSEEK_V2),
    "falcon": _falcon,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": lambda c, task: ("mamba", FALCON_MAMBA),
    "gemma3_text": lambda c, task: _gguf("gemma-embedding" if task == "encoder" else "gemma3"),
    "glm4_moe": lambda c, task: _gguf("bailingmoe2" if (c.n_group or 1) > 1 else "glm4moe"),
    "granitemoe_swa": lambda c, task: ("granite_swa", GRANITE_MOE_SWA),
    "hrm_text": lambda c, task: ("hrm_text", hrm_text(int(c.num_layers_per_stack))),
    "llama": lambda c, task: _gguf("llama-embed" if task == "encoder" else "llama"),
    "mixtral": lambda c, task: ("llama", MIXTRAL),
    "nemotron_h": lambda c, task: _gguf("nemotron_h_moe" if "moe" in c.layers_block_type else "nemotron_h"),
    "qwen4_exp_text": lambda c, task: ("qwen4exp", qwen4(c.ple_layer_ids[0] - 1 if c.ple_layer_ids else None)),
    "t5": _t5,
}
"""Model type -> (general.architecture, table) for (configuration, task), where it alone does not
say which.
"""


IN_WEIGHTS = "multipliers_in_weights"
"""Attribute of a configuration whose multipliers go into the weights: stem -> a number, or one for
each row.
"""


def _falcon_h1_sizes(config: Any) -> Any:
    """Multipliers of 1, and those of the configuration as they go into the weights. They stay where
    a bias would have another one than its weight, or a shared table two of them.
    """
    biases = (config.attention_bias, config.mlp_bias, config.mamba_proj_bias, config.projectors_bias)
    if any(biases) or (config.tie_word_embeddings and config.embedding_multiplier != config.lm_head_multiplier):
        return config
    groups = config.mamba_n_groups * config.mamba_d_state
    parts = [config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads]
    gate, down = config.mlp_multipliers
    factors = {
        "token_embd": config.embedding_multiplier, "output": config.lm_head_multiplier, "ffn_gate": gate, "ffn_down": down,
        "attn_q": config.attention_in_multiplier, "attn_k": config.attention_in_multiplier * config.key_multiplier,
        "attn_v": config.attention_in_multiplier, "attn_output": config.attention_out_multiplier,
        "ssm_in": np.repeat(config.ssm_multipliers, parts) * config.ssm_in_multiplier, "ssm_out": config.ssm_out_multiplier,
    }  # fmt: skip
    setattr(config, IN_WEIGHTS, {stem: np.asarray(f, np.float32) for stem, f in factors.items() if (np.asarray(f) != 1).any()})
    for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"):
        setattr(config, f"{name}_multiplier", 1.0)
    config.mlp_multipliers, config.ssm_multipliers = [1.0] * 2, [1.0] * 5
    return config


def _falcon_heads(config: Any) -> int:
    """Heads for keys: of newer models their number, of older ones 1 or all."""
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _lfm2(config: Any) -> Any:
    """The width that the model makes of what its configuration has, as that width."""
    if config.block_auto_adjust_ff_dim:
        width = int(2 * config.intermediate_size / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
        multiple = config.block_multiple_of
        config.intermediate_size = multiple * -(-width // multiple)
        config.block_auto_adjust_ff_dim = False
    return config


def _falcon_sizes(config: Any) -> Any:
    """Numbers that each generation of Falcon computes with."""
    config.num_kv_heads = _falcon_heads(config)
    config.multi_query = config.num_kv_heads == 1
    config.intermediate_size = config.ffn_hidden_size
    return config


def _both_sides(config: Any) -> Any:
    """A window of tokens on both sides: transformers counts one side and the token itself, which
    it computes from the two sides that config.json and a file have.
    """
    if getattr(config, "use_bidirectional_attention", False) and config.sliding_window:
        config.sliding_window = 2 * (config.sliding_window - 1)
    return config


def _gemma4_sizes(config: Any) -> Any:
    """The heads of global layers, which the configuration has layer by layer; and no experts where
    it has sizes of experts that it does not use.
    """
    each = [config.per_layer_config[i] for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    config.global_head_dim = each[0].head_dim if each else config.head_dim
    config.num_global_key_value_heads = each[0].num_key_value_heads if each else config.num_key_value_heads
    if not config.enable_moe_block:
        config.num_experts = config.top_k_experts = config.moe_intermediate_size = None
    return config


def _laguna_sizes(config: Any) -> Any:
    """The number of heads of a layer, of which a file's reader takes the most."""
    config.num_attention_heads = max(config.num_attention_heads_per_layer)
    return config


def _mpt_sizes(config: Any) -> Any:
    config.max_position_embeddings = config.max_seq_len
    return config


def _t5_sizes(config: Any) -> Any:
    """T5's positions are relative; a file states the length of the texts of its training."""
    if not getattr(config, "max_position_embeddings", None):
        config.max_position_embeddings = getattr(config, "n_positions", None) or 512
    return config


def _bailing_sizes(config: Any) -> Any:
    """Its heads' length in a configuration is that of delta networks."""
    config.head_dim = config.linear_head_dim
    return config


SAME_SIZES: dict[str, Callable[[Any], Any]] = {
    "bailing_hybrid": _bailing_sizes,
    "falcon": _falcon_sizes,
    "falcon_h1": _falcon_h1_sizes,
    "gemma3_text": _both_sides,
    "gemma4_text": _gemma4_sizes,
    "laguna": _laguna_sizes,
    "lfm2": _lfm2,
    "mpt": _mpt_sizes,
    "t5": _t5_sizes,
}
"""Model type -> the configuration with the sizes that its model has, where it computes them."""

WRITTEN_AS = {
    "baichuan": "llama", "codeshell": "starcoder2", "exaone": "llama", "hunyuan_vl": "hunyuan-dense", "internlm2": "llama",
    "maincoder": "hunyuan-dense", "minicpm": "granite", "orion": "stablelm", "paddleocr": "llama", "pangu-embedded": "llama",
    "qwen": "qwen2", "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe", "xverse": "llama",
}  # fmt: skip
"""GGUF architectures of models that transformers has as another's -> the architecture that a folder
of one becomes.
"""
