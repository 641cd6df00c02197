"""FP8 with float scales: E4M3 or E5M2 elements under a float number a channel, group, tile or
tensor.

    value = float8(code) · scale

| scope | group_size | rows |
|---|---|---|
| channel (default) | −1 | – |
| group | g | – |
| tile of r × g | g | r |
| tensor | −1 | −1 |

Codecs: `fp8_e4m3`, `fp8_e5m2`. Format options: `scale_dtype` (float32), `rows` (rows that share a
scale, −1 for all of a matrix).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..spec import Format
from .base import Family, check_group
from .options import only_options, rows_option, scale_dtype_option
from .rounding.float_scaled import encode_float_scaled

_CODECS = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


class FP8(Family):
    """E4M3 and E5M2 under float scales of any scope."""

    name = "fp8"
    codecs = tuple(_CODECS)
    format_options = ("scale_dtype", "rows")
    policies: ClassVar[dict[str, dict[str, Any]]] = {
        "compressed-tensors": {"scale_dtype": "input", "compute": "input", "zero_scale": "eps", "zeros": "value"},
    }

    policy_codecs: ClassVar[dict[str, tuple[str, ...]]] = {"compressed-tensors": ("fp8_e4m3",)}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(codec, options, self.format_options)
        group = check_group(codec, -1 if group_size is None else group_size)
        scale = scale_dtype_option(codec, options, "float32")
        return Format("fp8", codec, 8, _CODECS[codec], group, scale, **rows_option(codec, options))

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        return encode_float_scaled(x, fmt, policy)
