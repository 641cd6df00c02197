"""The tensors that a model's configuration requires: what a checkpoint of a known decoder family
must have.

    required(config)    one `Requirement` for each tensor: its names, best first, and its shape
                        where config.json gives it
    required_gguf(...)  the same for a GGUF header

A family is a row of `FAMILIES` (config.json's `model_type`) or `GGUF_FAMILIES`
(`general.architecture`). Other models of config.json are compared with transformers'
(`meta_model.py`); what is not compared the ledger says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from .expert_names import words_for

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys of a multimodal model's config.json that hold the configuration of its language model."""
_TOWERS = ("vision", "visual", "audio", "mtp", "draft", "eagle")


@dataclass(frozen=True)
class Requirement:
    """One tensor that a model needs.

    names  module paths or parameter names; each inner tuple is a set of names that together hold
           it: `((q,), (qkv,))`
    shape  of a dense tensor that is not a matrix (a norm), under its usual name; None where it is
           not checked here
    """

    names: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The usual name."""
        return self.names[0][0]


@dataclass(frozen=True)
class Family:
    """One family of decoders; paths below `layers.N.`.

    attention   projections
    norms       vectors of hidden_size; `head_norms` of head_dim
    mlp         projections of a dense feed-forward block, () for none
    router      path of the router of a model with experts, "" for a dense one
    biases      projections that have a bias; with `attention_bias` in config.json those of
                `attention` have one
    extra       further tensors
    expert_biases  the experts' projections have biases
    tied        transformers' default of tie_word_embeddings
    """

    attention: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    router: str = ""
    biases: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    expert_biases: bool = False
    tied: bool = False


_QK = ("self_attn.q_norm", "self_attn.k_norm")
_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_QKV_BIAS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PLAIN = Family()
FAMILIES: dict[str, Family] = {
    "llama": _PLAIN, "mistral": _PLAIN, "granite": _PLAIN, "smollm3": _PLAIN, "ministral": _PLAIN, "ministral3": _PLAIN,
    "qwen2": Family(biases=_QKV_BIAS),
    "qwen3": Family(head_norms=_QK),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=_SANDWICH, tied=True),
    "gemma3_text": Family(norms=_SANDWICH, head_norms=_QK, tied=True),
    "phi3": _PLAIN,
    "mixtral": Family(mlp=(), router="mlp.gate"),
    "qwen3_moe": Family(head_norms=_QK, mlp=(), router="mlp.gate"),
    "gpt_oss": Family(mlp=(), router="mlp.router", biases=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                      "self_attn.o_proj", "mlp.router"), extra=("self_attn.sinks",), expert_biases=True),
}  # fmt: skip
"""`model_type` -> family."""

_FUSED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
_ROUTERS = {"mlp.gate": ("block_sparse_moe.gate",), "mlp.router": ("mlp.gate",)}

GGUF_FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (), "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"), "qwen3": ("attn_q_norm", "attn_k_norm"),
    "qwen3moe": ("attn_q_norm", "attn_k_norm"), "gemma": (),
    "gemma2": ("post_attention_norm", "post_ffw_norm"),
    "gemma3": ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"), "phi3": (),
}  # fmt: skip
"""`general.architecture` -> tensors of a block besides attention, feed-forward block and their two
norms.
"""


def longrope_factor(longest: float, original: float) -> float:
    """What a `longrope` rotation multiplies queries and keys by where the configuration states
    nothing else: √(1 + ln(longest / original) / ln original), of a context of `original` tokens
    that was stretched to `longest`.
    """
    return math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original > 1 else 1.0


def is_longrope_factor(factor: float, longest: float, original: float) -> bool:
    """Whether an `attention_factor` that is stated is `longrope_factor`, as float32 holds it."""
    return math.isclose(float(factor), longrope_factor(longest, original), rel_tol=1e-6)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model."""
    return next((config[c] for c in TEXT_CONFIGS if isinstance(config.get(c), dict)), config)


