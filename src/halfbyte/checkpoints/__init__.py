"""Files: checkpoints of every kind, opened lazily and memory-mapped; see docs/checkpoints.md."""

from .checkpoint import Checkpoint, Finding, MissingKeyError, TensorInfo

__all__ = ["Checkpoint", "Finding", "MissingKeyError", "TensorInfo"]
