"""Importance matrices from calibration text: the squares of every input of a model's layers,
collected one layer at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import torch

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..conversion.importance import ImportanceMatrix, InputSquares, gguf_modules
from ..gguf_models.to_gguf import GGUFView
from ..gguf_models.view import ModelView
from .matrices import layer_matrices
from .running import first_inputs, run_layer
from .sources import layer_source
from .statistics import InputCollector, InputStatistics
from .walk import multiplying, token_sequences

Progress = Callable[[int, int, str], None]


def collect_importance(
    checkpoint: Checkpoint,
    text: str | Path,
    *,
    context: int = 512,
    sequences: int = 32,
    device: str = "auto",
    progress: Progress | None = None,
) -> ImportanceMatrix:
    """Σ x² of each input of the layers' weights over `text`, under the names of a GGUF.

    checkpoint  dense or packed; packed layers are decoded, one at a time
    text        path of a UTF-8 file
    context     tokens of a sequence, `sequences` of which are taken evenly from the text
    device      where the model runs; "auto" takes a GPU if there is one

    Embedding and head are not included, as by default in llama.cpp. An expert that no token reached
    has a count of 0. Raises CalibrationError for a text that is too short or a model without
    tokenizer, UnsupportedError for a model without a table of GGUF names.
    """
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    view = ModelView(checkpoint) if isinstance(checkpoint, GGUFCheckpoint) else GGUFView(checkpoint, names_only=True)
    modules = gguf_modules(checkpoint if isinstance(checkpoint, GGUFCheckpoint) else view)
    source = layer_source(checkpoint, where)
    ids = token_sequences(source.tokenizer, Path(text), context, sequences)
    found: dict[str, dict[int, InputStatistics | None]] = defaultdict(dict)
    widths: dict[str, int] = {}
    with torch.no_grad():
        hidden, arguments = first_inputs(source, ids, where)
        for number in range(source.count):
            if progress is not None:
                progress(number, source.count, f"layer {number}")
            layer, prefix = source.layer(number), f"{source.prefix}.{number}"
            with InputCollector(layer, *multiplying(layer), squares_only=True) as inputs:
                for i, h in enumerate(hidden):
                    hidden[i] = run_layer(layer, h, arguments[number])
                    inputs.sequence_done()
            for matrix in layer_matrices(layer, prefix, source.slots, lambda key: checkpoint.info(key).shape[-2]):
                name, in_stack = modules[matrix.key.removesuffix(".weight")]
                found[name][matrix.expert if matrix.expert is not None else in_stack or 0] = inputs.of(matrix.input)
                widths[name] = matrix.view.shape[1]
            source.drop(number)
    if progress is not None:
        progress(source.count, source.count, "")
    entries = {name: _entry(each, widths[name]) for name, each in found.items()}
    for name, order in view.input_orders().items():
        if name in entries:
            entries[name] = replace(entries[name], sums=entries[name].sums[:, np.argsort(order)])
    return ImportanceMatrix(entries, (Path(text).name,), len(ids), context)


def _entry(each: dict[int, InputStatistics | None], k: int) -> InputSquares:
    """The squares of a weight, of each matrix of a stack."""
    sums, counts = np.zeros((max(each) + 1, k), np.float32), np.zeros(max(each) + 1, np.float32)
    for expert, seen in each.items():
        if seen is not None and seen.squares is not None:
            sums[expert], counts[expert] = seen.squares.cpu().numpy(), seen.tokens
    return InputSquares(sums, counts)
