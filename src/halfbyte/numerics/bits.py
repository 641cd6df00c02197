"""Codes to bytes and back: the canonical little-endian bit stream.

Code j of a row occupies bits j·b to j·b + b − 1 of the row's bytes, counting from bit 0 of byte 0;
every row starts on a byte. For 4 bits that is low nibble first; for 3 bits eight codes fill three
bytes.

>>> pack(np.array([[1, 2, 3]], np.uint8), 4).tolist()
[[33, 3]]

Packing works on eight codes at a time, one byte each in a 64-bit word. Three steps of shift, mask
and or collect their 8·b bits: bytes are merged into fields of 2b bits, those into fields of 4b,
those into 8b. Codes of 4 bits need one step on 16-bit words, codes of 2 bits two steps on 32-bit
words, codes of 1 bit NumPy's own routine. 64 KiB are worked on at a time, so that the words stay in
cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError

U8 = NDArray[np.uint8]

_WHOLE: dict[int, np.dtype[Any]] = {2: np.dtype("<u4"), 4: np.dtype("<u2")}
"""Word of as many codes as fill one packed byte."""
_EIGHT: np.dtype[Any] = np.dtype("<u8")
"""Word of the other widths: eight codes, which fill `bits` packed bytes."""
_BLOCK = 1 << 16
"""Codes worked on at a time: the words and their scratch fit in a 256 KiB cache."""


def pack(codes: NDArray[np.integer], bits: int) -> U8:
    """Codes [..., k] of `bits` bits each -> bytes [..., ceil(k·bits/8)], padding bits zero.

    Raises ShapeError when a code does not fit in `bits` bits.
    """
    codes = np.asarray(codes)
    if codes.size and (int(codes.max()) >> bits or int(codes.min()) < 0):
        raise ShapeError(f"[pack] codes run from {codes.min()} to {codes.max()}; a {bits}-bit code is 0 to {(1 << bits) - 1}")
    c = np.ascontiguousarray(codes, dtype=np.uint8)
    if bits == 8:
        return c.copy()
    if bits == 1:
        return np.packbits(c, axis=-1, bitorder="little")
    k = c.shape[-1]
    word = _WHOLE.get(bits, _EIGHT)
    c = _pad_last(c, -(-k // word.itemsize) * word.itemsize)
    out = np.empty(c.size // 8 * bits if bits not in _WHOLE else c.size // word.itemsize, np.uint8)
    source, target = c.reshape(-1).view(word), out.reshape(-1, 1 if bits in _WHOLE else bits)
    for part, w, spare in _blocks(source.size, word):
        np.copyto(w, source[part])
        for step in _steps(bits, word):
            np.right_shift(w, step.shift, out=spare)
            if bits <= 4:  # moved and unmoved fields do not overlap, so one mask serves both
                np.bitwise_or(w, spare, out=w)
                np.bitwise_and(w, step.low | step.high, out=w)
            else:
                np.bitwise_and(spare, step.high, out=spare)
                np.bitwise_and(w, step.low, out=w)
                np.bitwise_or(w, spare, out=w)
        if bits in _WHOLE:
            np.copyto(target[part, 0], w, casting="unsafe")
        else:
            _copy_columns(target[part], _bytes(w, bits))
    rows = out.reshape(*c.shape[:-1], c.shape[-1] * bits // 8)
    return np.ascontiguousarray(rows[..., : -(-k * bits // 8)])


def unpack(data: U8, bits: int, k: int) -> U8:
    """Bytes [..., ceil(k·bits/8)] -> codes uint8 [..., k]. Inverse of `pack`.

    Raises ShapeError when the last axis is not ceil(k·bits/8) bytes.
    """
    data = np.asarray(data, dtype=np.uint8)
    nbytes = -(-k * bits // 8)
    if data.shape[-1] != nbytes:
        raise ShapeError(f"[unpack] {data.shape[-1]} bytes a row; {k} codes of {bits} bits take {nbytes}")
    if bits == 8:
        return data
    if bits == 1:
        return np.unpackbits(data, axis=-1, count=k, bitorder="little")
    word = _WHOLE.get(bits, _EIGHT)
    units = -(-k // word.itemsize)
    d = np.ascontiguousarray(_pad_last(data, units * word.itemsize * bits // 8))
    out = np.empty((*d.shape[:-1], units * word.itemsize), np.uint8)
    source, target = d.reshape(-1, 1 if bits in _WHOLE else bits), out.reshape(-1).view(word)
    for part, w, spare in _blocks(target.size, word):
        if bits in _WHOLE:
            np.copyto(w, source[part, 0])
        else:
            w[...] = 0
            _copy_columns(_bytes(w, bits), source[part])
        for step in reversed(_steps(bits, word)):
            if bits <= 4:
                np.left_shift(w, step.shift, out=spare)
                np.bitwise_or(w, spare, out=w)
                np.bitwise_and(w, step.separate, out=w)
            else:
                np.bitwise_and(w, step.high, out=spare)
                np.left_shift(spare, step.shift, out=spare)
                np.bitwise_and(w, step.low, out=w)
                np.bitwise_or(w, spare, out=w)
        np.copyto(target[part], w)
    return out[..., :k]


def padding_is_zero(data: U8, bits: int, k: int) -> bool:
    """True when the bits after code k−1 in each row's last byte are zero."""
    spare = data.shape[-1] * 8 - k * bits
    if spare == 0 or data.size == 0:
        return True
    return not bool((data[..., -1] >> np.uint8(8 - spare)).any())


class Step(NamedTuple):
    """One step of packing a word, and its inverse: pairs of adjacent fields are merged.

    shift    distance in bits by which the upper field of a pair moves
    low      mask of the lower fields, which stay
    high     mask of the upper fields where they arrive, next to the lower
    separate mask of both before the upper ones move
    """

    shift: Any
    low: Any
    high: Any
    separate: Any


@cache
def _steps(bits: int, word: np.dtype[Any]) -> tuple[Step, ...]:
    """Steps from one code a byte to one field a word."""
    size, steps, lane, field = word.itemsize * 8, [], 8, bits
    while lane < size:
        low = sum(((1 << field) - 1) << at for at in range(0, size, 2 * lane))
        steps.append(Step(*map(word.type, (lane - field, low, low << field, low | low << lane))))
        lane, field = 2 * lane, 2 * field
    return tuple(steps)


def _blocks(words: int, word: np.dtype[Any]) -> Any:
    """(slice, words, scratch) for each block of a flat array of words; the two arrays are reused."""
    size = min(_BLOCK // word.itemsize, words)
    w, spare = np.empty(size, word), np.empty(size, word)
    for start in range(0, words, max(size, 1)):
        part = slice(start, min(start + size, words))
        yield part, w[: part.stop - start], spare[: part.stop - start]


def _bytes(words: NDArray[Any], bits: int) -> U8:
    """The first `bits` bytes of each 64-bit word, [words, bits], a view."""
    return words.view(np.uint8).reshape(-1, 8)[:, :bits]


def _copy_columns(target: U8, source: U8) -> None:
    """`target[...] = source`, a column at a time: three times faster than rows of a few bytes."""
    for i in range(target.shape[1]):
        target[:, i] = source[:, i]


def _pad_last(a: U8, size: int) -> U8:
    """`a` with its last axis zero-padded to `size`."""
    if a.shape[-1] == size:
        return a
    out = np.zeros((*a.shape[:-1], size), a.dtype)
    out[..., : a.shape[-1]] = a
    return out
