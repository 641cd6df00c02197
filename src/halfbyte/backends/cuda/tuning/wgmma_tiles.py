"""Tiles of the fused schedule, as data: measured on an NVIDIA H200 at n = 4096 and 14336, k = 4096
(docs/design/cuda-gemm.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class FusedTile:
    """Shape and pipeline of a tile.

    tokens    of a tile: a power of two, or with `deep` 1 the sum of two
    rows      blocks of 64 rows of a warpgroup
    groups    warpgroups along the rows, 1 or 2
    stages    of 64 inputs in shared memory; fewer where they do not fit (`stages`)
    split     parts along the inputs of a tile in the incomplete last round; 0: by `parts`
    together  token blocks that are adjacent in the order of tiles
    deep      warpgroups on the same rows, each with every deep-th unit of inputs; groups · deep ≤ 4
    ahead     read the next words while products run: 0 never, 1 always, 2 except with E8M0 scales,
              where that is slower
    """

    tokens: int
    rows: int = 1
    groups: int = 2
    stages: int = 4
    split: int = 0
    together: int = 8
    deep: int = 1
    ahead: int = 2


class WorkSplit(NamedTuple):
    """How the tiles of a launch are divided: programs; tiles beyond whole rounds, and programs that
    share them; float32 values of partial sums that cut tiles leave in memory.
    """

    programs: int
    rest: int
    sharing: int
    partials: int = 0


MANY_ROWS = 8192
"""Outputs from which a weight counts as tall."""

LEAST_TOKENS = 17
"""Tokens from which the fused schedule serves: at 32 it takes 0.5 to 0.9 of the fragment kernel's
time, at 16 it is slower.
"""

FEW_INPUTS = 2048
FEW_INPUTS_LEAST = 65
"""Weights of fewer inputs and fewer than MANY_ROWS rows: one round of tiles is mostly its start and
end, and up to 64 tokens the fragment kernel takes 0.4 to 0.75 of the time.
"""

FEW_ROWS = 512
FEW_ROWS_MOST = 512
"""Weights of so few rows have too few tiles for the machine past so many tokens, even cut in parts:
dequantize_then_gemm takes half the time at 1024.
"""


EXPERT_TILES = {
    # pairs an expert gets on average, up to: tile
    8: FusedTile(16, 2, 2, 6),
    16: FusedTile(32, 2, 2, 6),
    32: FusedTile(64, 1, 2, 8, deep=2),
    128: FusedTile(128, 1, 2, 6, deep=2, ahead=0),
    1 << 30: FusedTile(256, 1, 2, 4),
}

INVARIANT_TILES = {
    # tokens, or pairs an expert gets on average, up to: tile of many rows, of few
    16: (FusedTile(16, 1, 2, 8, deep=2), FusedTile(16, 1, 1, 8, deep=2)),
    32: (FusedTile(32, 1, 2, 8, deep=2), FusedTile(32, 1, 1, 8, deep=2)),
    64: (FusedTile(64, 1, 2, 8, deep=2), FusedTile(64, 1, 1, 8, deep=2)),
    1 << 30: (FusedTile(128, 1, 2, 6, deep=2), FusedTile(128, 1, 1, 8, deep=2)),
}
"""Tiles of the batch-invariant mode: all with the same `deep`, which orders a row's sums. Those of
few rows serve where the others make fewer than MANY_TILES.
"""
MANY_TILES = 100

LEAST_PAIRS = 16
"""Pairs an expert on average from which the fused schedule serves a block of experts."""


def parts(rest: int, programs: int, units: int) -> int:
    """Parts for each of `rest` tiles: as many as there are programs for, a power of two, each of
    four units or more.
    """
    count = 1
    while count < 8 and 2 * count * rest <= programs and units >= 8 * count:
        count *= 2
    return count


def second_tokens(tokens: int) -> int:
    """Tokens of a tile that a second product takes: what its width has beyond a power of two."""
    return tokens - (1 << tokens.bit_length() - 1)


SHARED_BYTES = 232448 - 1024
"""Shared memory a block may have on compute capability 9.0, less barriers."""


def stages(tile: FusedTile, bits: int, groups: int, scale_bytes: int, addend_bytes: int, supers: int = 0) -> int:
    """The tile's stages, or as many as fit beside outputs and the sums of warpgroups that share
    rows; `groups` are a unit's, each with so many bytes of scale and addend; `supers`: super scales
    and super minimums.

    A multiple of `deep`, so that a stage belongs to one warpgroup. A barrier reports the parity of
    its last phase alone: a warpgroup that did not wait for every phase of a stage would take the
    data of two phases ago for those that it needs. A tile that holds fewer than two stages a
    warpgroup cannot be launched: with `ahead` a warpgroup waits for its next stage before it leaves
    the one that it has.
    """
    bn, first = 64 * tile.rows * tile.groups, tile.tokens - second_tokens(tile.tokens)
    words = 8 * (bn * bits + (max(128 - bn, 0) if bits % 2 else 0))  # of single bits, eight tiles at least
    stage = tile.tokens * 128 + words + max(bn // 16, 8) * 16 * (groups * (scale_bytes + addend_bytes) + 2 * supers)
    other = bn * first * (2 + 4 * (tile.deep - 1))
    count = min(tile.stages, (SHARED_BYTES - other) // stage)
    return count - count % tile.deep


def most_blocks(pairs: int, experts: int, tokens: int) -> int:
    """Upper bound of the number of blocks of at most `tokens` (token, expert) pairs of one expert."""
    return min(pairs, pairs // tokens + experts)


def invariant_tile(tokens: int, rows: int) -> FusedTile:
    """The tile of the batch-invariant mode for so many tokens and rows of the weight."""
    wide, narrow = next(tiles for most, tiles in INVARIANT_TILES.items() if tokens <= most)
    return wide if -(-rows // 128) * -(-tokens // wide.tokens) >= MANY_TILES else narrow


def uncut(m: int, n: int, tile: FusedTile, most: int) -> WorkSplit:
    """The tiles of y (m, n) among at most `most` programs, none cut in parts."""
    tiles = -(-n // (64 * tile.rows * tile.groups)) * -(-m // tile.tokens)
    programs = min(most, tiles)
    return WorkSplit(programs, tiles % programs, max(1, tiles % programs))


def expert_tile(pairs: int, experts: int) -> FusedTile:
    """Tile of a block of experts."""
    return next(tile for limit, tile in EXPERT_TILES.items() if pairs <= limit * experts)