def prefix_of(keys: Iterable[str]) -> str | None:
    """What precedes `layers.N.` in the names of the language model's tensors; None when there are
    no layers.

    >>> prefix_of(["model.language_model.layers.0.self_attn.q_proj", "vision_tower.layers.0.self_attn.q_proj"])
    'model.language_model.'
    """
    counts: dict[str, int] = {}
    for key in keys:
        match = re.match(r"((?:[^.]+\.)*?)layers\.\d+\.(?:self_attn|mlp|block_sparse_moe|\w*layernorm)\b", key)
        if match and not any(tower in match[1] for tower in _TOWERS):
            counts[match[1]] = counts.get(match[1], 0) + 1
    return max(counts, key=lambda p: counts[p]) if counts else None


def in_table(config: Mapping[str, Any]) -> bool:
    """True when the table has the model's family."""
    return _family_word(config) in FAMILIES


def _family_word(config: Mapping[str, Any]) -> str:
    return str(text_config(config).get("model_type") or config.get("model_type") or "").replace("-", "_")


def required(config: Mapping[str, Any], prefix: str, tensors: int) -> list[Requirement] | str:
    """The tensors of the model, names with `prefix`; or why they are not checked, as a clause.

    tensors  how many the checkpoint has: layers and experts are named up to one more than it can
             hold, whatever number the configuration states
    """
    text = text_config(config)
    word = _family_word(config)
    family, layers = FAMILIES.get(word), text.get("num_hidden_layers")
    if family is None:
        return f"model_type {word!r} is not in the table" if word else "there is no config.json with a model_type"
    if type(layers) is not int or not 0 < layers < 4096:
        return "config.json has no num_hidden_layers"
    if text.get("layer_types") and word not in ("gemma2", "gemma3_text", "gpt_oss", "qwen2", "qwen3", "smollm3", "mistral"):
        return "its layers are of several kinds"
    hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
    head = _size(text, "head_dim") or (hidden // heads if hidden and heads else None)
    out = [_module(prefix + "embed_tokens"), _vector(prefix + "norm", hidden)]
    # A multimodal model as a whole ties by the outer value, its language model alone by the inner.
    stated = [c["tie_word_embeddings"] for c in (text, config) if c.get("tie_word_embeddings") is not None]
    if not (any(stated) if stated else family.tied) and not _without_head(config):
        out.append(Requirement((("lm_head",), (prefix + "lm_head",), (_outer(prefix) + "lm_head",))))
    for i in range(min(layers, tensors + 1)):
        out += _layer(f"{prefix}layers.{i}.", family, text, hidden, head, tensors)
    return out


def _without_head(config: Mapping[str, Any]) -> bool:
    """Whether the class that the configuration names makes vectors alone (`LlamaModel`)."""
    classes = config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return bool(names) and all(name.endswith("Model") and "LMHead" not in name for name in names)


def _layer(
    at: str, family: Family, text: Mapping[str, Any], hidden: int | None, head: int | None, tensors: int
) -> list[Requirement]:
    out = [_projection(at, name) for name in (*family.attention, *family.mlp)]
    out += [_vector(at + name, hidden) for name in family.norms] + [_vector(at + name, head) for name in family.head_norms]
    biases = family.attention if text.get("attention_bias") and not family.biases else family.biases
    if text.get("attention_bias") is False:
        biases = tuple(b for b in biases if b not in family.attention)
    for name in biases:
        fused = [at + _FUSED[name] + ".bias"] if name in _FUSED else []
        out.append(Requirement(tuple((n,) for n in (at + name + ".bias", *fused))))
    out += [Requirement(((at + name,),)) for name in family.extra]
    if family.router:
        out.append(_module(at + family.router, *(at + r for r in _ROUTERS.get(family.router, ()))))
        count = _size(text, "num_local_experts") or _size(text, "num_experts")
        out += [_experts(at, name, min(count, tensors + 1)) for name in ("gate_proj", "up_proj", "down_proj") if count]
        if family.expert_biases and count:
            inner = _size(text, "intermediate_size")
            out.append(_expert_bias(at, "gate_up_proj", count, inner and 2 * inner, tensors))
            out.append(_expert_bias(at, "down_proj", count, hidden, tensors))
    return out


def _experts(at: str, name: str, count: int) -> Requirement:
    """One projection of all experts: a stack, a fused stack, or a matrix for each expert under the
    names in use.
    """
    words = words_for(name) if name == "down_proj" else (*words_for(name), *words_for("gate_up_proj"))
    modules = ("mlp.experts", "block_sparse_moe.experts")
    stacks = [f"{at}{module}.{word}" for module in (*modules, "mlp.switch_mlp", "block_sparse_moe.switch_mlp") for word in words]
    each = [tuple(f"{at}{module}.{e}.{word}" for e in range(count)) for module in modules for word in words]
    return Requirement((*each, *((s,) for s in stacks)))


def _expert_bias(at: str, name: str, count: int, size: int | None, tensors: int) -> Requirement:
    """The biases of one projection of all experts, as a stack or separate."""
    halves = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    path = f"{at}mlp.experts."
    names = [(f"{path}{name}_bias",), (f"{path}{name}.bias",), tuple(f"{path}{h}.bias" for h in halves)]
    each = range(min(count, tensors + 1))
    names += [tuple(f"{path}{e}.{h}.bias" for e in each for h in group) for group in (halves, (name,))]
    names.append(tuple(f"{path}{h}_bias" for h in halves))
    return Requirement(tuple(dict.fromkeys(names)), None if size is None else (count, size))


GGUF_KEYS = {
    "block_count": "integer",
    "context_length": "integer",
    "embedding_length": "integer",
    "attention.head_count": "integer",
    "feed_forward_length": "integer",
    "attention.layer_norm_rms_epsilon": "float",
}
"""Keys, after the architecture, without which no program runs a model of `GGUF_FAMILIES`, and their
types; a count may be an array, one for each layer.
"""
GGUF_OPTIONAL_KEYS = {
    "attention.head_count_kv": "integer", "attention.key_length": "integer", "attention.value_length": "integer",
    "rope.dimension_count": "integer", "rope.freq_base": "float", "expert_count": "integer", "expert_used_count": "integer",
    "vocab_size": "integer",
}  # fmt: skip
"""Keys that have defaults, and their types."""
GGUF_SIZES = (
    *(key for key, kind in GGUF_KEYS.items() if kind == "integer"),
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
)  # fmt: skip
"""Keys of which no model has 0."""
GGUF_TOKENS = tuple(f"tokenizer.ggml.{word}_token_id" for word in ("bos", "eos", "unknown", "padding"))
"""Keys of single tokens, integers."""
_QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_ROTATION_FACTORS = ("rope_factors_long", "rope_factors_short")
GGUF_TENSOR_NAME = re.compile(r"(blk\.\d+\.)?[a-z0-9_]+\.(weight|bias|scale|input_scale)")
"""Names of the tensors of `GGUF_FAMILIES`; programs refuse a file that has others."""


def required_gguf(
    architecture: str, blocks: int | None, tied: bool, tensors: int, width: int | None = None
) -> list[Requirement] | str:
    """The tensors of a GGUF model without `.weight`; or why they are not checked.

    tied     the file has no `output.weight`: the embedding serves
    tensors  as for `required`
    width    embedding_length
    """
    if architecture not in GGUF_FAMILIES:
        return f"general.architecture {architecture!r} is not in the table"
    if not blocks:
        return f"{architecture}.block_count is missing"
    out = [_module("token_embd"), _vector("output_norm", width)]
    for i in range(min(blocks, tensors + 1)):
        at = f"blk.{i}."
        out += [_vector(at + n, width) for n in ("attn_norm", "ffn_norm")]
        out += [_module(at + n) for n in ("attn_output", *GGUF_FAMILIES[architecture])]
        out += [_module(at + n, at + "attn_qkv") for n in ("attn_q", "attn_k", "attn_v")]
        fused = [at + "ffn_up"] if architecture == "phi3" else []
        for n in ("ffn_gate", "ffn_up", "ffn_down"):
            out.append(_module(at + n, at + n + "_exps", *(fused if n == "ffn_gate" else [])))
    return out


def implied_gguf(names: Set[str], blocks: int) -> list[Requirement]:
    """What the tensors of a GGUF model of `GGUF_FAMILIES` imply: in every block the biases that one
    block has, q, k and v together; a router beside experts; both lists of rotation factors.

    names  of all tensors, without `.weight`
    """
    stems = {match[1] for name in names if (match := re.fullmatch(r"blk\.\d+\.(.+)", name))}
    needed = {stem for stem in stems if stem.endswith(".bias")}
    if needed & set(_QKV_BIASES):
        needed |= set(_QKV_BIASES)
    if any(stem.endswith("_exps") for stem in stems):
        needed.add("ffn_gate_inp")
    out = [_module(f"blk.{i}.{stem}") for i in range(min(blocks, len(names) + 1)) for stem in sorted(needed)]
    return out + [_module(name) for name in _ROTATION_FACTORS if names & set(_ROTATION_FACTORS)]


def stacks_gguf(blocks: int, tensors: int, width: int | None, experts: int | None, inner: int | None) -> list[Requirement]:
    """The experts of a GGUF model of `GGUF_FAMILIES` that has some: a router and three stacks a
    block, in the shapes that the header gives them where it states every size.

    experts  expert_count
    inner    width of one expert
    """
    if not experts:
        return []

    def shaped(name: str, *shape: int | None) -> Requirement:
        return Requirement(((name,),), None if None in shape else tuple(s for s in shape if s))

    out: list[Requirement] = []
    for i in range(min(blocks, tensors + 1)):
        at = f"blk.{i}.ffn_"
        out.append(shaped(at + "gate_inp", experts, width))
        out += [shaped(f"{at}{half}_exps", experts, inner, width) for half in ("gate", "up")]
        out.append(shaped(at + "down_exps", experts, width, inner))
    return out


def expected_gguf(
    blocks: int, tensors: int, width: int | None, heads: tuple[int, int] | None, head: tuple[int, int] | None, inner: int | None
) -> dict[str, tuple[int | None, int | None]]:
    """(n, k) of the matrices of a model of `GGUF_FAMILIES`, None where the header does not say.

    heads  of queries, and of keys and values
    head   elements of a key, and of a value
    inner  inputs of ffn_down
    """
    queries, keys = heads or (None, None)
    key, value = head or (None, None)

    def times(count: int | None, size: int | None) -> int | None:
        return count * size if count and size else None

    rows = [times(queries, key), times(keys, key), times(keys, value)]
    fused = sum(r for r in rows if r) if None not in rows else None
    out: dict[str, tuple[int | None, int | None]] = {"token_embd": (None, width), "output": (None, width)}
    for i in range(min(blocks, tensors + 1)):
        at = f"blk.{i}."
        out |= {
            f"{at}attn_q": (rows[0], width), f"{at}attn_k": (rows[1], width), f"{at}attn_v": (rows[2], width),
            f"{at}attn_qkv": (fused, width), f"{at}attn_output": (width, times(queries, value)),
            f"{at}ffn_gate": (inner, width), f"{at}ffn_up": (None, width), f"{at}ffn_down": (width, inner),
        }  # fmt: skip
    return out


def _projection(at: str, name: str) -> Requirement:
    """A projection by itself, within a fused one, or within the parts that a fused one is saved in."""
    if name not in _FUSED:
        return _module(at + name)
    fused = at + _FUSED[name]
    return Requirement(((at + name,), (fused,), (f"{fused}.0", f"{fused}.1")))


def _module(*names: str) -> Requirement:
    return Requirement(tuple((n,) for n in names))


def _vector(name: str, size: int | None) -> Requirement:
    return Requirement(((name,),), None if size is None else (size,))


def _size(text: Mapping[str, Any], key: str) -> int | None:
    value = text.get(key)
    return value if type(value) is int and value > 0 else None


def _outer(prefix: str) -> str:
    """The prefix without its last wrapper: where a multimodal model has its head."""
    return prefix.removesuffix("model.")
