"""Stretched rotations, of which a GGUF stores a number for each frequency: Llama 3's, which a
configuration describes by four numbers, Phi 3's long and short ones, and Gemma 4's, which end a
rotation after part of a head.

    divisor of frequency i = 1 / ((1 − s) / factor + s)
    s = clip((L / w − low) / (high − low), 0, 1),   w = 2π · theta^(2i / d)

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
from .keys import YARN_BORDERS
from .names import LONG_ROTATION, ROTATION_FACTORS

LOW, HIGH = 1.0, 4.0
"""The borders of every published model."""


def divisors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """The divisors of a `llama3` rotation, float32 [head_dim / 2]."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / float(rope["factor"]) + smooth), np.float32)


def stored_factors(rope: Mapping[str, Any], head_dim: int) -> dict[str, NDArray[np.float32]]:
    """The tensors that a file has of a rotation: name -> factors, none for most."""
    kind = rope.get("rope_type")
    if kind == "llama3":
        return {ROTATION_FACTORS: divisors(rope, int(head_dim * float(rope.get("partial_rotary_factor") or 1)))}
    if kind == "longrope":
        factors = (rope["long_factor"], rope["short_factor"])
        return {name: np.asarray(values, np.float32) for name, values in zip(LONG_ROTATION, factors, strict=True)}
    if kind == "proportional":
        rotated = int(float(rope.get("partial_rotary_factor", 1.0)) * head_dim // 2)
        return {ROTATION_FACTORS: np.where(np.arange(head_dim // 2) < rotated, 1, 1e30).astype(np.float32)}
    return {}


def with_defaults(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rotation with what transformers takes where nothing is stated: for `yarn` the borders of
    the ramp, whether they are rounded, and the factor of queries and keys, which `mscale` gives.
    """
    stated = {k: v for k, v in rope.items() if v is not None and k != "mscale"}
    if "rope_type" not in rope:
        return stated
    stated.setdefault("mscale_all_dim", 0)
    if rope["rope_type"] != "yarn" or not rope.get("factor"):
        return stated
    log = math.log(max(rope["factor"], 1))

    def growth(scale: float) -> float:
        return 0.1 * float(np.float32(scale)) * log + 1

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    attention = growth(above) / growth(below) if above and below else growth(1)
    return {**YARN_BORDERS, "truncate": True, "attention_factor": attention} | stated


def llama3_rope(checkpoint: GGUFCheckpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration whose divisors a file has. UnsupportedError where no `llama3` rotation has
    them.
    """
    stored = checkpoint[ROTATION_FACTORS]
    assert not isinstance(stored, QTensor)
    given = stored.astype(np.float64)
    head_dim = int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])
    theta = float(settings["rope_parameters"]["rope_theta"])
    factor = float(given.max())
    between = np.flatnonzero((given > 1) & (given < factor))
    context = 8192.0
    if len(between):
        i = int(between[len(between) // 2])
        smooth = (1 / given[i] - 1 / factor) / (1 - 1 / factor)
        context = 2 * math.pi * theta ** (2 * i / head_dim) * (smooth * (HIGH - LOW) + LOW)
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": round(context),
    }
    if given.shape != (head_dim // 2,) or factor <= 1 or not np.allclose(divisors(rope, head_dim), given, rtol=1e-4, atol=0):
        raise UnsupportedError(
            f"[gguf] {checkpoint.path}: '{ROTATION_FACTORS}' stretches the rotation in a way that no configuration of "
            "transformers describes"
        )
    return rope
