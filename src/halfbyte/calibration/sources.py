"""A model whose layers are read from the checkpoint when their turn comes, and which keys their weights are.

The architecture stands on torch's meta device. What lies outside the layers (embedding, norms, head) is read at once;
`layer(i)` reads one layer and `drop(i)` lets it go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..checkpoints import Checkpoint
from ..checkpoints.gguf_checkpoint import GGUFCheckpoint
from ..errors import UnsupportedError
from ..transformers.folder_config import config_of_folder, tokenizer_of_folder
from ..transformers.folder_fill import FolderFilling
from ..transformers.gguf_config import architecture_of, config_of
from ..transformers.gguf_fill import _GGUFFilling
from ..transformers.gguf_tokenizer import tokenizer_of
from ..transformers.load import empty_model
from ..transformers.places import Place


class Source(ABC):
    """One checkpoint as an empty model that fills layer by layer.

    keys   parameter path ("model.layers.0.mlp.up_proj.weight") -> key of the checkpoint
    """

    model: Any
    tokenizer: Any
    keys: dict[str, str]

    def __init__(self) -> None:
        layers = [n for n, m in self.model.named_modules() if isinstance(m, nn.ModuleList) and n.rpartition(".")[2] == "layers"]
        if not layers:
            raise UnsupportedError(f"[quantize] {type(self.model).__name__} has no list of layers to walk over; use --method mse")
        self.prefix = min(layers, key=len)
        self.count = len(self.model.get_submodule(self.prefix))

    @abstractmethod
    def fill(self, wanted: str, outside: str = "") -> None:
        """Read what lies under the module path `wanted`, and not under `outside`."""

    def rows(self, key: str, count: int) -> NDArray[np.int64] | None:
        """Rows of the file's tensor in the model's order; None for the same order."""
        return None

    def start(self) -> None:
        """Read what is outside the layers."""
        self.fill("", self.prefix + ".")

    def layer(self, number: int) -> nn.Module:
        """A layer with its weights."""
        path = f"{self.prefix}.{number}"
        self.fill(path + ".")
        layer: nn.Module = self.model.get_submodule(path)
        return layer

    def drop(self, number: int) -> None:
        """Let a layer go."""
        self.model.get_submodule(self.prefix)[number] = nn.Identity()


class FolderSource(Source):
    """Safetensors with a config.json."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self.model = empty_model(config_of_folder(checkpoint), torch.float32)
        self.tokenizer = tokenizer_of_folder(checkpoint)
        self._filling = FolderFilling(self.model, checkpoint, device=device)
        self._groups: dict[str, dict[Place, str]] = self._filling.plan()[0]
        self.keys = {g: next(iter(k.values())) for g, k in self._groups.items() if len(k) == 1}
        super().__init__()

    def fill(self, wanted: str, outside: str = "") -> None:
        packed = self._filling.checkpoint.info
        there = [g for g in self._groups if g.startswith(wanted) and not (outside and g.startswith(outside))]
        for group in sorted(there, key=lambda g: not any(packed(k).quantized for k in self._groups[g].values())):
            self._filling.put(group, self._groups[group])
        if outside:
            self._filling.tie()


class GGUFSource(Source):
    """A GGUF file."""

    def __init__(self, checkpoint: GGUFCheckpoint, device: str) -> None:
        self.model = empty_model(config_of(checkpoint), torch.float32)
        self.tokenizer = tokenizer_of(checkpoint)
        self._filling = _GGUFFilling(self.model, checkpoint, device=device)
        self._filling.architecture = architecture_of(checkpoint)
        self._places: dict[str, tuple[str, str]] = {}
        for key in checkpoint:
            place = self._filling.place(checkpoint.tensor_name(key))
            if place is not None:
                self._places[key] = place
        self.keys = {".".join(place): key for key, place in self._places.items()}
        super().__init__()

    def fill(self, wanted: str, outside: str = "") -> None:
        filling = self._filling
        for key, (path, leaf) in self._places.items():
            if not path.startswith(wanted) or (outside and path.startswith(outside)):
                continue
            if filling.checkpoint.info(key).quantized:
                filling.put_packed(key, filling.weight(key), path, leaf)
            else:
                filling.put_dense(key, filling.values(key, path, leaf), path, leaf)
        if outside and self.model.config.tie_word_embeddings:
            filling.tie_head()

    def rows(self, key: str, count: int) -> NDArray[np.int64] | None:
        return self._filling.row_order(key, count)


def source_of(checkpoint: Checkpoint, device: str) -> Source:
    """The source for a checkpoint. UnsupportedError for an architecture that transformers does not build."""
    return GGUFSource(checkpoint, device) if isinstance(checkpoint, GGUFCheckpoint) else FolderSource(checkpoint, device)
