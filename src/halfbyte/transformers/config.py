"""The transformers configuration and generation settings that are beside a checkpoint's tensors.

Nothing that a checkpoint names is executed or fetched: custom code (`auto_map`), kernels of the hub
(`attn_implementation`) are removed and reported, and numbers are compared with the tensors before a
model is built from them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ..checkpoints import Checkpoint
from ..checkpoints.config_numbers import impossible_number
from ..checkpoints.io.bounded_json import check_plain_files, decoded_floats
from ..conversion.to_dense import QUANTIZATION_KEYS
from ..errors import CheckpointError, UnsupportedError, summary_of
from ..generation.native_tokenizer import folder_of


def config_of_folder(checkpoint: Checkpoint) -> Any:
    """The configuration, without what it says of quantization: the tensors are read here, not by
    transformers.

    Raises CheckpointError without a config.json, UnsupportedError for a model type that
    transformers does not have.
    """
    import transformers
    from transformers import AutoConfig

    from .compat import CONFIG_MAPPING

    raw = plain_config(
        {k: v for k, v in checkpoint.config.items() if k not in QUANTIZATION_KEYS}, f"[load_model] {checkpoint.path}"
    )
    kind = raw.pop("model_type", None)
    if not kind:
        raise CheckpointError(
            f"[load_model] {checkpoint.path}: no config.json with a model_type; a model cannot be built from tensors alone"
        )
    if not isinstance(kind, str):
        raise CheckpointError(f"[load_model] {checkpoint.path}: config.json has model_type {kind!r}; a string is allowed")
    for part in [v for v in raw.values() if isinstance(v, dict)]:
        for key in QUANTIZATION_KEYS:
            part.pop(key, None)
    check_numbers(checkpoint, raw)
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"[load_model] {checkpoint.path}: model_type {kind!r} is not one that transformers {transformers.__version__} builds"
        )
    try:
        config = AutoConfig.for_model(kind, **raw)
    except Exception as error:  # its checks raise errors of many kinds
        raise CheckpointError(
            f"[load_model] {checkpoint.path}: its config.json describes no {kind}: {summary_of(error)}"
        ) from error
    config._name_or_path = str(folder_of(checkpoint))
    return config


CODE = ("auto_map", "custom_pipelines", "trust_remote_code")
"""Keys by which a configuration names code to run."""
IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal|_autoset)?")
"""Keys that choose implementations; one named `owner/name` is fetched from the hub."""


def plain_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A configuration without what names code or implementations (a warning reports it), its
    encoded floats decoded.
    """
    removed: list[str] = []

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(v) for v in value]
        if not isinstance(value, dict):
            return value
        out = {}
        for key, item in value.items():
            if key in CODE or (IMPLEMENTATIONS.fullmatch(str(key)) and item is not None):
                removed.append(f"{key} = {json.dumps(item)[:80]}")
            else:
                out[key] = clean(item)
        return out

    plain: dict[str, Any] = decoded_floats(clean(dict(config)))
    if removed:
        warnings.warn(
            f"{where}: config.json names code or implementations, which are not used: {', '.join(removed)}",
            RuntimeWarning,
            stacklevel=3,
        )
    return plain


def check_numbers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """CheckpointError for numbers of layers, experts, heads or dimensions that no tensor of the
    checkpoint can have.

    A model is built before its tensors are read, so its size must be known to be theirs.
    """
    infos = list(checkpoint.infos())
    longest = max((d for info in infos for d in info.shape), default=0)
    if found := impossible_number(config, len(infos), longest):
        raise CheckpointError(f"[load_model] {checkpoint.path}: config.json has {found}")


def add_generation_settings(model: Any, checkpoint: Checkpoint) -> None:
    """`generation_config.json` (stop tokens, sampling defaults), where there is one."""
    from transformers import GenerationConfig

    folder = folder_of(checkpoint)
    if (folder / "generation_config.json").exists():
        check_plain_files(folder, "load_model")
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise CheckpointError(
                f"[load_model] {folder}: its generation_config.json cannot be read: {summary_of(error)}"
            ) from error
