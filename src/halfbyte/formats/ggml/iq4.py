"""ggml's non-linear 4-bit formats: a table of 16 signed integers, denser near zero.

    iq4_nl   value = table[code] · d                 32 values a block
    iq4_xs   value = table[code] · sc · d            super-blocks of 256

The table runs from −127 to 113 and has no zero: its smallest entry is 1. Encoding: a scale for each
group by the rule `search` (default) or `extreme` of `scale_search.py`; iq4_xs then proceeds as the
K-quants do (`k_quants.py`). llama.cpp's bytes are not reproduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack
from ...spec import Format
from ..base import Family, PartSpec
from .k_quants import encode_super
from .scale_search import (
    F32,
    extreme,
    float16_reaching,
    in_chunks,
    nearest,
    safe_divide,
    scale_extreme,
    scale_search,
    wants_search,
)
from .types import check_blocks, require_fixed

_CODECS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("ggml_iq4", "iq4_nl", 4, "iq4_nl", 32, "float16"),
        Format("ggml_iq4", "iq4_xs", 4, "iq4_nl", 32, "i6", super_size=256),
    )
}


class GGMLIQ4(Family):
    """IQ4_NL, IQ4_XS."""

    name = "ggml_iq4"
    codecs = tuple(_CODECS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        return require_fixed(_CODECS[codec], group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], fmt.super_size or fmt.group_size)
        return super().geometry(fmt, shape)

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        """Parts of finite x [*lead, n, k]. `scale` is "search" or "extreme"."""
        search, one = wants_search(fmt, policy), encode_super if fmt.super_size else _encode_nl
        return in_chunks(x, fmt, fmt.super_size or 32, lambda rows: one(rows, fmt, search))


def _encode_nl(x: F32, fmt: Format, search: bool) -> dict[str, NDArray[Any]]:
    """Rows [rows, k] -> codes and scales of iq4_nl."""
    groups = x.reshape(len(x), -1, fmt.group_size)
    s = scale_search(groups, "iq4_nl", 4) if search else scale_extreme(groups, "iq4_nl", 4)
    d = float16_reaching(s, extreme(groups), 127, fmt)
    codes = nearest(safe_divide(groups.astype(np.float64), d.astype(np.float64)), "iq4_nl", 4)
    return {"codes": pack(codes.reshape(x.shape), 4), "scales": d.reshape(len(x), -1)}
