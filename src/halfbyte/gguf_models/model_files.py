"""The files that a folder of safetensors needs beside its weights, from a GGUF header: tokenizer,
chat template, generation settings.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import CheckpointError, UnsupportedError

NEEDED = "tokenizers is not installed, and tokenizer.json cannot be written without it; pip install 'halfbyte[transformers]'"


def missing_package() -> str:
    """What is not written for lack of a package, and how to get it; "" where nothing is missing."""
    return "" if find_spec("tokenizers") else NEEDED


def model_files(checkpoint: GGUFCheckpoint) -> tuple[dict[str, Any], list[str]]:
    """(file name -> JSON value, or text for a template; remarks about what the header lacks).

    `config.json` is not among them: it also describes the weights that are written.
    """
    if why := missing_package():
        return {}, [f"no tokenizer is written: {why}"]
    from .tokenizer import SCANNED, described, end_of_turn_ids

    metadata = checkpoint.metadata
    if "tokenizer.ggml.model" not in metadata:
        return {}, ["no tokenizer is written: the GGUF has none"]
    try:
        backend, settings = described(checkpoint)
    except (UnsupportedError, CheckpointError) as error:
        return {}, [f"no tokenizer is written: {error}"]
    if (kind := metadata["tokenizer.ggml.model"]) in SCANNED:
        return {}, [f"no tokenizer is written: tokenizer.json cannot state how a {kind!r} vocabulary cuts text"]
    files: dict[str, Any] = {
        "tokenizer.json": json.loads(backend.to_str()),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **settings},
    }
    template = metadata.typed("tokenizer.chat_template", "string")
    if template:
        files["chat_template.jinja"] = template
    generation: dict[str, Any] = {}
    for name, word in (("bos", "bos"), ("padding", "pad")):
        index = metadata.typed(f"tokenizer.ggml.{name}_token_id", "integer")
        if index is not None:
            generation[f"{word}_token_id"] = index
    ends = end_of_turn_ids(metadata)
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {**files, "generation_config.json": generation}, []
