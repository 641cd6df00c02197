"""ggml's non-linear 4-bit formats: a table of 16 signed integers, denser near zero.

    iq4_nl   value = table[code] · d                 32 values a block
    iq4_xs   value = table[code] · sc · d            super-blocks of 256
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
        Format("ggml_iq4", "iq4_nl", 4, "iq4_nl", 32, "float16"),
        Format("ggml_iq4", "iq4_xs", 4, "iq4_nl", 32, "i6", super_size=256),
    )
}


class GGMLIQ4(Family):
    """IQ4_NL, IQ4_XS."""

    name = "ggml_iq4"
    words = tuple(_WORDS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        return fixed(_WORDS[word], group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], fmt.super_size or fmt.group_size)
        return super().geometry(fmt, shape)

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError
