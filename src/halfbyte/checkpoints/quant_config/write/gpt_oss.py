"""gpt-oss's config as transformers writes it: MXFP4, and the modules that stay dense."""

from __future__ import annotations

from collections.abc import Sequence

from .common import ConfigFiles, Dense, Packed, dense_modules


def describe(packed: Sequence[Packed], dense: Sequence[Dense]) -> ConfigFiles:
    """`quantization_config`."""
    skipped = dense_modules(dense)
    return ConfigFiles({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}})
