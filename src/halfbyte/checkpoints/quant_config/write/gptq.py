"""GPTQ's config: one width and group for most modules, `dynamic` rules for the others (GPTQModel's; the first match decides)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .common import ConfigFiles, Dense, Packed, dense_modules, differing, usual

_KEYS = ("bits", "group_size")


def describe(packed: Sequence[Packed], dense: Sequence[Dense]) -> ConfigFiles:
    """`quantization_config`, and the same as quantize_config.json for readers of AutoGPTQ's time."""
    base = usual(packed, _KEYS)
    dynamic: dict[str, dict[str, Any]] = {}
    for p in differing(packed, base, _KEYS):
        dynamic[f"+:^{re.escape(p.name)}$"] = {k: p.params[k] for k in _KEYS}
    # The head is dense by default, and no reader looks for embeddings.
    for name in dense_modules(dense):
        if name.rpartition(".")[2] != "lm_head":
            dynamic[f"-:^{re.escape(name)}$"] = {}
    config: dict[str, Any] = {
        "quant_method": "gptq", **base,
        "sym": all(p.params.get("sym") for p in packed), "desc_act": any(p.params.get("desc_act") for p in packed),
        "checkpoint_format": next((p.params["checkpoint_format"] for p in packed), "gptq"),
        "lm_head": any(p.name.rpartition(".")[2] == "lm_head" for p in packed),
        "pack_dtype": "int32", "meta": {"converter": "halfbyte"},
    }  # fmt: skip
    if dynamic:
        config["dynamic"] = dynamic
    return ConfigFiles({"quantization_config": config}, {"quantize_config.json": config})
