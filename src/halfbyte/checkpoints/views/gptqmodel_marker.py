"""GPTQModel's gpt-oss, whose gate and up are no rows of one kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cut_in_halves(config: Mapping[str, Any]) -> bool:
    """True where alternating rows of gate and up were cut in the middle: GPTQModel's `gate_proj` is the first half of
    gpt-oss's `gate_up_proj`, and its forward puts the halves together again before it takes every second row."""
    if str(config.get("model_type", "")).replace("-", "_") != "gpt_oss":
        return False
    stated = config.get("quantization_config")
    meta = stated.get("meta") if isinstance(stated, Mapping) else None
    made_by = meta.get("quantizer") or () if isinstance(meta, Mapping) else ()
    return "gptqmodel" in str(made_by).lower()
