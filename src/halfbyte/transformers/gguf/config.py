"""GGUF key-values to a transformers configuration.

    config = config_of(checkpoint)      a LlamaConfig, Gemma3TextConfig, ... with the shape, norms and rotations the file states

Keys are llama.cpp's (`ARCH.embedding_length`, ...; ggml's docs/gguf.md). What a file does not state and llama.cpp computes is
computed the same way: Gemma's query scale and pattern of local layers, the rotation of local layers. A file whose shape
transformers cannot express is refused, never read nearly right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...checkpoints.gguf.checkpoint import GGUFCheckpoint
from ...errors import CheckpointError, UnsupportedError

_SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
"""Key after `ARCH.` -> configuration field: the counts every family here needs."""


class Keys:
    """The key-values of one architecture, typed; errors name file and key."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.metadata = checkpoint.metadata
        self.arch: str = self.metadata.typed("general.architecture", "string", "")

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        return self.metadata.typed(f"{self.arch}.{key}", kind, default)

    def need(self, key: str, kind: str) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise self.error(f"key '{self.arch}.{key}' is missing; the model needs it")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of 1 or more."""
        value: int = self.need(key, "integer") if default is None else self.get(key, "integer", default)
        if value < 1:
            raise self.error(f"key '{self.arch}.{key}' is {value}; 1 or more is allowed")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value: float = self.need(key, "float") if default is None else self.get(key, "float", default)
        if not 0 < value < math.inf:
            raise self.error(f"key '{self.arch}.{key}' is {value}; a finite number above 0 is allowed")
        return value

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"[load_model] {self.checkpoint.path}: {message}")

    def refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"[load_model] {self.checkpoint.path}: a {self.arch} model {why}")


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture becomes a transformers model.

    model_type   transformers' word for it
    names        GGUF tensor stem (after `blk.N.`) -> module path within a layer; what follows `EXPERTS` is a projection of an
                 experts module, what follows `PARAMETER` a parameter that is no weight or bias
    norm_offset  the file holds w + 1 of norms that transformers keeps as w
    interleaved  rows of attn_q and attn_k are in llama.cpp's order of rotated pairs
    experts      its feed-forward layers are mixtures of experts
    extra        more configuration fields, from the keys and the fields so far
    """

    model_type: str
    names: dict[str, str]
    norm_offset: bool = False
    interleaved: bool = False
    experts: bool = False
    extra: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, config: {}


