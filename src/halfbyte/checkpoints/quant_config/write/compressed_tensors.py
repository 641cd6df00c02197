"""compressed-tensors' config: a group for each set of arguments, its targets by class or by name, and what is ignored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .common import EMBEDDINGS, ConfigFiles, Dense, Packed, dense_modules


def describe(packed: Sequence[Packed], dense: Sequence[Dense]) -> ConfigFiles:
    """`quantization_config`. One group takes every Linear; of several, each names its modules."""
    groups: dict[str, list[Packed]] = {}
    for p in packed:
        groups.setdefault(json.dumps(p.params, sort_keys=True), []).append(p)
    embedding = any(p.name.rpartition(".")[2] in EMBEDDINGS for p in packed)
    config_groups: dict[str, Any] = {}
    for number, members in enumerate(groups.values()):
        args = members[0].params
        targets = ["Linear"] if len(groups) == 1 and not embedding else [p.name for p in members]
        config_groups[f"group_{number}"] = {
            "targets": targets, "format": args["format"], "weights": args["weights"],
            "input_activations": None, "output_activations": None,
        }  # fmt: skip
    formats = {g["format"] for g in config_groups.values()}
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": dense_modules(dense),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return ConfigFiles({"quantization_config": config})
