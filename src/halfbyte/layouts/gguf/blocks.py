"""The bits of each ggml block, as tables: fields of a block, planes its codes are spread over,
small scales.

    code[a, p, c] = Σ over planes of ((field[a, c] >> p·bits) & (2^bits − 1)) << at

A field of codes is `arrays` runs of bytes; each byte holds 8/bits codes that are a whole run
distant from each other, so that one shift and one mask of a run give consecutive elements.
docs/formats/ggml.md draws every block. Source: ggml's block structs (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...numerics.bits import pack, unpack

U8 = NDArray[np.uint8]
Fields = Mapping[str, U8]
"""Contiguous bytes of each field, [blocks, bytes]."""


class Plane(NamedTuple):
    """Some bits of every code. `field` is `arrays` runs of bytes, 8/bits codes a byte; they are
    bits `at` and up of the code.
    """

    field: str
    arrays: int
    bits: int
    at: int = 0


class Small(NamedTuple):
    """Small-integer scales (and minima) of a block: fields to parts and back."""

    parts: tuple[str, ...]
    split: Callable[[Fields], tuple[U8, ...]]
    join: Callable[..., dict[str, U8]]


class BlockOrder(NamedTuple):
    """One ggml block.

    fields  (name, bytes) in file order
    planes  where the codes are
    whole   part -> field, for parts whose bytes are a field unchanged
    small   small-integer scales, None without
    flip    exclusive-or that turns the field's codes into canonical ones (Q8_0 stores two's
            complement)
    """

    fields: tuple[tuple[str, int], ...]
    planes: tuple[Plane, ...]
    whole: dict[str, str]
    small: Small | None = None
    flip: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """A block as a record of byte strings: fields move as whole items."""
        return np.dtype([(name, f"V{size}") for name, size in self.fields])


def split_codes(order: BlockOrder, fields: Fields, out: U8) -> None:
    """Codes of blocks, a byte each, into `out` [blocks, elements], contiguous."""
    for plane in order.planes:
        target = out if plane.at == 0 else np.empty_like(out)
        data = fields[plane.field]
        run = data.shape[1] // plane.arrays
        if plane.bits == 8:
            target[...] = data
        elif run == 1:
            target[...] = unpack(data, plane.bits, out.shape[1])
        else:
            runs = _runs(target, plane, run)
            for p in range(8 // plane.bits):
                shifted = data >> np.uint8(p * plane.bits)
                shifted &= np.uint8((1 << plane.bits) - 1)
                runs[:, p] = shifted.reshape(-1).view(runs.dtype)
        if plane.at:
            target *= np.uint8(1 << plane.at)  # NumPy's shift of bytes to the left is eight times slower than its product
            out |= target
    if order.flip:
        out ^= np.uint8(order.flip)


def join_codes(order: BlockOrder, codes: U8) -> dict[str, U8]:
    """Fields of codes [blocks, elements]; inverse of `split_codes`."""
    fields: dict[str, U8] = {}
    if order.flip:
        codes = codes ^ np.uint8(order.flip)
    sizes = dict(order.fields)
    for plane in order.planes:
        size = sizes[plane.field]
        run = size // plane.arrays
        part = codes
        if plane.at or len(order.planes) > 1:
            part = (codes >> np.uint8(plane.at)) & np.uint8((1 << plane.bits) - 1)
        if run == 1:
            data = pack(part, plane.bits)
        elif plane.bits == 8:
            data = part
        else:
            runs = _runs(part, plane, run)
            data = np.zeros((codes.shape[0], size), np.uint8)
            for p in range(8 // plane.bits):
                data |= np.ascontiguousarray(runs[:, p]).view(np.uint8).reshape(data.shape) * np.uint8(1 << p * plane.bits)
        fields[plane.field] = data
    return fields


def _runs(codes: U8, plane: Plane, run: int) -> NDArray[Any]:
    """Contiguous codes as [arrays, 8/bits] items of one run of bytes each: a run moves as one item,
    faster than as bytes.
    """
    return codes.reshape(-1).view(f"V{run}").reshape(-1, 8 // plane.bits)


def _words(data: U8) -> NDArray[np.uint32]:
    """Bytes [blocks, 4·w] as little-endian words [blocks, w], four small integers worked on at
    once.
    """
    return data.view("<u4")


_LOW6, _LOW4, _LOW2, _HIGH2 = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x03030303), np.uint32(0x30303030)


def _split_k4(f: Fields) -> tuple[U8, ...]:
    """Twelve bytes -> eight 6-bit scales and minima: 0–3 in the low six bits, 4–7 in nibbles and
    the two bits left over.
    """
    w = _words(f["scales"])
    out = np.empty((2, w.shape[0], 2), "<u4")
    for i in range(2):  # 0 scales, 1 minima
        out[i, :, 0] = w[:, i] & _LOW6
        out[i, :, 1] = ((w[:, 2] >> np.uint32(4 * i)) & _LOW4) | ((w[:, i] >> np.uint32(2)) & _HIGH2)
    sc, mn = out.view(np.uint8)
    return sc, mn


def _join_k4(sc: U8, mn: U8) -> dict[str, U8]:
    w = np.zeros((sc.shape[0], 3), "<u4")
    for i, part in enumerate((_words(sc), _words(mn))):
        w[:, i] = part[:, 0] | ((part[:, 1] & _HIGH2) << np.uint32(2))
        w[:, 2] |= (part[:, 1] & _LOW4) << np.uint32(4 * i)
    return {"scales": w.view(np.uint8)}


def _split_k3(f: Fields) -> tuple[U8, ...]:
    """Twelve bytes -> sixteen 6-bit scales less 32: low nibbles 0–7, high nibbles 8–15, top bits in
    four planes of four.
    """
    w = _words(f["scales"])
    out = np.empty((w.shape[0], 4), "<u4")
    for i in range(4):
        low = (w[:, i % 2] >> np.uint32(4 * (i // 2))) & _LOW4
        out[:, i] = low | (((w[:, 2] >> np.uint32(2 * i)) & _LOW2) << np.uint32(4))
    sc = out.view(np.uint8)
    return (sc - np.uint8(32),)


def _join_k3(sc: U8) -> dict[str, U8]:
    s = _words(sc + np.uint8(32))
    w = np.zeros((sc.shape[0], 3), "<u4")
    for i in range(4):
        w[:, i % 2] |= (s[:, i] & _LOW4) << np.uint32(4 * (i // 2))
        w[:, 2] |= ((s[:, i] >> np.uint32(4)) & _LOW2) << np.uint32(2 * i)
    return {"scales": w.view(np.uint8)}


def _split_k2(f: Fields) -> tuple[U8, ...]:
    """A byte a group: scale low, minimum high."""
    return f["scales"] & np.uint8(15), f["scales"] >> np.uint8(4)


def _join_k2(sc: U8, mn: U8) -> dict[str, U8]:
    return {"scales": sc | (mn << np.uint8(4))}


def _split_iq4(f: Fields) -> tuple[U8, ...]:
    """Eight 6-bit scales less 32: low four bits a nibble stream, high two bits a stream of their
    own.
    """
    low, high = unpack(f["scales_l"], 4, 8), unpack(f["scales_h"], 2, 8)
    return ((low | (high << np.uint8(4))) - np.uint8(32),)


def _join_iq4(sc: U8) -> dict[str, U8]:
    s = sc + np.uint8(32)
    return {"scales_l": pack(s & np.uint8(15), 4), "scales_h": pack(s >> np.uint8(4), 2)}


_K4 = Small(("scales", "mins"), _split_k4, _join_k4)
_D = {"scales": "d"}
_DM = {"scales": "d", "biases": "m"}
_SUPER = {"super_scales": "d"}
_SUPER_MIN = {"super_scales": "d", "super_mins": "dmin"}
_HALVES = (Plane("qs", 1, 4),)
"""Sixteen bytes: low nibbles are elements 0–15, high nibbles 16–31."""
_FIFTH = (*_HALVES, Plane("qh", 4, 1, 4))

ORDERS: dict[str, BlockOrder] = {
    "Q4_0": BlockOrder((("d", 2), ("qs", 16)), _HALVES, _D),
    "Q4_1": BlockOrder((("d", 2), ("m", 2), ("qs", 16)), _HALVES, _DM),
    "Q5_0": BlockOrder((("d", 2), ("qh", 4), ("qs", 16)), _FIFTH, _D),
    "Q5_1": BlockOrder((("d", 2), ("m", 2), ("qh", 4), ("qs", 16)), _FIFTH, _DM),
    "Q8_0": BlockOrder((("d", 2), ("qs", 32)), (Plane("qs", 1, 8),), _D, flip=0x80),
    "Q2_K": BlockOrder(
        (("scales", 16), ("qs", 64), ("d", 2), ("dmin", 2)),
        (Plane("qs", 2, 2),), _SUPER_MIN, Small(("scales", "mins"), _split_k2, _join_k2)),
    "Q3_K": BlockOrder(
        (("hmask", 32), ("qs", 64), ("scales", 12), ("d", 2)),
        (Plane("qs", 2, 2), Plane("hmask", 1, 1, 2)), _SUPER, Small(("scales",), _split_k3, _join_k3)),
    "Q4_K": BlockOrder((("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)), (Plane("qs", 4, 4),), _SUPER_MIN, _K4),
    "Q5_K": BlockOrder(
        (("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)),
        (Plane("qs", 4, 4), Plane("qh", 1, 1, 4)), _SUPER_MIN, _K4),
    "Q6_K": BlockOrder(
        (("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)),
        (Plane("ql", 2, 4), Plane("qh", 2, 2, 4)), {"scales": "scales", **_SUPER}),
    "IQ4_NL": BlockOrder((("d", 2), ("qs", 16)), _HALVES, _D),
    "IQ4_XS": BlockOrder(
        (("d", 2), ("scales_h", 2), ("scales_l", 4), ("qs", 128)),
        (Plane("qs", 8, 4),), _SUPER, Small(("scales",), _split_iq4, _join_iq4)),
    "MXFP4": BlockOrder((("e", 1), ("qs", 16)), _HALVES, {"scales": "e"}),
    "NVFP4": BlockOrder((("d", 4), ("qs", 32)), (Plane("qs", 4, 4),), {"scales": "d"}),
}  # fmt: skip
"""Block orders by ggml type name."""
