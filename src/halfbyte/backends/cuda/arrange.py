"""order.py's fragment order made by torch, where the weight will lie: codes cross as the file has
them, one matrix at a time.

NumPy needs a second for 45 million codes on one core; a GPU moves them while the next matrix is
read. order.py is the referee: both give the same words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .order import AXES_OF_4_BITS, AXES_OF_8_BITS, E2M1_BITS, INNER_SIZES, PLANES, TILE_ROWS

CODES_AT_ONCE = 1 << 24
"""Codes that are spread out at a time: a byte each, and a few copies of them."""


def to_fragments(codes: Tensor, k: int, by_16: bool = False, element: str = "uint", bits: int = 4) -> Tensor:
    """Canonical codes of 4 or 8 bits, uint8 [n, bytes] -> int32 [ceil(n/16), ceil(k/64) · bits/4,
    32, 4] on their device; of 2 bits [ceil(n/16), ceil(k/64), 16, 4].
    """
    n = codes.shape[0]
    tiles, units = -(-n // TILE_ROWS), -(-k // 64)
    if bits == 2:
        stream = torch.zeros((tiles * TILE_ROWS, units * 16), dtype=torch.uint8, device=codes.device)
        stream[:n, : codes.shape[1]] = codes
        return stream.view(torch.int32).reshape(tiles, TILE_ROWS, units, 4).transpose(1, 2).contiguous()
    out = torch.empty((tiles, units * bits // 4, 32, 4), dtype=torch.int32, device=codes.device)
    step = max(1, CODES_AT_ONCE // (TILE_ROWS * 64 * max(1, units)))
    for first in range(0, tiles, step):
        last = min(first + step, tiles)
        rows = codes[first * TILE_ROWS : last * TILE_ROWS]
        q = torch.zeros(((last - first) * TILE_ROWS, units * 64), dtype=torch.uint8, device=codes.device)
        if bits == 8:
            q[: len(rows), :k] = rows
        else:
            pairs = q[: len(rows), : 2 * rows.shape[1]].unflatten(1, (-1, 2))
            pairs[..., 0], pairs[..., 1] = rows & 15, rows >> 4
        q = q.reshape(last - first, 2, 8, units, 2, *INNER_SIZES[by_16])
        q = q.permute((AXES_OF_8_BITS if bits == 8 else AXES_OF_4_BITS)[by_16]).reshape(-1)
        words = (q if bits == 8 else q[0::2] | (q[1::2] << 4)).view(torch.int32)
        out[first:last] = (spread_e2m1(words) if element == "e2m1" and bits == 4 else words).reshape(out[first:last].shape)
    return out


def to_lanes(codes: Tensor, bits: int, k: int) -> dict[int, Tensor]:
    """`order.to_lanes` of canonical codes, uint8 [n, bytes], on their device."""
    n = codes.shape[0]
    tiles, units = -(-n // TILE_ROWS), -(-k // 64)
    out = {w: torch.empty((tiles, units, 32, w), dtype=torch.int32, device=codes.device) for w in PLANES[bits]}
    step = max(1, CODES_AT_ONCE // (4 * TILE_ROWS * 64 * max(1, units)))
    for first in range(0, tiles, step):
        last = min(first + step, tiles)
        rows = codes[first * TILE_ROWS : last * TILE_ROWS]
        stream = torch.zeros(((last - first) * TILE_ROWS, units * 8 * bits), dtype=torch.uint8, device=codes.device)
        stream[: len(rows), : rows.shape[1]] = rows
        stream = stream.reshape(len(stream), units * 8, bits)  # eight codes each
        q = torch.empty((*stream.shape[:2], 8), dtype=torch.int32, device=codes.device)
        for j in range(8):
            byte, bit = divmod(bits * j, 8)
            v = stream[..., byte].to(torch.int32) >> bit
            if bit + bits > 8:
                v |= stream[..., byte + 1].to(torch.int32) << (8 - bit)
            q[..., j] = v & ((1 << bits) - 1)
        q = q.reshape(last - first, 2, 8, units, 8, 4, 2).permute(0, 3, 2, 5, 1, 4, 6)  # tile unit g t, h c p
        shift = 0
        for width, plane in out.items():
            part = (q >> shift) & ((1 << width) - 1)
            part = part.reshape(last - first, units, 32, width, 16 // width, 2)
            words = torch.zeros(part.shape[:4], dtype=torch.int32, device=codes.device)
            for c in range(16 // width):
                for p in range(2):
                    words |= part[..., c, p] << (width * c + 16 * p)
            plane[first:last] = words
            shift += width
    return out


def spread_e2m1(words: Tensor) -> Tensor:
    """`order.spread_e2m1` of int32 words."""
    out = torch.zeros_like(words)
    for i, (magnitude, sign) in enumerate(E2M1_BITS):
        nibble = words >> (4 * i)  # the sign bit's copies lie above what is kept
        out |= (nibble & 0x00070007) << magnitude
        out |= (nibble & 0x00080008) << (sign - 3)
    return out


def by_tiles(scales: Tensor) -> Tensor:
    """`order.by_tiles` of values a group, of a matrix or of a stack: [*lead, n, G] -> [*lead,
    ceil(n/16), G, 16].
    """
    *lead, n, groups = scales.shape
    tiles = -(-n // TILE_ROWS)
    padded: Any = scales.new_zeros((*lead, tiles * TILE_ROWS, groups))
    padded[..., :n, :] = scales
    axes = [*range(len(lead) + 1), len(lead) + 3, len(lead) + 2, len(lead) + 1]
    tiled: Tensor = padded.reshape(*lead, tiles, 2, 8, groups).permute(axes).reshape(*lead, tiles, groups, TILE_ROWS)
    return tiled
