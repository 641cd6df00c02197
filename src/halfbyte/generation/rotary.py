"""Angles of rotary position embeddings in NumPy, after the formulas of transformers'
`modeling_rope_utils` (RoPE: arXiv 2104.09864; YaRN: arXiv 2309.00071).

    angle(position, i) = position · frequency[i],   frequency[i] = theta^(−2i / d), stretched
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gguf_models.keys import YARN_BORDERS
from ..gguf_models.rotation import divisors as llama3_divisors

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Rotation:
    """Frequencies [d / 2], and the factor of cosines and sines (YaRN's)."""

    frequencies: F32
    factor: float = 1.0

    def table(self, start: int, count: int) -> tuple[F32, F32]:
        """Cosines and sines [count, d] of the positions from `start`; both halves of a row are the
        same.
        """
        angles = np.arange(start, start + count, dtype=np.float32)[:, None] * self.frequencies
        angles = np.concatenate([angles, angles], axis=1)
        factor = np.float32(self.factor)
        return np.cos(angles) * factor, np.sin(angles) * factor


def rotation_of(rope: Mapping[str, Any], head_dim: int, context: int, stored: F32 | None = None) -> Rotation | None:
    """The rotation of a configuration's `rope_parameters`; None for a kind that is not computed.

    context  the model's longest text, which YaRN's factor is inferred from where none is given
    stored   divisors of the frequencies, of a file that has them
    """
    kind, theta = rope.get("rope_type", "default"), float(rope["rope_theta"])
    # Powers rounded from float64: those of float32 differ from one machine and library to another.
    powers = [theta**exponent for exponent in (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).tolist()]
    plain = np.float32(1) / np.array(powers, np.float32)
    if stored is not None:
        return Rotation(np.asarray(plain / stored, np.float32))
    if kind == "default":
        return Rotation(plain)
    if kind == "linear":
        return Rotation(plain / np.float32(rope["factor"]))
    if kind == "llama3":
        return Rotation(np.asarray(plain / llama3_divisors(rope, head_dim), np.float32))
    if kind == "yarn":
        return _yarn(rope, plain, head_dim, context)
    return None


def _yarn(rope: Mapping[str, Any], plain: F32, head_dim: int, context: int) -> Rotation:
    """Low frequencies are divided by the factor, high ones stay, those between are mixed."""
    theta, original = float(rope["rope_theta"]), int(rope.get("original_max_position_embeddings") or context)
    factor = float(rope.get("factor") or context / original)

    def bound(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(bound(float(rope.get("beta_fast") or YARN_BORDERS["beta_fast"]))), 0)
    high = min(math.ceil(bound(float(rope.get("beta_slow") or YARN_BORDERS["beta_slow"]))), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low if high > low else 0.001), 0, 1)
    kept = np.float32(1) - ramp.astype(np.float32)
    scale = rope.get("attention_factor")
    return Rotation(
        np.asarray(plain / np.float32(factor) * (1 - kept) + plain * kept, np.float32),
        float(scale) if scale else (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    )
