"""Words of compressed-tensors' pack-quantized weights: dense since 0.19, a whole number of codes a
word before.

| packing | 32-bit words of k codes of b bits | position of code j |
|---|---|---|
| dense | ceil(k·b / 32) | bit j·b of the row's little-endian stream |
| padded | ceil(k / p), p = floor(32 / b) | word j // p, bit b·(j mod p); the top 32 − p·b bits are unused |

At 1, 2, 4 and 8 bits the two are the same. Elsewhere no file says which it is: they differ in width
wherever k is whole 32s; where both fit, the one whose unused bits are all zero is taken. Zero
points are packed the same way along n.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...numerics import bits as stream
from ..common.words import as_bytes, as_words, join_stream, split_stream, word_count

DENSE, PADDED = "dense", "padded"


def words_in(k: int, bits: int, packing: str) -> int:
    """32-bit words that k codes take."""
    return word_count(k, bits) if packing == DENSE else -(-k // (32 // bits))


def packings(width: int, k: int, bits: int) -> tuple[str, ...]:
    """The packings in which k codes take `width` words, dense first; one where both are the same
    bits.
    """
    same = 32 % bits == 0 or k <= 32 // bits
    return tuple(p for p in ((DENSE,) if same else (DENSE, PADDED)) if words_in(k, bits, p) == width)


def codes_of_words(
    words: NDArray[np.int32], bits: int, k: int, packing: str
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Words [..., w] -> (canonical codes [..., ceil(k·bits/8)], unused bits that are set or None)."""
    raw = as_bytes(words)
    if packing == DENSE:
        return split_stream(raw, bits, k)
    per = 32 // bits
    fields = stream.unpack(raw.reshape(*words.shape, 4), bits, per)
    codes = stream.pack(fields.reshape(*words.shape[:-1], -1)[..., :k], bits)
    unused = raw ^ as_bytes(words_of_codes(codes, bits, k, PADDED))
    return codes, unused if unused.any() else None


def words_of_codes(codes: NDArray[np.uint8], bits: int, k: int, packing: str, unused: Any = None) -> NDArray[np.int32]:
    """Canonical codes -> words. Inverse of `codes_of_words`."""
    if packing == DENSE:
        return as_words(join_stream(codes, 4 * word_count(k, bits), bits, k, unused))
    per, lead = 32 // bits, codes.shape[:-1]
    width = words_in(k, bits, PADDED)
    fields = np.zeros((*lead, width * per), np.uint8)
    fields[..., :k] = stream.unpack(codes, bits, k)
    raw = stream.pack(fields.reshape(*lead, width, per), bits).reshape(*lead, 4 * width)
    return as_words(raw if unused is None else raw | unused)


def unused_shape(lead: tuple[int, ...], k: int, bits: int, packing: str) -> tuple[int, ...]:
    """Shape of the unused bits `codes_of_words` returns."""
    if packing == DENSE:
        return (*lead, 4 * word_count(k, bits) - k * bits // 8)
    return (*lead, 4 * words_in(k, bits, PADDED))


def decide(words: NDArray[np.int32], bits: int, k: int, possible: tuple[str, ...]) -> str:
    """The packing of `words` among those their width allows: the one whose unused bits are all
    clear, dense when that is both or neither.
    """
    for packing in possible[:-1]:
        if codes_of_words(words, bits, k, packing)[1] is None:
            return packing
    return possible[-1] if codes_of_words(words, bits, k, possible[-1])[1] is None else possible[0]
