"""Tiles of the fused schedule by shape, as data: measured on an NVIDIA H100 (docs/cuda.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedTile:
    """Tokens a tile; blocks of 64 rows a warpgroup; warpgroups; stages of 64 inputs; programs a multiprocessor; most parts that a
    tile is cut into along its inputs; token blocks side by side."""

    tokens: int
    rows: int = 1
    groups: int = 2
    stages: int = 4
    programs: int = 1
    split: int = 4
    together: int = 8


def fused_tile(n: int, k: int, m: int, multiprocessors: int) -> FusedTile:
    """Tile for a shape."""
    if m <= 32:
        return FusedTile(32, 2, 2, 6)
    if m <= 64:
        return FusedTile(64, 2, 2, 6)
    if m <= 256:
        return FusedTile(128, 1, 2, 5)
    return FusedTile(256, 1, 2, 4)


def least_tokens(n: int, k: int) -> int:
    """Tokens from which the fused schedule is the fastest for a weight (n, k)."""
    return 1 << 30


def expert_tile(pairs: int, experts: int) -> FusedTile:
    """Tile of a block of experts: as many tokens as an expert gets on average, a power of two."""
    each = pairs // experts
    if each <= 24:
        return FusedTile(16, 2, 2, 6)
    if each <= 48:
        return FusedTile(32, 2, 2, 6)
    if each <= 96:
        return FusedTile(64, 2, 2, 6)
    return FusedTile(128, 2, 2, 4)
