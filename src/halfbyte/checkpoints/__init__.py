"""Files: checkpoints of every kind, opened lazily and memory-mapped; see docs/checkpoints.md."""

from .checkpoint import Checkpoint, Finding, MissingKeyError, TensorInfo
from .opening import open
from .overflow import CheckpointWarning
from .save import load, save
from .writer import SafetensorsWriter

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
