"""What one GGUF architecture is, and the tables of tensor names that several share.

    Architecture("qwen2", LLAMA)          a family whose tensors are llama's

Names and keys are llama.cpp's (`llama-arch.cpp`, gguf's `constants.py`); module paths and fields
are transformers'. `architectures.py` and its neighbours have the families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .keys import Keys

EXPERTS, PARAMETER, PART, EACH = "/", "#", "+", "*"
"""Within a module path of `Architecture.names`: what follows is a projection of an experts module,
a parameter's own name, or the number of a part that with the others makes one parameter; "*" is the
number of each module of a list, whose weights the file has as one stack.
"""
Order = Callable[[Any, int], NDArray[np.int64] | None]
"""(configuration, number of rows or inputs) -> the file's index of each, in transformers' order;
None where both orders are the same.
"""


@dataclass(frozen=True)
class Change:
    """Values that a file has in another form than transformers.

    read      (configuration, values as the file has them) -> as transformers keeps them
    write     the inverse
    reshapes  whether the shape may be another
    """

    read: Callable[[Any, NDArray[Any]], NDArray[Any]]
    write: Callable[[Any, NDArray[Any]], NDArray[Any]]
    reshapes: bool = True


@dataclass(frozen=True)
class Join:
    """A parameter that a file has as several tensors, which are more than its rows.

    read   (configuration, the tensors' values) -> the parameter
    write  the inverse
    """

    read: Callable[[Any, list[NDArray[Any]]], NDArray[Any]]
    write: Callable[[Any, NDArray[Any]], list[NDArray[Any]]]


Cuts = Callable[[Any, int], list[int]]
"""(configuration, number of rows) -> where the rows of each part of a parameter but the last end."""
DBRX_EXPERTS = {"gate_proj": "mlp.w1", "up_proj": "mlp.v1", "down_proj": "mlp.w2"}
"""Projection -> DBRX's parameter within its experts module: the rows of all experts in one matrix,
that of down transposed.
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
    top          the same outside the layers; of a layer whose module has another path, with `blk.N.`
    layers       module path of the layers
    eps          key of the norms' epsilon, and transformers' field
    norm_offset  the file has w + 1 of norms that transformers keeps as w
    plain_norms  stems of norms that have no such offset
    interleaved  rows of attn_q and attn_k are in llama.cpp's order of rotated pairs
    fused_heads  rows of attn_qkv are all q, all k, all v, where transformers has q, k, v of each
                 head
    orders       stem, or module path of a joined parameter -> order of its rows
    columns      stem -> order of its inputs
    changes      stem -> change of its values
    splits       stem -> stems whose parameters are its rows, one after another
    joins        module path -> its parameter from parts, where it is not their rows one after
                 another
    cuts         module path, or stem of `splits`, -> where the rows of its parts end; parts of one
                 length, and queries, keys and values of heads of one length, have none
    whole        stems of `splits` that files of this architecture have, rather than their parts
    experts      its feed-forward layers are mixtures of experts; None where they may be
    partial      each head may be rotated in part
    heads        its attention has heads of one length for queries, keys and values
    varying      layers may differ in kind: keys of sizes may be arrays, 0 for a layer without
    repeated     the file counts runs of layers, several of which share tensors
    absent       (configuration, layer, stem) -> whether the model does not use a tensor that the
                 file may have; layer −1 is outside the layers
    task         "text" continues a text, "encoder" makes a vector of each token, "encoder-decoder"
                 answers a text
    fields       keys of its own
    constants    fields that every such model has
    computed     fields that transformers' configuration computes itself and does not take
    extra        fields that are computed from the keys and the fields so far
    parameters   parameters that the file has as keys: name in the model -> value
    """

    model_type: str
    names: Mapping[str, str]
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers"
    eps: tuple[str, str] = RMS_EPS
    norm_offset: bool = False
    plain_norms: tuple[str, ...] = ()
    interleaved: bool = False
    fused_heads: bool = False
    orders: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joins: Mapping[str, Join] = field(default_factory=dict)
    cuts: Mapping[str, Cuts] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    experts: bool | None = False
    partial: bool = False
    heads: bool = True
    varying: bool = False
    repeated: bool = False
    absent: Callable[[Any, int, str], bool] = lambda config, layer, stem: False
    task: str = "text"
    fields: tuple[Field, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    extra: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, config: {}
    parameters: Callable[[Keys, dict[str, Any]], dict[str, NDArray[Any]]] = lambda keys, config: {}

    def adds_one(self, path: str, leaf: str, stem: str) -> bool:
        """Whether the file has this weight of transformers' model with 1 added."""
        named = self.norm_offset and path.endswith("norm") and leaf == "weight"
        return named and stem not in self.plain_norms


def changed(*steps: Change) -> Change:
    """Changes one after another, the first on the file's values."""

    def read(config: Any, a: NDArray[Any]) -> NDArray[Any]:
        for step in steps:
            a = step.read(config, a)
        return a

    def write(config: Any, a: NDArray[Any]) -> NDArray[Any]:
        for step in reversed(steps):
            a = step.write(config, a)
        return a

    return Change(read, write)


NEGATED = Change(lambda config, a: -a, lambda config, a: -a)
"""The other sign."""
LOG_OF_NEGATIVE = Change(
    lambda config, a: np.log(-a.astype(np.float64)).astype(np.float32),
    lambda config, a: (-np.exp(a.astype(np.float64))).astype(np.float32),
)
"""A of a recurrent layer, a negative number, as transformers' A_log = log(−A), rounded once. Both
are float32, so the inverse of a rounded logarithm is near A rather than A.
"""
CONVOLUTION = Change(lambda config, a: a[:, None, :], lambda config, a: a[:, 0, :])
"""Kernels of a depthwise convolution: (channels, length) as (channels, 1, length)."""


def reshaped(read: Callable[[Any, int], tuple[int, ...]], write: Callable[[Any, int], tuple[int, ...]]) -> Change:
    """The same values in other shapes: (configuration, how many values) -> shape."""
    return Change(lambda c, a: a.reshape(read(c, a.size)), lambda c, a: a.reshape(write(c, a.size)))


COLUMN = reshaped(lambda config, n: (n,), lambda config, n: (n, 1))
"""A vector that the file has with an axis of one."""
ONE_MORE = Change(lambda config, a: a.astype(np.float32) - np.float32(1), lambda config, a: a.astype(np.float32) + np.float32(1))
"""Weights of a norm, which the file has with 1 added."""


def expert_counts(keys: Keys, name: str) -> dict[str, Any]:
    """The number of experts under transformers' name for it, and how many serve a token."""
    count, used = keys.size("expert_count"), keys.size("expert_used_count")
    if used > count:
        raise keys.error(f"'{keys.arch}.expert_used_count' is {used}; there are {count} experts")
    return {name: count, "num_experts_per_tok": used}


def optional(key: str, name: str, kind: str, default: Any = None) -> Field:
    """A key that a file may leave out."""
    return Field(key, name, kind, default, required=False)


ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
FUSED_QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
"""`Architecture.splits` where the file has one projection and transformers three."""
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = ATTENTION | MLP | {"ffn_norm": "post_attention_layernorm"}
SEED_OSS = ATTENTION | MLP | {"post_attention_norm": "post_attention_layernorm"}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
HUNYUAN_NORM = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
GEMMA2 = (
    ATTENTION
    | MLP
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
POST_NORMS = (
    ATTENTION
    | MLP
    | QK_NORM
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)


def routed(path: str, router: str) -> dict[str, str]:
    """Stacked experts at `path` and their router."""
    stacks = {f"ffn_{w}_exps": f"{path}{EXPERTS}{w}_proj" for w in ("gate", "up", "down", "gate_up")}
    return stacks | {"ffn_gate_inp": router}


def shared(path: str) -> dict[str, str]:
    """A shared expert at `path`."""
    return {f"ffn_{w}_shexp": f"{path}.{w}_proj" for w in ("gate", "up", "down")}


MOE = LLAMA | routed("mlp.experts", "mlp.gate")
BIASED_ROUTING = {"exp_probs_b": f"mlp.gate{PARAMETER}e_score_correction_bias"}
GPT_OSS = SEED_OSS | routed("mlp.experts", "mlp.router") | {"attn_sinks": f"self_attn{PARAMETER}sinks"}
FUSED_UP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **FUSED_UP,
}
GLM4 = (
    ATTENTION
    | FUSED_UP
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
)
PHI2 = ATTENTION | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
STARCODER2 = LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
GPTNEOX = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
GPTNEOX_TOP = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}
