"""FP4 with float group scales: E2M1 elements under a float16, bfloat16 or float32 number a group
(the Marlin-style FP4).

    value = e2m1(code) · scale

Codecs: `fp4`. Any group size, −1 for the whole row; 32 unless given. Format option: `scale_dtype`
(float16).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import Format
from .base import Family, check_group
from .options import only_options, scale_dtype_option
from .rounding.float_scaled import encode_float_scaled


class FP4(Family):
    """E2M1 under float group scales."""

    name = "fp4"
    codecs = ("fp4",)
    format_options = ("scale_dtype",)

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(codec, options, self.format_options)
        group = check_group(codec, 32 if group_size is None else group_size)
        return Format("fp4", codec, 4, "e2m1", group, scale_dtype_option(codec, options, "float16"))

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        return encode_float_scaled(x, fmt, policy)
