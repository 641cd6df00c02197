"""GGUF key-values to a transformers configuration.

    config = config_of(checkpoint)      a LlamaConfig, Gemma3TextConfig, ... with the shape, norms
                                        and rotations the file states

Keys are llama.cpp's (`ARCH.embedding_length`, ...; the GGUF specification). What a file does not
state and llama.cpp computes is computed the same way: Gemma's query scale and pattern of local
layers, the rotation of local layers. A file whose shape transformers cannot express is refused,
never read nearly right.
"""

from __future__ import annotations

from typing import Any

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.runnable import refusal
from ..errors import CheckpointError, UnsupportedError
from .architectures import ARCHITECTURES, MIXTRAL, Architecture, Field
from .keys import Keys

_SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
"""Key after `ARCH.` -> configuration field: the counts every family here needs."""


def config_of(checkpoint: GGUFCheckpoint) -> Any:
    """The transformers configuration of a GGUF file.

    Raises UnsupportedError, listing what is read, for another architecture or variant;
    CheckpointError for keys that are missing, mistyped or do not fit the tensors.
    """
    from transformers import AutoConfig

    settings = settings_of(checkpoint)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def settings_of(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """The fields of `config_of`, `model_type` among them, as plain values. Needs no transformers."""
    keys = Keys(checkpoint)
    architecture = architecture_of(checkpoint)
    config: dict[str, Any] = {field: keys.size(key) for key, field in _SIZES.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    key, name = architecture.eps
    config[name] = keys.positive(key)
    config["num_key_value_heads"] = keys.size("attention.head_count_kv", heads)
    config["head_dim"] = keys.size("attention.key_length", hidden // heads)
    if keys.get("attention.value_length", "integer", config["head_dim"]) != config["head_dim"]:
        raise keys.refuse("whose keys and values differ in length")
    rotated = keys.size("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"] and not architecture.partial:
        raise keys.refuse("that rotates part of each head")
    if bool(keys.get("expert_count", "integer", 0)) != architecture.experts:
        raise keys.refuse("with experts" if not architecture.experts else "without experts")
    config["rope_parameters"] = _rope(keys)
    if architecture.partial:
        config["rope_parameters"]["partial_rotary_factor"] = rotated / config["head_dim"]
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    config["vocab_size"] = _check_sizes(keys, config)
    config["tie_word_embeddings"] = not any(k in checkpoint for k in ("output", "output.weight"))
    for name in ("bos", "eos", "unknown", "padding"):
        field = {"unknown": "unk", "padding": "pad"}.get(name, name)
        index = config[f"{field}_token_id"] = keys.metadata.typed(f"tokenizer.ggml.{name}_token_id", "integer")
        if index is not None and not 0 <= index < config["vocab_size"]:
            raise keys.error(f"tokenizer.ggml.{name}_token_id is {index}; the embedding has {config['vocab_size']} rows")
    config |= _biases(keys) | dict(architecture.constants) | {f.name: _value(keys, f) for f in architecture.fields}
    config |= architecture.extra(keys, config)
    return {"model_type": architecture.model_type, **config}


def _value(keys: Keys, field: Field) -> Any:
    """What a key of the file gives a field of the configuration."""
    default = None if field.required else field.default
    if field.kind == "size":
        return keys.size(field.key, default)
    if field.kind == "positive":
        return keys.positive(field.key, default)
    return keys.need(field.key, field.kind) if field.required else keys.get(field.key, field.kind, default)


def _biases(keys: Keys) -> dict[str, bool]:
    """Which projections have biases, under all of transformers' names for it."""
    qkv = any(f"blk.0.{stem}.bias" in keys.checkpoint for stem in ("attn_q", "attn_qkv"))
    out = "blk.0.attn_output.bias" in keys.checkpoint
    return {
        "attention_bias": qkv, "qkv_bias": qkv, "use_qkv_bias": qkv, "use_bias": qkv, "attention_out_bias": out,
        "mlp_bias": "blk.0.ffn_up.bias" in keys.checkpoint,
    }  # fmt: skip


def _check_sizes(keys: Keys, config: dict[str, Any]) -> int:
    """Compares the sizes that decide what is allocated with the tensors. Returns the vocabulary's
    size, the embedding's rows.
    """
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
            f"[load_model] {checkpoint.path}: {refusal(checkpoint.metadata)}; models that can be built: "
            f"{', '.join(ARCHITECTURES)}. "
            "Its weights can still be opened, converted and multiplied one by one"
        )
    if arch == "llama" and Keys(checkpoint).get("expert_count", "integer", 0):
        return MIXTRAL
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
