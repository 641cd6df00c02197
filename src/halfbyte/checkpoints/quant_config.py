"""Quantization configs: which producer wrote one, by the readers and writers that the layouts bring
along.

read_config(raw, "config.json")           -> ConfigReader, which says what each module is given
write_config("mlx", packed, dense)        -> ConfigFiles, from all modules that were written
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError
from ..layouts import config_readers, layout_named
from ..layouts.quant_config.reader import ConfigReader
from ..layouts.quant_config.writer import ConfigFiles, DenseTensor, PackedModule
from ..layouts.unsupported import refuse_recognised

CONFIG_KEYS = ("quantization_config", "quantization", "compression_config")
"""Keys of config.json that may hold a quantization config."""
BESIDE = ("sparsity_config", "transform_config")
"""Keys beside a config that belong to it."""


def readers_by_method() -> dict[str, type[ConfigReader]]:
    """`quant_method` -> the class that reads such a config."""
    return {method: reader for reader in config_readers() for method in (reader.method, *reader.methods)}


def read_config(raw: Mapping[str, Any], where: str) -> ConfigReader:
    """The reader of a quantization config. CheckpointError when it is of no known kind, or its
    values are of the wrong type; UnsupportedError for a producer that is recognised and not read.

    raw    the dictionary, or one that holds it under `quantization_config` or `quantization`
    where  names its file in messages
    """
    for key in ("quantization_config", "quantization"):
        if isinstance(raw.get(key), dict) and "quant_method" not in raw and "producer" not in raw:
            beside = {k: raw[k] for k in BESIDE if k in raw}
            return read_config({**beside, **raw[key]}, where)
    refuse_recognised(raw, where=where)
    method = raw.get("quant_method")
    if method is None:
        reader = next((r for r in config_readers() if r.recognises(raw)), None)
        if reader is None:
            keys = ", ".join(sorted(map(str, raw))[:12]) or "no keys"
            raise CheckpointError(
                f"[config] {where}: a quantization config with {keys} and no quant_method; its producer cannot be recognised; "
                "add quant_method"
            )
        return reader(raw, where)
    word = str(method).lower().replace("compressed_tensors", "compressed-tensors")
    readers = readers_by_method()
    if word not in readers:
        raise CheckpointError(
            f"[config] {where}: quant_method {method!r} is not read; read: {', '.join(readers)}. Where the tensors are those of "
            """one of these, give its config instead: --config '{"quant_method": "gptq", ...}' (config= in Python)"""
        )
    return readers[word](raw, where)


def write_config(layout: str, packed: Sequence[PackedModule], dense: Sequence[DenseTensor]) -> ConfigFiles:
    """The config of a checkpoint of this layout, as its producer's loaders want it. CheckpointError
    when the modules do not fit under one; LayoutError for a layout whose checkpoints are not
    written.
    """
    return layout_named(layout).write_config(packed, dense)
