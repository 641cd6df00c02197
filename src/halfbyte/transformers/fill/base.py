"""Load one tensor of a checkpoint into an empty transformers model, as a packed module or as a
parameter.

Shared by GGUF files (`fill.gguf`) and folders of safetensors (`fill.safetensors`), which map keys
to modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

import torch
from torch import nn

from ...checkpoints import Checkpoint
from ...errors import CheckpointError
from ...formats import EXTRA_PARTS
from ...tensor.qtensor import QTensor
from ...torch.composite_linear import CompositeLinear
from ...torch.modules import QEmbedding, QLinear
from ...torch.packed_weight import PackedWeight
from ...torch.state import tensor

MULTIPLIED_BY_THE_MODEL = ("dt_proj",)
"""Names of linear layers whose weight the model multiplies by itself instead of calling them."""
READ_BY_THE_MODEL = {
    "RwkvSelfAttention": "output",
    "RwkvFeedForward": "value",
    "LongcatFlashTopkRouter": "classifier",
    "ProphetNetDecoder": "ngram_embeddings",
}
"""Module -> its layer whose weight the model converts, divides or indexes by itself."""
PLAIN_PRODUCTS = ("FalconLinear",)
"""Linear layers of another forward that is the same product, x · Wᵀ + b."""


class Filling:
    """Fills an empty model from a checkpoint.

    activations, backend, device  as for `load_model`
    """

    def __init__(
        self, model: Any, checkpoint: Checkpoint, *, activations: str = "exact", backend: str | None = None, device: str = "cpu"
    ) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.activations, self.backend, self.device = activations, backend, device

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"[load_model] {self.checkpoint.path}: {message}")

    def module(self, key: str, path: str) -> nn.Module:
        try:
            module: nn.Module = self.model.get_submodule(path)
        except AttributeError:
            have = f"a {type(self.model).__name__} of {self.model.config.get_text_config(decoder=True).num_hidden_layers} layers"
            raise self.error(f"tensor {key!r} belongs to {path}, which {have} does not have") from None
        return module

    def packed(self, key: str) -> QTensor:
        weight = self.checkpoint[key]
        if not isinstance(weight, QTensor):
            raise self.error(f"tensor {key!r} is dense; a packed weight is wanted")
        return weight

    def dense(self, key: str) -> NDArray[Any]:
        array = self.checkpoint[key]
        if isinstance(array, QTensor):
            raise self.error(f"tensor {key!r} is quantized; plain numbers are wanted")
        return array

    def check(self, key: str, shape: tuple[int, ...], have: torch.Tensor) -> None:
        if tuple(have.shape) != shape:
            raise self.error(f"tensor {key!r} is {list(shape)}; the model wants {list(have.shape)}")

    def prepare(self, weight: QTensor) -> PackedWeight:
        packed = PackedWeight.of(weight, device=self.device, backend=self.backend, activations=self.activations)
        packed.dtype = self.model.dtype
        return packed

    def put_packed(self, key: str, weight: QTensor, path: str, leaf: str) -> None:
        """Replace by a packed module the linear or embedding module at `path`.

        A router is a parameter in transformers, not a layer; Mamba multiplies by the weight of its
        `dt_proj` itself; a Linear of another forward (DeepSeek-V4's groups of heads) computes
        another product; an Embedding of another forward (BART's positions) computes other rows;
        JetMoE's experts are a parameter of three axes.
        They are dequantized here, once.
        """
        module = self.module(key, path)
        have = module._parameters.get(leaf)
        if self.has_own_product(path, module) and have is not None and have.ndim in (2, 3):
            self.put_dense(key, weight.dequantize("float32"), path, leaf)
            return
        if leaf != "weight" or not isinstance(module, nn.Linear | nn.Embedding):
            raise self.error(f"tensor {key!r} is quantized, and {path}.{leaf} of a {type(module).__name__} cannot be")
        self.check(key, weight.shape, module.weight)
        if isinstance(module, nn.Linear):
            self.model.set_submodule(path, self.layer(weight, module.bias))
            return
        scale = getattr(module, "scalar_embed_scale", None)
        if scale is None and type(module).forward is not nn.Embedding.forward:
            self.put_dense(key, weight.dequantize("float32"), path, leaf)
            return
        # Rows are decoded exactly whatever the activations are.
        table = self.prepare(weight)
        self.model.set_submodule(path, QEmbedding(table, scale=scale, dtype=self.model.dtype, backend=self.backend))

    def has_own_product(self, path: str, module: nn.Module) -> bool:
        """Whether a module multiplies by its weight in another way than the packed modules do."""
        parent, _, name = path.rpartition(".")
        if READ_BY_THE_MODEL.get(type(self.model.get_submodule(parent)).__name__) == name:
            return True
        if not isinstance(module, nn.Linear):
            return not isinstance(module, nn.Embedding)
        if name in MULTIPLIED_BY_THE_MODEL:
            return True
        return type(module).forward is not nn.Linear.forward and type(module).__name__ not in PLAIN_PRODUCTS

    def layer(self, weight: QTensor, bias: torch.Tensor | None = None) -> QLinear:
        """The module of one weight: dense parts beside packed ones are multiplied separately."""
        if weight.format.extra not in EXTRA_PARTS:
            return self.linear(self.prepare(weight), bias)
        options: dict[str, Any] = {"device": self.device, "backend": self.backend, "activations": self.activations}
        return CompositeLinear(weight, bias, dtype=self.model.dtype, **options)

    def linear(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> QLinear:
        return QLinear(weight, bias, activations=self.activations, backend=self.backend)

    def put_dense(self, key: str, array: NDArray[Any], path: str, leaf: str) -> None:
        """A dense array as a parameter (or buffer) of the dtype the model gives it."""
        module = self.module(key, path)
        have = getattr(module, leaf, None)
        if not isinstance(have, torch.Tensor):
            raise self.error(f"tensor {key!r} belongs to {path}.{leaf}, which a {type(self.model).__name__} does not have")
        self.check(key, array.shape, have)
        value = tensor(array).to(device=self.device, dtype=have.dtype)
        if leaf in module._buffers:
            setattr(module, leaf, value)
        else:
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))

    def tie_head(self) -> None:
        """The head multiplies by the embedding's own weight."""
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if isinstance(table, QEmbedding):
            self.model.set_output_embeddings(self.linear(table.weight, getattr(head, "bias", None)))
        else:
            head.weight = table.weight

    def check_full(self) -> None:
        """CheckpointError naming the parameters that no tensor filled."""
        empty = [name for name, p in self.model.named_parameters() if p.is_meta]
        if empty:
            raise self.error(f"no tensor for {first_names(empty)} of {type(self.model).__name__}")


def first_names(names: list[str]) -> str:
    """The first five of many names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def inputs_first(model: Any) -> dict[str, nn.Module]:
    """GPT-2's linear layers, whose weights are (inputs, outputs), by their paths."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ == "Conv1D"}


def make_linear(model: Any, modules: Mapping[str, nn.Module]) -> None:
    """Puts ordinary linear layers, of the same products, in place of `inputs_first`."""
    for path, module in modules.items():
        k, n = module.weight.shape
        model.set_submodule(path, nn.Linear(k, n, device="meta", dtype=module.weight.dtype))
