"""The architecture of a checkpoint on torch's meta device, and the whole model of a GGUF file.

model = empty_model(config, torch.float32)              parameters without memory, buffers computed
model = model_of_gguf(checkpoint, config, None, "cpu")  every tensor of the file in its module
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import UnsupportedError
from ..gguf_models.config import architecture_of, config_of
from ..gguf_models.keys import Keys
from ..gguf_models.tokenizer import end_of_turn_ids
from .fill.gguf import fill

POOLED = ("bert", "jina_embeddings_v3")
"""Model types whose encoder has a pooler where its checkpoint has one; a GGUF file leaves it out."""


def config_of_gguf(checkpoint: GGUFCheckpoint) -> Any:
    """The transformers configuration of a GGUF file that `load_model` serves; raises what it
    raises.
    """
    if checkpoint.metadata.get("general.architecture") == "clip":
        checkpoint.check("load_model")
    config = config_of(checkpoint)
    checkpoint.check("load_model")
    return config


def model_of_gguf(
    checkpoint: GGUFCheckpoint,
    config: Any,
    dtype: torch.dtype | None,
    device: str,
    activations: str = "exact",
    backend: str | None = None,
    tokens: Sequence[str] | None = None,
) -> Any:
    """The model of a GGUF file and its configuration, its weights packed; the others as for
    `load_model`.

    tokens  the texts of its tokens, where the caller has them
    """
    architecture = architecture_of(checkpoint)
    given = architecture.parameters(Keys(checkpoint), config.to_dict())
    model = empty_model(config, default_dtype(dtype, device, config), given.__contains__, architecture.task)
    fill(model, checkpoint, architecture, activations, backend, device)
    ends = end_of_turn_ids(checkpoint.metadata, tokens)
    if ends and getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = ends
    return model


def default_dtype(dtype: torch.dtype | None, device: str, config: Any) -> torch.dtype:
    """The dtype asked for; without one, float32 on the CPU and the configuration's (else bfloat16)
    elsewhere.
    """
    if dtype is not None:
        return dtype
    stated = getattr(config, "dtype", None)
    return torch.float32 if device == "cpu" else stated if isinstance(stated, torch.dtype) else torch.bfloat16


def empty_model(config: Any, dtype: torch.dtype, filled: Callable[[str], bool] = lambda name: False, task: str = "text") -> Any:
    """The architecture without weights: parameters on the meta device, buffers computed.

    filled   whether the checkpoint has a buffer's values, so that nothing needs to compute it
    task     "text", "encoder" or "encoder-decoder" (`gguf_models.Architecture.task`)

    Raises UnsupportedError when transformers cannot build it, or the architecture does not say how
    to compute a buffer.
    """
    try:
        with torch.device("meta"):
            pooled = task == "encoder" and config.model_type in POOLED
            options = {"add_pooling_layer": filled("pooler.dense.weight") or filled("pooler.dense")} if pooled else {}
            model = _class_for(config, task).from_config(config, dtype=dtype, **options)
    except ImportError as error:
        text = config.get_text_config(decoder=True)
        if text is config:
            raise
        package = getattr(error, "name", None) or _package_of(str(error))
        warnings.warn(
            f"[load_model] {config.model_type} without its other towers, which need {package}: the language model is loaded",
            RuntimeWarning,
            stacklevel=3,
        )
        return empty_model(text, dtype, filled, task)
    except Exception as error:  # whatever its code meets in a configuration that makes no sense
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UnsupportedError(
            f"[load_model] transformers makes no causal language model of this {config.model_type} configuration ({why})"
        ) from error
    missing: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        missing[name] = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
        for n in missing[name]:
            buffer = getattr(module, n)
            unset = torch.nan if buffer.is_floating_point() else 0
            setattr(module, n, torch.full_like(buffer, unset, device="cpu"))
    for name, names in missing.items():
        module = model.get_submodule(name)
        # Some models compute a layer's buffer where they initialize the model around it.
        for path in _with_ancestors(name) if names else ():
            owner = next(m for p in _with_ancestors(path) if hasattr(m := model.get_submodule(p), "_init_weights"))
            owner._init_weights(model.get_submodule(path))
            if not any(bool(getattr(module, n).isnan().any()) for n in names):
                break
        for n in names:
            if bool(getattr(module, n).isnan().any()) and not filled(f"{name}.{n}"):
                raise UnsupportedError(f"[load_model] {type(model).__name__} does not say how to compute its buffer {name}.{n}")
    return model


def _class_for(config: Any, task: str) -> Any:
    """transformers' class that builds a model of this configuration for a task. For text it is the
    causal one, or for a multimodal model without one the whole, whose vision tower then is loaded
    too.
    """
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForTextEncoding,
    )

    from .compat import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if task == "encoder":
        return AutoModelForTextEncoding if config.model_type == "t5" else AutoModel  # half of T5
    if task == "encoder-decoder":
        return AutoModelForSeq2SeqLM
    kind = type(config)
    whole = kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def _package_of(message: str) -> str:
    """The package that an ImportError of transformers names."""
    found = re.search(r"requires the (\w+) library", message)
    return found[1] if found else "a package that is not installed"


def _with_ancestors(path: str) -> list[str]:
    """A module's path, and those of the modules around it, the nearest first."""
    pieces = path.split(".") if path else []
    return [".".join(pieces[:n]) for n in range(len(pieces), -1, -1)]
