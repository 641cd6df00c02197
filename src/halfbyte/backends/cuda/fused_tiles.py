"""Tiles of the fused schedule by shape, as data: measured on NVIDIA H100 and H200 (docs/cuda.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedTile:
    """Tokens a tile; blocks of 64 rows a warpgroup; warpgroups (1 or 2); stages of 64 inputs; most parts that a tile is cut into
    along its inputs; token blocks side by side."""

    tokens: int
    rows: int = 1
    groups: int = 2
    stages: int = 4
    split: int = 4
    together: int = 8


MANY_ROWS = 8192
"""Outputs from which a weight counts as tall; the table was measured at n = 4096 and 14336, k = 4096."""

FUSED_TILES = {
    # (tokens up to, tall): tile. More tokens take the last row.
    (32, False): FusedTile(32, 2, 2, 6, 8),
    (32, True): FusedTile(32, 2, 2, 6, 4),
    (64, False): FusedTile(64, 1, 2, 6, 4),
    (64, True): FusedTile(64, 2, 2, 6, 2),
    (128, False): FusedTile(128, 1, 2, 5, 4),
    (128, True): FusedTile(128, 1, 2, 5, 1),
    (256, False): FusedTile(128, 1, 2, 5, 2),
    (256, True): FusedTile(128, 2, 2, 4, 1),
    (1024, False): FusedTile(128, 2, 2, 4, 1),
    (1024, True): FusedTile(128, 2, 2, 4, 2),
}


def fused_tile(n: int, m: int) -> FusedTile:
    """Tile for m tokens and n outputs."""
    limit = min((tokens for tokens, _ in FUSED_TILES if m <= tokens), default=1024)
    return FUSED_TILES[limit, n >= MANY_ROWS]


def least_tokens(n: int, k: int) -> int:
    """Tokens from which the fused schedule is the fastest for a weight (n, k)."""
    return 1 << 30


def expert_tile(pairs: int, experts: int) -> FusedTile:
    """Tile of a block of experts: as many tokens as an expert gets on average, a power of two."""
    each = pairs // experts
    if each <= 16:
        return FusedTile(16, 2, 2, 6)
    if each <= 32:
        return FusedTile(32, 2, 2, 6)
    if each <= 64:
        return FusedTile(64, 2, 2, 6)
    return FusedTile(128, 2, 2, 4)
