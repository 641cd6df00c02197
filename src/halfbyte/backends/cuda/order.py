"""The GPU's order of a weight: the canonical code stream split into bit planes, eight elements a
word.

| bits | planes |
|---|---|
| 8 | bytes |
| 4 | nibbles: the canonical stream itself, read as 32-bit words |
| 2, 1 | pairs, bits: the canonical stream |
| 7 = 4 + 2 + 1, 6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1 | low bits in the widest plane |

Rows are padded with zero codes to whole words of eight. `split` and `join` are inverses on every
code.

4-bit integers and E2M1 are stored in *fragment order* instead: int32 [tiles of 16 rows, units of 64
inputs, 32 lanes, 4 words]. One word is the part of a lane in the A operand of one mma.m16n8k16.
Within a tile, row = 8 h + g. Within a unit, half s and

    input = 32 s + 8 t + 4 b + 2 i + p        (groups of 32 and more: a lane's inputs are 16
                                              contiguous bytes of x)
    input = 32 s + 16 b + 4 t + 2 i + p       (groups of 16: no word mixes two groups)

That code is in lane 4 g + t, word 2 s + b, nibble 4 p + 2 i + h. The bits of E2M1 nibbles are
permuted for their decoder (`spread_e2m1`). Rows are padded to 16, inputs to 64, with code 0. Scales
are [tiles, groups, 8, 2], rows g and g + 8 adjacent.

8-bit codes are stored likewise, one half of a unit after the other: int32 [tiles, 2 units, 32
lanes, 4 words]. In half s of a unit a code is in word 2 b + i, byte 2 h + p: one word has the codes
of two of the operand's four registers.

2-bit codes keep the order of the stream within a word of 16 inputs; words are int32 [tiles, units,
16 rows, 4 words].

*Lane order* is for the other formats that the wgmma kernel takes (`weight.in_lanes`): each bit
plane in the same tiles and units, int32 [tiles, units, 32 lanes, words a lane], words a lane being
the plane's width. Lane 4 g + t has, of rows g and g + 8, the inputs that it wants of operand A:

    input = 8 c + 2 t + p,   c = 0 … 7,   row = 8 h + g

    nibbles   word 2 h + c / 4, bits 4 (c mod 4) + 16 p
    pairs     word h, bits 2 c + 16 p
    bits      the only word, bit 8 h + c + 16 p
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack, unpack
from ...numerics.row_slices import row_slices

U8 = NDArray[np.uint8]

_BLOCK = 1 << 22
"""Codes put in order at a time, which bounds memory."""

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


TILE_ROWS = 16


# Axes of one tile's codes as (h, g, unit, s, inner four axes of 32 inputs) and where they go:
# (unit, g, t, s, b, p, i, h).
INNER_SIZES = {False: (4, 2, 2, 2), True: (2, 4, 2, 2)}  # t b i p, or b t i p for groups of 16
AXES_OF_4_BITS = {False: (0, 3, 2, 5, 4, 6, 8, 7, 1), True: (0, 3, 2, 6, 4, 5, 8, 7, 1)}


# 8 bits: (h, g, unit, s, inner four) to (unit, s, g, t, b, i, h, p).
AXES_OF_8_BITS = {False: (0, 3, 4, 2, 5, 6, 7, 1, 8), True: (0, 3, 4, 2, 6, 5, 7, 1, 8)}


# Nibble i of a half word (lowest first) -> (lowest bit of its three magnitude bits, its sign bit).
E2M1_BITS = ((9, 15), (6, 12), (3, 14), (0, 13))


def spread_e2m1(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Words of eight E2M1 nibbles -> the same bits with signs and magnitudes separated: `s b c d`
    `aaa` `bbb` `ccc` `ddd` in each half.

    The decoder needs the sign in bit 15 and the magnitude in bits 9 to 11 of a float16. Nibble 0 is
    stored there; nibble 1 is stored three bits lower; one multiplication each, by 2^6 + 2 and 2^9 +
    4, moves sign and magnitude of nibbles 2 and 3 by their two distances (`decoders.py`).
    """
    w = words.view(np.uint32)
    out = np.zeros_like(w)
    for i, (magnitude, sign) in enumerate(E2M1_BITS):
        nibble = w >> np.uint32(4 * i)
        out |= (nibble & np.uint32(0x00070007)) << np.uint32(magnitude)
        out |= (nibble & np.uint32(0x00080008)) << np.uint32(sign - 3)
    return out.view(np.int32)


