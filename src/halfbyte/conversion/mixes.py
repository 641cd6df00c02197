"""llama.cpp's mixes by name: which block type each tensor of a GGUF gets.

    quantize --to gguf:q4_K_M      most weights Q4_K, the head and some values and down projections
                                   Q6_K

Rules and order are those of llama-quantize without an importance matrix (`llama-quant.cpp`); the
first rule that fits a tensor decides, otherwise the mix's own type. Names that are also codecs mean
the mix where they are spelled as llama.cpp spells them: `gguf:Q6_K` is the mix, with the embedding
packed too, `gguf:q6_K` the codec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import FormatError
from ..formats.ggml.types import GGML_BY_CODEC
from ..gguf_models.pairs import metadata_of
from ..gguf_models.to_gguf import GGUFView


@dataclass(frozen=True)
class Rule:
    """stem   of tensors in a layer, a regular expression
    codec  they get
    when   name of a condition in `_CONDITIONS`
    """

    stem: str
    codec: str
    when: str = "always"


@dataclass(frozen=True)
class Mix:
    """codec      of tensors without a rule
    file_type  llama.cpp's number
    rules      in order
    """

    codec: str
    file_type: int
    rules: tuple[Rule, ...] = ()


V, DOWN, OUT = "attn_(v|qkv)", r"ffn_down(_exps|_shexp)?", "attn_output"
_EIGHT_EXPERTS = (Rule("attn_[kv]", "q8_0", "eight_experts"),)
_EIGHT_OUT = Rule(OUT, "q5_K", "eight_experts")
_MEDIUM = (Rule(V, "q6_K", "more_bits"), Rule(DOWN, "q6_K", "more_bits"))

MIXES: dict[str, Mix] = {
    "Q4_0": Mix("q4_0", 2, _EIGHT_EXPERTS),
    "Q4_1": Mix("q4_1", 3, _EIGHT_EXPERTS),
    "Q8_0": Mix("q8_0", 7, _EIGHT_EXPERTS),
    "Q5_0": Mix("q5_0", 8, _EIGHT_EXPERTS),
    "Q5_1": Mix("q5_1", 9, _EIGHT_EXPERTS),
    "Q2_K": Mix("q2_K", 10, (
        *_EIGHT_EXPERTS, _EIGHT_OUT, Rule(V, "q4_K", "four_queries"), Rule(V, "q3_K"), Rule(DOWN, "q3_K"), Rule(OUT, "q3_K"),
    )),
    "Q3_K_S": Mix("q3_K", 11, (*_EIGHT_EXPERTS, _EIGHT_OUT, Rule(V, "q5_K", "seventy_billion"))),
    "Q3_K_M": Mix("q3_K", 12, (
        *_EIGHT_EXPERTS, _EIGHT_OUT, Rule(V, "q5_K", "seventy_billion"), Rule(V, "q5_K", "first_2"), Rule(V, "q4_K"),
        Rule(DOWN, "q5_K", "first_sixteenth"), Rule(DOWN, "q4_K"), Rule(OUT, "q4_K"),
    )),
    "Q3_K_L": Mix("q3_K", 13, (
        *_EIGHT_EXPERTS, Rule(V, "q5_K"), Rule(DOWN, "q5_K"), Rule(OUT, "q5_K", "other_experts"),
    )),
    "Q4_K_S": Mix("q4_K", 14, (
        *_EIGHT_EXPERTS, _EIGHT_OUT, Rule(V, "q5_K", "seventy_billion"), Rule(V, "q5_K", "first_4"),
        Rule(DOWN, "q5_K", "first_eighth"),
    )),
    "Q4_K_M": Mix("q4_K", 15, (
        *_EIGHT_EXPERTS, _EIGHT_OUT, *_MEDIUM, Rule(V, "q5_K", "seventy_billion"),
    )),
    "Q5_K_S": Mix("q5_K", 16, _EIGHT_EXPERTS),
    "Q5_K_M": Mix("q5_K", 17, (*_EIGHT_EXPERTS, *_MEDIUM)),
    "Q6_K": Mix("q6_K", 18, _EIGHT_EXPERTS),
    "IQ4_NL": Mix("iq4_nl", 25, (
        *_EIGHT_EXPERTS, _EIGHT_OUT, Rule(V, "q5_K", "four_queries"), Rule(DOWN, "q5_K", "first_eighth"),
    )),
    "IQ4_XS": Mix("iq4_xs", 30, (
        *_EIGHT_EXPERTS, _EIGHT_OUT, Rule(V, "q5_K", "four_queries"), Rule(DOWN, "q5_K", "first_eighth"),
    )),
}  # fmt: skip
"""Name -> mix."""

NARROWER = {"q2_K": "iq4_nl", "q3_K": "iq4_nl", "iq4_xs": "iq4_nl", "q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}
"""What a row that is not whole super-blocks of 256 gets instead."""
_KEPT = re.compile(r"(.*norm|ffn_gate_inp(_shexp)?|attn_sinks|exp_probs_b|position_embd|token_types)")
"""Stems that llama-quantize leaves as they are."""


def mix_named(word: str) -> str | None:
    """The name of a mix, None for what is none. Mixes whose names end in _S, _M or _L are found in
    any case.
    """
    if word in MIXES:
        return word
    return next((name for name in MIXES if name.lower() == word.lower() and name[-2:] in ("_S", "_M", "_L")), None)


class BoundMix:
    """A mix for one model, whose layers and heads the rules depend on."""

    def __init__(self, name: str, checkpoint: GGUFCheckpoint | GGUFView) -> None:
        self.name, self.mix = name, MIXES[name]
        keys: Mapping[str, Any] = (
            metadata_of(checkpoint.pairs, checkpoint.path) if isinstance(checkpoint, GGUFView) else checkpoint.metadata
        )
        arch = str(keys.get("general.architecture", ""))
        self.layers = int(keys.get(f"{arch}.block_count", 0))
        heads, kv = (keys.get(f"{arch}.attention.{k}", 1) for k in ("head_count", "head_count_kv"))
        if arch == "falcon" or not isinstance(heads, int) or not isinstance(kv, int):
            raise FormatError(f"[quantize] mix {name}: its rules for {arch} with heads {heads} and {kv} are not known here")
        self.queries = heads // max(1, kv)
        self.experts = int(keys.get(f"{arch}.expert_count", 0))
        self.seventy_billion = self.layers == 80 and arch in ("llama", "qwen2") and heads != kv
        names = [key.removesuffix(".weight") for key in checkpoint.keys()]  # noqa: SIM118 a checkpoint is no dict
        self.tied = "output" not in names
        with_values = sorted(int(n.split(".")[1]) for n in names if n.endswith((".attn_v", ".attn_qkv")))
        self.values = {layer: i for i, layer in enumerate(with_values)}

    def codec(self, module: str, shape: tuple[int, ...]) -> str | None:
        """The codec of a tensor's module, None where it is left as it is."""
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
        stem = match[2] if match else module
        if len(shape) < 2 or _KEPT.fullmatch(stem):
            return None
        codec = self.mix.codec
        if stem == "output" or (stem == "token_embd" and self.tied):
            fits = shape[-1] % GGML_BY_CODEC[codec].block == 0
            codec = "q8_0" if not fits or codec == "q8_0" else "q6_K"
        elif match:
            layer = int(match[1])
            for rule in self.mix.rules:
                if re.fullmatch(rule.stem, stem) and self._fits(rule.when, stem, layer):
                    codec = rule.codec
                    break
        if shape[-1] % GGML_BY_CODEC[codec].block:
            codec = NARROWER.get(codec, codec)
        return codec if shape[-1] % GGML_BY_CODEC[codec].block == 0 else None

    def _fits(self, when: str, stem: str, layer: int) -> bool:
        i, n = (self.values.get(layer, layer), len(self.values)) if re.fullmatch(V, stem) else (layer, self.layers)
        conditions = {
            "always": True, "eight_experts": self.experts == 8, "other_experts": self.experts != 8,
            "four_queries": self.queries >= 4, "seventy_billion": self.seventy_billion, "first_2": i < 2, "first_4": i < 4,
            "first_sixteenth": i < n // 16, "first_eighth": i < n // 8,
            "more_bits": i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2,
        }  # fmt: skip
        return conditions[when]
