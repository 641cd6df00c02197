"""Matrices of codes, rows to columns: what a checkpoint's order along n needs to become the canonical one along k, and back.

    turned(x)                          xᵀ of whole elements, in C order
    turned_nibbles(rows, columns)      xᵀ of packed codes of 4 bits

The native core does it where it is built, a cache line of either side at a time (native/turning.cpp); where it is not, NumPy
gives the same bytes, words in one and a half times the time and nibbles in three times. Both release the interpreter's lock:
callers bring the threads.
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
PLAIN = (0, 1, 2, 3, 4, 5, 6, 7)
"""The order of rows as they lie."""
_LINE = 64
"""Bytes of a cache line."""
_TILE = 256
"""Sides of a tile of `tiles_turned`, copied first since rows a power of two apart share few places of a cache: twice to four
times as fast as a whole transposition of 30 MB."""
_WORDS = 128
"""Sides of a tile of `words_turned`: eight arrays of 64 KiB stay in cache."""


@cache
def native() -> ModuleType | None:
    """The compiled core; None where it is not built, cannot start, or is of an older build."""
    try:
        from .. import _native as module
    except ImportError:
        return None
    return module if hasattr(module, "turn_nibbles") else None


def turned(x: NDArray[Any]) -> NDArray[Any]:
    """xᵀ of a matrix, or of each matrix of a stack [*lead, r, c], in C order."""
    *lead, rows, columns = x.shape
    core = native()
    if core is None or x.itemsize not in (1, 2, 4, 8) or not x.flags.c_contiguous:
        return tiles_turned(x)
    out = _empty((*lead, columns, rows), x.dtype)
    size = rows * columns * x.itemsize
    for i in range(math.prod(lead)):
        core.turn(x.ctypes.data + i * size, rows, columns, x.itemsize, out.ctypes.data + i * size)
    return out


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`np.empty` from the beginning of a cache line: the core writes whole lines, and halves of two take twice as long."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def tiles_turned(x: NDArray[Any]) -> NDArray[Any]:
    """`turned` in NumPy: in tiles, since whole rows of one side are whole columns of the other's pages."""
    *lead, rows, columns = x.shape
    if x.nbytes < 1 << 20:
        return np.ascontiguousarray(x.swapaxes(-1, -2))
    out = np.empty((*lead, columns, rows), x.dtype)
    for at in np.ndindex(*lead):
        for i in range(0, rows, _TILE):
            for j in range(0, columns, _TILE):
                out[at][j : j + _TILE, i : i + _TILE] = x[at][i : i + _TILE, j : j + _TILE].copy().T
    return out


def turned_nibbles(x: U8, columns: int, order: Sequence[int] = PLAIN, out_order: Sequence[int] = PLAIN) -> U8:
    """Rows of nibbles [r, ceil(columns/2)] -> [columns, ceil(r/2)], low nibble first, the padding of an odd row zero.

    order      row 8i + j of `x` is the one that lies at 8i + order[j]; other than PLAIN only for whole eights of rows
    out_order  the same of the result, for whole eights of columns
    """
    core = native()
    if core is None:
        return words_turned(x, columns, order, out_order)
    x = np.ascontiguousarray(x)
    out = _empty((columns, -(-x.shape[0] // 2)), np.dtype(np.uint8))
    orders = np.array([order, out_order], np.uint8)
    core.turn_nibbles(x.ctypes.data, x.shape[0], columns, orders[0].ctypes.data, orders[1].ctypes.data, out.ctypes.data)
    return out


def words_turned(x: U8, columns: int, order: Sequence[int] = PLAIN, out_order: Sequence[int] = PLAIN) -> U8:
    """`turned_nibbles` in NumPy: words of eight rows and eight columns are matrices of nibbles, turned many at a time."""
    r = x.shape[0]
    rows, wide = -(-r // 8), -(-columns // 8)
    words = _words(x, rows, wide, columns).reshape(rows, 8, wide)[:, list(order)]
    out = np.empty((wide, 8, rows), np.uint32)
    for a in range(0, rows, _WORDS):
        for b in range(0, wide, _WORDS):
            tile = words[a : a + _WORDS, :, b : b + _WORDS]
            fields = [tile[:, row].copy() for row in range(8)]
            turn_words(fields)
            for place, field in zip(out_order, fields, strict=True):
                out[b : b + _WORDS, place, a : a + _WORDS] = field.T
    raw = out.astype("<u4", copy=False).view(np.uint8).reshape(8 * wide, 4 * rows)
    return np.ascontiguousarray(raw[:columns, : -(-r // 2)])


def _words(x: U8, rows: int, wide: int, columns: int) -> NDArray[np.uint32]:
    """Bytes as words of eight nibbles, filled with zeros to whole eights of rows and columns."""
    if x.shape != (8 * rows, 4 * wide) or columns % 8:
        filled = np.zeros((8 * rows, 4 * wide), np.uint8)
        filled[: x.shape[0], : x.shape[1]] = x
        x = filled
    return np.ascontiguousarray(x).view("<u4").astype(np.uint32, copy=False)


def turn_words(words: list[NDArray[np.uint32]]) -> None:
    """Nibble j of word i changes places with nibble i of word j, in place: eight arrays of one shape.

    Halves, quarters, eighths of the words are exchanged crosswise (Warren, Hacker's Delight, 7-3).
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
