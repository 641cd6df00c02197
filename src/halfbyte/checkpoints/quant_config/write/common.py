"""What a quantization config is written from: the modules of a checkpoint, packed and dense."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....spec import Format

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings", "tok_embeddings", "token_embd")
"""Last segments of embedding modules: readers look for linear layers, and these are none."""


class Packed(NamedTuple):
    """A packed module and the parameters its layout wrote it with."""

    name: str
    format: Format
    shape: tuple[int, ...]
    params: Mapping[str, Any]


class Dense(NamedTuple):
    """A dense tensor."""

    name: str
    shape: tuple[int, ...]


class ConfigFiles(NamedTuple):
    """What goes where.

    entries   keys of config.json, the quantization config among them
    beside    further files by name
    """

    entries: dict[str, Any]
    beside: dict[str, dict[str, Any]] = {}  # noqa: RUF012  never changed


def dense_modules(dense: Sequence[Dense]) -> list[str]:
    """Modules that look like linear layers and are dense: those a config must name, for they look like the packed ones."""
    out = []
    for name, shape in dense:
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        linear = len(shape) >= 2 and (name.endswith(".weight") or last.endswith("_proj"))
        if linear and last not in EMBEDDINGS and "norm" not in last:
            out.append(module)
    return out


def usual(packed: Sequence[Packed], keys: Sequence[str]) -> dict[str, Any]:
    """The values of `keys` that most modules have together."""
    counts = Counter(json.dumps([p.params.get(k) for k in keys], sort_keys=True) for p in packed)
    values = json.loads(counts.most_common(1)[0][0]) if counts else [None] * len(keys)
    return {k: v for k, v in zip(keys, values, strict=True) if v is not None}


def differing(packed: Sequence[Packed], base: Mapping[str, Any], keys: Sequence[str]) -> list[Packed]:
    """Modules that do not have the usual values."""
    return [p for p in packed if any(p.params.get(k) != base.get(k) for k in keys)]
