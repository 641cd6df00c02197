"""halfbyte: low-bit quantized weights, decoded exactly, moved without loss, multiplied packed.

    import halfbyte as hb

    ckpt = hb.open("model-dir, model.safetensors or model.gguf")
    w = ckpt["model.layers.0.mlp.down_proj"]      # a QTensor (packed) or a dense array
    w.dequantize("float32")                       # the exact value, rounded once
    y = hb.linear(x, w)                           # never a dense copy of w

Importing it loads NumPy and little else; torch and transformers are imported by what needs them,
when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .checkpoints import Checkpoint, load, open, save
from .checkpoints.gguf.checkpoint import GGUFCheckpoint
from .checkpoints.ledger import Entry
from .errors import HalfbyteError
from .formats import format_named
from .ops import Prepared, dequantize, embedding, experts, linear, prepare
from .spec import Format
from .tensor.qtensor import QTensor
from .tensor.quantize import quantize

__version__ = "0.1.0"

_LATE = {"convert": "conversion", "verify": "verification.compare", "load_model": "transformers", "warmup": "torch.warmup"}
"""Names whose modules are imported on first use."""

__all__ = [
    "Checkpoint", "Format", "HalfbyteError", "Prepared", "QTensor", "convert", "dequantize", "embedding", "experts",
    "format_named", "linear", "load", "load_model", "open", "prepare", "quantize", "save", "verify", "warmup",
]  # fmt: skip


def _needed(checkpoint: GGUFCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> list[Entry] | str:
    """What a GGUF model needs, by the tables of its architecture."""
    from .gguf_models.required import missing_tensors

    return missing_tensors(checkpoint, shapes)


GGUFCheckpoint.needed = _needed


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
