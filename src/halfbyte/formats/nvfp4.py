"""NVFP4: blocks of 16 E2M1 elements, an E4M3 scale a block, and one float32 for the tensor.

| `global_scale` | value | whose |
|---|---|---|
| `multiply` (default) | e2m1(code) · e4m3(scale_byte) · global | ModelOpt, torchao |
| `divide` | e2m1(code) · e4m3(scale_byte) / global | compressed-tensors |
| `amax` | e2m1(code) · e4m3(scale_byte) · global / 2688 | MLX, which stores the tensor's largest magnitude |
| `none` | e2m1(code) · e4m3(scale_byte) | MLX and torchao without a tensor scale |

2688 = 6 · 448, the largest element times the largest scale. Block scales are signed E4M3 (0x7F and 0xFF are NaN); GGUF reads
the same byte without its sign and is a format of its own.

Words: `nvfp4`. Group 16. Format option: `global_scale`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..spec import Format
from .base import Family, check_group
from .options import only_options

LEVELS: dict[str, tuple[str, float]] = {
    "multiply": ("multiply", 1.0), "divide": ("divide", 1.0), "amax": ("multiply", 2688.0), "none": ("", 1.0),
}  # fmt: skip
"""global_scale word -> (Format.global_op, Format.divisor)."""


class NVFP4(Family):
    """NVFP4 with one or two levels of scale."""

    name = "nvfp4"
    words = ("nvfp4",)
    format_options = ("global_scale",)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(word, options, self.format_options)
        level = options.get("global_scale", "multiply")
        if level not in LEVELS:
            raise FormatError(f"[format] {word} with global_scale {level!r}; allowed: {', '.join(LEVELS)}")
        group = check_group(word, 16 if group_size is None else group_size, (16,))
        op, divisor = LEVELS[level]
        return Format("nvfp4", word, 4, "e2m1", group, "e4m3", global_op=op, divisor=divisor)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError
