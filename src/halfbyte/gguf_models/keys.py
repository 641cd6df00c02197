"""The key-values of a GGUF file's architecture, typed and checked."""

from __future__ import annotations

import math
from typing import Any

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import CheckpointError, UnsupportedError, plural

MOST_LAYERS = 512
"""As in llama.cpp; it bounds what a number in a header makes this program allocate."""


class MissingError(CheckpointError):
    """A key or a tensor that the model needs is not in the file.

    subject  "key" or "tensor"
    """

    def __init__(self, path: object, subject: str, name: str, more: str = "") -> None:
        super().__init__(f"[load_model] {path}: {subject} '{name}' is missing{more}")
        self.subject, self.name = subject, name


YARN_BORDERS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Turns within the original context at which YaRN's ramp begins and ends where nothing is stated."""


class Keys:
    """The key-values of one architecture, typed; errors name file and key."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.metadata = checkpoint.metadata
        self.arch: str = self.metadata.typed("general.architecture", "string", "")

    @property
    def layers(self) -> int:
        """Layers of the model. Those that predict further tokens, which follow in the file, are not
        among them.
        """
        count, predicting = self.size("block_count"), self.get("nextn_predict_layers", "integer", 0)
        if count > MOST_LAYERS:
            raise self.error(f"'{self.arch}.block_count' is {count}; 1 to {MOST_LAYERS} is allowed, as in llama.cpp")
        if not 0 <= predicting < count:
            raise self.error(f"'{self.arch}.nextn_predict_layers' is {predicting}; 0 to {count - 1} is allowed")
        return count - int(predicting)

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        return self.metadata.typed(f"{self.arch}.{key}", kind, default)

    def need(self, key: str, kind: str) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise MissingError(self.checkpoint.path, "key", f"{self.arch}.{key}", "; the model needs it")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of 1 or more."""
        value: int = self.need(key, "integer") if default is None else self.get(key, "integer", default)
        if value < 1:
            raise self.error(f"key '{self.arch}.{key}' is {value}; 1 or more is allowed")
        return value

    def rotated(self, key: str, head: int, default: int | None = None) -> int:
        """How many channels of a head rotate, which are pairs; all where the file states none."""
        value = self.size(key, head if default is None else default)
        if value > head or value % 2:
            raise self.error(f"key '{self.arch}.{key}' is {value}; an even number up to {head}, a head's length, is allowed")
        return value

    def expert_groups(self) -> dict[str, int]:
        """In how many groups the experts are, and how many of these a token chooses from."""
        groups = self.get("expert_group_count", "integer", 0) or 1
        used = self.get("expert_group_used_count", "integer", 0) or groups
        experts = self.size("expert_count")
        if experts % groups or not 0 < used <= groups or (groups > 1 and experts < 2 * groups):
            raise self.error(
                f"{plural(experts, 'expert')} in {groups} groups, {used} of them used; equal groups of 2 experts or more, at "
                "least one of them used, are allowed"
            )
        return {"n_group": groups, "topk_group": used}

    def sizes(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """A count for each layer, 0 where a layer has none: an array, or one number for all."""
        name = f"{self.arch}.{key}"
        if name not in self.metadata or not self.metadata.type_name(name).startswith("array"):
            value = self.need(key, "integer") if default is None else self.get(key, "integer", default)
            values = [value] * layers
        else:
            if "int" not in self.metadata.type_name(name):
                raise self.error(f"key '{name}' is {self.metadata.type_name(name)}; integers are needed")
            if self.metadata.length(name) < layers:
                raise self.error(f"key '{name}' has {self.metadata.length(name)} values; there are {layers} layers")
            values = [int(v) for v in self.metadata[name][:layers]]
        if min(values) < 0:
            raise self.error(f"key '{name}' has {min(values)}; 0 or more is allowed")
        return values

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """A flag for each layer, None where the file has no array of them."""
        name = f"{self.arch}.{key}"
        if name not in self.metadata or not self.metadata.type_name(name).startswith("array"):
            return None
        if self.metadata.length(name) < layers:
            raise self.error(f"key '{name}' has {self.metadata.length(name)} values; there are {layers} layers")
        return [bool(v) for v in self.metadata[name][:layers]]

    def local_layers(self, period: int = 0, *, global_first: bool = False) -> list[bool]:
        """Which layers have a window: what the file states of each, else all but the last of every
        period, or with `global_first` the first. `period` is for files that state none; 0: the file
        must state it of each.
        """
        key = "attention.sliding_window_pattern"
        local = self.flags(key, self.layers)
        if local is None:
            if not period:
                raise self.error(f"key '{self.arch}.{key}' is not a flag for each layer; the model needs them")
            length = self.size(key, period)
            local = [(i + (not global_first)) % length != 0 for i in range(self.layers)]
        return local

    def numbers(self, name: str, layers: int) -> list[float]:
        """A finite number for each layer, of a key with its whole name: an array, or one for all."""
        if name in self.metadata and self.metadata.type_name(name).startswith("array[float"):
            values = [float(v) for v in self.metadata[name][:layers]]
        else:
            value = self.metadata.typed(name, "float")
            if value is None:
                raise MissingError(self.checkpoint.path, "key", name, "; the model needs it")
            values = [value] * layers
        if len(values) < layers or not all(math.isfinite(v) for v in values):
            raise self.error(f"key '{name}' is {values}; {layers} finite numbers are needed")
        return values

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value: float = self.need(key, "float") if default is None else self.get(key, "float", default)
        if not 0 < value < math.inf:
            raise self.error(f"key '{self.arch}.{key}' is {value}; a finite number above 0 is allowed")
        return value

    def any_layer(self, stem: str) -> bool:
        """Whether any layer has a tensor of this stem, dense or packed."""
        ends = (f".{stem}", f".{stem}.weight")
        return any(name.startswith(("blk.", "enc.", "dec.")) and name.endswith(ends) for name in self.checkpoint.file.headers)

    def expert_layers(self) -> list[bool]:
        """Which layers have any tensor of a mixture of experts."""
        stems = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        return [any(self.has(f"blk.{i}.{stem}") for stem in stems) for i in range(self.layers)]

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this stem, dense or packed."""
        return tensor in self.checkpoint or f"{tensor}.weight" in self.checkpoint

    def rows(self, tensor: str, default: int | None = None) -> int:
        """Rows of the tensor of this stem; `default`, or an error without one, where it is missing."""
        if not self.has(tensor):
            if default is None:
                raise MissingError(self.checkpoint.path, "tensor", f"{tensor}.weight")
            return default
        return int(self.checkpoint.info(tensor if tensor in self.checkpoint else f"{tensor}.weight").shape[0])

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"[load_model] {self.checkpoint.path}: {message}")

    def refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"[load_model] {self.checkpoint.path}: a {self.arch} model {why}")
