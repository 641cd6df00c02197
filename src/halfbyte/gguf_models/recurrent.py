"""Architectures with recurrent or convolutional layers: Mamba, Mamba 2, gated delta networks, short
convolutions, alone or between layers of attention.

    RECURRENT["qwen35"].names["ssm_out"]      "linear_attn.out_proj"

llama.cpp stores A = −exp(A_log), kernels of convolutions without their axis of one, and the value
heads of a delta network with the key head varying fastest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import (
    ATTENTION,
    COLUMN,
    CONVOLUTION,
    EXPERTS,
    FUSED_QKV,
    LLAMA,
    LOG_OF_NEGATIVE,
    MLP,
    NEGATED,
    PARAMETER,
    PART,
    QK_NORM,
    TOP,
    Architecture,
    Change,
    Field,
    changed,
    expert_counts,
    layer_eps,
    optional,
    reshaped,
    routed,
    shared,
)
from .keys import Keys
from .latent import DEEPSEEK, LATENT_JOINS, SIGMOID, latent_sizes

GRANITE_SCALES = (
    optional("embedding_scale", "embedding_multiplier", "float", 1.0),
    optional("residual_scale", "residual_multiplier", "float", 1.0),
    optional("logit_scale", "logits_scaling", "float", 1.0),
)
"""Granite's scales of embeddings, residuals and logits."""


