"""What a checkpoint has for vLLM's layers, by the module names of transformers; a GGUF file's
tensors under them too (`gguf_models.view`).

    source = Source(path)
    source.matrices["model.layers.0.self_attn.q_proj"]    -> its key
    source.experts["model.layers.0.mlp.experts"]          -> the keys of its projections
    source.weight(key)                                    -> QTensor, rows in transformers' order
    source.dense(done)                                    -> (name, tensor) of everything else

Only headers are read until a weight is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import torch
from torch import Tensor

from ..checkpoints import Checkpoint, expert_names
from ..checkpoints import open as open_checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.views.usual import usual
from ..errors import UnsupportedError
from ..gguf_models.names import unsupported
from ..gguf_models.view import ModelView
from ..layouts.claims import AUXILIARY
from ..tensor.qtensor import QTensor
from ..torch.state import tensor
from ..transformers.fill.safetensors import INPUT_SCALE

Projection = tuple[str, int | None]
"""(gate_proj, up_proj, gate_up_proj or down_proj; the expert, None for a stack of all)."""

NEEDED = ("e_score_correction_bias",)
"""Endings of tensors that change no weight and that vLLM's models load."""
CONV1D = (".c_attn", ".c_proj", ".c_fc")
"""Endings of GPT-2's matrices that checkpoints have with inputs before outputs."""


def stated_activations(settings: Mapping[str, Any]) -> str:
    """How the layers of a checkpoint round their inputs: "int8_token" where every group of
    compressed-tensors' `config_groups` says symmetric integers of 8 bits under a scale a token for
    them, "int8" where it says other integers of 8 bits, else "exact".
    """
    listed = settings.get("config_groups")
    groups = list(listed.values()) if isinstance(listed, dict) else []
    inputs = [group.get("input_activations") if isinstance(group, dict) else None for group in groups]
    stated = [i for i in inputs if isinstance(i, dict) and i.get("num_bits") == 8 and i.get("type", "int") == "int"]
    if not stated or len(stated) < len(inputs):
        return "exact"
    by_token = all(i.get("strategy") == "token" and i.get("dynamic") and i.get("symmetric", True) for i in stated)
    return "int8_token" if by_token else "int8"


def model_view(checkpoint: GGUFCheckpoint) -> ModelView:
    """A GGUF file under the names of vLLM's models. UnsupportedError for a model whose parameters
    have another form in its file.
    """
    view = ModelView(checkpoint, joined=True, published=True)
    if why := unsupported(view.architecture):
        raise UnsupportedError(
            f"[vllm] {checkpoint.path}: {view.architecture.model_type} has some parameters in another form than its GGUF "
            f"({why}), and vLLM's models take them as they are; halfbyte convert makes a folder"
        )
    return view


class Source:
    """An opened checkpoint, its packed weights by module path.

    matrices  module path of a linear layer or an embedding -> key
    experts   module path of the experts of a layer -> {projection: key}

    Raises what `halfbyte.open` and the ledger's check raise: CheckpointError for damaged files and
    for tensors or config words that no layout accounts for.
    """

    def __init__(self, path: str | Path) -> None:
        opened = open_checkpoint(path)
        opened.check("vllm")
        self.checkpoint: Checkpoint = model_view(opened) if isinstance(opened, GGUFCheckpoint) else usual(opened)
        self.matrices: dict[str, str] = {}
        self.experts: dict[str, dict[Projection, str]] = defaultdict(dict)
        self._unused = {e.name for e in opened.ledger().entries if e.status == AUXILIARY and not e.name.endswith(NEEDED)}
        self._biases: dict[str, dict[Projection, str]] = defaultdict(dict)
        scaled = [key for key in self.checkpoint if key.endswith(INPUT_SCALE)]
        if scaled:
            raise UnsupportedError(
                f"[vllm] {self.checkpoint.path}: {scaled[0]} multiplies the inputs of a layer, which vLLM's layers have no "
                "argument for; fold the scales into the weights before them, or use halfbyte's own `load_model`"
            )
        alternating = self.checkpoint.config.get("model_type") == "gpt_oss"
        for key in self.checkpoint:
            found = expert_names.parse(key)
            if not self.checkpoint.info(key).quantized:
                if found and alternating and found.leaf == "bias":
                    self._biases[found.path][found.projection, found.expert] = key
            elif found:
                self.experts[found.path][found.projection, found.expert] = key
            else:
                self.matrices[key] = key
        joint = [path for path, keys in self._biases.items() if ("gate_up_proj", None) in keys]
        for path in joint:  # vLLM's own names
            del self._biases[path]

    def is_tied(self) -> bool:
        """True where the head multiplies by the table of embeddings."""
        settings = self.checkpoint.config
        text = settings.get("text_config") or settings
        stated = text.get("tie_word_embeddings", settings.get("tie_word_embeddings"))
        return bool(stated) and "lm_head" not in self.matrices

    def weight(self, key: str) -> QTensor:
        """The packed weight at `key`."""
        found = self.checkpoint[key]
        assert isinstance(found, QTensor)
        return found

    def dense(self, done: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor whose key is not in `done`, under its name in a dense checkpoint: what
        vLLM's models load themselves. A packed weight among them is dequantized; scales of
        activations and caches are left out.
        """
        biases = {key for keys in self._biases.values() for key in keys.values()}
        for key in self.checkpoint:
            if key in done or key in biases or key in self._unused:
                continue
            name = self._name(key)
            if self.checkpoint.info(key).quantized:
                yield name, self._as_stored(key, tensor(self.weight(key).dequantize("float32")))
            else:
                array = self.checkpoint[key]
                assert not isinstance(array, QTensor)
                yield name, tensor(array)

        for path, keys in self._biases.items():
            gate, up = (self._bias(keys, f"{name}_proj") for name in ("gate", "up"))
            yield f"{path}.gate_up_proj_bias", torch.stack([gate, up], -1).flatten(-2)
            yield f"{path}.down_proj_bias", self._bias(keys, "down_proj")

    def row_numbers(self, key: str) -> tuple[str, Tensor]:
        """(name, column of the numbers of its rows) of a packed matrix: what a model makes of them
        as it loads the matrix is the order in which it wants the rows.
        """
        rows = torch.arange(self.checkpoint.info(key).shape[0], dtype=torch.float32)[:, None]
        return self._name(key), self._as_stored(key, rows)

    def _as_stored(self, key: str, values: Tensor) -> Tensor:
        """A packed matrix, rows first, as a dense checkpoint has it: GPT-2's has inputs first."""
        return values.T if self.checkpoint.config.get("model_type") == "gpt2" and key.endswith(CONV1D) else values

    def _bias(self, keys: Mapping[Projection, str], projection: str) -> Tensor:
        """A projection's biases, (e, n)."""
        experts = sorted({e for _, e in keys if e is not None})
        rows = [tensor(np.asarray(self.checkpoint[keys[projection, e]])) for e in experts]
        return torch.stack(rows) if experts else tensor(np.asarray(self.checkpoint[keys[projection, None]]))

    def _name(self, key: str) -> str:
        if not self.checkpoint.info(key).quantized:
            return key
        found = expert_names.parse(key)
        return key if found is not None and found.expert is None else f"{key}.weight"
