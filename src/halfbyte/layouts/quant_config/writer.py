"""What a quantization config is written from: the modules of a checkpoint, packed and dense.

layout.write_config(packed, dense) -> ConfigFiles       what goes into config.json, and which files go beside it
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...spec import Format

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings", "tok_embeddings", "token_embd")
"""Last segments of embedding modules: producers' loaders look for linear layers, and these are
none.
"""


class PackedModule(NamedTuple):
    """A packed module and the parameters its layout wrote it with."""

    name: str
    format: Format
    shape: tuple[int, ...]
    params: Mapping[str, Any]


class DenseTensor(NamedTuple):
    """A dense tensor."""

    name: str
    shape: tuple[int, ...]


class ConfigFiles(NamedTuple):
    """A quantization config as files.

    entries   keys of config.json, the quantization config among them
    beside    further files by name
    """

    entries: dict[str, Any]
    beside: dict[str, dict[str, Any]] = {}  # noqa: RUF012  never changed


def dense_modules(dense: Sequence[DenseTensor]) -> list[str]:
    """Modules that look like linear layers and are dense: a config must name them, for a loader
    takes them for packed ones.
    """
    out = []
    for name, shape in dense:
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        linear = len(shape) >= 2 and (name.endswith(".weight") or last.endswith("_proj"))
        if linear and last not in EMBEDDINGS and "norm" not in last:
            out.append(module)
    return out


def most_common(packed: Sequence[PackedModule], keys: Sequence[str]) -> dict[str, Any]:
    """The values of `keys` that the largest number of modules have together."""
    counts = Counter(json.dumps([p.params.get(k) for k in keys], sort_keys=True) for p in packed)
    values = json.loads(counts.most_common(1)[0][0]) if counts else [None] * len(keys)
    return {k: v for k, v in zip(keys, values, strict=True) if v is not None}


def differing(packed: Sequence[PackedModule], base: Mapping[str, Any], keys: Sequence[str]) -> list[PackedModule]:
    """Modules that have other values than `base`."""
    return [p for p in packed if any(p.params.get(k) != base.get(k) for k in keys)]
