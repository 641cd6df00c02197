"""MLX affine: an unsigned code, a scale and a bias a group, both in one float dtype.

    value = code · scale + bias

The scale may be negative: MLX ties the end of the range that lies farther from zero to an exact code.

Words: `affine1` … `affine6`, `affine8`. Any group size, −1 for the whole row (MLX itself has 32, 64 and 128); 64 unless given. Format option: `scale_dtype` (float16), the dtype of scales and biases. Files in which
the two differ are widened by `one_dtype`, which loses nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..exact import bfloat16
from ..spec import Format
from .base import Family, check_group
from .options import only_options, scale_dtype_option

_BITS = (1, 2, 3, 4, 5, 6, 8)


class Affine(Family):
    """MLX affine, 1 to 6 and 8 bits."""

    name = "affine"
    words = tuple(f"affine{b}" for b in _BITS)
    format_options = ("scale_dtype",)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        only_options(word, options, self.format_options)
        group = check_group(word, 64 if group_size is None else group_size)
        return Format("affine", word, int(word[6:]), "uint", group, scale_dtype_option(word, options, "float16"), bias=True)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise NotImplementedError


def one_dtype(scales: NDArray[Any], biases: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales and biases in one dtype that holds both exactly: their own when equal, else float32.

    Raises FormatError for a dtype other than float16, bfloat16 or float32.
    """
    for label, a in (("scales", scales), ("biases", biases)):
        if a.dtype not in (np.dtype(np.float16), np.dtype(np.float32), bfloat16):
            raise FormatError(f"[affine] {label} are {a.dtype}; allowed: float16, bfloat16, float32")
    if scales.dtype == biases.dtype:
        return scales, biases
    return scales.astype(np.float32), biases.astype(np.float32)
