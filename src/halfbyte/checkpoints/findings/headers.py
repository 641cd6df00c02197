"""Findings from the headers and configuration of a safetensors checkpoint, without weight data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from ...errors import HalfbyteError, plural
from ...layouts.quant_config.module_rules import path_matches
from ...layouts.quant_config.reader import ConfigReader
from ..base import TensorInfo
from ..ledger import AUXILIARY, Ledger
from ..safetensors.detect import Reading
from ..safetensors.shards import Shards
from ..views.gptqmodel_gpt_oss import has_split_gate_up
from . import Finding, problem_findings

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


ASSUMED: dict[str, tuple[tuple[str, ...], str]] = {
    "gptq": (("checkpoint_format", "format"), "zero points are read as AutoGPTQ's v1, which stores them minus 1"),
    "metal-marlin": (("codec",), "codes are read as int4, beside zero points as uint4"),
}
"""Method -> keys of its config without which a default decides the values, and that default."""


class Headers(Protocol):
    """What the checks need of an opened checkpoint; `SafetensorsCheckpoint` has it."""

    shards: Shards
    scheme: ConfigReader | None
    config: dict[str, Any]
    format: str
    allowed: tuple[str, ...]

    @property
    def index(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    def packed_keys(self) -> tuple[str, ...]: ...
    def dense_keys(self) -> tuple[str, ...]: ...
    def reading_or_error(self, key: str) -> Reading | HalfbyteError: ...
    def ledger(self) -> Ledger: ...
    def expected_inputs(self, key: str) -> int | None: ...
    def same_bytes(self, a: str, b: str) -> bool | None: ...
    def info(self, key: str) -> TensorInfo: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, key: object) -> bool: ...


def header_findings(c: Headers) -> list[Finding]:
    """Every finding that needs no weight data."""
    return [
        *_unlisted(c),
        *_unreadable(c),
        *_config(c),
        *problem_findings(c.ledger(), c.allowed),
        *_auxiliary(c),
        *_tied(c),
        *_shapes(c),
        *_halves(c),
    ]


def _unlisted(c: Headers) -> Iterator[Finding]:
    for tensor in c.shards.unlisted:
        yield Finding("warning", "unlisted-tensor", tensor, f"is in {c.shards.shard_of(tensor)}, but {c.index} does not name it")


def _halves(c: Headers) -> Iterator[Finding]:
    if has_split_gate_up(c.config):
        text = "GPTQModel's gate_proj and up_proj of gpt-oss are halves of a matrix whose rows alternate between gate and up"
        yield Finding("note", "alternating-rows", "", f"{text}; load_model, convert, dequantize and verify read the rows by name")


def _unreadable(c: Headers) -> Iterator[Finding]:
    for key in c.packed_keys():
        reading = c.reading_or_error(key)
        if not isinstance(reading, Reading):
            yield Finding("error", "unreadable", key, str(reading))
        elif reading.odd is not None:
            yield reading.odd


def _config(c: Headers) -> Iterator[Finding]:
    """Modules about which config and file disagree."""
    if c.scheme is None:
        if c.packed_keys() and c.format != "halfbyte":
            yield Finding(
                "note", "no-config", "", f"no quantization config; read as {c.format} from the tensors' names, dtypes and shapes"
            )
        return
    keys, default = ASSUMED.get(c.scheme.method, ((), ""))
    symmetric = c.scheme.method == "gptq" and c.scheme.raw.get("sym") is not False
    if keys and not symmetric and not any(c.scheme.raw.get(key) for key in keys):
        yield Finding("note", "assumed-key", "", f"the config has no {keys[0]}: {default}")
    if not c.packed_keys() and not c.shards.sparse:
        yield Finding("warning", "config-without-weights", "", f"the config says {c.scheme.method}, but no tensor is packed")
    for key in c.packed_keys():
        if c.scheme.parameters(key) is None:
            text = "the config leaves it dense, but it is packed; it is read with the parameters of the others"
            yield Finding("warning", "packed-but-skipped", key, text)
    for key in c.dense_keys():
        module = key.removesuffix(".weight")
        linear = module != key and module.rpartition(".")[2] in LINEAR
        if linear and c.packed_keys() and c.scheme.parameters(module) is not None:
            yield Finding("warning", "dense-but-listed", key, f"the config says {c.scheme.method}, but it is stored dense")


def _auxiliary(c: Headers) -> Iterator[Finding]:
    counts = Counter(e.name.rpartition(".")[2] for e in c.ledger().entries if e.status == AUXILIARY)
    for last, count in counts.items():
        text = f"of activations or caches: {plural(count, 'tensor')} of this name, kept as arrays; no weight uses them"
        if last == "pre_quant_scale":
            text = f"scales of inputs of weights: {plural(count, 'tensor')} of this name; load_model multiplies by them"
        yield Finding("note", "activation-tensors", last, text)


def _tied(c: Headers) -> Iterator[Finding]:
    """A head stored although it is the embedding."""
    head = next((k for k in c if path_matches("lm_head", k.removesuffix(".weight"))), None)
    embedding = next((k for k in c if k.removesuffix(".weight").endswith("embed_tokens")), None)
    if head is None or embedding is None:
        return
    text = c.config.get("text_config")
    settings = text if isinstance(text, dict) and "tie_word_embeddings" in text else c.config
    tied = settings.get("tie_word_embeddings") is True
    if tied:
        same = {
            True: "the same bytes",
            False: "other bytes: which one the model uses depends on who loads it",
            None: "bytes that are not compared over the network",
        }[c.same_bytes(head, embedding)]
        yield Finding(
            "warning", "tied-head-twice", head, f"tie_word_embeddings is true, yet it is stored beside {embedding}, with {same}"
        )
    elif "tie_word_embeddings" not in settings and c.same_bytes(head, embedding):
        yield Finding("note", "tied-head-twice", head, f"stored twice: {embedding} has the same bytes")


def _shapes(c: Headers) -> Iterator[Finding]:
    """Weights whose sizes contradict the model's configuration, and biases of another length than
    their weight.
    """
    wrong = {e.name for e in c.ledger().problems}
    for key in c.packed_keys():
        reading = c.reading_or_error(key)
        if not isinstance(reading, Reading) or key in wrong:
            continue
        shape = reading.described.shape
        k = c.expected_inputs(key)
        if k is not None and k != shape[-1]:
            text = (
                f"has {shape[-1]} inputs as {reading.described.format}; the model's config makes it {k}. "
                f"Are bits and group size right?"
            )
            yield Finding("warning", "unexpected-width", key, text)
        bias = f"{key}.bias"
        if bias in c and c.info(bias).shape[-1:] != (int(np.int64(shape[-2])),):
            yield Finding(
                "warning", "bias-shape", bias, f"has shape {list(c.info(bias).shape)}; the weight has {shape[-2]} outputs"
            )
