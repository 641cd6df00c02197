"""A checkpoint as a transformers model whose matrices stay packed.

    model, tokenizer = load_model("model.gguf")

The architecture is built on torch's meta device, so no dense weight is ever allocated; then each quantized matrix becomes a
packed module over `ops.linear` or `ops.embedding`, and each dense tensor a parameter. A tied head shares the embedding's bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..backends import X_DTYPES
from ..checkpoints import open as open_checkpoint
from ..checkpoints.gguf_checkpoint import GGUFCheckpoint
from ..errors import FormatError, UnsupportedError
from ..torch.modules import packed_modules
from .gguf_config import architecture_of, config_of
from .gguf_fill import fill
from .gguf_tokenizer import tokenizer_of


@dataclass(frozen=True)
class Size:
    """Bytes and weights of a model, a shared tensor counted once."""

    nbytes: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 0.0


def load_model(
    path: str | Path, *, activations: str = "exact", backend: str | None = None, dtype: str = "float32"
) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file, the model ready to run on the CPU.

    path         a .gguf file, any shard of a split one, or a folder that holds one model
    activations  "exact" or "int8", for every packed matrix
    backend      None picks the best one that serves
    dtype        what activations and dense parameters are in: float32, bfloat16 or float16

    Raises UnsupportedError for an architecture or variant that transformers cannot build from the file, CheckpointError for a
    file that is damaged or lacks a tensor.
    """
    if dtype not in X_DTYPES:
        raise FormatError(f"[load_model] dtype={dtype!r}; allowed: {', '.join(X_DTYPES)}")
    with _gguf(path) as checkpoint:
        config = config_of(checkpoint)
        tokenizer = tokenizer_of(checkpoint)
        checkpoint.file.release_header()  # the vocabulary's pages
        model = empty_model(config, getattr(torch, dtype))
        fill(model, checkpoint, architecture_of(checkpoint), activations, backend)
    return model.eval().requires_grad_(False), tokenizer


def import_model_code(path: str | Path) -> None:
    """Imports what `load_model` will need for this file, so that its time can be told from the model's."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with _gguf(path) as checkpoint:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config_of(checkpoint))]


def _gguf(path: str | Path) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(path)
    if not isinstance(checkpoint, GGUFCheckpoint):
        checkpoint.close()
        raise UnsupportedError(
            f"[load_model] {path} is a {checkpoint.format} checkpoint; models are built from GGUF files. "
            "Its weights can be opened, converted and multiplied one by one"
        )
    return checkpoint


def model_size(model: nn.Module) -> Size:
    """Bytes and weights held by a model's packed modules and parameters."""
    packed = {id(m.weight): m.weight for m in packed_modules(model).values()}.values()
    parameters = list(model.parameters())
    nbytes = sum(w.nbytes for w in packed) + sum(p.numel() * p.element_size() for p in parameters)
    return Size(nbytes, sum(math.prod(w.shape) for w in packed) + sum(p.numel() for p in parameters))


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The architecture without weights: parameters on the meta device, buffers computed.

    Raises UnsupportedError when the architecture does not say how to compute a buffer.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in model.named_modules():
        names = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
        for n in names:
            buffer = getattr(module, n)
            unset = torch.nan if buffer.is_floating_point() else 0
            setattr(module, n, torch.full_like(buffer, unset, device="cpu"))
        if names:
            model._init_weights(module)
        for n in names:
            if bool(getattr(module, n).isnan().any()):
                raise UnsupportedError(f"[load_model] {type(model).__name__} does not say how to compute its buffer {name}.{n}")
    return model