def granite_attention(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The scale of scores is one over the root of a head's length where the file states none."""
    return {"attention_multiplier": keys.get("attention.scale", "float", 0.0) or config["head_dim"] ** -0.5}


def _mixer(path: str) -> dict[str, str]:
    """Tensors that both generations of Mamba have."""
    return {
        "ssm_in": f"{path}.in_proj",
        "ssm_conv1d": f"{path}.conv1d",
        "ssm_a": f"{path}{PARAMETER}A_log",
        "ssm_d": f"{path}{PARAMETER}D",
        "ssm_out": f"{path}.out_proj",
    }


def _mamba(path: str) -> dict[str, str]:
    return _mixer(path) | {"ssm_x": f"{path}.x_proj", "ssm_dt": f"{path}.dt_proj"}


def _mamba2(path: str) -> dict[str, str]:
    return _mixer(path) | {"ssm_dt": f"{path}{PARAMETER}dt_bias", "ssm_norm": f"{path}.norm"}


def _groups(config: Any) -> int:
    """Groups of channels of a Mamba 2 layer."""
    return int(getattr(config, "mamba_n_groups", 0) or config.n_groups)


MAMBA_CHANGES = {"ssm_a": LOG_OF_NEGATIVE, "ssm_conv1d": CONVOLUTION}
_MAMBA2_CHANGES = MAMBA_CHANGES | {
    "ssm_a": changed(COLUMN, LOG_OF_NEGATIVE),
    "ssm_d": COLUMN,
    "ssm_norm": reshaped(lambda config, n: (n,), lambda config, n: (_groups(config), n // _groups(config))),
}
_MAMBA_TOP = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_FINAL_NORM = TOP | {"output_norm": "model.final_layernorm"}
_SSM = (Field("ssm.conv_kernel", "conv_kernel"), Field("ssm.state_size", "state_size"))


def _mamba_sizes(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    inner, hidden = keys.size("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise keys.refuse(f"whose {inner} inner channels are no multiple of its {hidden}")
    return {"expand": inner // hidden, "intermediate_size": inner, "time_step_rank": keys.size("ssm.time_step_rank")}


def _mamba2_heads(keys: Keys) -> tuple[int, int]:
    """(heads, channels of a head) of a Mamba 2 layer."""
    inner, heads = keys.size("ssm.inner_size"), keys.size("ssm.time_step_rank")
    if inner % heads or inner % keys.size("ssm.group_count"):
        raise keys.error(f"{inner} inner channels are no multiple of {heads} heads and {keys.size('ssm.group_count')} groups")
    return heads, inner // heads


def _mamba2_sizes(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    heads, head = _mamba2_heads(keys)
    if heads * head % config["hidden_size"]:
        raise keys.refuse(f"whose {heads * head} inner channels are no multiple of its {config['hidden_size']}")
    return {
        "num_heads": heads,
        "head_dim": head,
        "expand": heads * head // config["hidden_size"],
        "n_groups": keys.size("ssm.group_count"),
    }


def _prefixed_sizes(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Mamba 2 within another model, whose fields begin with `mamba_`."""
    heads, head = _mamba2_heads(keys)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head,
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_expand": max(1, heads * head // config["hidden_size"]),
        "mamba_conv_bias": keys.any_layer("ssm_conv1d.bias"),
    }


def _kinds(keys: Keys, attention: str, other: str) -> list[str]:
    """The kind of each layer: attention where it has heads for keys."""
    return [attention if n else other for n in keys.sizes("attention.head_count_kv", keys.layers)]


def _period(keys: Keys, layers: list[bool], what: str) -> tuple[int, int]:
    """(period, offset) of the marked layers. UnsupportedError where they follow no period."""
    at = [i for i, marked in enumerate(layers) if marked]
    if not at:
        return len(layers) + 1, len(layers)
    period = at[1] - at[0] if len(at) > 1 else max(at[0] + 1, len(layers) - at[0])
    if [i % period == at[0] for i in range(len(layers))] != layers:
        raise keys.refuse(f"whose layers of {what} are {at}; transformers takes those of one period")
    return period, at[0]


def _jamba(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    attention = [bool(n) for n in keys.sizes("attention.head_count_kv", keys.layers)]
    experts = keys.expert_layers()
    periods = dict(zip(("attn_layer_period", "attn_layer_offset"), _period(keys, attention, "attention"), strict=True))
    periods |= zip(("expert_layer_period", "expert_layer_offset"), _period(keys, experts, "experts"), strict=True)
    sizes = _mamba_sizes(keys, config)
    counts = expert_counts(keys, "num_experts") if any(experts) else {"num_experts": 1, "num_experts_per_tok": 1}
    return {
        **counts,
        **periods,
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_expand": sizes["expand"],
        "mamba_dt_rank": sizes["time_step_rank"],
        "sliding_window": None,
    }


def _falcon_h1(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Its multipliers are in the file's weights."""
    norm = keys.any_layer("ssm_norm")
    return {
        **_prefixed_sizes(keys, config),
        "mamba_d_ssm": keys.size("ssm.inner_size"),
        "mamba_rms_norm": norm,
        "mamba_norm_before_gate": not norm,
    }


def _granite_hybrid(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    experts = bool(keys.get("expert_count", "integer", 0))
    width = keys.size("expert_shared_feed_forward_length", config.get("intermediate_size", 1))
    counts = expert_counts(keys, "num_local_experts") if experts else {"num_local_experts": 0, "num_experts_per_tok": 0}
    return {
        **granite_attention(keys, config),
        **_prefixed_sizes(keys, config),
        **counts,
        "layer_types": _kinds(keys, "full_attention", "linear_attention"),
        "shared_intermediate_size": width,
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", "bool", True) else "nope",
    }


def _nemotron_h(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A layer is attention where it has heads for keys, feed-forward where it has a width, Mamba 2
    elsewhere.
    """
    heads, head = _mamba2_heads(keys)
    kv, widths = keys.sizes("attention.head_count_kv", keys.layers), keys.sizes("feed_forward_length", keys.layers)
    kinds = ["full_attention" if n else "mlp" if w else "linear_attention" for n, w in zip(kv, widths, strict=True)]
    return {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": head,
        "ssm_state_size": keys.size("ssm.state_size"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "n_groups": keys.size("ssm.group_count"),
        "use_conv_bias": keys.any_layer("ssm_conv1d.bias"),
        "use_bias": False,
        "mlp_bias": keys.any_layer("ffn_up.bias"),
    }


def _nemotron_h_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Its feed-forward layers are mixtures of experts without gates, on a shorter vector where the
    file has its projections.
    """
    counts = expert_counts(keys, "n_routed_experts")
    widths = {n for n in keys.sizes("expert_feed_forward_length", keys.layers) if n}
    if len(widths) != 1:
        raise keys.refuse(f"whose experts are {sorted(widths)} wide; transformers takes one width")
    base = _nemotron_h(keys, config)
    latent = next((name.partition(".ffn_latent_")[0] for name in keys.checkpoint.file.headers if ".ffn_latent_" in name), "")
    return {
        **base,
        **counts,
        "layers_block_type": ["moe" if kind == "mlp" else kind for kind in base["layers_block_type"]],
        "moe_intermediate_size": widths.pop(),
        "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.rows(f"{latent}.ffn_latent_down") if latent else None,
        "norm_topk_prob": keys.get("expert_weights_norm", "bool", False),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "n_group": 1,
        "topk_group": 1,
    }


def _lfm2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": _kinds(keys, "full_attention", "conv"), "block_auto_adjust_ff_dim": False}


def _lfm2_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_lfm2(keys, config),
        **expert_counts(keys, "num_experts"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.get("leading_dense_block_count", "integer", 0),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
    }


def _delta(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a gated delta network, and which layers are one."""
    keys_, values = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    if values % keys_ or inner % values:
        raise keys.error(f"{keys_} key heads, {values} value heads and {inner} inner channels do not divide")
    recurrent = keys.flags("attention.recurrent_layers", keys.layers)
    if recurrent is None:
        interval = keys.size("full_attention_interval", 4)
        recurrent = [(i + 1) % interval != 0 for i in range(keys.layers)]
    sections = keys.metadata.get(f"{keys.arch}.rope.dimension_sections")
    rope = config["rope_parameters"]
    return {
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": keys_,
        "linear_num_value_heads": values,
        "rope_parameters": rope | ({} if sections is None else {"mrope_section": [int(s) for s in sections[:3]]}),
    }


def delta_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The same with experts, a shared one among them."""
    counts = expert_counts(keys, "num_experts")
    width = keys.size("expert_feed_forward_length", max(1, config.get("intermediate_size", 1) // counts["num_experts_per_tok"]))
    return {
        **_delta(keys, config),
        **counts,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", width),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _value_heads(config: Any, width: int) -> NDArray[np.int64] | None:
    """Value head r of key head k lies at r, k in the file; None where each key head has one."""
    groups = config.linear_num_key_heads
    each = config.linear_num_value_heads // groups
    if each == 1:
        return None
    return np.arange(each * groups * width).reshape(each, groups, width).swapaxes(0, 1).reshape(-1)


def values_of(width: str | None) -> Any:
    """The order of rows that are value heads of a width that the configuration names, or of one."""
    return lambda config, rows: _value_heads(config, 1 if width is None else getattr(config, width))


def _queries_keys_values(config: Any, rows: int) -> NDArray[np.int64] | None:
    """Queries and keys stay in order; the values after them are in the file's order of heads."""
    values = _value_heads(config, config.linear_value_head_dim)
    if values is None:
        return None
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([np.arange(first), first + values])


def _queries_keys(config: Any, rows: int) -> list[int]:
    """Rows of `in_proj_qkvz` before its gates."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return [first + config.linear_num_value_heads * config.linear_value_head_dim]


def _by_key_head(config: Any, rows: int) -> NDArray[np.int64]:
    """Rows of all queries, keys, values and gates, in the order that has those of each key head
    together.
    """
    heads = config.linear_num_key_heads
    query = heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    cuts = np.cumsum([query, query, value])
    return np.concatenate([p.reshape(heads, -1) for p in np.split(np.arange(rows), cuts)], axis=1).reshape(-1)


def _kimi_linear(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Layers of latent attention, without rotation, have heads for keys; the others are delta
    networks that forget each channel by its own rate.
    """
    if (function := keys.get("expert_gating_func", "integer", 0)) != SIGMOID:
        raise keys.refuse(f"that scores experts by function {function}; {SIGMOID} (sigmoid) is read")
    sizes = latent_sizes(keys, config)
    dense = int(keys.get("leading_dense_block_count", "integer", 0))
    return {
        **sizes,
        **expert_counts(keys, "num_local_experts"),
        "layer_types": _kinds(keys, "full_attention", "linear_attention"),
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(keys.layers)],
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": keys.size("kda.head_dim"),
        "linear_num_heads": sizes["num_attention_heads"],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
    }


def _bailing3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Ling 3: Kimi's layers with rotation, gates of whole projections, and forgetting with a floor."""
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if f"{keys.arch}.{key}" in keys.metadata and any(keys.numbers(f"{keys.arch}.{key}", keys.layers)):
            raise keys.refuse(f"whose experts are limited ({key}), which transformers' model does not do")
    if f"{keys.arch}.rope.dimension_sections" in keys.metadata:
        raise keys.refuse("with sections of its rotation, which transformers' model does not have")
    if not keys.get("kda.safe_gate", "bool", True):
        raise keys.refuse("without a floor of forgetting (kda.safe_gate), which llama.cpp does not run")
    out = _kimi_linear(keys, config)
    width = out["moe_intermediate_size"] * out["n_shared_experts"]
    if (whole := keys.size("expert_shared_feed_forward_length", width)) != width:
        raise keys.refuse(f"whose shared experts are {whole} wide; transformers takes {width}, the width of the others")
    kernel = out.pop("linear_conv_kernel_dim")
    return out | {
        "norm_topk_prob": keys.get("expert_weights_norm", "bool", False),
        **keys.expert_groups(),
        "head_dim": out.pop("linear_head_dim"),
        "short_conv_kernel_size": kernel,
        "kda_safe_gate": True,
        "kda_lower_bound": keys.need("kda.gate_lower_bound", "float"),
        "num_nextn_predict_layers": 0,
    }


def _other_gate(config: Any, layer: int, stem: str) -> bool:
    """Whether a stem is that of the gate that the other kind of layers has."""
    return stem in ("attn_gate", "ssm_g_a") and (stem == "attn_gate") == (config.layer_types[layer] == "linear_attention")


_HYBRID_ATTENTION = {k: v for k, v in ATTENTION.items() if k != "attn_norm"}
_FEED_FORWARD = {stem: path.replace("mlp.", "feed_forward.") for stem, path in MLP.items()}
DELTA = LLAMA | QK_NORM | {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_dt": f"linear_attn{PARAMETER}dt_bias", "ssm_a": f"linear_attn{PARAMETER}A_log",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
del DELTA["ffn_norm"]
DELTA_EXPERTS = routed("mlp.experts", "mlp.gate") | shared("mlp.shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_QWEN3NEXT = (
    DELTA
    | DELTA_EXPERTS
    | {
        "attn_qkv": f"linear_attn.in_proj_qkvz{PART}0",
        "attn_gate": f"linear_attn.in_proj_qkvz{PART}1",
        "ssm_ba": "linear_attn.in_proj_ba",
    }
)
DELTA_ORDERS = {
    "attn_qkv": _queries_keys_values, "ssm_conv1d": _queries_keys_values, "attn_gate": values_of("linear_value_head_dim"),
    "ssm_dt": values_of(None), "ssm_a": values_of(None), "ssm_alpha": values_of(None), "ssm_beta": values_of(None),
}  # fmt: skip
_LFM2 = _HYBRID_ATTENTION | {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_NEMOTRON_H = _mamba2("mixer") | {
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    **{stem: path.replace("self_attn", "mixer") for stem, path in _HYBRID_ATTENTION.items()},
}
_NEMOTRON_H_MOE = _NEMOTRON_H | {
    "ffn_up_exps": f"mixer.experts{EXPERTS}up_proj", "ffn_down_exps": f"mixer.experts{EXPERTS}down_proj",
    "ffn_gate_inp": "mixer.gate", "exp_probs_b": f"mixer.gate{PARAMETER}e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
_NEMOTRON_H_TOP = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
_KIMI_LINEAR = DEEPSEEK | {
    **{f"ssm_conv1d_{w}": f"self_attn.conv1d{PART}{i}" for i, w in enumerate("qkv")},
    **{f"ssm_f_{w}": f"self_attn.forget_gate.f_{w}_proj" for w in "ab"},
    **{f"ssm_g_{w}": f"self_attn.g_{w}_proj" for w in "ab"},
    "ssm_a": f"self_attn.forget_gate{PARAMETER}A_log",
    "ssm_dt": f"self_attn.forget_gate{PARAMETER}dt_bias",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
_BAILING3 = {stem: path for stem, path in _KIMI_LINEAR.items() if not stem.startswith(("ssm_f", "ssm_g"))} | {
    "attn_gate": "self_attn.g_proj",
    "ssm_g_a": "self_attn.g_proj",
    "ssm_f_a": "self_attn.forget_gate.f_proj",
}
_KIMI_CONVOLUTION = Change(lambda config, a: a.reshape(-1, 1, a.shape[-1]), lambda config, a: a.reshape(1, -1, 1, a.shape[-1]))
_OF_HEADS = reshaped(lambda config, n: (1, 1, n, 1), lambda config, n: (1, 1, n, 1))
_KIMI_CONVOLUTIONS = {f"ssm_conv1d_{w}": _KIMI_CONVOLUTION for w in "qkv"}
_GRANITE_HYBRID = (
    ATTENTION
    | _mamba2("mamba")
    | routed("block_sparse_moe.experts", "block_sparse_moe.router")
    | {
        "ffn_norm": "post_attention_layernorm",
        **{f"ffn_{w}{end}": f"shared_mlp.input_linear{PART}{i}" for end in ("", "_shexp") for i, w in enumerate(("gate", "up"))},
        "ffn_down": "shared_mlp.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    }
)

FALCON_MAMBA = Architecture(
    "falcon_mamba",
    _mamba("mixer") | {"attn_norm": "norm"},
    top=_MAMBA_TOP,
    layers="backbone.layers",
    heads=False,
    varying=True,
    eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
    changes=MAMBA_CHANGES,
    fields=_SSM,
    extra=lambda keys, config: _mamba_sizes(keys, config) | {"mixer_rms_eps": config["layer_norm_epsilon"]},
)
"""What a file of architecture mamba becomes that normalizes the time step, B and C."""

RECURRENT: dict[str, Architecture] = {
    "bailingmoe3": Architecture(
        "bailing_hybrid",
        _BAILING3,
        heads=False,
        experts=True,
        splits=FUSED_QKV,
        joins=LATENT_JOINS,
        cuts={"attn_qkv": lambda config, rows: [config.linear_num_heads * config.head_dim * i for i in (1, 2)]},
        changes=_KIMI_CONVOLUTIONS | {"ssm_a": changed(COLUMN, NEGATED, LOG_OF_NEGATIVE)},
        absent=_other_gate,
        extra=_bailing3,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        ATTENTION | _FEED_FORWARD | _mamba2("mamba") | {"ffn_norm": "pre_ff_layernorm"},
        top=_FINAL_NORM,
        changes=_MAMBA2_CHANGES,
        extra=_falcon_h1,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _GRANITE_HYBRID,
        interleaved=True,
        varying=True,
        experts=None,
        changes=_MAMBA2_CHANGES,
        fields=GRANITE_SCALES,
        extra=_granite_hybrid,
    ),
    "jamba": Architecture(
        "jamba",
        ATTENTION
        | _FEED_FORWARD
        | _mamba("mamba")
        | routed("feed_forward.experts", "feed_forward.router")
        | {
            "ffn_norm": "pre_ff_layernorm",
            **{f"ssm_{w}_norm": f"mamba.{w}_layernorm" for w in ("dt", "b", "c")},
        },
        top=_FINAL_NORM,
        varying=True,
        experts=None,
        changes=MAMBA_CHANGES,
        extra=_jamba,
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        _KIMI_LINEAR,
        heads=False,
        experts=True,
        splits=FUSED_QKV,
        joins=LATENT_JOINS,
        cuts={"attn_qkv": lambda config, rows: [config.linear_num_heads * config.linear_head_dim * i for i in (1, 2)]},
        changes=_KIMI_CONVOLUTIONS | {"ssm_a": changed(_OF_HEADS, LOG_OF_NEGATIVE)},
        computed=("rope_parameters",),
        extra=_kimi_linear,
    ),
    "lfm2": Architecture(
        "lfm2",
        _LFM2,
        top=_LFM2_TOP,
        eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
        varying=True,
        changes={"shortconv.conv": CONVOLUTION},
        fields=(Field("shortconv.l_cache", "conv_L_cache"),),
        extra=_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        _LFM2 | routed("feed_forward.experts", "feed_forward.gate") | {"exp_probs_b": f"feed_forward{PARAMETER}expert_bias"},
        top=_LFM2_TOP,
        eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
        varying=True,
        experts=True,
        changes={"shortconv.conv": CONVOLUTION},
        fields=(Field("shortconv.l_cache", "conv_L_cache"),),
        extra=_lfm2_moe,
    ),
    "mamba": replace(FALCON_MAMBA, model_type="mamba", extra=_mamba_sizes),
    "mamba2": Architecture(
        "mamba2",
        _mamba2("mixer") | {"attn_norm": "norm"},
        top=_MAMBA_TOP,
        layers="backbone.layers",
        heads=False,
        varying=True,
        eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
        changes=_MAMBA2_CHANGES,
        fields=_SSM,
        extra=_mamba2_sizes,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        _NEMOTRON_H,
        top=_NEMOTRON_H_TOP,
        eps=layer_eps("layer_norm_epsilon"),
        varying=True,
        changes=_MAMBA2_CHANGES,
        extra=_nemotron_h,
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        _NEMOTRON_H_MOE,
        top=_NEMOTRON_H_TOP,
        eps=layer_eps("layer_norm_epsilon"),
        varying=True,
        experts=True,
        changes=_MAMBA2_CHANGES,
        extra=_nemotron_h_moe,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        DELTA,
        norm_offset=True,
        plain_norms=("ssm_norm",),
        partial=True,
        changes=MAMBA_CHANGES,
        orders=DELTA_ORDERS,
        columns={"ssm_out": values_of("linear_value_head_dim")},
        extra=_delta,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        DELTA | DELTA_EXPERTS,
        norm_offset=True,
        plain_norms=("ssm_norm",),
        partial=True,
        varying=True,
        experts=True,
        changes=MAMBA_CHANGES,
        orders=DELTA_ORDERS,
        columns={"ssm_out": values_of("linear_value_head_dim")},
        extra=delta_moe,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _QWEN3NEXT,
        norm_offset=True,
        plain_norms=("ssm_norm",),
        partial=True,
        varying=True,
        experts=True,
        changes=MAMBA_CHANGES,
        orders={"linear_attn.in_proj_qkvz": _by_key_head},
        cuts={"linear_attn.in_proj_qkvz": _queries_keys},
        extra=delta_moe,
    ),
}
"""GGUF architectures with recurrent or convolutional layers."""
