"""Load every tensor of a GGUF file into a transformers model: packed modules, parameters, rotary
frequencies.

What llama.cpp's converter changed on the way into the file is undone: rows of llama's q and k are
put back in order, Gemma's norms, stored as w + 1, lose the 1, a recurrent layer's A becomes its
logarithm, and tensors that were split are joined.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import nn

from ...checkpoints.gguf.checkpoint import GGUFCheckpoint
from ...errors import UnsupportedError, plural
from ...gguf_models.architecture import EACH, EXPERTS, PART, Architecture
from ...gguf_models.keys import Keys
from ...gguf_models.names import LAYER, LONG_ROTATION, ROTATION_FACTORS, input_order, row_order, slot, stem_of
from ...tensor.concat import concat_rows, incompatibility, take_rows
from ...tensor.qtensor import QTensor
from ...torch.state import tensor
from .base import Filling, first_names, inputs_first, make_linear
from .experts import fill_experts
from .module_paths import Slot


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
        make_linear(self.model, inputs_first(self.model))
        unknown: list[str] = []
        experts: dict[str, dict[Slot, str]] = defaultdict(dict)
        parts: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        layers = self.model.config.num_hidden_layers
        # The largest first: its pages of the file are let go before the others' copies are there.
        for key in sorted(self.checkpoint.keys(), key=lambda k: -self.checkpoint.info(k).nbytes):
            name = self.checkpoint.tensor_name(key)
            slot = self.slot(name)
            if self.is_unused(name, layers):
                continue
            if not self.checkpoint.info(key).shape:
                raise self.error(f"tensor {key!r} is a scalar; no tensor of the model is one")
            if key == ROTATION_FACTORS:
                self.stretch_rotation(self.dense(key))
            elif self.stem(key) in self.architecture.splits:
                self.put_split(key)
            elif slot is None:
                unknown.append(key)
            elif EXPERTS in slot[0]:
                path, _, piece = slot[0].partition(EXPERTS)
                experts[path][Slot(path, slot[1], piece)] = key
            elif PART in slot[0]:
                path, _, number = slot[0].partition(PART)
                parts[path, slot[1]][int(number)] = key
            elif EACH in slot[0]:
                self.put_each(key, *slot)
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
        for (path, leaf), numbered in parts.items():
            self.join([numbered[i] for i in sorted(numbered)], path, leaf)
        self.put_parameters()
        if self.model.get_output_embeddings() is not None and not Keys(self.checkpoint).has("output"):
            self.tie_head()
        if self.model.config.model_type == "t5":
            self.model.set_input_embeddings(self.model.get_input_embeddings())  # its sides share it
        self.check_full()

    def put_split(self, key: str) -> None:
        """A tensor whose rows are those of several parameters, one after another."""
        name, stem = self.checkpoint.tensor_name(key), self.stem(key)
        where = [self.slot(name.replace(f".{stem}.", f".{part}.")) for part in self.architecture.splits[stem]]
        slots = [one for one in where if one is not None]
        quantized = self.checkpoint.info(key).quantized
        whole = self.packed(key) if quantized else self.dense(key)
        rows = [int(getattr(self.module(key, path), leaf).shape[0]) for path, leaf in slots]
        if sum(rows) != whole.shape[0]:
            raise self.error(f"tensor {key!r} has {whole.shape[0]} rows; the model wants {rows}")
        put: Any = self.put_packed if quantized else self.put_dense
        start = 0
        for part, target, count in zip(self.architecture.splits[stem], slots, rows, strict=True):
            order = np.arange(start, start + count)
            within = self.order_of(part, count)
            order = order if within is None else order[within]
            put(key, take_rows(whole, order) if isinstance(whole, QTensor) else np.ascontiguousarray(whole[order]), *target)
            start += count

    def put_each(self, key: str, path: str, leaf: str) -> None:
        """A stack of matrices, one for each module of a list."""
        quantized = self.checkpoint.info(key).quantized
        stack = self.packed(key) if quantized else self.dense(key)
        modules = self.module(key, path.removesuffix(f".{EACH}"))
        if len(stack.shape) != 3 or stack.shape[0] != len(modules):
            raise self.error(f"tensor {key!r} is {list(stack.shape)}; the model wants a stack of {plural(len(modules), 'part')}")
        put: Any = self.put_packed if quantized else self.put_dense
        for i in range(stack.shape[0]):
            put(key, stack[i], path.replace(EACH, str(i)), leaf)

    def is_unused(self, name: str, layers: int) -> bool:
        """Whether a tensor belongs to what is not run: layers that predict further tokens, or a
        stem that the architecture names as not used.
        """
        match = LAYER.match(name)
        layer, stem = (int(match[1]), match[2]) if match else (-1, name)
        if layers <= layer < self.checkpoint.metadata[f"{Keys(self.checkpoint).arch}.block_count"] or name in LONG_ROTATION:
            return True
        return self.architecture.absent(self.model.config, layer, stem.removesuffix(".weight"))

    def slot(self, name: str) -> tuple[str, str] | None:
        """(module path, parameter) of a GGUF tensor, None when the architecture does not know it."""
        return slot(self.architecture, name)

    def stem(self, key: str) -> str:
        """The stem of a layer's tensor, "" for one outside the layers."""
        return stem_of(self.checkpoint.tensor_name(key))

    def row_order(self, key: str, rows: int) -> NDArray[np.int64] | None:
        """Rows in transformers' order where llama.cpp has another (`names.row_order`)."""
        return self.order_of(self.stem(key), rows)

    def order_of(self, stem: str, rows: int) -> NDArray[np.int64] | None:
        """`row_order` of a stem."""
        config = self.model.config
        # Recurrent models have no heads, and in Gemma 4 their size differs from layer to layer.
        heads = config.num_attention_heads if self.architecture.fused_heads else 0
        size = config.head_dim if self.architecture.interleaved else 0
        return row_order(self.architecture, config, stem, rows, heads, size, self.checkpoint.path)

    def input_order(self, key: str, width: int) -> NDArray[np.int64] | None:
        """The same of a matrix's inputs."""
        return input_order(self.architecture, self.model.config, self.stem(key), width, self.checkpoint.path)

    def weight(self, key: str) -> QTensor:
        """The packed weight, its rows in transformers' order."""
        weight = self.packed(key)
        order = self.row_order(key, weight.shape[0])
        return weight if order is None else take_rows(weight, order)

    def put_packed(self, key: str, weight: QTensor, path: str, leaf: str) -> None:
        """As in `Filling`; a weight whose inputs have another order in the file gathers them first."""
        super().put_packed(key, weight, path, leaf)
        order = self.input_order(key, weight.shape[-1])
        if order is not None:
            self.model.set_submodule(path, GatheredInputs(self.module(key, path), np.argsort(order)))

    def values(self, key: str, path: str, leaf: str) -> NDArray[Any]:
        """The dense tensor as transformers keeps it."""
        array = self.dense(key)
        stem, architecture = self.stem(key), self.architecture
        order = self.row_order(key, array.shape[0])
        if order is not None:
            array = array[order]
        if (order := self.input_order(key, array.shape[-1])) is not None:
            array = array[..., order]
        if architecture.adds_one(path, leaf, stem):
            array = array.astype(np.float32) - np.float32(1)
        if stem in architecture.changes and not (leaf == "bias" and array.ndim == 1):
            array = architecture.changes[stem].read(self.model.config, array)
        have = getattr(self.module(key, path), leaf, None)
        if isinstance(have, torch.Tensor) and have.ndim == 2 and array.shape == tuple(have.shape[1:]) and len(have) == 1:
            array = array[None]  # a matrix of one row, which the file has as a vector
        return array

    def join(self, keys: list[str], path: str, leaf: str) -> None:
        """One parameter from several tensors: packed where they share a format and only their rows
        follow one another, otherwise from their values.
        """
        inner = path.removeprefix(f"{self.architecture.layers}.").partition(".")[2]
        join = self.architecture.joins.get(inner)
        packed = [self.weight(key) for key in keys if self.checkpoint.info(key).quantized]
        if join is None and len(packed) == len(keys) and incompatibility(packed) is None:
            weight = concat_rows(packed)
            order = self.order_of(inner, weight.shape[0])
            self.put_packed(keys[0], weight if order is None else take_rows(weight, order), path, leaf)
            return
        arrays = [
            self.weight(key).dequantize("float32") if self.checkpoint.info(key).quantized else self.values(key, path, leaf)
            for key in keys
        ]
        if join is not None:
            array = join.read(self.model.config, arrays)
        else:
            array = np.concatenate(arrays)
            order = self.order_of(inner, len(array))
            array = array if order is None else array[order]
        self.put_dense(keys[0], np.ascontiguousarray(array), path, leaf)

    def put_parameters(self) -> None:
        """Parameters that the file has as key-values."""
        keys = Keys(self.checkpoint)
        for name, array in self.architecture.parameters(keys, self.model.config.to_dict()).items():
            path, _, leaf = name.rpartition(".")
            self.put_dense(name, array, path, leaf)

    def stretch_rotation(self, factors: NDArray[Any]) -> None:
        """Divides each frequency of the rotation by its factor."""
        found = [m for m in self.model.modules() if isinstance(getattr(m, "original_inv_freq", None), torch.Tensor)]
        if len(found) != 1:
            raise self.error(
                f"tensor {ROTATION_FACTORS!r} stretches one rotation; a {type(self.model).__name__} has {len(found)} such modules"
            )
        rotary = found[0]
        self.check(ROTATION_FACTORS, factors.shape, rotary.inv_freq)
        rotary.inv_freq = rotary.inv_freq / tensor(factors).to(torch.float32)
        rotary.original_inv_freq = rotary.inv_freq.clone()


class GatheredInputs(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """A linear layer over inputs in another order: y = linear(x[..., order])."""

    def __init__(self, linear: nn.Module, order: NDArray[np.int64]) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("order", torch.from_numpy(order.copy()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x[..., self.order])
        return y
