"""Load every tensor of a GGUF file into a transformers model: packed modules, parameters, rotary
frequencies.

What llama.cpp's converter changed on the way into the file is undone: rows of llama's q and k are
put back in order, and Gemma's norms, stored as w + 1, lose the 1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import nn

from ...checkpoints.gguf.checkpoint import GGUFCheckpoint
from ...errors import UnsupportedError
from ...gguf_models.architectures import EXPERTS, PARAMETER, Architecture
from ...tensor.qtensor import QTensor
from ...torch.state import tensor
from .base import Filling, first_names
from .experts import fill_experts
from .module_paths import Slot

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ROTATION_FACTORS = "rope_freqs.weight"
"""Llama 3's stretched rotation: one divisor for each frequency."""


def fill(
    model: Any,
    checkpoint: GGUFCheckpoint,
    architecture: Architecture,
    activations: str = "exact",
    backend: str | None = None,
    device: str = "cpu",
) -> None:
    """Puts every tensor of the file into an empty model.

    Raises UnsupportedError when the file has tensors the architecture does not know,
    CheckpointError when shapes differ or a parameter stays empty.
    """
    filling = GGUFFilling(model, checkpoint, activations=activations, backend=backend, device=device)
    filling.architecture = architecture
    filling.run()


class GGUFFilling(Filling):
    """Fills from the names and the layout of one GGUF architecture."""

    checkpoint: GGUFCheckpoint
    architecture: Architecture

    def run(self) -> None:
        _linear_layers(self.model)
        unknown: list[str] = []
        experts: dict[str, dict[Slot, str]] = defaultdict(dict)
        # The largest first: its pages of the file are let go before the others' copies are there.
        for key in sorted(self.checkpoint.keys(), key=lambda k: -self.checkpoint.info(k).nbytes):
            slot = self.slot(self.checkpoint.tensor_name(key))
            if key == ROTATION_FACTORS:
                self.stretch_rotation(self.dense(key))
            elif slot is None:
                unknown.append(key)
            elif EXPERTS in slot[0]:
                path, _, piece = slot[0].partition(EXPERTS)
                experts[path][Slot(path, slot[1], piece)] = key
            elif self.checkpoint.info(key).quantized:
                self.put_packed(key, self.weight(key), *slot)
            else:
                self.put_dense(key, self.values(key, *slot), *slot)
        if unknown:
            raise UnsupportedError(
                f"[load_model] {self.checkpoint.path}: {first_names(unknown)} have no counterpart in "
                f"{type(self.model).__name__}; this variant of {self.checkpoint.config['model_type']} is not built"
            )
        for path, keys in experts.items():
            fill_experts(self, path, keys)
        if self.model.config.tie_word_embeddings:
            self.tie_head()
        self.check_full()

    def slot(self, name: str) -> tuple[str, str] | None:
        """(module path, parameter) of a GGUF tensor, None when the architecture does not know it."""
        stem, _, leaf = name.rpartition(".")
        if match := _LAYER.fullmatch(stem):
            within = self.architecture.names.get(match[2])
            if within is None:
                return None
            path, parameter, name = within.partition(PARAMETER)
            return f"{self.architecture.layers}.{match[1]}.{path}", name if parameter else leaf
        top = self.architecture.top
        return (top[stem], leaf) if stem in top else None

    def row_order(self, key: str, rows: int) -> NDArray[np.int64] | None:
        """Rows in transformers' order where llama.cpp has another.

        Rotated pairs: head h, half j, pair i lies at head h, pair i, half j. Fused heads: head h of
        projection j lies at j, h.
        """
        if self.architecture.fused_heads and re.search(r"\.attn_qkv(\.|$)", key):
            heads = self.model.config.num_attention_heads
            return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
        if not self.architecture.interleaved or re.search(r"\.attn_[qk](\.|$)", key) is None:
            return None
        half = self.model.config.head_dim // 2
        return np.arange(rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)

    def weight(self, key: str) -> QTensor:
        """The packed weight, its rows in transformers' order."""
        weight = self.packed(key)
        order = self.row_order(key, weight.shape[0])
        return weight if order is None else _reordered(weight, order)

    def values(self, key: str, path: str, leaf: str) -> NDArray[Any]:
        """The dense tensor as transformers keeps it."""
        array = self.dense(key)
        order = self.row_order(key, array.shape[0])
        if order is not None:
            array = array[order]
        if self.architecture.norm_offset and path.endswith("norm") and leaf == "weight":
            array = array.astype(np.float32) - np.float32(1)
        have = getattr(self.module(key, path), leaf, None)
        if isinstance(have, torch.Tensor) and have.ndim == 2 and array.shape == tuple(have.shape[1:]) and len(have) == 1:
            array = array[None]  # a matrix of one row, which the file has as a vector
        return array

    def stretch_rotation(self, factors: NDArray[Any]) -> None:
        """Divides each frequency of the rotation by its factor."""
        rotary = self.model.model.rotary_emb
        self.check(ROTATION_FACTORS, factors.shape, rotary.inv_freq)
        rotary.inv_freq = rotary.inv_freq / tensor(factors).to(torch.float32)
        rotary.original_inv_freq = rotary.inv_freq.clone()


def _linear_layers(model: Any) -> None:
    """GPT-2's layers, whose weights are (k, n), as ordinary linear layers of the same product."""
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            k, n = module.weight.shape
            model.set_submodule(path, nn.Linear(k, n, device="meta", dtype=module.weight.dtype))


def _reordered(weight: QTensor, order: NDArray[np.int64]) -> QTensor:
    """The rows of a ggml weight in another order: every part but the factor of the whole has one
    entry a row.
    """
    parts = {p: a if p == "global_scale" else a[order] for p, a in weight.parts.items()}
    return QTensor(weight.format, weight.shape, parts, origin=weight.origin, details=weight.details)
