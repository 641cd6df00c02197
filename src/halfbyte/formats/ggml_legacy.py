"""ggml's plain block formats: 32 values, one float16 scale, perhaps a float16 offset.

    q4_0, q5_0, q8_0   value = (code − 2^(bits−1)) · d
    q4_1, q5_1         value = code · d + m
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..spec import Format
from .base import Family, PartSpec
from .ggml_types import check_blocks, fixed

_WORDS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("ggml_legacy", "q4_0", 4, "int", 32, "float16"),
        Format("ggml_legacy", "q4_1", 4, "uint", 32, "float16", bias=True),
        Format("ggml_legacy", "q5_0", 5, "int", 32, "float16"),
        Format("ggml_legacy", "q5_1", 5, "uint", 32, "float16", bias=True),
        Format("ggml_legacy", "q8_0", 8, "int", 32, "float16"),
    )
}


class GGMLLegacy(Family):
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""

    name = "ggml_legacy"
    words = tuple(_WORDS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {"gguf": {}}

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        return fixed(_WORDS[word], group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], 32)
        return super().geometry(fmt, shape)

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError
