"""The transformers configuration, tokenizer and generation settings that lie beside a checkpoint's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoints import Checkpoint
from ..conversion.to_dense import QUANTIZATION_KEYS
from ..errors import CheckpointError, UnsupportedError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
"""Any of these says that the folder has a tokenizer."""


def folder_of(checkpoint: Checkpoint) -> Path:
    """The folder a checkpoint's files lie in."""
    return checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent


def config_of_folder(checkpoint: Checkpoint) -> Any:
    """The configuration, without what it says of quantization: the tensors are read here, not by transformers.

    Raises CheckpointError without a config.json, UnsupportedError for a model type that transformers does not have.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import transformers
    from transformers import AutoConfig

    raw = {k: v for k, v in checkpoint.config.items() if k not in QUANTIZATION_KEYS}
    kind = raw.pop("model_type", None)
    if not kind:
        raise CheckpointError(
            f"[load_model] {checkpoint.path}: no config.json with a model_type; a model cannot be built from tensors alone"
        )
    for part in [v for v in raw.values() if isinstance(v, dict)]:
        for key in QUANTIZATION_KEYS:
            part.pop(key, None)
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"[load_model] {checkpoint.path}: model_type {kind!r} is not one that transformers {transformers.__version__} builds"
        )
    try:
        config = AutoConfig.for_model(kind, **raw)
    except Exception as error:  # its checks raise errors of many kinds
        raise CheckpointError(f"[load_model] {checkpoint.path}: its config.json describes no {kind}: {_first(error)}") from error
    config._name_or_path = str(folder_of(checkpoint))
    return config


def tokenizer_of_folder(checkpoint: Checkpoint) -> Any:
    """The tokenizer beside the tensors, None when there is none. CheckpointError for one that cannot be read."""
    from transformers import AutoTokenizer

    folder = folder_of(checkpoint)
    if not any((folder / name).exists() for name in TOKENIZERS):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of JSON, of tokenizers, of a package that it wants
        raise CheckpointError(f"[load_model] {folder}: its tokenizer cannot be read: {_first(error)}") from error


def _first(error: Exception) -> str:
    """The kind of an error and what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def add_generation_settings(model: Any, checkpoint: Checkpoint) -> None:
    """`generation_config.json` (stop tokens, sampling defaults), where there is one."""
    from transformers import GenerationConfig

    folder = folder_of(checkpoint)
    if (folder / "generation_config.json").exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"[load_model] {folder}: its generation_config.json cannot be read: {_first(error)}") from error
