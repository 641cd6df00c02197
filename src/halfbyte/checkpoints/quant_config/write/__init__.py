"""Quantization configs as the producers' readers want them: the inverse of `schemes.py`, one producer a file.

written = CONFIGS["mlx"](packed, dense)         from what was written, for all modules at once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import awq, compressed_tensors, gpt_oss, gptq, mlx, modelopt, native
from .common import ConfigFiles, Dense, Packed

CONFIGS: dict[str, Callable[[Sequence[Packed], Sequence[Dense]], ConfigFiles]] = {
    "gptq": gptq.describe,
    "awq-gemm": awq.describe,
    "compressed-tensors": compressed_tensors.describe,
    "modelopt": modelopt.describe,
    "mlx": mlx.describe,
    "gpt-oss": gpt_oss.describe,
    "halfbyte": native.describe,
}
"""Layout -> what describes a checkpoint of it."""

__all__ = ["CONFIGS", "ConfigFiles", "Dense", "Packed"]
