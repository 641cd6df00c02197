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
from ..errors import CheckpointError, UnsupportedError, plural, summary_of
from ..tensor.qtensor import QTensor
from .architecture import Architecture, Field
from .architectures import ARCHITECTURES, architecture_named
from .keys import Keys, MissingError
from .names import LAYER, OWN_MODEL


def config_of(checkpoint: GGUFCheckpoint) -> Any:
    """The transformers configuration of a GGUF file.

    Raises UnsupportedError, listing what is read, for another architecture or variant;
    CheckpointError for keys that are missing, mistyped or do not fit the tensors, or values that
    transformers refuses.
    """
    from transformers import AutoConfig

    settings = settings_of(checkpoint)
    kind = settings.pop("model_type")
    register(kind)
    try:
        return AutoConfig.for_model(kind, **settings)
    except Exception as error:  # its checks raise errors of many kinds
        raise CheckpointError(f"[load_model] {checkpoint.path}: its header describes no {kind}: {summary_of(error)}") from error


def register(model_type: str) -> None:
    """Makes transformers' automatic classes know a model type that is defined here, or that they
    leave out.
    """
    if model_type == OWN_MODEL:
        from . import smallthinker

        smallthinker.register()
    if model_type == "mistral4":
        from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

        AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def settings_of(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """The fields of `config_of`, `model_type` among them, as plain values. Needs no transformers."""
    keys = Keys(checkpoint)
    architecture = architecture_of(checkpoint)
    config: dict[str, Any] = {
        "max_position_embeddings": keys.size("context_length"),
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": keys.layers,
    }
    key, name = architecture.eps
    config[name] = keys.positive(key)
    config |= _feed_forward(keys, architecture)
    if architecture.heads:
        config |= _heads(keys, architecture, config)
    if architecture.experts is not None and bool(keys.get("expert_count", "integer", 0)) != architecture.experts:
        raise keys.refuse("with experts" if not architecture.experts else "without experts")
    config["rope_parameters"] = _rope(keys)
    if architecture.partial:
        rotated = keys.rotated("rope.dimension_count", config["head_dim"])
        config["rope_parameters"]["partial_rotary_factor"] = rotated / config["head_dim"]
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    config["vocab_size"] = _check_sizes(keys, config, architecture.repeated)
    config["tie_word_embeddings"] = not any(k in checkpoint for k in ("output", "output.weight"))
    for name in ("bos", "eos", "unknown", "padding"):
        field = {"unknown": "unk", "padding": "pad"}.get(name, name)
        index = config[f"{field}_token_id"] = keys.metadata.typed(f"tokenizer.ggml.{name}_token_id", "integer")
        if index is not None and not 0 <= index < config["vocab_size"]:
            raise keys.error(f"tokenizer.ggml.{name}_token_id is {index}; the embedding has {config['vocab_size']} rows")
    config |= _biases(keys) | dict(architecture.constants) | {f.name: _value(keys, f) for f in architecture.fields}
    config |= architecture.extra(keys, config)
    kept = {name: value for name, value in config.items() if name not in architecture.computed}
    return {"model_type": architecture.model_type, **kept}


def _feed_forward(keys: Keys, architecture: Architecture) -> dict[str, int]:
    """The width of the dense feed-forward layers; 0 in a file says that there are none."""
    if not architecture.varying:
        return {"intermediate_size": keys.size("feed_forward_length")}
    width = max(keys.sizes("feed_forward_length", keys.layers, 0))
    return {"intermediate_size": width} if width else {}


def _heads(keys: Keys, architecture: Architecture, config: dict[str, Any]) -> dict[str, int]:
    """Number and length of the heads, where queries, keys and values have one length."""
    if architecture.varying:
        heads = max(keys.sizes("attention.head_count", keys.layers))
        kv = max(keys.sizes("attention.head_count_kv", keys.layers, heads))
        if not heads or not kv:
            raise keys.error(f"'{keys.arch}.attention.head_count' and head_count_kv are 0 in every layer; a layer needs heads")
    else:
        heads = keys.size("attention.head_count")
        kv = keys.size("attention.head_count_kv", heads)
    head = keys.size("attention.key_length", config["hidden_size"] // heads)
    if keys.get("attention.value_length", "integer", head) != head:
        raise keys.refuse("whose keys and values differ in length (attention.key_length, attention.value_length)")
    if keys.size("rope.dimension_count", head) != head and not architecture.partial:
        raise keys.refuse("that rotates part of each head")
    return {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head}


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
    names = keys.checkpoint.file.headers
    qkv, out, up = (
        any(n.endswith(ends) for n in names)
        for ends in (
            tuple(f".attn_{word}.bias" for word in ("q", "k", "v", "qkv")),
            (".attn_output.bias",),
            tuple(f".ffn_{word}.bias" for word in ("gate", "up", "down")),
        )
    )
    return {
        "attention_bias": qkv,
        "qkv_bias": qkv,
        "use_qkv_bias": qkv,
        "use_bias": qkv,
        "attention_out_bias": out,
        "mlp_bias": up,
    }


def _check_sizes(keys: Keys, config: dict[str, Any], repeated: bool) -> int:
    """Compares the sizes that decide what is allocated with the tensors. Returns the vocabulary's
    size, the embedding's rows.

    repeated  `Architecture.repeated`
    """
    checkpoint = keys.checkpoint
    embedding = checkpoint.info(embedding_key(checkpoint)).shape
    if len(embedding) != 2 or embedding[1] != config["hidden_size"]:
        raise keys.error(f"'token_embd.weight' is {list(embedding)}; '{keys.arch}.embedding_length' is {config['hidden_size']}")
    layers = {match[1] for match in map(LAYER.match, checkpoint.file.headers) if match}
    if config["num_hidden_layers"] > len(layers) and not repeated:
        have = plural(len(layers), "layer")
        raise keys.error(f"'{keys.arch}.block_count' is {config['num_hidden_layers']}; there are tensors of {have}")
    if "head_dim" in config:
        _check_heads(keys, config)
    tokens = checkpoint.metadata.length("tokenizer.ggml.tokens") if "tokenizer.ggml.tokens" in checkpoint.metadata else 0
    if tokens > embedding[0]:
        raise keys.error(f"the vocabulary has {tokens} tokens; the embedding has {embedding[0]} rows")
    return int(embedding[0])


def _check_heads(keys: Keys, config: dict[str, Any]) -> None:
    """Compares the heads with the rows of the projections."""
    checkpoint = keys.checkpoint
    heads, kv, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    differ = keys.metadata.type_name(f"{keys.arch}.attention.head_count").startswith("array")
    if heads % kv or head % 2 or (config["hidden_size"] % heads and not differ):
        raise keys.error(f"{heads} heads of {head}, {kv} for keys, in {config['hidden_size']} inputs: these do not divide")
    if f"{keys.arch}.attention.key_length_swa" in keys.metadata or differ:
        return  # layers differ in the length of their heads, or in their number
    for name, rows in (("blk.0.attn_q", heads * head), ("blk.0.attn_k", kv * head)):
        for key in (name, f"{name}.weight"):
            gated = 2 * rows if name.endswith("q") else rows
            if key in checkpoint and checkpoint.info(key).shape[0] not in (rows, gated):
                raise keys.error(f"{name}.weight has {checkpoint.info(key).shape[0]} rows; the heads of {head} make {rows}")


def architecture_of(checkpoint: GGUFCheckpoint) -> Architecture:
    """The architecture a file states. UnsupportedError lists those that are read."""
    arch = Keys(checkpoint).arch
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"[load_model] {checkpoint.path}: {refusal(checkpoint.metadata)}; models that can be built: "
            f"{', '.join(ARCHITECTURES)}. "
            "Its weights can still be opened, converted and multiplied one by one"
        )
    return architecture_named(Keys(checkpoint))


def embedding_key(checkpoint: GGUFCheckpoint) -> str:
    """Key of the token embedding, packed or dense."""
    for key in ("token_embd", "token_embd.weight"):
        if key in checkpoint:
            return key
    raise MissingError(checkpoint.path, "tensor", "token_embd.weight")


def _rope(keys: Keys) -> dict[str, Any]:
    """Rotation parameters: base frequency and context extension."""
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base", 10000.0)}
    kind = keys.get("rope.scaling.type", "string", "none")
    factor = keys.get("rope.scaling.factor", "float", 1.0)
    if any(keys.has(f"rope_factors_{word}") for word in ("long", "short")):
        return out | _longrope(keys)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return out
    if kind == "linear":
        return out | {"rope_type": "linear", "factor": keys.positive("rope.scaling.factor")}
    if kind == "yarn":
        original, factor = keys.size("rope.scaling.original_context_length"), keys.positive("rope.scaling.factor")
        betas = {f"beta_{w}": keys.get(f"rope.scaling.yarn_beta_{w}", "float") for w in ("fast", "slow")}
        out |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return out | {k: v for k, v in betas.items() if v}
    raise keys.refuse(f"with rope scaling {kind!r}; none, linear and yarn are read, and longrope with its factors")


def _longrope(keys: Keys) -> dict[str, Any]:
    """One divisor for each frequency, for texts within the original context and for longer ones."""
    original = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
    scale = keys.get("rope.scaling.attn_factor", "float")
    out: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "factor": keys.size("context_length") / original,
    }
    for word in ("long", "short"):
        name = f"rope_factors_{word}.weight"
        if name not in keys.checkpoint:
            raise MissingError(keys.checkpoint.path, "tensor", name, "; the other list of rotation factors is there")
        factors = keys.checkpoint[name]
        if isinstance(factors, QTensor):
            raise keys.error(f"tensor '{name}' is quantized; plain numbers are wanted")
        out[f"{word}_factor"] = [float(v) for v in factors]
    return out | ({"attention_factor": scale} if scale else {})