def config_of(checkpoint: GGUFCheckpoint) -> Any:
    """The transformers configuration of a GGUF file.

    Raises UnsupportedError, listing what is read, for another architecture or variant; CheckpointError for keys that are missing,
    mistyped or do not fit the tensors.
    """
    from transformers import AutoConfig

    keys = Keys(checkpoint)
    architecture = architecture_of(checkpoint)
    config: dict[str, Any] = {field: keys.size(key) for key, field in _SIZES.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config["rms_norm_eps"] = keys.positive("attention.layer_norm_rms_epsilon")
    config["num_key_value_heads"] = keys.size("attention.head_count_kv", heads)
    config["head_dim"] = keys.size("attention.key_length", hidden // heads)
    if keys.get("attention.value_length", "integer", config["head_dim"]) != config["head_dim"]:
        raise keys.refuse("whose keys and values differ in length")
    if keys.get("rope.dimension_count", "integer", config["head_dim"]) != config["head_dim"]:
        raise keys.refuse("that rotates part of each head")
    if bool(keys.get("expert_count", "integer", 0)) != architecture.experts:
        raise keys.refuse("with experts" if not architecture.experts else "without experts")
    config["rope_parameters"] = _rope(keys)
    config["vocab_size"] = _check_sizes(keys, config)
    config["tie_word_embeddings"] = not any(k in checkpoint for k in ("output", "output.weight"))
    for name in ("bos", "eos", "unknown", "padding"):
        field = {"unknown": "unk", "padding": "pad"}.get(name, name)
        index = config[f"{field}_token_id"] = keys.metadata.typed(f"tokenizer.ggml.{name}_token_id", "integer")
        if index is not None and not 0 <= index < config["vocab_size"]:
            raise keys.error(f"tokenizer.ggml.{name}_token_id is {index}; the embedding has {config['vocab_size']} rows")
    config |= architecture.extra(keys, config)
    return AutoConfig.for_model(architecture.model_type, **config)


def _check_sizes(keys: Keys, config: dict[str, Any]) -> int:
    """Compares the sizes that decide what is allocated with the tensors. Returns the vocabulary's size, the embedding's rows."""
    checkpoint = keys.checkpoint
    embedding = checkpoint.info(embedding_key(checkpoint)).shape
    if len(embedding) != 2 or embedding[1] != config["hidden_size"]:
        raise keys.error(f"'token_embd.weight' is {list(embedding)}; '{keys.arch}.embedding_length' is {config['hidden_size']}")
    layers = {name.split(".")[1] for name in checkpoint.file.headers if name.startswith("blk.")}
    if config["num_hidden_layers"] > len(layers):
        raise keys.error(f"'{keys.arch}.block_count' is {config['num_hidden_layers']}; there are tensors of {len(layers)} layers")
    heads, kv, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    if heads % kv or head % 2 or config["hidden_size"] % heads:
        raise keys.error(f"{heads} heads of {head}, {kv} for keys, in {config['hidden_size']} inputs: these do not divide")
    for name, rows in (("blk.0.attn_q", heads * head), ("blk.0.attn_k", kv * head)):
        for key in (name, f"{name}.weight"):
            if key in checkpoint and checkpoint.info(key).shape[0] != rows:
                raise keys.error(f"{name}.weight has {checkpoint.info(key).shape[0]} rows; the heads of {head} make {rows}")
    tokens = checkpoint.metadata.length("tokenizer.ggml.tokens") if "tokenizer.ggml.tokens" in checkpoint.metadata else 0
    if tokens > embedding[0]:
        raise keys.error(f"the vocabulary has {tokens} tokens; the embedding has {embedding[0]} rows")
    return int(embedding[0])


def architecture_of(checkpoint: GGUFCheckpoint) -> Architecture:
    """The architecture a file states. UnsupportedError lists those that are read."""
    arch = Keys(checkpoint).arch
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"[load_model] {checkpoint.path}: architecture {arch!r}; models that can be built: {', '.join(ARCHITECTURES)}. "
            "Its weights can still be opened, converted and multiplied one by one"
        )
    if arch == "llama" and Keys(checkpoint).get("expert_count", "integer", 0):
        return _MIXTRAL
    return ARCHITECTURES[arch]


def embedding_key(checkpoint: GGUFCheckpoint) -> str:
    """Key of the token embedding, packed or dense."""
    for key in ("token_embd", "token_embd.weight"):
        if key in checkpoint:
            return key
    raise CheckpointError(f"[load_model] {checkpoint.path}: tensor 'token_embd.weight' is missing")


def _rope(keys: Keys) -> dict[str, Any]:
    """Rotation parameters: base frequency and context extension."""
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base", 10000.0)}
    kind = keys.get("rope.scaling.type", "string", "none")
    factor = keys.get("rope.scaling.factor", "float", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return out
    if kind == "linear":
        return out | {"rope_type": "linear", "factor": keys.positive("rope.scaling.factor")}
    if kind == "yarn":
        original, factor = keys.size("rope.scaling.original_context_length"), keys.positive("rope.scaling.factor")
        return out | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise keys.refuse(f"with rope scaling {kind!r}; none, linear and yarn are read")


def _llama(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.checkpoint, "mlp_bias": "blk.0.ffn_up.bias" in keys.checkpoint}


def _gemma_query(keys: Keys, config: dict[str, Any], largest: int) -> int:
    """What the query scale is one over the root of: the head's length, but hidden/heads in the 27B models, told by depth."""
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
    """Five local layers, then a global one. Local layers rotate with base 10000 and are never stretched."""
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
    return {"sliding_window": None, **_expert_counts(keys, "num_local_experts")}


def _qwen3_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Every layer has experts; their shares are normalized, as llama.cpp does for this architecture."""
    return {
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        **_expert_counts(keys, "num_experts"),
    }


def _gpt_oss(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Local and global layers alternate; the rotation's ramp is not cut to whole places."""
    kinds = ("sliding_attention", "full_attention")
    rope = config["rope_parameters"]
    return {
        "layer_types": [kinds[i % 2] for i in range(config["num_hidden_layers"])],
        "sliding_window": keys.size("attention.sliding_window"),
        "intermediate_size": keys.size("expert_feed_forward_length", config["intermediate_size"]),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        **_expert_counts(keys, "num_local_experts"),
    }


def _expert_counts(keys: Keys, field: str) -> dict[str, Any]:
    count, used = keys.size("expert_count"), keys.size("expert_used_count")
    if used > count:
        raise keys.error(f"'{keys.arch}.expert_used_count' is {used}; there are {count} experts")
    return {field: count, "num_experts_per_tok": used}


def _phi3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if any(f"rope_factors_{kind}.weight" in keys.checkpoint for kind in ("long", "short")):
        raise keys.refuse("with long and short rotation factors")
    return {"sliding_window": keys.get("attention.sliding_window", "integer") or None}


EXPERTS, PARAMETER = "/", "#"
"""Within a module path of `Architecture.names`: what follows is no module."""
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LLAMA = _ATTENTION | {"ffn_norm": "post_attention_layernorm"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _ATTENTION | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_ROUTED = {
    "ffn_gate_exps": f"mlp.experts{EXPERTS}gate_proj", "ffn_up_exps": f"mlp.experts{EXPERTS}up_proj",
    "ffn_down_exps": f"mlp.experts{EXPERTS}down_proj",
}  # fmt: skip
_GPT_OSS = _ATTENTION | _ROUTED | {
    "post_attention_norm": "post_attention_layernorm", "attn_sinks": f"self_attn{PARAMETER}sinks", "ffn_gate_inp": "mlp.router",
}  # fmt: skip
_PHI3 = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_MIXTRAL = Architecture(
    "mixtral", _LLAMA | _ROUTED | {"ffn_gate_inp": "mlp.gate"}, interleaved=True, experts=True, extra=_mixtral
)
"""What a file of architecture llama with experts becomes."""
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""GGUF tensor stem -> module path outside the layers."""

ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture("gemma2", _GEMMA, norm_offset=True, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", _GEMMA | _QK_NORM, norm_offset=True, extra=_gemma3),
    "gpt-oss": Architecture("gpt_oss", _GPT_OSS, experts=True, extra=_gpt_oss),
    "llama": Architecture("llama", _LLAMA, interleaved=True, extra=_llama),
    "phi3": Architecture("phi3", _PHI3, extra=_phi3),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _LLAMA | _QK_NORM),
    "qwen3moe": Architecture(
        "qwen3_moe", _LLAMA | _QK_NORM | _ROUTED | {"ffn_gate_inp": "mlp.gate"}, experts=True, extra=_qwen3_moe
    ),
}
"""GGUF architectures that become transformers models."""
