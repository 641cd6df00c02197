"""ggml's K-quants: super-blocks of 256 values, small-integer scales (and minima) of their groups
under float16 ones.

    q3_K, q6_K         value = (code − 2^(bits−1)) · sc · d
    q2_K, q4_K, q5_K   value = code · sc · d − mn · dmin

Encoding has two levels. First each group gets a real scale (and a minimum that is not negative), by
the rule `search` (default) or `extreme` of `scale_search.py`. Then d = largest group scale /
largest small integer, in float16; sc, mn and the codes are rounded to nearest in that order, each
with the rounded values before it. llama.cpp searches with weights of its own: its bytes are not
reproduced. How a block's bytes hold these numbers is in `layouts/gguf/blocks.py`; the
value is computed as every format's is, in `formats/decode.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack
from ...spec import SMALL_SCALES, Format
from ..base import Family, PartSpec
from .scale_search import (
    F32,
    ends,
    extreme,
    float16_reaching,
    in_chunks,
    line_search,
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
    codecs = tuple(_CODECS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        return require_fixed(_CODECS[codec], group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], fmt.super_size)
        return super().geometry(fmt, shape)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        """Parts of finite x [*lead, n, k]. `scale` is "search" or "extreme"."""
        search, one = wants_search(fmt, policy), _with_minimum if fmt.minimum else encode_super
        return in_chunks(x, fmt, fmt.super_size, lambda rows: one(rows, fmt, search))


def encode_super(x: F32, fmt: Format, search: bool) -> dict[str, NDArray[Any]]:
    """Rows [rows, k] -> parts of a format with signed small scales: q3_K, q6_K, iq4_xs."""
    groups = x.reshape(len(x), -1, fmt.group_size)
    s = scale_search(groups, fmt.element, fmt.bits) if search else scale_extreme(groups, fmt.element, fmt.bits)
    sc, d, step = _second_level(s, fmt, fmt.scale)
    codes = nearest(safe_divide(groups.astype(np.float64), step), fmt.element, fmt.bits)
    return {"codes": pack(codes.reshape(x.shape), fmt.bits), "scales": sc, "super_scales": d}


def _with_minimum(x: F32, fmt: Format, search: bool) -> dict[str, NDArray[Any]]:
    """Rows [rows, k] -> parts of q2_K, q4_K, q5_K."""
    groups, top = x.reshape(len(x), -1, fmt.group_size), (1 << fmt.bits) - 1
    if search:
        s, low = line_search(groups, top, below_zero=True)
    else:
        low, span = ends(groups, below_zero=True)
        s = span / np.float32(top)
    sc, d, step = _second_level(s, fmt, fmt.scale)
    # With a scale of 0 the value is the minimum alone: the group's mean, or 0 if that is positive.
    low = np.where(step == 0, np.minimum(groups.mean(axis=-1, keepdims=True), 0), low)
    mn, dmin, floor = _second_level(-low, fmt, fmt.minimum)
    codes = nearest(safe_divide(groups + floor, step), fmt.element, fmt.bits)
    packed = pack(codes.reshape(x.shape), fmt.bits)
    return {"codes": packed, "scales": sc, "mins": mn, "super_scales": d, "super_mins": dmin}


def _second_level(s: F32, fmt: Format, kind: str) -> tuple[NDArray[Any], NDArray[np.float16], NDArray[np.float64]]:
    """Group scales s [rows, G, 1] -> small integers [rows, G], float16 [rows, k/256], and their
    product, float64 [rows, G, 1].
    """
    low, high = SMALL_SCALES[kind]
    per_super = s.reshape(len(s), -1, fmt.super_size // fmt.group_size)
    largest = extreme(per_super)
    d = float16_reaching(largest / (low or high), largest, abs(low or high), fmt)
    exact = d.astype(np.float64)
    small = np.clip(np.rint(safe_divide(per_super.astype(np.float64), exact)), low, high)
    stored: NDArray[Any] = small.astype(np.int8 if low else np.uint8).reshape(len(s), -1)
    return stored, d.reshape(len(s), -1), (small * exact).reshape(s.shape)
