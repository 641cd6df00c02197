"""AWQ's config: one width and group for every module, and the modules that stay dense."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import CheckpointError
from .common import ConfigFiles, Dense, Packed, dense_modules, differing, usual

_KEYS = ("bits", "group_size")


def describe(packed: Sequence[Packed], dense: Sequence[Dense]) -> ConfigFiles:
    """`quantization_config`. CheckpointError where modules differ: AWQ has no rules for that."""
    base = usual(packed, _KEYS)
    others = differing(packed, base, _KEYS)
    if others:
        p = others[0]
        raise CheckpointError(
            f"[convert] AWQ has one width and group size for all modules: most have {base}, {p.name} has "
            f"{ {k: p.params[k] for k in _KEYS} } (and {len(others) - 1} more differ); name one (awq:uint4:g64), or write gptq"
        )
    config = {"quant_method": "awq", **base, "zero_point": True, "version": "gemm"}
    return ConfigFiles({"quantization_config": {**config, "modules_to_not_convert": dense_modules(dense) or None}})
