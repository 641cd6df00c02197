"""Files: checkpoints of every kind, opened lazily; see docs/reference/checkpoints.md."""

from .base import Checkpoint, MissingKeyError, TensorInfo
from .findings import Finding
from .findings.overflow import CheckpointWarning
from .open import open
from .safetensors.save import load, save
from .safetensors.writer import SafetensorsWriter

__all__ = [
    "Checkpoint",
    "CheckpointWarning",
    "Finding",
    "MissingKeyError",
    "SafetensorsWriter",
    "TensorInfo",
    "load",
    "open",
    "save",
]
