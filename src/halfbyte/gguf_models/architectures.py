"""Each GGUF architecture that becomes a transformers model, as a table: names, norms, rotation,
experts, sizes.

    ARCHITECTURES["qwen2moe"].names["ffn_gate_shexp"]      "mlp.shared_expert.gate_proj"

Names and keys are llama.cpp's (`llama-arch.cpp`, gguf's `constants.py`); module paths and fields
are transformers'. What a file does not state and llama.cpp computes is computed the same way:
Gemma's query scale, patterns of local layers, defaults of scales.

A new architecture is an entry here (or in classic, encoders, gemma, latent, mixtures, recurrent),
its name in `READ` of checkpoints/gguf/runnable.py, a case in tests/support/gguf_families.py, and
the page that tools/gguf_models_page.py writes; test_registry.py and test_families.py, below
tests/gguf_models/, compare them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import (
    BIASED_ROUTING,
    FUSED_QKV,
    GLM4,
    GPT2,
    GPT2_TOP,
    GPT_OSS,
    GPTNEOX,
    GPTNEOX_TOP,
    HUNYUAN_NORM,
    LLAMA,
    MOE,
    PARAMETER,
    PHI2,
    PHI3,
    POST_NORMS,
    QK_NORM,
    SEED_OSS,
    STARCODER2,
    TOP,
    Architecture,
    Field,
    expert_counts,
    layer_eps,
    optional,
    routed,
    shared,
)
from .classic import CLASSIC, FALCON_40B
from .cycles import CYCLES, cycles_of, hrm_text
from .encoders import ENCODERS, T5_PLAIN, T5_PLAIN_ENCODER
from .gemma import GEMMA
from .keys import YARN_BORDERS, Keys
from .latent import DEEPSEEK_V2, LATENT, SIGMOID, SOFTMAX
from .mixtures import COHERE2_MOE_RMS, GRANITE_MOE_SWA, MIXTURES
from .recurrent import FALCON_MAMBA, GRANITE_SCALES, RECURRENT, granite_attention
from .streams import STREAMS, embedding_layer, qwen4


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
    """Local and global layers alternate; the rotation's ramp is not rounded to whole indices, and
    its borders are written out, as published ones have them.
    """
    kinds = ("sliding_attention", "full_attention")
    rope = config["rope_parameters"]
    return {
        "layer_types": [kinds[i % 2] for i in range(config["num_hidden_layers"])],
        "sliding_window": keys.size("attention.sliding_window"),
        "intermediate_size": keys.size("expert_feed_forward_length", config["intermediate_size"]),
        "rope_parameters": YARN_BORDERS | rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
        **expert_counts(keys, "num_local_experts"),
    }


def _phi3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": keys.get("attention.sliding_window", "integer") or None,
        "original_max_position_embeddings": keys.get(
            "rope.scaling.original_context_length", "integer", config["max_position_embeddings"]
        ),
    }


def _ernie_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    counts = expert_counts(keys, "moe_num_experts")
    return {
        "moe_num_experts": counts["moe_num_experts"],
        "moe_k": counts["num_experts_per_tok"],
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count", "integer", 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", "integer", 0),
        "moe_layer_interval": keys.size("interleave_moe_layer_step", 1),
        "moe_layer_end_index": keys.layers - 1,
    }


def _minimax(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    width = keys.size("expert_feed_forward_length", config["intermediate_size"])
    return expert_counts(keys, "num_local_experts") | {"intermediate_size": width}


def _llama4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Three layers of chunked attention with rotation, then a global one without."""
    window = keys.get("attention.sliding_window", "integer")
    whole = window == 0
    return {
        **expert_counts(keys, "num_local_experts"),
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": keys.size("interleave_moe_layer_step", 1),
        "use_qk_norm": keys.get("expert_count", "integer", 0) != 128,
        "attention_chunk_size": None if whole else 8192,
        "no_rope_layers": [1] * keys.layers if whole else [int((i + 1) % 4 != 0) for i in range(keys.layers)],
    }


def _mistral3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Queries grow with the logarithm of their position past the original context."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise keys.refuse("with a temperature of attention and no yarn, whose original context it counts in")
    scale = keys.get("rope.scaling.yarn_log_multiplier", "float", 0.0)
    rope = rope | ({"mscale": 1.0, "mscale_all_dim": scale} if scale else {})
    return {
        "sliding_window": None,
        "rope_parameters": rope | {"llama_4_scaling_beta": keys.positive("attention.temperature_scale")},
    }


