"""OCP Microscaling: a block of 32 small elements and one power of two.

    value = element(code) · 2^(scale_byte − 127)

mxfp4 (E2M1), mxfp6_e2m3, mxfp6_e3m2, mxfp8_e4m3, mxfp8_e5m2, mxint8, after the OCP Microscaling Formats (MX) specification 1.0. Block 32 is the
standard; 16 and 64 are non-standard variants, asked for by group size. mxint2 and mxint4 exist in microxcaling only.

Scale rules, with amax the block's largest magnitude, emax the element's largest exponent and M its largest value:

| rule | exponent | used by |
|---|---|---|
| `floor` | floor(log2 amax) − emax | OCP, ggml, microxcaling, torchao FLOOR |
| `even` | the same after amax is rounded to the element's mantissa width | compressed-tensors, torchao EVEN |
| `ceil` | ceil(log2(amax / M)) | MLX, ModelOpt, torchao RCEIL |
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..bits import pack
from ..errors import FormatError
from ..minifloat import MINIFLOATS, e8m0_encode, element_table, round_to_element, scale_table
from ..spec import Format
from .base import Family, check_group, finite, grouped

_WORDS = {
    "mxfp4": ("e2m1", 4), "mxfp6_e2m3": ("e2m3", 6), "mxfp6_e3m2": ("e3m2", 6), "mxfp8_e4m3": ("e4m3", 8),
    "mxfp8_e5m2": ("e5m2", 8), "mxint8": ("mxint", 8), "mxint4": ("mxint", 4), "mxint2": ("mxint", 2),
}  # fmt: skip
SCALE_RULES = ("floor", "even", "ceil")


class MX(Family):
    name = "mx"
    words = tuple(_WORDS)
    default_policy = "even"
    policies: ClassVar[dict[str, dict[str, Any]]] = {}  # TODO(formats): producers' policies

    def format(self, word: str, group_size: int | None = None, **options: Any) -> Format:
        if options:
            raise FormatError(f"[format] {word} takes no option {', '.join(options)}")
        element, bits = _WORDS[word]
        group = check_group(word, 32 if group_size is None else group_size, (16, 32, 64))
        return Format("mx", word, bits, element, group, "e8m0")

    def encode(self, x: NDArray[np.floating], fmt: Format, *, scale: str = "even", ties: str = "even") -> dict[str, NDArray[Any]]:
        raise NotImplementedError(MINIFLOATS, pack, e8m0_encode, element_table, round_to_element, scale_table, finite, grouped)
