"""GGUF key-values to a transformers configuration.

    config = config_of(checkpoint)      a LlamaConfig, Gemma3TextConfig, ... with the shape, norms and rotations the file states

Keys are llama.cpp's (`ARCH.embedding_length`, ...; ggml's docs/gguf.md). What a file does not state and llama.cpp computes is
computed the same way: Gemma's query scale and pattern of local layers, the rotation of local layers. A file whose shape
transformers cannot express is refused, never read nearly right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..checkpoints.gguf_checkpoint import GGUFCheckpoint
from ..errors import CheckpointError, UnsupportedError

_FIELDS: dict[str, tuple[str, str]] = {
    "context_length": ("integer", "max_position_embeddings"),
    "embedding_length": ("integer", "hidden_size"),
    "block_count": ("integer", "num_hidden_layers"),
    "feed_forward_length": ("integer", "intermediate_size"),
    "attention.head_count": ("integer", "num_attention_heads"),
    "attention.layer_norm_rms_epsilon": ("float", "rms_norm_eps"),
}
"""Key after `ARCH.` -> (type, configuration field): what every family here needs."""


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
            raise CheckpointError(f"[load_model] {self.checkpoint.path}: key '{self.arch}.{key}' is missing; the model needs it")
        return value

    def refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"[load_model] {self.checkpoint.path}: a {self.arch} model {why}")


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture becomes a transformers model.

    model_type   transformers' word for it
    names        GGUF tensor stem (after `blk.N.`) -> module path within a layer
    norm_offset  the file holds w + 1 of norms that transformers keeps as w
    interleaved  rows of attn_q and attn_k are in llama.cpp's order of rotated pairs
    extra        more configuration fields, from the keys and the fields so far
    """

    model_type: str
    names: dict[str, str]
    norm_offset: bool = False
    interleaved: bool = False
    extra: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, config: {}


def config_of(checkpoint: GGUFCheckpoint) -> Any:
    """The transformers configuration of a GGUF file.

    Raises UnsupportedError, listing what is read, for another architecture or variant; CheckpointError for missing or mistyped
    keys.
    """
    from transformers import AutoConfig

    keys = Keys(checkpoint)
    architecture = architecture_of(checkpoint)
    config = {field: keys.need(key, kind) for key, (kind, field) in _FIELDS.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if min(config[f] for f in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")) < 1:
        raise CheckpointError(f"[load_model] {checkpoint.path}: a size is 0: {config}")
    config["num_key_value_heads"] = keys.get("attention.head_count_kv", "integer", heads)
    config["head_dim"] = keys.get("attention.key_length", "integer", hidden // heads)
    if keys.get("attention.value_length", "integer", config["head_dim"]) != config["head_dim"]:
        raise keys.refuse("whose keys and values differ in length")
    if keys.get("rope.dimension_count", "integer", config["head_dim"]) != config["head_dim"]:
        raise keys.refuse("that rotates part of each head")
    if keys.get("expert_count", "integer", 0):
        raise keys.refuse("with experts")
    config["rope_parameters"] = _rope(keys)
    config["vocab_size"] = checkpoint.info(embedding_key(checkpoint)).shape[0]
    config["tie_word_embeddings"] = not any(k in checkpoint for k in ("output", "output.weight"))
    for name in ("bos", "eos", "unknown", "padding"):
        field = {"unknown": "unk", "padding": "pad"}.get(name, name)
        config[f"{field}_token_id"] = keys.metadata.typed(f"tokenizer.ggml.{name}_token_id", "integer")
    config |= architecture.extra(keys, config)
    return AutoConfig.for_model(architecture.model_type, **config)


def architecture_of(checkpoint: GGUFCheckpoint) -> Architecture:
    """The architecture a file states. UnsupportedError lists those that are read."""
    arch = Keys(checkpoint).arch
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"[load_model] {checkpoint.path}: architecture {arch!r}; models that can be built: {', '.join(ARCHITECTURES)}. "
            "Its weights can still be opened, converted and multiplied one by one"
        )
    return ARCHITECTURES[arch]


def embedding_key(checkpoint: GGUFCheckpoint) -> str:
    """Key of the token embedding, packed or dense."""
    for key in ("token_embd", "token_embd.weight"):
        if key in checkpoint:
            return key
    raise CheckpointError(f"[load_model] {checkpoint.path}: tensor 'token_embd.weight' is missing")


def _rope(keys: Keys) -> dict[str, Any]:
    """Rotation parameters: base frequency and context extension."""
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", "float", 10000.0)}
    kind = keys.get("rope.scaling.type", "string", "none")
    factor = keys.get("rope.scaling.factor", "float", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return out
    if kind == "linear":
        return out | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.need("rope.scaling.original_context_length", "integer")
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
        "sliding_window": keys.get("attention.sliding_window", "integer", 4096),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", "float", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", "float", 30.0),
    }


def _gemma3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Five local layers, then a global one. Local layers rotate with base 10000 and are never stretched."""
    pattern = keys.get("attention.sliding_window_pattern", "integer", 6)
    layers = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(config["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", "float", 10000.0)}
    return {
        "query_pre_attn_scalar": _gemma_query(keys, config, 62),
        "sliding_window": keys.need("attention.sliding_window", "integer"),
        "layer_types": layers,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", "float"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", "float"),
    }


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
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""GGUF tensor stem -> module path outside the layers."""

ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture("gemma2", _GEMMA, norm_offset=True, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", _GEMMA | _QK_NORM, norm_offset=True, extra=_gemma3),
    "llama": Architecture("llama", _LLAMA, interleaved=True, extra=_llama),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _LLAMA | _QK_NORM),
}
"""GGUF architectures that become transformers models."""
