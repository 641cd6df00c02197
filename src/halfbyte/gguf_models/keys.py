"""The key-values of a GGUF file's architecture, typed and checked."""

from __future__ import annotations

import math
from typing import Any

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import CheckpointError, UnsupportedError


class Keys:
    """The key-values of one architecture, typed; errors name file and key."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.metadata = checkpoint.metadata
        self.arch: str = self.metadata.typed("general.architecture", "string", "")

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        return self.metadata.typed(f"{self.arch}.{key}", kind, default)

    def need(self, key: str, kind: str) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise self.error(f"key '{self.arch}.{key}' is missing; the model needs it")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of 1 or more."""
        value: int = self.need(key, "integer") if default is None else self.get(key, "integer", default)
        if value < 1:
            raise self.error(f"key '{self.arch}.{key}' is {value}; 1 or more is allowed")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value: float = self.need(key, "float") if default is None else self.get(key, "float", default)
        if not 0 < value < math.inf:
            raise self.error(f"key '{self.arch}.{key}' is {value}; a finite number above 0 is allowed")
        return value

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this stem, dense or packed."""
        return tensor in self.checkpoint or f"{tensor}.weight" in self.checkpoint

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"[load_model] {self.checkpoint.path}: {message}")

    def refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"[load_model] {self.checkpoint.path}: a {self.arch} model {why}")