def gather_e2m1(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Inverse of `spread_e2m1`."""
    w = words.view(np.uint32)
    out = np.zeros_like(w)
    for i, (magnitude, sign) in enumerate(E2M1_BITS):
        nibble = (w >> np.uint32(magnitude)) & np.uint32(0x00070007)
        nibble |= (w >> np.uint32(sign - 3)) & np.uint32(0x00080008)
        out |= nibble << np.uint32(4 * i)
    return out.view(np.int32)


def to_fragments(codes: U8, k: int, by_16: bool = False, element: str = "uint", bits: int = 4) -> NDArray[np.int32]:
    """Canonical codes of 4 or 8 bits [n, bytes] -> int32 [ceil(n/16), ceil(k/64) · bits/4, 32, 4],
    a few tiles at a time to bound memory; of 2 bits [ceil(n/16), ceil(k/64), 16, 4].
    """
    n = codes.shape[0]
    tiles, units = -(-n // 16), -(-k // 64)
    if bits == 2:
        stream = np.zeros((tiles * 16, units * 16), np.uint8)
        stream[:n, : codes.shape[1]] = codes
        words = stream.view("<i4").reshape(tiles, 16, units, 4)
        return np.ascontiguousarray(words.transpose(0, 2, 1, 3))
    out = np.empty((tiles, units * bits // 4, 32, 4), np.int32)
    for some in row_slices((tiles, 16 * k), _BLOCK):
        rows = codes[some.start * 16 : some.stop * 16]
        count = some.stop - some.start
        q = np.zeros((count * 16, units * 64), np.uint8)
        q[: len(rows), :k] = rows if bits == 8 else unpack(rows, 4, k)
        q = q.reshape(count, 2, 8, units, 2, *INNER_SIZES[by_16])
        if bits == 8:
            q = np.ascontiguousarray(q.transpose(AXES_OF_8_BITS[by_16]))
            out[some] = q.reshape(-1).view("<i4").reshape(count, units * 2, 32, 4)
            continue
        q = q.transpose(AXES_OF_4_BITS[by_16])
        words = np.ascontiguousarray(pack(q.reshape(count, units, 32, 4, 8), 4)).view("<i4")[..., 0]
        out[some] = spread_e2m1(words) if element == "e2m1" else words
    return out


def from_fragments(words: NDArray[np.int32], n: int, k: int, by_16: bool = False, element: str = "uint", bits: int = 4) -> U8:
    """Inverse of `to_fragments`."""
    if bits == 2:
        tiles, units = words.shape[:2]
        words = np.ascontiguousarray(words).view("<i4").reshape(tiles, units, 16, 4)
        stream = np.ascontiguousarray(words.transpose(0, 2, 1, 3)).view(np.uint8)
        return np.ascontiguousarray(stream.reshape(tiles * 16, units * 16)[:n, : -(-k // 4)])
    tiles, units = words.shape[0], words.shape[1] * 4 // bits
    words = np.ascontiguousarray(words, dtype="<i4")
    if bits == 8:
        sizes = [(tiles, 2, 8, units, 2, *INNER_SIZES[by_16])[a] for a in AXES_OF_8_BITS[by_16]]
        q = words.view(np.uint8).reshape(sizes).transpose(np.argsort(AXES_OF_8_BITS[by_16]))
        return np.ascontiguousarray(q.reshape(tiles * 16, units * 64)[:n, :k])
    raw = (gather_e2m1(words) if element == "e2m1" else words).view(np.uint8).reshape(tiles, units, 32, 4, 4)
    sizes = [(tiles, 2, 8, units, 2, *INNER_SIZES[by_16])[a] for a in AXES_OF_4_BITS[by_16]]
    q = unpack(raw, 4, 8).reshape(sizes).transpose(np.argsort(AXES_OF_4_BITS[by_16]))
    return pack(q.reshape(tiles * 16, units * 64)[:n, :k], 4)


def to_lanes(codes: U8, bits: int, k: int) -> dict[int, NDArray[np.int32]]:
    """Canonical codes [n, bytes] -> {plane width: int32 [ceil(n/16), ceil(k/64), 32, width]} in
    lane order.
    """
    n = codes.shape[0]
    tiles, units = -(-n // TILE_ROWS), -(-k // 64)
    q = np.zeros((tiles * TILE_ROWS, units * 64), np.uint8)
    q[:n, :k] = codes[:, :k] if bits == 8 else unpack(codes, bits, k)
    q = q.reshape(tiles, 2, 8, units, 8, 4, 2).transpose(0, 3, 2, 5, 1, 4, 6)  # tile unit g t, h c p
    planes: dict[int, NDArray[np.int32]] = {}
    shift = 0
    for width in PLANES[bits]:
        part = (q >> np.uint8(shift)) & np.uint8((1 << width) - 1)
        # [.., word, c in the word, p]: p · 16 + width · c, and of bits h is in the word too.
        part = part.reshape(tiles, units, 32, width, 8 * 2 // width, 2).swapaxes(-1, -2)
        planes[width] = pack(np.ascontiguousarray(part).reshape(tiles, units, 32, width * (32 // width)), width).view("<i4")
        shift += width
    return planes


def from_lanes(planes: dict[int, NDArray[np.int32]], bits: int, n: int, k: int) -> U8:
    """Inverse of `to_lanes`."""
    q: U8 | None = None
    shift = 0
    for width in PLANES[bits]:
        words = np.ascontiguousarray(planes[width], "<i4")
        tiles, units = words.shape[:2]
        part = unpack(words.view(np.uint8), width, 32).reshape(tiles, units, 32, width, 2, 16 // width).swapaxes(-1, -2)
        part = part.reshape(tiles, units, 8, 4, 2, 8, 2) << np.uint8(shift)
        q = part if q is None else q | part
        shift += width
    assert q is not None
    rows = q.transpose(0, 4, 2, 1, 5, 3, 6).reshape(q.shape[0] * TILE_ROWS, -1)[:n, :k]
    return pack(np.ascontiguousarray(rows), bits)


def by_tiles(scales: NDArray[Any]) -> NDArray[Any]:
    """Per-group values [n, G] -> [ceil(n/16), G, 8, 2]: rows g and g + 8 of a tile adjacent, since
    a lane needs both; padding rows are zero.
    """
    n, groups = scales.shape
    tiles = -(-n // TILE_ROWS)
    padded = np.zeros((tiles * TILE_ROWS, groups), scales.dtype)
    padded[:n] = scales
    return np.ascontiguousarray(padded.reshape(tiles, 2, 8, groups).transpose(0, 3, 2, 1).reshape(tiles, groups, TILE_ROWS))


def untile(tiled: NDArray[Any], n: int) -> NDArray[Any]:
    """Inverse of `by_tiles`: [*lead, ceil(n/16), G, 16] -> [*lead, n, G]."""
    *lead, tiles, groups, _ = tiled.shape
    rows = np.moveaxis(tiled.reshape(*lead, tiles, groups, 8, 2), (-1, -2, -3), (-3, -2, -1))
    return np.ascontiguousarray(rows.reshape(*lead, tiles * TILE_ROWS, groups)[..., :n, :])