def _apertus(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The activation's numbers are keys: two of each layer are parameters, two buffers."""
    out = {}
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        shape = (1,) if name.startswith("alpha") else ()
        for i, value in enumerate(keys.numbers(f"xielu.{name}", keys.layers)):
            out[f"model.layers.{i}.mlp.act_fn.{name}"] = np.full(shape, value, np.float32)
    return out


def _olmo(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"clip_qkv": keys.get("attention.clamp_kqv", "float", 0.0) or None}


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
    return {"use_qk_norm": keys.any_layer("attn_q_norm")}


def _cohere2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": _pattern(config, keys.size("attention.sliding_window_pattern", 4))}


def _exaone4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Only the model of 64 layers has local ones."""
    if config["num_hidden_layers"] != 64:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return {"sliding_window": keys.size("attention.sliding_window", 4096), "layer_types": _pattern(config, 4)}


def _stablelm(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": not keys.any_layer("ffn_norm")}


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
        "use_qk_norm": keys.any_layer("attn_q_norm"),
        "sliding_window": None,
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
    }


def _bailing2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Ling 2: GLM 4.5's layers with experts in groups."""
    if keys.get("expert_gating_func", "integer", 0) != SIGMOID:
        raise keys.refuse("that scores experts by another function than a sigmoid")
    return _deepseek_routing(keys, config) | keys.expert_groups()


def _phimoe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Experts are routed as transformers does, and the model was trained: the two that a softmax
    without the others chooses, each among scores within 2 % of the largest. llama.cpp takes the
    softmax of all.
    """
    rope = config["rope_parameters"]
    if rope["rope_type"] == "longrope":
        scale = rope.get("attention_factor", 1.0)
        rope = rope | {"short_mscale": scale, "long_mscale": scale}
    return expert_counts(keys, "num_local_experts") | {
        "rope_parameters": rope,
        "sliding_window": keys.get("attention.sliding_window", "integer") or None,
        "lm_head_bias": True,
        "router_jitter_noise": 0.01,
    }


def _hunyuan_vl(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Text of a model that reads images: one position a token, so the sections of its rotation are
    one rotation, of base · alpha^(d / (d − 2)) for heads of d.
    """
    alpha, rope = keys.get("rope.scaling.alpha", "float", 0.0), config["rope_parameters"]
    if alpha > 0:
        stretch = alpha ** (config["head_dim"] / (config["head_dim"] - 2))
        rope = rope | {"rope_theta": rope["rope_theta"] * stretch}
    return {"rope_parameters": rope}


def _mellum(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Three local layers, whose rotation is never stretched, then a global one."""
    window = keys.get("attention.sliding_window", "integer", 0)
    local = keys.local_layers(4)
    rope = config["rope_parameters"]
    base = keys.positive("rope.freq_base_swa", rope["rope_theta"])
    return {
        **expert_counts(keys, "num_local_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if flag and window else "full_attention" for flag in local],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }


def _smallthinker(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A global layer without rotation, then three local ones with it; without a window every layer
    is global and rotates.
    """
    window = keys.get("attention.sliding_window", "integer", 0)
    local = keys.local_layers(4, global_first=True)
    scores = keys.get("expert_gating_func", "integer", SOFTMAX) or SOFTMAX
    if scores not in (SOFTMAX, SIGMOID):
        raise keys.refuse(f"that scores experts by function {scores}; {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are read")
    return {
        **expert_counts(keys, "num_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length", config["intermediate_size"]),
        "router_scores": "sigmoid" if scores == SIGMOID else "softmax",
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if flag and window else "full_attention" for flag in local],
        "no_rope_layers": [int(not window or i % 4 != 0) for i in range(keys.layers)],
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


def _pairs(config: Any, rows: int) -> NDArray[np.int64]:
    """The weights of a norm of heads whose channels are in llama.cpp's order of rotated pairs."""
    return np.arange(rows).reshape(-1, 2).T.reshape(-1)


MISTRAL = Architecture("mistral", LLAMA, interleaved=True, constants={"sliding_window": None})
"""What a file of architecture mistral3 becomes without a temperature of attention."""
MIXTRAL = Architecture("mixtral", MOE, interleaved=True, experts=True, extra=_mixtral)
"""What a file of architecture llama with experts becomes."""
_QWEN3MOE = Architecture("qwen3_moe", MOE | QK_NORM, experts=True, extra=_qwen3_moe)

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture("arcee", LLAMA, interleaved=True),
    "baichuan": Architecture("llama", LLAMA, interleaved=True, extra=_baichuan),
    "bailingmoe2": Architecture(
        "glm4_moe", MOE | QK_NORM | shared("mlp.shared_experts") | BIASED_ROUTING, experts=True, partial=True, splits=FUSED_QKV,
        whole=("attn_qkv",), extra=_bailing2,
    ),
    "bitnet": Architecture(
        "bitnet", LLAMA | {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
        constants={"hidden_act": "silu"},
    ),
    "cohere2": Architecture(
        "cohere2", LLAMA, eps=layer_eps("layer_norm_eps"), extra=_cohere2,
        fields=(Field("logit_scale", "logit_scale", "positive"), Field("attention.sliding_window", "sliding_window")),
    ),
    "command-r": Architecture(
        "cohere", LLAMA | QK_NORM, eps=layer_eps("layer_norm_eps"), fields=(Field("logit_scale", "logit_scale", "positive"),),
        extra=_cohere,
    ),
    "dots1": Architecture(
        "dots1", MOE | QK_NORM | shared("mlp.shared_experts") | BIASED_ROUTING, experts=True, extra=_deepseek_routing
    ),
    "ernie4_5": Architecture("ernie4_5", LLAMA),
    "exaone4": Architecture("exaone4", POST_NORMS, extra=_exaone4),
    "glm4": Architecture("glm4", GLM4, partial=True),
    "glm4moe": Architecture(
        "glm4_moe",
        SEED_OSS | QK_NORM | routed("mlp.experts", "mlp.gate") | shared("mlp.shared_experts") | BIASED_ROUTING,
        experts=True, partial=True, extra=_deepseek_routing,
    ),
    "gpt-oss": Architecture("gpt_oss", GPT_OSS, experts=True, extra=_gpt_oss),
    "gpt2": Architecture(
        "gpt2", GPT2, top=GPT2_TOP, layers="transformer.h", eps=layer_eps("layer_norm_epsilon"),
        fields=(Field("feed_forward_length", "n_inner"),),
    ),
    "gptneox": Architecture(
        "gpt_neox", GPTNEOX, top=GPTNEOX_TOP, layers="gpt_neox.layers", eps=layer_eps("layer_norm_eps"), partial=True,
        fused_heads=True, fields=(optional("use_parallel_residual", "use_parallel_residual", "bool", True),),
    ),
    "granite": Architecture("granite", LLAMA, interleaved=True, fields=GRANITE_SCALES, extra=granite_attention),
    "granitemoe": Architecture(
        "granitemoe", LLAMA | routed("block_sparse_moe.experts", "block_sparse_moe.router"), interleaved=True, experts=True,
        fields=GRANITE_SCALES,
        extra=lambda keys, config: granite_attention(keys, config) | expert_counts(keys, "num_local_experts"),
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", LLAMA | HUNYUAN_NORM),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        LLAMA | HUNYUAN_NORM | routed("mlp.experts", "mlp.gate.wg") | shared("mlp.shared_mlp"), experts=True,
        extra=_hunyuan_moe,
    ),
    "hunyuan_vl": Architecture("hunyuan_v1_dense", LLAMA | HUNYUAN_NORM, extra=_hunyuan_vl),
    "internlm2": Architecture("llama", LLAMA, interleaved=True),
    "llama": Architecture("llama", LLAMA, interleaved=True),
    "maincoder": Architecture(
        "hunyuan_v1_dense", LLAMA | HUNYUAN_NORM, interleaved=True, orders={"attn_q_norm": _pairs, "attn_k_norm": _pairs}
    ),
    "mellum": Architecture("mellum", MOE | QK_NORM, experts=True, extra=_mellum),
    "minicpm": Architecture("granite", LLAMA, interleaved=True, extra=_minicpm),
    "nemotron": Architecture("nemotron", LLAMA, eps=layer_eps("norm_eps"), norm_offset=True, partial=True),
    "olmo2": Architecture("olmo2", POST_NORMS),
    "olmoe": Architecture(
        "olmoe", MOE | QK_NORM, experts=True, constants={"norm_topk_prob": False},
        extra=lambda keys, config: expert_counts(keys, "num_experts"),
    ),
    "paddleocr": Architecture("llama", LLAMA),
    "phi2": Architecture(
        "phi", PHI2, top=TOP | {"output_norm": "model.final_layernorm"}, eps=layer_eps("layer_norm_eps"), partial=True
    ),
    "phi3": Architecture("phi3", PHI3, partial=True, extra=_phi3),
    "phimoe": Architecture("phimoe", LLAMA | routed("mlp.experts", "mlp.router"), experts=True, extra=_phimoe),
    "qwen2": Architecture("qwen2", LLAMA),
    "qwen2moe": Architecture(
        "qwen2_moe", MOE | shared("mlp.shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, experts=True,
        fields=(
            Field("expert_feed_forward_length", "moe_intermediate_size"),
            Field("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ),
        constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        extra=lambda keys, config: expert_counts(keys, "num_experts"),
    ),
    "qwen2vl": Architecture("qwen2", LLAMA),
    "qwen3": Architecture("qwen3", LLAMA | QK_NORM),
    "qwen3moe": _QWEN3MOE,
    "qwen3vl": Architecture("qwen3", LLAMA | QK_NORM),
    "qwen3vlmoe": _QWEN3MOE,
    "seed_oss": Architecture("seed_oss", SEED_OSS),
    "smallthinker": Architecture("smallthinker", MOE, experts=True, constants={"hidden_act": "relu"}, extra=_smallthinker),
    "smollm3": Architecture("smollm3", LLAMA, interleaved=True, constants={"no_rope_layer_interval": 4}, extra=_full_attention),
    "stablelm": Architecture("stablelm", LLAMA, eps=layer_eps("layer_norm_eps"), partial=True, extra=_stablelm),
    "starcoder2": Architecture(
        "starcoder2", STARCODER2, eps=layer_eps("norm_epsilon"), constants={"sliding_window": None}
    ),
    "xverse": Architecture("llama", LLAMA, interleaved=True),
    "apertus": Architecture(
        "apertus", LLAMA | QK_NORM | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        parameters=_apertus,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        MOE | shared("mlp.shared_experts") | {"exp_probs_b": f"mlp.gate.moe_statics{PARAMETER}e_score_correction_bias"},
        experts=True, extra=_ernie_moe,
    ),
    "exaone": Architecture("llama", LLAMA),
    "llama4": Architecture(
        "llama4_text",
        {k: v.replace("mlp", "feed_forward") for k, v in (MOE | routed("mlp.experts", "mlp.router")).items()}
        | shared("feed_forward.shared_expert"),
        experts=True, interleaved=False, extra=_llama4,
    ),
    "minimax-m2": Architecture(
        "minimax_m2", MOE | QK_NORM | {"exp_probs_b": f"mlp{PARAMETER}e_score_correction_bias"}, experts=True, partial=True,
        extra=_minimax,
    ),
    "mistral3": Architecture("ministral3", LLAMA, interleaved=True, extra=_mistral3),
    "olmo": Architecture(
        "olmo", {k: v for k, v in LLAMA.items() if not k.endswith("_norm")}, interleaved=True, eps=layer_eps("layer_norm_eps"),
        extra=_olmo,
    ),
    **CLASSIC, **CYCLES, **ENCODERS, **GEMMA, **LATENT, **MIXTURES, **RECURRENT, **STREAMS,
}  # fmt: skip
ARCHITECTURES = dict(sorted(ARCHITECTURES.items()))
"""GGUF architectures that become transformers models."""


def architecture_named(keys: Keys) -> Architecture:
    """The architecture of a file, which for some names depends on a key."""
    if keys.arch == "llama" and keys.get("expert_count", "integer", 0):
        return MIXTRAL
    if keys.arch in ("t5", "t5encoder") and not keys.any_layer("ffn_gate"):
        return T5_PLAIN if keys.arch == "t5" else T5_PLAIN_ENCODER
    if keys.arch == "falcon" and keys.any_layer("attn_norm_2"):
        return FALCON_40B
    if keys.arch == "mamba" and keys.get("ssm.dt_b_c_rms", "bool", False):
        return FALCON_MAMBA
    if keys.arch == "deepseek2" and keys.get("attention.temperature_scale", "float", 0.0):
        return LATENT["mistral4" if keys.get("expert_gating_func", "integer", 0) != SIGMOID else "deepseek2"]
    if keys.arch == "deepseek2" and keys.get("expert_gating_func", "integer", 0) != SIGMOID:
        return DEEPSEEK_V2
    if keys.arch == "qwen4exp":
        return qwen4(embedding_layer(keys))
    if keys.arch == "hrm_text":
        return hrm_text(cycles_of(keys)[0])
    if keys.arch == "granite_swa" and keys.get("expert_count", "integer", 0):
        return GRANITE_MOE_SWA
    if keys.arch == "cohere2moe" and keys.get("attention.layer_norm_rms_epsilon", "float", 0.0):
        return COHERE2_MOE_RMS
    if keys.arch == "mistral3" and not keys.get("attention.temperature_scale", "float", 0.0):
        return MISTRAL
    return ARCHITECTURES[keys.arch]
