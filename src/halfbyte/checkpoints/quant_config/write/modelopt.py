"""ModelOpt's config: `quant_algo` for all, or `quantized_layers` when mixed; in config.json and in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .common import ConfigFiles, Dense, Packed, dense_modules, differing, usual

_KEYS = ("quant_algo", "group_size")


def describe(packed: Sequence[Packed], dense: Sequence[Dense]) -> ConfigFiles:
    """`quantization_config` flat, and the nested form that ModelOpt's export writes beside it."""
    base = usual(packed, _KEYS)
    excluded = dense_modules(dense)
    nested: dict[str, Any] = {**base, "kv_cache_quant_algo": None, "exclude_modules": excluded}
    if differing(packed, base, _KEYS):
        nested = {
            "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
            "quantized_layers": {p.name: {k: p.params[k] for k in _KEYS} for p in packed},
        }  # fmt: skip
    producer = {"name": "halfbyte", "version": "0.1.0"}
    flat = {k: v for k, v in nested.items() if k != "exclude_modules"}
    flat |= {"quant_method": "modelopt", "ignore": excluded, "producer": producer}
    return ConfigFiles({"quantization_config": flat}, {"hf_quant_config.json": {"producer": producer, "quantization": nested}})
