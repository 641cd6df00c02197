"""32-bit words and the canonical stream.

A row of 32-bit words, read as little-endian bytes, is a little-endian bit stream: for codes laid
down LSB first, dense, it *is* the canonical row, followed by the bits that fill the last word.
`stream_of_words` and `words_of_stream` go between them (without a copy when k·bits fills whole
words). The filling, zero in every producer's file, is returned separately, so that no bit of a file
is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack, unpack

U8 = NDArray[np.uint8]


def word_count(k: int, bits: int) -> int:
    """32-bit words that k codes take, dense: ceil(k·bits / 32)."""
    return -(-k * bits // 32)


def as_bytes(words: NDArray[Any]) -> U8:
    """[..., w] integers of b bytes -> uint8 [..., b·w], little-endian, a view when `words` is
    contiguous.
    """
    size = words.dtype.itemsize
    little = np.ascontiguousarray(words.astype(words.dtype.newbyteorder("<"), copy=False))
    return little.reshape(-1).view(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * size)


def as_words(raw: U8, dtype: Any = np.int32) -> NDArray[Any]:
    """uint8 [..., b·w] -> integers of b bytes [..., w]. Inverse of `as_bytes`."""
    dt = np.dtype(dtype)
    flat: NDArray[Any] = np.ascontiguousarray(raw).reshape(-1).view(dt.newbyteorder("<")).astype(dt, copy=False)
    return flat.reshape(*raw.shape[:-1], raw.shape[-1] // dt.itemsize)


def split_stream(raw: U8, bits: int, k: int) -> tuple[U8, U8 | None]:
    """Bytes [..., b] that begin with k codes -> (canonical codes [..., ceil(k·bits/8)], the filling
    after them or None when zero).

    The filling is the tail of each row, from the byte the last code ends in, with the code's own
    bits cleared.
    """
    used = k * bits
    if raw.shape[-1] * 8 == used or raw.size == 0:
        return raw[..., : -(-used // 8)], None
    nbytes, start, kept = -(-used // 8), used // 8, used % 8
    codes = np.ascontiguousarray(raw[..., :nbytes])
    filling = np.ascontiguousarray(raw[..., start:])
    if kept:
        if codes.base is not None or not codes.flags.writeable:
            codes = codes.copy()
        mask = np.uint8((1 << kept) - 1)
        codes[..., -1] &= mask
        filling = filling.copy()
        filling[..., 0] &= ~mask
    return codes, filling if filling.any() else None


def join_stream(codes: U8, nbytes: int, bits: int, k: int, filling: U8 | None = None) -> U8:
    """Canonical codes -> rows of `nbytes` bytes, filled with zeros or with `filling`. Inverse of
    `split_stream`.
    """
    if codes.shape[-1] == nbytes and filling is None:
        return codes
    raw = np.zeros((*codes.shape[:-1], nbytes), np.uint8)
    raw[..., : codes.shape[-1]] = codes
    if filling is not None:
        raw[..., k * bits // 8 :] |= filling
    return raw


def stream_of_words(words: NDArray[Any], bits: int, k: int) -> tuple[U8, U8 | None]:
    """Dense words [..., ceil(k·bits/32)] -> (canonical codes, filling or None)."""
    return split_stream(as_bytes(words), bits, k)


def words_of_stream(codes: U8, bits: int, k: int, filling: U8 | None = None, dtype: Any = np.int32) -> NDArray[Any]:
    """Canonical codes -> dense words. Inverse of `stream_of_words`."""
    return as_words(join_stream(codes, 4 * word_count(k, bits), bits, k, filling), dtype)


def fields_of_words(words: NDArray[Any], bits: int, count: int) -> tuple[U8, U8 | None]:
    """Dense words [..., w] -> (codes uint8 [..., count], filling or None)."""
    codes, filling = stream_of_words(words, bits, count)
    return unpack(codes, bits, count), filling


def words_of_fields(fields: NDArray[Any], bits: int, filling: U8 | None = None) -> NDArray[np.int32]:
    """Codes [..., count] -> dense int32 words. Inverse of `fields_of_words`."""
    return words_of_stream(pack(fields, bits), bits, fields.shape[-1], filling)


def remember(details: dict[str, Any], key: str, filling: NDArray[Any] | None) -> None:
    """Keep stray bits in `details` as a hexadecimal string; nothing when there are none."""
    if filling is not None:
        details[key] = np.ascontiguousarray(filling).tobytes().hex()


def remember_lost(details: dict[str, Any], key: str, stored: NDArray[Any], back: NDArray[Any]) -> None:
    """Keep `stored` when casting it and back gave other bits (`back`): NaN has many encodings, and
    a cast makes one of them.
    """
    if stored.tobytes() != back.tobytes():
        remember(details, key, stored)


def restored(details: Mapping[str, Any], key: str, back: NDArray[Any]) -> NDArray[Any]:
    """`back`, or what `remember_lost` kept for it while the two are still the same numbers."""
    kept = recall(details, key, back.shape, back.dtype)
    if kept is None:
        return back
    with np.errstate(invalid="ignore"):
        same = np.array_equal(kept.astype(np.float64), back.astype(np.float64), equal_nan=True)
    return kept if same else back


def recall(details: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any] | None:
    """The bits kept under `key`, or None when there are none or when they are of another shape (the
    tensor was sliced since).
    """
    kept = details.get(key)
    if not isinstance(kept, str):
        return None
    raw = np.frombuffer(bytes.fromhex(kept), dtype)
    return raw.reshape(shape) if raw.size == np.prod(shape, dtype=np.int64) else None
