"""A model that reads its layers from the checkpoint one at a time, and the keys of their weights.

The model starts on torch's meta device. `start()` reads what is outside the layers (embedding,
norms, head), `layer(i)` reads one layer and `drop(i)` frees it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import torch
from torch import nn

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..conversion.recipe import is_kept
from ..errors import CheckpointError, UnsupportedError
from ..generation.native_tokenizer import tokenizer_of_folder
from ..gguf_models.architecture import EXPERTS, PART
from ..gguf_models.config import architecture_of, config_of
from ..gguf_models.names import ROTATION_FACTORS, task_of_class
from ..gguf_models.tokenizer import tokenizer_of
from ..gguf_models.view import ModelView
from ..tensor.qtensor import QTensor
from ..transformers.build import empty_model
from ..transformers.config import config_of_folder
from ..transformers.fill.base import first_names
from ..transformers.fill.experts import fill_experts
from ..transformers.fill.gguf import GGUFFilling
from ..transformers.fill.module_paths import Slot
from ..transformers.fill.safetensors import FolderFilling


class Decoded:
    """A view of a checkpoint that dequantizes packed layers to float32; embedding and head stay
    packed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def __iter__(self) -> Any:
        return iter(self._checkpoint)

    def __contains__(self, key: object) -> bool:
        return key in self._checkpoint

    def info(self, key: str) -> TensorInfo:
        info = self._checkpoint.info(key)
        decoded = info.quantized and not is_kept(key)
        return replace(info, kind="dense", format=None, dtype="float32") if decoded else info

    def __getitem__(self, key: str) -> QTensor | NDArray[Any]:
        weight = self._checkpoint[key]
        if isinstance(weight, QTensor) and not self.info(key).quantized:
            return weight.dequantize("float32")
        return weight


class Source(ABC):
    """An empty model that is filled from one checkpoint layer by layer.

    slots       key of a checkpoint -> the parameter of the model it belongs to
    """

    model: Any
    tokenizer: Any
    slots: dict[str, Slot]

    def __init__(self, path: Path, device: str) -> None:
        lists = [n for n, m in self.model.named_modules() if isinstance(m, nn.ModuleList) and n.rpartition(".")[2] == "layers"]
        outer = [n for n in lists if len(n) == len(min(lists, key=len))]
        if len(outer) != 1:
            has = f"several lists of layers ({', '.join(outer)})" if outer else "no list of layers"
            raise UnsupportedError(
                f"[quantize] {path}: {type(self.model).__name__} has {has}, and calibration walks one; use --method mse or rtn"
            )
        self.path, self.device = path, device
        self.prefix = outer[0]
        self.count = len(self.model.get_submodule(self.prefix))
        self._empty: dict[int, nn.Module] = {}
        """Layers as they were before their weights were read, on the meta device."""

    @abstractmethod
    def put(self, keys: Iterable[str]) -> None:
        """Read these keys into the model."""

    def rows(self, key: str, count: int) -> NDArray[np.int64] | None:
        """Rows of the file's tensor in the model's order; None for the same order."""
        return None

    def inputs(self, key: str, width: int) -> NDArray[np.int64] | None:
        """Inputs of the file's matrix in the model's order; None for the same order."""
        return None

    def offset(self, key: str) -> float:
        """What the file adds to the model's values."""
        return 0.0

    def key_of(self, path: str, leaf: str) -> str | None:
        """The key that is all of a parameter."""
        whole = Slot(path, leaf)
        return next((key for key, slot in self.slots.items() if slot == whole), None)

    def start(self) -> None:
        """Read the tensors outside the layers."""
        inside = f"{self.prefix}."
        self.put(key for key, slot in self.slots.items() if not slot.path.startswith(inside))
        self.tie()
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    @abstractmethod
    def tie(self) -> None:
        """The head from the embedding, where it is tied."""

    def layer(self, number: int) -> nn.Module:
        """A layer with its weights."""
        path = f"{self.prefix}.{number}"
        self._empty[number] = deepcopy(self.model.get_submodule(path))
        self.put(key for key, slot in self.slots.items() if slot.path.startswith(f"{path}."))
        layer: nn.Module = self.model.get_submodule(path)
        empty = [name for name, p in layer.named_parameters() if p.is_meta]
        if empty:
            raise CheckpointError(f"[quantize] {self.path}: no tensor for {first_names(empty)} of {path}")
        return layer

    def drop(self, number: int) -> None:
        """Free a layer, which may be read again."""
        self.model.get_submodule(self.prefix)[number] = self._empty.pop(number)


class FolderSource(Source):
    """Safetensors with a config.json, or a GGUF file under the names of such a folder."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        if isinstance(checkpoint, ModelView):
            self.model = _empty(config_of(checkpoint.source), checkpoint, checkpoint.architecture.task)
            self.tokenizer = tokenizer_of(checkpoint.source)
        else:
            kind, classes = checkpoint.config.get("model_type"), checkpoint.config.get("architectures")
            self.model = _empty(config_of_folder(checkpoint), checkpoint, task_of_class(str(kind), classes or ()))
            self.tokenizer = tokenizer_of_folder(checkpoint)
        # Keys are resolved as spelled; those of packed weights lack ".weight".
        groups: dict[str, dict[Slot, str]] = FolderFilling(self.model, checkpoint).plan()[0]
        self._filling = FolderFilling(self.model, cast(Checkpoint, Decoded(checkpoint)), device=device)
        self._groups = groups
        self.slots = {key: slot for keys in groups.values() for slot, key in keys.items()}
        self._group_of = {key: group for group, keys in groups.items() for key in keys.values()}
        super().__init__(checkpoint.path, device)

    def put(self, keys: Iterable[str]) -> None:
        packed = self._filling.checkpoint.info
        there = dict.fromkeys(self._group_of[key] for key in keys)
        for group in sorted(there, key=lambda g: not any(packed(k).quantized for k in self._groups[g].values())):
            self._filling.put(group, self._groups[group])

    def tie(self) -> None:
        self._filling.tie()


class GGUFSource(Source):
    """A GGUF file."""

    def __init__(self, checkpoint: GGUFCheckpoint, device: str) -> None:
        self.model = _empty(config_of(checkpoint), checkpoint, architecture_of(checkpoint).task)
        self.tokenizer = tokenizer_of(checkpoint)
        self._filling = GGUFFilling(self.model, cast(Checkpoint, Decoded(checkpoint)), device=device)
        self._filling.architecture = architecture_of(checkpoint)
        self.slots = {}
        layers = self.model.config.num_hidden_layers
        for key in checkpoint:
            name = checkpoint.tensor_name(key)
            slot = self._filling.slot(name)
            divided = self._filling.stem(key) in self._filling.architecture.splits
            if divided or (slot is not None and (PART in slot[0] or self._filling.is_unused(name, layers))):
                raise UnsupportedError(
                    f"[quantize] {checkpoint.path}: {name} is divided, joined with other tensors, or not used, in "
                    f"{checkpoint.config['model_type']}, which calibration does not walk; use --method mse or rtn, or quantize "
                    "the model's own folder"
                )
            if slot is not None:
                path, _, piece = slot[0].partition(EXPERTS)
                self.slots[key] = Slot(path, slot[1], piece)
        super().__init__(checkpoint.path, device)

    def put(self, keys: Iterable[str]) -> None:
        filling = self._filling
        experts: dict[str, dict[Slot, str]] = defaultdict(dict)
        for key in keys:
            slot = self.slots[key]
            if slot.projection:
                experts[slot.path][slot] = key
            elif filling.checkpoint.info(key).quantized:
                filling.put_packed(key, filling.weight(key), slot.path, slot.leaf)
            else:
                filling.put_dense(key, filling.values(key, slot.path, slot.leaf), slot.path, slot.leaf)
        for path, pieces in experts.items():
            fill_experts(filling, path, pieces)

    def tie(self) -> None:
        unused = self._filling.is_unused(ROTATION_FACTORS, self.count)
        if ROTATION_FACTORS in self._filling.checkpoint and not unused:
            self._filling.stretch_rotation(self._filling.dense(ROTATION_FACTORS))
        if getattr(self.model.config, "tie_word_embeddings", False):
            self._filling.tie_head()

    def rows(self, key: str, count: int) -> NDArray[np.int64] | None:
        return self._filling.row_order(key, count)

    def inputs(self, key: str, width: int) -> NDArray[np.int64] | None:
        return self._filling.input_order(key, width)

    def offset(self, key: str) -> float:
        slot = self.slots[key]
        return float(self._filling.architecture.adds_one(slot.path, slot.leaf, self._filling.stem(key)))


def _empty(config: Any, checkpoint: Checkpoint, task: str) -> Any:
    """The causal language model of a configuration, without weights."""
    why = ""
    if task == "text":
        try:
            return empty_model(config, torch.float32, checkpoint.__contains__)
        except UnsupportedError as error:
            why = f" ({str(error).partition('] ')[2]})"
    raise UnsupportedError(
        f"[quantize] {checkpoint.path}: {config.model_type} here is no causal language model{why}, and calibration walks no "
        "other; use --method mse or rtn"
    )


def layer_source(checkpoint: Checkpoint, device: str) -> Source:
    """The source for a checkpoint. UnsupportedError for an architecture that transformers does not
    build.
    """
    return GGUFSource(checkpoint, device) if isinstance(checkpoint, GGUFCheckpoint) else FolderSource(checkpoint, device)
