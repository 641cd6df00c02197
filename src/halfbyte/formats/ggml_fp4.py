"""ggml's NVFP4: E2M1 codes, an unsigned E4M3 scale for 16 of them, at times one float32 factor for the tensor.

    value = e2m1(code) · ue4m3(scale_byte) · global

A word of its own, `nvfp4_ue4m3`, because the scale byte is read differently from `nvfp4`'s: the sign bit is ignored, 0x7F is
0 and 0xFF 480. Blocks hold 64 values. The factor is a separate `.scale` tensor in a file; with it `global_op` is "multiply".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..spec import Format
from .base import Family, PartSpec
from .ggml_types import check_blocks, fixed

_NVFP4 = Format("ggml_fp4", "nvfp4_ue4m3", 4, "e2m1", 16, "ue4m3")


class GGMLFP4(Family):
    """NVFP4 with an unsigned E4M3 scale (ggml type 40). MXFP4, type 39, is `mxfp4` of the `mx` family."""

    name = "ggml_fp4"
    words = ("nvfp4_ue4m3",)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, word: str, group_size: int | None = None, *, global_scale: bool = False, **options: Any) -> Format:
        return fixed(_NVFP4, group_size, options).with_(global_op="multiply" if global_scale else "")

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], 64)
        return super().geometry(fmt, shape)

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError
