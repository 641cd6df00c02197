"""MLX's config: `quantization` with the usual parameters, and an object under a module's path where it has others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .common import ConfigFiles, Dense, Packed, dense_modules, differing, usual

_KEYS = ("group_size", "bits", "mode")


def describe(packed: Sequence[Packed], dense: Sequence[Dense]) -> ConfigFiles:
    """`quantization`, and its copy under `quantization_config`; dense projections are false."""
    base = usual(packed, _KEYS)
    config: dict[str, Any] = dict(base)
    for p in differing(packed, base, _KEYS):
        config[p.name] = {k: p.params[k] for k in _KEYS}
    config |= dict.fromkeys(dense_modules(dense), False)
    return ConfigFiles({"quantization": config, "quantization_config": config})
