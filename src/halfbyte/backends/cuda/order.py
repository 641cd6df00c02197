"""The GPU's order of a weight: the canonical code stream split into bit planes, eight elements a word.

| bits | planes |
|---|---|
| 8 | bytes |
| 4 | nibbles: the canonical stream itself, read as 32-bit words |
| 2, 1 | pairs, bits: the canonical stream |
| 7 = 4 + 2 + 1, 6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1 | low bits in the widest plane |

Rows are padded with zero codes to whole words of eight. `split` and `join` are inverses on every code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...bits import pack, unpack

U8 = NDArray[np.uint8]

PLANES: dict[int, tuple[int, ...]] = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}
"""Width of code -> widths of its planes, low bits first."""


def split(codes: U8, bits: int, k: int) -> dict[int, U8]:
    """Canonical codes [..., ceil(k·bits/8)] -> {plane width: bytes [..., ceil(k/8)·width]}."""
    words = -(-k // 8)
    if len(PLANES[bits]) == 1:
        row = words * bits
        if codes.shape[-1] == row:
            return {bits: codes}
        out = np.zeros((*codes.shape[:-1], row), np.uint8)
        out[..., : codes.shape[-1]] = codes
        return {bits: out}
    q = np.zeros((*codes.shape[:-1], words * 8), np.uint8)
    q[..., :k] = unpack(codes, bits, k)
    planes: dict[int, U8] = {}
    shift = 0
    for width in PLANES[bits]:
        planes[width] = pack((q >> np.uint8(shift)) & np.uint8((1 << width) - 1), width)
        shift += width
    return planes


def join(planes: dict[int, U8], bits: int, k: int) -> U8:
    """Inverse of `split`."""
    words = -(-k // 8)
    if len(PLANES[bits]) == 1:
        return planes[bits][..., : -(-k * bits // 8)]
    q: U8 | None = None
    shift = 0
    for width in PLANES[bits]:
        part = unpack(planes[width], width, words * 8) << np.uint8(shift)
        q = part if q is None else q | part
        shift += width
    assert q is not None
    return pack(q[..., :k], bits)
