"""Each GGUF architecture that becomes a transformers model, as a table: names, norms, rotation,
experts, sizes.

    ARCHITECTURES["qwen2moe"].names["ffn_gate_shexp"]      "mlp.shared_expert.gate_proj"

Names and keys are llama.cpp's (`llama-arch.cpp`, gguf's `constants.py`); module paths and fields
are transformers'. What a file does not state and llama.cpp computes is computed the same way:
Gemma's query scale, patterns of local layers, defaults of scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .keys import Keys

EXPERTS, PARAMETER = "/", "#"
"""Within a module path of `Architecture.names`: what follows is a projection of an experts module,
or a parameter's own name.
"""
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""GGUF tensor stem -> module path outside the layers."""
RMS_EPS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


def layer_eps(name: str) -> tuple[str, str]:
    """The key of LayerNorm's epsilon and transformers' field for it."""
    return ("attention.layer_norm_epsilon", name)


@dataclass(frozen=True)
class Field:
    """A key of the file -> a field of the configuration.

    key      after `ARCH.`
    name     transformers' field
    kind     "size" (1 or more), "integer", "positive" (a float above 0), "float" or "bool"
    default  where the key is missing; REQUIRED raises
    """

    key: str
    name: str
    kind: str = "size"
    default: Any = None
    required: bool = True


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture becomes a transformers model.

    model_type   transformers' word for it
    names        GGUF tensor stem (after `blk.N.`) -> module path within a layer
    top          the same outside the layers
    layers       module path of the layers
    eps          key of the norms' epsilon, and transformers' field
    norm_offset  the file has w + 1 of norms that transformers keeps as w
    interleaved  rows of attn_q and attn_k are in llama.cpp's order of rotated pairs
    fused_heads  rows of attn_qkv are all q, all k, all v, where transformers has q, k, v of each
                 head
    experts      its feed-forward layers are mixtures of experts
    partial      each head may be rotated in part
    fields       keys of its own
    constants    fields that every such model has
    extra        fields that are computed from the keys and the fields so far
    """

    model_type: str
    names: Mapping[str, str]
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers"
    eps: tuple[str, str] = RMS_EPS
    norm_offset: bool = False
    interleaved: bool = False
    fused_heads: bool = False
    experts: bool = False
    partial: bool = False
    fields: tuple[Field, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    extra: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, config: {}


def _gemma_query(keys: Keys, config: dict[str, Any], largest: int) -> int:
    """The query scale is one over the root of this: the head's length, but hidden/heads in the 27B
    models, known by depth.
    """
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_query(keys, config, 46),
        "sliding_window": keys.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Five local layers, then a global one. Local layers rotate with base 10000 and are never
    stretched.
    """
    pattern = keys.size("attention.sliding_window_pattern", 6)
    layers = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(config["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10000.0)}
    return {
        "query_pre_attn_scalar": _gemma_query(keys, config, 62),
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": layers,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", "float"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", "float"),
    }


def _mixtral(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if "blk.0.attn_q.bias" in keys.checkpoint:
        raise keys.refuse("with experts and biases of attention")
    return {"sliding_window": None, **expert_counts(keys, "num_local_experts")}


def _qwen3_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Every layer has experts; their weights are normalized, as llama.cpp does for this
    architecture.
    """
    return {
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        **expert_counts(keys, "num_experts"),
    }


def _gpt_oss(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Local and global layers alternate; the rotation's ramp is not rounded to whole indices."""
    kinds = ("sliding_attention", "full_attention")
    rope = config["rope_parameters"]
    return {
        "layer_types": [kinds[i % 2] for i in range(config["num_hidden_layers"])],
        "sliding_window": keys.size("attention.sliding_window"),
        "intermediate_size": keys.size("expert_feed_forward_length", config["intermediate_size"]),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        **expert_counts(keys, "num_local_experts"),
    }


def expert_counts(keys: Keys, name: str) -> dict[str, Any]:
    """The number of experts under transformers' name for it, and how many serve a token."""
    count, used = keys.size("expert_count"), keys.size("expert_used_count")
    if used > count:
        raise keys.error(f"'{keys.arch}.expert_used_count' is {used}; there are {count} experts")
    return {name: count, "num_experts_per_tok": used}


def _phi3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if any(f"rope_factors_{kind}.weight" in keys.checkpoint for kind in ("long", "short")):
        raise keys.refuse("with long and short rotation factors")
    return {"sliding_window": keys.get("attention.sliding_window", "integer") or None}


def _optional(key: str, name: str, kind: str, default: Any = None) -> Field:
    return Field(key, name, kind, default, required=False)


def _granite(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The scale of scores is one over the root of a head's length where the file states none."""
    return {"attention_multiplier": keys.get("attention.scale", "float", 0.0) or config["head_dim"] ** -0.5}


def _minicpm(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Older files leave out the scales, which follow from the sizes."""
    return {
        "embedding_multiplier": keys.get("embedding_scale", "float", 12.0),
        "residual_multiplier": keys.get("residual_scale", "float", 1.4 / config["num_hidden_layers"] ** 0.5),
        "logits_scaling": keys.get("logit_scale", "float", config["hidden_size"] / 256),
        "attention_multiplier": config["head_dim"] ** -0.5,
    }


def _baichuan(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if config["num_hidden_layers"] == 40:
        raise keys.refuse("of 40 layers, which has ALiBi positions (the 13B size)")
    return {}


def _pattern(config: dict[str, Any], period: int) -> list[str]:
    """Local layers with a global one at the end of each period."""
    count = config["num_hidden_layers"]
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)]


def _cohere(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": keys.has("blk.0.attn_q_norm")}


def _cohere2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": _pattern(config, keys.size("attention.sliding_window_pattern", 4))}


def _exaone4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Only the model of 64 layers has local ones."""
    if config["num_hidden_layers"] != 64:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return {"sliding_window": keys.size("attention.sliding_window", 4096), "layer_types": _pattern(config, 4)}


def _stablelm(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": not keys.has("blk.0.ffn_norm")}


def _full_attention(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def _deepseek_routing(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Sigmoid scores with a bias for choosing, a shared expert, dense layers first."""
    return {
        **expert_counts(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "first_k_dense_replace": keys.get("leading_dense_block_count", "integer", 0),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", "bool", False),
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": keys.has("blk.0.attn_q_norm"),
        "sliding_window": None,
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
    }


def _hunyuan_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    counts = expert_counts(keys, "num_experts")
    ff = keys.size("expert_feed_forward_length", config["intermediate_size"])
    shared = keys.size("expert_shared_feed_forward_length", config["intermediate_size"])
    return {
        **counts,
        "moe_topk": counts["num_experts_per_tok"],
        "intermediate_size": ff,
        "num_shared_expert": max(1, shared // ff),
    }


_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_SEED_OSS = _ATTENTION | _MLP | {"post_attention_norm": "post_attention_layernorm"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_HUNYUAN_NORM = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GEMMA2 = _ATTENTION | _MLP | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_POST_NORMS = _ATTENTION | _MLP | _QK_NORM | {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


def _routed(path: str, router: str) -> dict[str, str]:
    """Stacked experts at `path` and their router."""
    return {f"ffn_{w}_exps": f"{path}{EXPERTS}{w}_proj" for w in ("gate", "up", "down")} | {"ffn_gate_inp": router}


def _shared(path: str) -> dict[str, str]:
    return {f"ffn_{w}_shexp": f"{path}.{w}_proj" for w in ("gate", "up", "down")}


_MOE = _LLAMA | _routed("mlp.experts", "mlp.gate")
_BIASED_ROUTING = {"exp_probs_b": f"mlp.gate{PARAMETER}e_score_correction_bias"}
_GPT_OSS = _SEED_OSS | _routed("mlp.experts", "mlp.router") | {"attn_sinks": f"self_attn{PARAMETER}sinks"}
_FUSED_UP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_PHI3 = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", **_FUSED_UP,
}  # fmt: skip
_GLM4 = _ATTENTION | _FUSED_UP | {
    "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
_PHI2 = _ATTENTION | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_STARCODER2 = _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
_GPTNEOX = {
    "attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
_GPTNEOX_TOP = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}

_GRANITE_SCALES = (
    _optional("embedding_scale", "embedding_multiplier", "float", 1.0),
    _optional("residual_scale", "residual_multiplier", "float", 1.0),
    _optional("logit_scale", "logits_scaling", "float", 1.0),
)
MIXTRAL = Architecture("mixtral", _MOE, interleaved=True, experts=True, extra=_mixtral)
"""What a file of architecture llama with experts becomes."""
_QWEN3MOE = Architecture("qwen3_moe", _MOE | _QK_NORM, experts=True, extra=_qwen3_moe)

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture("arcee", _LLAMA, interleaved=True),
    "baichuan": Architecture("llama", _LLAMA, interleaved=True, extra=_baichuan),
    "cohere2": Architecture(
        "cohere2", _LLAMA, eps=layer_eps("layer_norm_eps"), extra=_cohere2,
        fields=(Field("logit_scale", "logit_scale", "positive"), Field("attention.sliding_window", "sliding_window")),
    ),
    "command-r": Architecture(
        "cohere", _LLAMA | _QK_NORM, eps=layer_eps("layer_norm_eps"), fields=(Field("logit_scale", "logit_scale", "positive"),),
        extra=_cohere,
    ),
    "dots1": Architecture(
        "dots1", _MOE | _QK_NORM | _shared("mlp.shared_experts") | _BIASED_ROUTING, experts=True, extra=_deepseek_routing
    ),
    "ernie4_5": Architecture("ernie4_5", _LLAMA),
    "exaone4": Architecture("exaone4", _POST_NORMS, extra=_exaone4),
    "gemma": Architecture("gemma", _LLAMA, norm_offset=True),
    "gemma2": Architecture("gemma2", _GEMMA2, norm_offset=True, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", _GEMMA2 | _QK_NORM, norm_offset=True, extra=_gemma3),
    "glm4": Architecture("glm4", _GLM4, partial=True),
    "glm4moe": Architecture(
        "glm4_moe",
        _SEED_OSS | _QK_NORM | _routed("mlp.experts", "mlp.gate") | _shared("mlp.shared_experts") | _BIASED_ROUTING,
        experts=True, partial=True, extra=_deepseek_routing,
    ),
    "gpt-oss": Architecture("gpt_oss", _GPT_OSS, experts=True, extra=_gpt_oss),
    "gpt2": Architecture(
        "gpt2", _GPT2, top=_GPT2_TOP, layers="transformer.h", eps=layer_eps("layer_norm_epsilon"),
        fields=(Field("feed_forward_length", "n_inner"),),
    ),
    "gptneox": Architecture(
        "gpt_neox", _GPTNEOX, top=_GPTNEOX_TOP, layers="gpt_neox.layers", eps=layer_eps("layer_norm_eps"), partial=True,
        fused_heads=True, fields=(_optional("use_parallel_residual", "use_parallel_residual", "bool", True),),
    ),
    "granite": Architecture("granite", _LLAMA, interleaved=True, fields=_GRANITE_SCALES, extra=_granite),
    "granitemoe": Architecture(
        "granitemoe", _LLAMA | _routed("block_sparse_moe.experts", "block_sparse_moe.router"), interleaved=True, experts=True,
        fields=_GRANITE_SCALES, extra=lambda keys, config: _granite(keys, config) | expert_counts(keys, "num_local_experts"),
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _LLAMA | _HUNYUAN_NORM),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        _LLAMA | _HUNYUAN_NORM | _routed("mlp.experts", "mlp.gate.wg") | _shared("mlp.shared_mlp"), experts=True,
        extra=_hunyuan_moe,
    ),
    "internlm2": Architecture("llama", _LLAMA, interleaved=True),
    "llama": Architecture("llama", _LLAMA, interleaved=True),
    "minicpm": Architecture("granite", _LLAMA, interleaved=True, extra=_minicpm),
    "nemotron": Architecture("nemotron", _LLAMA, eps=layer_eps("norm_eps"), norm_offset=True, partial=True),
    "olmo2": Architecture("olmo2", _POST_NORMS),
    "olmoe": Architecture(
        "olmoe", _MOE | _QK_NORM, experts=True, constants={"norm_topk_prob": False},
        extra=lambda keys, config: expert_counts(keys, "num_experts"),
    ),
    "phi2": Architecture(
        "phi", _PHI2, top=TOP | {"output_norm": "model.final_layernorm"}, eps=layer_eps("layer_norm_eps"), partial=True
    ),
    "phi3": Architecture("phi3", _PHI3, extra=_phi3),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen2moe": Architecture(
        "qwen2_moe", _MOE | _shared("mlp.shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, experts=True,
        fields=(
            Field("expert_feed_forward_length", "moe_intermediate_size"),
            Field("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ),
        constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        extra=lambda keys, config: expert_counts(keys, "num_experts"),
    ),
    "qwen2vl": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _LLAMA | _QK_NORM),
    "qwen3moe": _QWEN3MOE,
    "qwen3vl": Architecture("qwen3", _LLAMA | _QK_NORM),
    "qwen3vlmoe": _QWEN3MOE,
    "seed_oss": Architecture("seed_oss", _SEED_OSS),
    "smollm3": Architecture("smollm3", _LLAMA, interleaved=True, constants={"no_rope_layer_interval": 4}, extra=_full_attention),
    "stablelm": Architecture("stablelm", _LLAMA, eps=layer_eps("layer_norm_eps"), partial=True, extra=_stablelm),
    "starcoder2": Architecture(
        "starcoder2", _STARCODER2, eps=layer_eps("norm_epsilon"), constants={"sliding_window": None}
    ),
    "xverse": Architecture("llama", _LLAMA, interleaved=True),
}  # fmt: skip
"""GGUF architectures that become transformers models."""
