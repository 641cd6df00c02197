"""Transposition of matrices of whole elements and of packed 4-bit codes.

    transpose(x)                          xᵀ of whole elements, in C order
    transpose_nibbles(rows, columns)      xᵀ of packed codes of 4 bits

Checkpoints that store codes along n are converted to the canonical order along k with these, and
back. The compiled core does the work where it is built, one cache line of either side at a time;
without it NumPy gives the same bytes, elements in 1.5 times the time and nibbles in 3 times. Both
release the interpreter's lock, so that callers may use threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
NATURAL_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
"""Rows in their stored order."""
_LINE = 64
"""Bytes of a cache line."""
_TILE = 256
"""Side of a tile of `transpose_tiled`. Rows a power of two apart fall into few cache sets, so a
tile is copied before it is transposed: 2 to 4 times as fast on 30 MB.
"""
_WORDS = 128
"""Side of a tile of `transpose_nibbles_numpy`: eight arrays of 64 KiB stay in cache."""


@cache
def native() -> ModuleType | None:
    """The compiled core; None where it is not built, cannot be loaded, or is an older build without
    `Strings`.
    """
    try:
        from .. import _native as module
    except ImportError:
        return None
    return module if hasattr(module, "Strings") else None


def transpose(x: NDArray[Any]) -> NDArray[Any]:
    """xᵀ of a matrix, or of each matrix of a stack [*lead, r, c], in C order."""
    *lead, rows, columns = x.shape
    core = native()
    if core is None or x.itemsize not in (1, 2, 4, 8) or not x.flags.c_contiguous:
        return transpose_tiled(x)
    out = _empty((*lead, columns, rows), x.dtype)
    if out.size:
        word = f"u{x.itemsize}"
        matrices, results = x.view(word).reshape(-1, rows, columns), out.view(word).reshape(-1, columns, rows)
        for matrix, result in zip(matrices, results, strict=True):
            core.transpose(matrix, result)
    return out


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`np.empty` aligned to a cache line: the core writes whole lines, and an unaligned one takes
    twice as long.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def transpose_tiled(x: NDArray[Any]) -> NDArray[Any]:
    """`transpose` in NumPy, tile by tile, so that both sides of a tile stay in cache."""
    *lead, rows, columns = x.shape
    if x.nbytes < 1 << 20:
        return np.ascontiguousarray(x.swapaxes(-1, -2))
    out = np.empty((*lead, columns, rows), x.dtype)
    for at in np.ndindex(*lead):
        for i in range(0, rows, _TILE):
            for j in range(0, columns, _TILE):
                out[at][j : j + _TILE, i : i + _TILE] = x[at][i : i + _TILE, j : j + _TILE].copy().T
    return out


def transpose_nibbles(x: U8, columns: int, order: Sequence[int] = NATURAL_ORDER, out_order: Sequence[int] = NATURAL_ORDER) -> U8:
    """Rows of nibbles [r, ceil(columns/2)] -> [columns, ceil(r/2)], low nibble first, the padding
    of an odd row zero.

    order      row 8i + j is stored as row 8i + order[j] of `x`; any order but the natural one needs
               rows in multiples of 8
    out_order  the same for rows of the result; any order but the natural one needs columns in
               multiples of 8
    """
    core = native()
    if core is None:
        return transpose_nibbles_numpy(x, columns, order, out_order)
    x = np.ascontiguousarray(x)
    out = _empty((columns, -(-x.shape[0] // 2)), np.dtype(np.uint8))
    orders = np.array([order, out_order], np.uint8)
    core.transpose_nibbles(x, columns, orders[0], orders[1], out)
    return out


def transpose_nibbles_numpy(
    x: U8, columns: int, order: Sequence[int] = NATURAL_ORDER, out_order: Sequence[int] = NATURAL_ORDER
) -> U8:
    """`transpose_nibbles` in NumPy: eight rows of 32-bit words are 8 × 8 matrices of nibbles,
    transposed many at a time.
    """
    r = x.shape[0]
    rows, wide = -(-r // 8), -(-columns // 8)
    words = _words(x, rows, wide, columns).reshape(rows, 8, wide)[:, list(order)]
    out = np.empty((wide, 8, rows), np.uint32)
    for a in range(0, rows, _WORDS):
        for b in range(0, wide, _WORDS):
            tile = words[a : a + _WORDS, :, b : b + _WORDS]
            fields = [tile[:, row].copy() for row in range(8)]
            transpose_8x8(fields)
            for slot, field in zip(out_order, fields, strict=True):
                out[b : b + _WORDS, slot, a : a + _WORDS] = field.T
    raw = out.astype("<u4", copy=False).view(np.uint8).reshape(8 * wide, 4 * rows)
    return np.ascontiguousarray(raw[:columns, : -(-r // 2)])


def _words(x: U8, rows: int, wide: int, columns: int) -> NDArray[np.uint32]:
    """Bytes as 32-bit words of eight nibbles, padded with zeros to multiples of 8 rows and columns."""
    if len(x) % 8 or columns % 8:
        padded = np.zeros((8 * rows, 4 * wide), np.uint8)
        padded[: x.shape[0], : x.shape[1]] = x
        x = padded
    return np.ascontiguousarray(x).view("<u4").astype(np.uint32, copy=False)


def transpose_8x8(words: list[NDArray[np.uint32]]) -> None:
    """Exchange nibble j of word i with nibble i of word j, in place, in eight arrays of one shape.

    Recursive transposition of blocks of 1, 2 and 4 nibbles (Warren, Hacker's Delight, 7-3).
    """
    for step, mask in ((1, 0x0F0F0F0F), (2, 0x00FF00FF), (4, 0x0000FFFF)):
        shift, kept = np.uint32(4 * step), np.uint32(mask)
        for i in range(8):
            if not i & step:
                low, high = words[i], words[i + step]
                moved = low >> shift
                moved ^= high
                moved &= kept
                high ^= moved
                moved <<= shift
                low ^= moved
