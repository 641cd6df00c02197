"""ggml's rare types, kept as the file has them and decoded by the gguf package: IQ1, IQ2, IQ3 (codebooks) and TQ1, TQ2 (ternary).

One part, `blocks`, the bytes of the file. `gguf.quants` is imported when a value is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..spec import Format
from .base import Family, PartSpec
from .decode import Parts
from .ggml_types import GGML_BY_WORD, check_blocks, fixed

_BITS = {"iq1_s": 1, "iq1_m": 1, "iq2_xxs": 2, "iq2_xs": 2, "iq2_s": 2, "iq3_xxs": 3, "iq3_s": 3, "tq1_0": 1, "tq2_0": 2}
"""Nominal bits of a code: what the name says. The exact size of a block is in `ggml_types`."""


class GGMLRare(Family):
    """IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, TQ1_0, TQ2_0."""

    name = "ggml_rare"
    words = tuple(_BITS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        return fixed(Format("ggml_rare", word, _BITS[word], "blocks", 256, "none"), group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        *lead, k = shape
        check_blocks(fmt.name, k, 256)
        return {"blocks": PartSpec((*lead, GGML_BY_WORD[fmt.name].row_bytes(k)), np.dtype(np.uint8))}

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def decode(
        self, fmt: Format, shape: tuple[int, ...], parts: Parts, dtype: Any, window: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        raise NotImplementedError

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError
