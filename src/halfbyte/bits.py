"""Codes to bytes and back: the canonical little-endian bit stream.

Code j of a row occupies bits j·b to j·b + b − 1 of the row's bytes, counting from bit 0 of byte 0; every row starts on a
byte. For 4 bits that is low nibble first; for 3 bits eight codes lie in three bytes.

>>> pack(np.array([[1, 2, 3]], np.uint8), 4).tolist()
[[33, 3]]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import ShapeError

U8 = NDArray[np.uint8]


def pack(codes: NDArray[np.integer], bits: int) -> U8:
    """Codes [..., k] of `bits` bits each -> bytes [..., ceil(k·bits/8)], padding bits zero.

    Raises ShapeError when a code does not fit in `bits` bits.
    """
    codes = np.asarray(codes)
    if codes.size and (int(codes.min()) < 0 or int(codes.max()) >> bits):
        raise ShapeError(f"[pack] codes run from {codes.min()} to {codes.max()}; a {bits}-bit code is 0 to {(1 << bits) - 1}")
    c = np.ascontiguousarray(codes, dtype=np.uint8)
    k = c.shape[-1]
    nbytes = -(-k * bits // 8)
    if bits == 8:
        return c.copy()
    if bits in (1, 2, 4):
        per = 8 // bits
        full = _pad_last(c, nbytes * per).reshape(*c.shape[:-1], nbytes, per)
        out = full[..., 0].copy()
        for i in range(1, per):
            out |= full[..., i] << np.uint8(i * bits)
        return out
    # 3, 5, 6, 7: eight codes make `bits` whole bytes; assemble them in one 64-bit word.
    units = -(-k // 8)
    word = np.zeros((*c.shape[:-1], units), np.uint64)
    full = _pad_last(c, units * 8).reshape(*c.shape[:-1], units, 8)
    for i in range(8):
        word |= full[..., i].astype(np.uint64) << np.uint64(i * bits)
    raw = word.astype("<u8").view(np.uint8).reshape(*c.shape[:-1], units, 8)[..., :bits]
    return np.ascontiguousarray(raw.reshape(*c.shape[:-1], units * bits)[..., :nbytes])


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
    if bits in (1, 2, 4):
        per = 8 // bits
        mask = np.uint8((1 << bits) - 1)
        out = np.empty((*data.shape[:-1], nbytes, per), np.uint8)
        for i in range(per):
            np.bitwise_and(data >> np.uint8(i * bits), mask, out=out[..., i])
        return out.reshape(*data.shape[:-1], nbytes * per)[..., :k]
    units = -(-k // 8)
    full = _pad_last(data, units * bits).reshape(*data.shape[:-1], units, bits)
    word = np.zeros((*data.shape[:-1], units), np.uint64)
    for i in range(bits):
        word |= full[..., i].astype(np.uint64) << np.uint64(8 * i)
    mask64 = np.uint64((1 << bits) - 1)
    out = np.empty((*data.shape[:-1], units, 8), np.uint8)
    for i in range(8):
        out[..., i] = ((word >> np.uint64(i * bits)) & mask64).astype(np.uint8)
    return out.reshape(*data.shape[:-1], units * 8)[..., :k]


def padding_is_zero(data: U8, bits: int, k: int) -> bool:
    """True when the bits after code k−1 in each row's last byte are zero."""
    spare = data.shape[-1] * 8 - k * bits
    if spare == 0 or data.size == 0:
        return True
    return not bool((data[..., -1] >> np.uint8(8 - spare)).any())


def _pad_last(a: U8, size: int) -> U8:
    """`a` with its last axis zero-padded to `size`."""
    if a.shape[-1] == size:
        return a
    out = np.zeros((*a.shape[:-1], size), a.dtype)
    out[..., : a.shape[-1]] = a
    return out
