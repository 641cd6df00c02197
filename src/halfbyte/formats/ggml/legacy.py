"""ggml's one-level block formats: 32 values, one float16 scale, and a float16 offset in some.

    q4_0, q5_0, q8_0   value = (code − 2^(bits−1)) · d
    q4_1, q5_1         value = code · d + m

Scale rules, with t the largest code:

| rule | q4_0, q5_0 | q8_0 | q4_1, q5_1 |
|---|---|---|---|
| `extreme` (ggml) | largest magnitude is −2^(bits−1) · d | largest magnitude / 127 | m smallest, d = (largest − m) / t |
| `search` (default) | least squared error of 19 scales (`scale_search.py`) | the same | the same, with m |

`extreme` gives ggml's reference bytes: codes from the unrounded float32 scale, ties upward (q8_0:
away from zero). Two cases differ: a scale beyond float16, which ggml writes as infinity, is
refused; a group so small that the reciprocal of its scale overflows float32, where ggml's codes are
undefined, gets the codes of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack
from ...spec import Format
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
    scale_search,
    to_float16,
    wants_search,
)
from .types import check_blocks, require_fixed

_CODECS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("ggml_legacy", "q4_0", 4, "int", 32, "float16"),
        Format("ggml_legacy", "q4_1", 4, "uint", 32, "float16", bias=True),
        Format("ggml_legacy", "q5_0", 5, "int", 32, "float16"),
        Format("ggml_legacy", "q5_1", 5, "uint", 32, "float16", bias=True),
        Format("ggml_legacy", "q8_0", 8, "int", 32, "float16"),
    )
}


class GGMLLegacy(Family):
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""

    name = "ggml_legacy"
    codecs = tuple(_CODECS)
    policies: ClassVar[dict[str, dict[str, Any]]] = {"gguf": {"scale": "extreme"}}

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        return require_fixed(_CODECS[codec], group_size, options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        check_blocks(fmt.name, shape[-1], 32)
        return super().geometry(fmt, shape)

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return {}

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        """Parts of finite x [*lead, n, k]. `scale` is a rule of the module's table."""
        search, one = wants_search(fmt, policy), _with_offset if fmt.bias else _around_zero
        return in_chunks(x, fmt, 32, lambda rows: one(rows.reshape(len(rows), -1, 32), fmt, search))


def _around_zero(x: F32, fmt: Format, search: bool) -> dict[str, NDArray[Any]]:
    """Groups [rows, G, 32] -> codes and scales of q4_0, q5_0, q8_0."""
    half = 1 << (fmt.bits - 1)
    if search:
        d = float16_reaching(scale_search(x, "int", fmt.bits), extreme(x), half, fmt)
        codes = nearest(safe_divide(x.astype(np.float64), d.astype(np.float64)), "int", fmt.bits)
        return _parts(codes, fmt, scales=d)
    s = np.abs(x).max(axis=-1, keepdims=True) / 127 if fmt.bits == 8 else extreme(x) / -half
    y = x * safe_divide(np.float32(1), s).astype(np.float32)
    if fmt.bits == 8:
        whole = np.floor(np.abs(y))
        y = np.copysign(whole + (np.abs(y) - whole >= 0.5), y)
        return _parts(y + half, fmt, scales=to_float16(s, fmt))
    return _parts(np.clip(np.trunc(y + np.float32(half + 0.5)), 0, 2 * half - 1), fmt, scales=to_float16(s, fmt))


def _with_offset(x: F32, fmt: Format, search: bool) -> dict[str, NDArray[Any]]:
    """Groups [rows, G, 32] -> codes, scales and biases of q4_1, q5_1."""
    top = (1 << fmt.bits) - 1
    if search:
        s, low = line_search(x, top, below_zero=False)
        d = float16_reaching(s, ends(x, below_zero=False)[1], top, fmt)
        m = to_float16(np.where(d == 0, x.mean(axis=-1, keepdims=True), low), fmt)
        codes = nearest(safe_divide(x - m.astype(np.float64), d.astype(np.float64)), "uint", fmt.bits)
        return _parts(codes, fmt, scales=d, biases=m)
    low, span = ends(x, below_zero=False)
    s = span / np.float32(top)
    y = (x - low) * safe_divide(np.float32(1), s).astype(np.float32)
    codes = np.clip(np.trunc(y + np.float32(0.5)), 0, top)
    return _parts(codes, fmt, scales=to_float16(s, fmt), biases=to_float16(low, fmt))


def _parts(codes: NDArray[Any], fmt: Format, **scales: NDArray[np.float16]) -> dict[str, NDArray[Any]]:
    """Packed codes of rows, and the parts with one value a group."""
    packed = pack(codes.reshape(len(codes), -1).astype(np.uint8), fmt.bits)
    return {"codes": packed} | {p: a.reshape(len(codes), -1) for p, a in scales.items()}
