"""A rotated model (`conversion.rotated`) beside the model itself, before anything is rounded."""

from __future__ import annotations

import numpy as np

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..conversion.rotated import Rotated
from ..errors import UnsupportedError
from .running import first_inputs, run_layer, without_layers
from .sources import layer_source

TOKENS = 64
TOLERANCE = 1e-3
"""Relative to the largest logit: float32 sums in another order differ by about 1e-6."""


def checked_rotation(checkpoint: Checkpoint, seed: int = 0) -> Rotated:
    """The rotated checkpoint. UnsupportedError where its logits, in float32 on random tokens, are
    not those of the checkpoint. One layer is in memory at a time.
    """
    rotated = Rotated(checkpoint, seed)
    before, after = _logits(checkpoint), _logits(Rotated(checkpoint, seed, "float32"))
    error = float((after - before).abs().max() / before.abs().max())
    if not error <= TOLERANCE:
        raise UnsupportedError(
            f"[quantize] {checkpoint.path}: --rotate would change what the model computes: logits by {error:.2g} of the largest, "
            f"{TOLERANCE:g} is allowed; quantize without --rotate"
        )
    return rotated


def _logits(checkpoint: Checkpoint) -> Tensor:
    source = layer_source(checkpoint, "cpu")
    ids = np.random.default_rng(0).integers(0, source.model.config.vocab_size, TOKENS).tolist()
    with torch.no_grad():
        (hidden,), arguments = first_inputs(source, [ids], "cpu")
        for number in range(source.count):
            hidden = run_layer(source.layer(number), hidden, arguments[number])
            source.drop(number)
        with without_layers(source) as run:
            return run(torch.tensor([ids], device=hidden.device), hidden)[0].float()
