"""ggml's K-quants: super-blocks of 256 values, small-integer scales (and minima) under float16 ones.

    q3_K, q6_K         value = (code − 2^(bits−1)) · sc · d
    q2_K, q4_K, q5_K   value = code · sc · d − mn · dmin
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
        Format("ggml_k", "q2_K", 2, "uint", 16, "u4", minimum="u4", super_size=256),
        Format("ggml_k", "q3_K", 3, "int", 16, "i6", super_size=256),
        Format("ggml_k", "q4_K", 4, "uint", 32, "u6", minimum="u6", super_size=256),
        Format("ggml_k", "q5_K", 5, "uint", 32, "u6", minimum="u6", super_size=256),
        Format("ggml_k", "q6_K", 6, "int", 16, "i8", super_size=256),
    )
}


class GGMLK(Family):
    """Q2_K, Q3_K, Q4_K, Q5_K, Q6_K."""

    name = "ggml_k"
    words = tuple(_WORDS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        return fixed(_WORDS[word], group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], fmt.super_size)
        return super().geometry(fmt, shape)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError
