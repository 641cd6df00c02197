"""Every tensor of a GGUF file into its place in a transformers model: packed modules, parameters, rotations.

What llama.cpp's converter changed on the way into the file is undone: rows of llama's q and k are put back in order, and Gemma's
norms, stored as w + 1, lose the 1.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .. import ops
from ..backends import Prepared
from ..checkpoints.gguf_checkpoint import GGUFCheckpoint
from ..errors import CheckpointError, UnsupportedError
from ..exact import bfloat16
from ..qtensor import QTensor
from ..torch.modules import QEmbedding, QLinear
from .gguf_config import TOP, Architecture

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROTATION_FACTORS = "rope_freqs.weight"
"""Llama 3's stretched rotation: one divisor for each frequency."""


def fill(model: Any, checkpoint: GGUFCheckpoint, architecture: Architecture, activations: str, backend: str | None) -> None:
    """Puts every tensor of the file into an empty model.

    Raises UnsupportedError when the file has tensors the architecture does not know, CheckpointError when shapes differ or a
    place stays empty.
    """
    _Filling(model, checkpoint, architecture, activations, backend).run()


class _Filling:
    def __init__(
        self, model: Any, checkpoint: GGUFCheckpoint, architecture: Architecture, activations: str, backend: str | None
    ) -> None:
        self.model, self.checkpoint, self.architecture = model, checkpoint, architecture
        self.activations, self.backend = activations, backend

    def run(self) -> None:
        strangers = []
        # The largest first: its pages of the file are let go before the others' copies are there.
        for key in sorted(self.checkpoint.keys(), key=lambda k: -self.checkpoint.info(k).nbytes):
            place = self.place(self.checkpoint.tensor_name(key))
            if key == _ROTATION_FACTORS:
                self.stretch_rotation(self.dense(key))
            elif place is None:
                strangers.append(key)
            elif self.checkpoint.info(key).quantized:
                self.put_packed(key, *place)
            else:
                self.put_dense(key, *place)
        if strangers:
            raise UnsupportedError(
                f"[load_model] {self.checkpoint.path}: {_some(strangers)} have no place in {type(self.model).__name__}; "
                f"this variant of {self.checkpoint.config['model_type']} is not built"
            )
        if self.model.config.tie_word_embeddings:
            self.tie_head()
        empty = [name for name, p in self.model.named_parameters() if p.is_meta]
        if empty:
            raise self.error(f"no tensor for {_some(empty)} of {type(self.model).__name__}")

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"[load_model] {self.checkpoint.path}: {message}")

    def place(self, name: str) -> tuple[str, str] | None:
        """(module path, parameter) of a GGUF tensor, None when the architecture does not know it."""
        stem, _, leaf = name.rpartition(".")
        if match := _LAYER.fullmatch(stem):
            within = self.architecture.names.get(match[2])
            return None if within is None else (f"model.layers.{match[1]}.{within}", leaf)
        return (TOP[stem], leaf) if stem in TOP else None

    def module(self, key: str, path: str) -> nn.Module:
        try:
            module: nn.Module = self.model.get_submodule(path)
        except AttributeError:
            have = f"a {type(self.model).__name__} of {self.model.config.num_hidden_layers} layers"
            raise self.error(f"tensor {key!r} belongs to {path}, which {have} does not have") from None
        return module

    def row_order(self, key: str, rows: int) -> NDArray[np.int64] | None:
        """Rows in transformers' order where llama.cpp has another: head h, half j, pair i lies at head h, pair i, half j."""
        if not self.architecture.interleaved or re.search(r"\.attn_[qk](\.|$)", key) is None:
            return None
        half = self.model.config.head_dim // 2
        return np.arange(rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)

    def dense(self, key: str) -> NDArray[Any]:
        array = self.checkpoint[key]
        if isinstance(array, QTensor):
            raise self.error(f"tensor {key!r} is quantized; plain numbers are wanted")
        return array

    def put_packed(self, key: str, path: str, leaf: str) -> None:
        """A packed module in place of the linear or embedding module."""
        module = self.module(key, path)
        if leaf != "weight" or not isinstance(module, nn.Linear | nn.Embedding):
            raise self.error(f"tensor {key!r} is quantized, and {path}.{leaf} of a {type(module).__name__} cannot be")
        weight = self.checkpoint[key]
        assert isinstance(weight, QTensor)
        self.check(key, weight.shape, module.weight)
        order = self.row_order(key, weight.shape[0])
        if order is not None:
            weight = _reordered(weight, order)
        prepared = ops.prepare(weight, backend=self.backend, activations=self.activations)
        if isinstance(module, nn.Embedding):
            scale = getattr(module, "scalar_embed_scale", None)
            self.model.set_submodule(path, QEmbedding(prepared, scale=scale, dtype=self.model.dtype, backend=self.backend))
        else:
            self.model.set_submodule(path, self.linear(prepared, module.bias))

    def linear(self, weight: QTensor | Prepared, bias: torch.Tensor | None = None) -> QLinear:
        return QLinear(weight, bias, activations=self.activations, backend=self.backend)

    def put_dense(self, key: str, path: str, leaf: str) -> None:
        """A dense tensor as a parameter in the model's dtype."""
        module = self.module(key, path)
        array = self.dense(key)
        have = getattr(module, leaf, None)
        if not isinstance(have, torch.Tensor):
            raise self.error(f"tensor {key!r} belongs to {path}.{leaf}, which a {type(self.model).__name__} does not have")
        self.check(key, array.shape, have)
        order = self.row_order(key, array.shape[0])
        if order is not None:
            array = array[order]
        if self.architecture.norm_offset and path.endswith("norm"):
            array = array.astype(np.float32) - np.float32(1)
        setattr(module, leaf, nn.Parameter(_tensor(array).to(self.model.dtype), requires_grad=False))

    def check(self, key: str, shape: tuple[int, ...], have: torch.Tensor) -> None:
        if tuple(have.shape) != shape:
            raise self.error(f"tensor {key!r} is {list(shape)}; the model wants {list(have.shape)}")

    def tie_head(self) -> None:
        """The head multiplies by the embedding's own weight."""
        table = self.model.get_input_embeddings()
        if isinstance(table, QEmbedding):
            self.model.set_output_embeddings(self.linear(table.weight))
        else:
            self.model.get_output_embeddings().weight = table.weight

    def stretch_rotation(self, factors: NDArray[Any]) -> None:
        """Divides each frequency of the rotation by its factor."""
        rotary = self.model.model.rotary_emb
        self.check(_ROTATION_FACTORS, factors.shape, rotary.inv_freq)
        rotary.inv_freq = rotary.inv_freq / _tensor(factors).to(torch.float32)
        rotary.original_inv_freq = rotary.inv_freq.clone()


def _reordered(weight: QTensor, order: NDArray[np.int64]) -> QTensor:
    """The rows of a ggml weight in another order: every part but the factor of the whole has one entry a row."""
    parts = {p: a if p == "global_scale" else a[order] for p, a in weight.parts.items()}
    return QTensor(weight.format, weight.shape, parts, origin=weight.origin, details=weight.details)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """A torch copy of a NumPy array, bfloat16 included."""
    copy = np.array(array)
    if copy.dtype == bfloat16:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
