"""Llama 3's stretched rotation: the four numbers of a configuration, and the divisors of each
frequency that a GGUF stores instead.

    divisor of frequency i = 1 / ((1 − s) / factor + s),  s = clip((L / w − low) / (high − low), 0,
    1),  w = 2π · theta^(2i / d)

after `rope_freqs` of llama.cpp's converter and transformers' `llama3` rotation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import UnsupportedError
from ..tensor.qtensor import QTensor
from .names import ROTATION_FACTORS

LOW, HIGH = 1.0, 4.0
"""The borders of every published model."""


def divisors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """The divisors of a `llama3` rotation, float32 [head_dim / 2]."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / float(rope["factor"]) + smooth), np.float32)


def llama3_rope(checkpoint: GGUFCheckpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration whose divisors a file has. UnsupportedError where no `llama3` rotation has
    them.
    """
    stored = checkpoint[ROTATION_FACTORS]
    assert not isinstance(stored, QTensor)
    given, head_dim = stored.astype(np.float64), int(settings["head_dim"])
    theta = float(settings["rope_parameters"]["rope_theta"])
    factor = float(given.max())
    between = np.flatnonzero((given > 1) & (given < factor))
    context = 8192.0
    if len(between):
        i = int(between[len(between) // 2])
        smooth = (1 / given[i] - 1 / factor) / (1 - 1 / factor)
        context = 2 * math.pi * theta ** (2 * i / head_dim) * (smooth * (HIGH - LOW) + LOW)
    rope = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": round(context),
    }  # fmt: skip
    if given.shape != (head_dim // 2,) or factor <= 1 or not np.allclose(divisors(rope, head_dim), given, rtol=1e-4, atol=0):
        raise UnsupportedError(
            f"[convert] {checkpoint.path}: '{ROTATION_FACTORS}' stretches the rotation in a way that no configuration of "
            "transformers describes"
        )
    return rope
