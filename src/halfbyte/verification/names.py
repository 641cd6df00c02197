"""One canonical name for each weight of a model, whatever a checkpoint calls it.

    blk.3.attn_q · model.layers.3.self_attn.q_proj.weight · language_model.layers.3.self_attn.q_proj
    -> layers.3.self_attn.q_proj

Canonical names are those of LLaMA in transformers, without the wrappers in front and without
`.weight`. GGUF's names come from its tensor name table (gguf-py, `constants.py`), those of experts
from `checkpoints/expert_names.py`. Other names are given as rules, `old=new`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import expert_names
from ..checkpoints.io.home import expanded
from ..errors import CheckpointError

_WRAPPERS = frozenset({"model", "language_model", "text_model", "transformer", "base_model"})
"""Leading path components that only wrap the text model."""

_GGUF_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip

_SAME: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.mlp\.gate$", ".mlp.router"),
        (r"\.mlp\.gate\.bias$", ".mlp.router.bias"),
        (r"\.mlp\.router\.(?:layer|gate)$", ".mlp.router"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        (r"\.self_attn\.W_pack\b", ".self_attn.qkv_proj"),
    )
)

ROTARY_GGUF = frozenset({"llama"})
"""GGUF architectures whose writer reorders the rows of q and k within each head."""
PLUS_ONE_GGUF = frozenset({"gemma", "gemma2", "gemma3", "nemotron"})
"""GGUF architectures whose writer stores norm weights with 1 added."""
FUSED_UP_GGUF = frozenset({"phi3", "glm4", "chatglm"})
"""GGUF architectures whose `ffn_up` is gate and up joined."""
TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "gpt-oss", "llama4", "llama4_text"})
"""model_type whose dense expert stacks are [e, k, n] in transformers."""


@dataclass(frozen=True)
class Dialect:
    """The facts about a checkpoint on which names and row orders depend.

    gguf          its names are GGUF's
    architecture  `general.architecture` or `model_type`, "" when unknown
    heads         attention heads, and `kv_heads` of keys and values; 0 when unknown
    tied          the output head is the embedding
    """

    gguf: bool = False
    architecture: str = ""
    heads: int = 0
    kv_heads: int = 0
    tied: bool = False


def dialect_of(keys: Iterable[str], config: dict[str, Any], metadata: Any) -> Dialect:
    """The dialect of a checkpoint with these keys, model configuration and GGUF key-values."""
    names = set(keys)
    header = "general.architecture" in metadata
    gguf = header or any(k.startswith("blk.") or module_of(k) == "token_embd" for k in names)
    if header:
        arch = str(metadata["general.architecture"])
        heads = _int(metadata.get(f"{arch}.attention.head_count"))
        kv_heads = _int(metadata.get(f"{arch}.attention.head_count_kv")) or heads
        return Dialect(gguf, arch, heads, kv_heads, tied="output.weight" not in names and "output" not in names)
    nested = config.get("text_config")
    text = {**nested, **{k: v for k, v in config.items() if k not in nested}} if isinstance(nested, dict) else config
    heads = _int(text.get("num_attention_heads"))
    # transformers' default for this key is true only in some models; when it is left out the
    # tensors decide.
    tied = text.get("tie_word_embeddings")
    head = any(canonical(k, Dialect(gguf)) == "lm_head" for k in names)
    kv_heads = _int(text.get("num_key_value_heads")) or heads
    return Dialect(gguf, str(text.get("model_type", "")), heads, kv_heads, tied=bool(tied) or (tied is None and not head))


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def module_of(key: str) -> str:
    """The key without a final `.weight`: packed weights are keyed by module, dense ones by tensor."""
    return key.removesuffix(".weight")


def canonical(key: str, dialect: Dialect = Dialect(), layer_has_post_norm: bool = False) -> str:
    """The canonical name of a key.

    layer_has_post_norm  the same GGUF layer also has `post_attention_norm`: then `ffn_norm` is the
                         norm before the feed-forward
    """
    name = module_of(key)
    module, bias = (name[: -len(".bias")], ".bias") if name.endswith(".bias") else (name, "")
    if dialect.gguf:
        if module in _GGUF_WHOLE:
            return _GGUF_WHOLE[module] + bias
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        if match:
            layer, tail = match.groups()
            if tail == "ffn_norm" and layer_has_post_norm:
                return f"layers.{layer}.pre_feedforward_layernorm{bias}"
            if tail == "ffn_up" and dialect.architecture in FUSED_UP_GGUF:
                return f"layers.{layer}.mlp.gate_up_proj{bias}"
            return f"layers.{layer}.{_GGUF_LAYER.get(tail, tail)}{bias}"
        return name
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    name = ".".join(parts)
    for pattern, new in _SAME:
        name = pattern.sub(new, name)
    if found := expert_names.parse(name):
        expert = "" if found.expert is None else f".{found.expert}"
        return f"{found.path}{expert}.{found.projection}{'.bias' if found.leaf == 'bias' else ''}"
    return name


def canonical_names(keys: Sequence[str], dialect: Dialect) -> dict[str, str]:
    """Key -> canonical name, one to one: keys whose canonical names collide keep their own."""
    present = {module_of(k) for k in keys}
    out: dict[str, str] = {}
    for key in keys:
        layer = re.match(r"blk\.\d+\.", key)
        post = layer is not None and f"{layer[0]}post_attention_norm" in present
        out[key] = canonical(key, dialect, post)
    owners: dict[str, list[str]] = {}
    for key, name in out.items():
        owners.setdefault(name, []).append(key)
    for sharing in owners.values():
        if len(sharing) > 1:
            out.update((key, key) for key in sharing)
    return out


@dataclass(frozen=True)
class Rules:
    """Renaming rules, `old=new`, applied in order to module paths: `old` is a regular expression,
    `new` its replacement.
    """

    rules: tuple[tuple[re.Pattern[str], str], ...] = ()

    def rename(self, key: str) -> str:
        """`key`, renamed; a final `.weight` is removed first."""
        name = module_of(key)
        for pattern, new in self.rules:
            name = pattern.sub(new, name)
        return name

    def __bool__(self) -> bool:
        return bool(self.rules)


MAX_BYTES = 16 << 20
"""Largest file of rules: 100,000 renamed tensors are 10 MB."""


def read_rules(texts: Iterable[str]) -> Rules:
    """Rules from `old=new` texts and from files, either a JSON object or one `old=new` a line (`#`
    starts a comment line).

    Raises CheckpointError naming the rule that is not one.
    """
    pairs: list[tuple[str, str]] = []
    for text in texts:
        if "=" not in text or os.path.isfile(text):
            pairs += _file_rules(expanded(text))
        else:
            pairs.append(_pair(text, text))
    rules = []
    for old, new in pairs:
        try:
            pattern = re.compile(old)
            re.compile(f"(?:{old})|").sub(new, "")  # an unknown group in `new` shows here, not at the first match
        except re.error as error:
            raise CheckpointError(f"[map] rule {old}={new}: not a regular expression and its replacement: {error}") from error
        rules.append((pattern, new))
    return Rules(tuple(rules))


def _pair(text: str, where: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise CheckpointError(f"[map] {where!r}: a rule is spelled old=new, old being a regular expression")
    return old.strip(), new.strip()


def _file_rules(path: Path) -> list[tuple[str, str]]:
    try:
        with path.open("rb") as f:  # a pipe is fine: --map <(sed ...)
            data = f.read(MAX_BYTES + 1)
        text = data[:MAX_BYTES].decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"[map] {str(path)!r} is neither a rule old=new nor a readable file of rules: {reason}") from error
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"[map] {path}: over {MAX_BYTES:,} bytes; a map is read up to that")
    if text.lstrip().startswith("{"):
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"[map] {path}: not JSON: {error}") from error
        if not all(isinstance(v, str) for v in table.values()):
            raise CheckpointError(f"[map] {path}: a map is an object of strings, {{old: new}}")
        return list(table.items())
    lines = [line.strip() for line in text.splitlines()]
    return [_pair(line, f"{path}: {line}") for line in lines if line and not line.startswith("#")]
