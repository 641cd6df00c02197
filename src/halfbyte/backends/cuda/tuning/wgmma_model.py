"""Which tiles multiply m tokens by a weight (n, k) on Hopper: a cost model with measured constants.

    time = start + unit · U + piece · P + cut · C + part · (parts − 1) − idle · U · free

U is the largest number of units of 64 inputs that a program does, P the pieces of tiles it ends, C
how many of those are parts of a tile that others share, `free` the share of multiprocessors without
a program. The six constants of a tile are fitted to measurements (wgmma_costs.py); m, n, k and the
number of multiprocessors come in through the count of tiles alone, so no shape is part of a table,
and rounds that are not full are counted as they are.

Tokens are divided in at most two launches: whole tiles, and a smaller tile for what is left. Where
a shape was measured and another launch was faster, that one is taken (`MEASURED`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import astuple
from typing import NamedTuple

from ..weight import WORKSPACE_BYTES
from .wgmma_costs import COSTS, MEASURED, SLOWER
from .wgmma_tiles import FusedTile, WorkSplit


class Costs(NamedTuple):
    """Constants of one tile, microseconds (module docstring)."""

    start: float
    unit: float
    piece: float
    cut: float
    part: float
    idle: float


class Step(NamedTuple):
    """One launch: tokens first to end of x, in tiles that are divided as `split` says."""

    first: int
    end: int
    tile: FusedTile
    split: WorkSplit


PARTS = (2, 3, 4, 6, 8)
"""Equal parts that a tile may be cut in; besides, as many as fill the machine."""
MEASURED_ON = 132
"""Multiprocessors of the card that MEASURED is of."""
LEAST_UNITS = 4
"""Units of a part."""
ABSENT_TOKENS = (1.3, 1.1)
"""Units take so many times as long where the copy engine fills 16 or more of a tile's 128 tokens
and more with zeros beside 64 rows, and where tiles are cut: it reads x for every program, and rows
outside a tensor are slower than those inside (NVIDIA H200: 45 µs at 100 tokens, 32 at 128, int4
8192 × 8192; 32 when the same 100 tokens lie in a tensor of 128).
"""


def bucket(m: int) -> int:
    """m rounded up to where a plan may change: every width of a tile is a multiple of 32, or of 16
    up to 1024 tokens.
    """
    step = 16 if m <= 1024 else 32 if m <= 4096 else 256
    return -(-m // step) * step


def candidates(family: str, half: bool) -> dict[FusedTile, Costs]:
    """The tiles of a family of weights with their constants."""
    times = SLOWER.get(family, {})
    known = {FusedTile(*tile): Costs(*us) for tile, us in COSTS["wide" if times else family, half].items()}
    return {tile: us._replace(unit=us.unit * times.get(astuple(tile), 1.0)) for tile, us in known.items()}


_candidates = functools.cache(candidates)


def tiles_of(m: int, n: int, tile: FusedTile) -> int:
    """Tiles of y (m, n)."""
    return -(-n // (64 * tile.rows * tile.groups)) * -(-m // tile.tokens)


def divisions(m: int, n: int, units: int, tile: FusedTile, most: int) -> Iterator[WorkSplit]:
    """The ways to divide the tiles of y (m, n) among at most `most` programs that are worth a look:
    whole, and what makes no whole round cut in parts, as far as partial sums fit the workspace.
    """
    tiles = tiles_of(m, n, tile)
    programs = min(most, tiles)
    rest = tiles % programs
    yield WorkSplit(programs, rest, max(1, rest))
    whole_rounds, rest = tiles >= most, rest if tiles >= most else tiles
    if not rest:
        return
    size = 2 * 64 * tile.rows * tile.groups * tile.tokens
    room = min(most, WORKSPACE_BYTES // (4 * size), rest * max(1, units // LEAST_UNITS))
    shares = {rest * parts for parts in PARTS if rest * parts <= room and units >= LEAST_UNITS * parts}
    for sharing in sorted({*shares, room} if room > rest else shares):
        yield WorkSplit(most if whole_rounds else sharing, rest, sharing, size * sharing)


def time_us(m: int, n: int, units: int, tile: FusedTile, split: WorkSplit, most: int, costs: Costs) -> float:
    """Modelled microseconds of one launch."""
    whole = tiles_of(m, n, tile) // split.programs
    cut = split.sharing > split.rest > 0
    longest = whole * units + (split.rest * units / split.sharing if split.rest else 0.0)
    shares = 0 if not split.rest else 2 if cut and split.sharing % split.rest else 1
    pieces = whole + shares
    joined = costs.cut * shares + costs.part * (split.sharing / split.rest - 1) if cut else 0.0
    if 64 * tile.rows * tile.groups < 128 <= tile.tokens and -m % tile.tokens >= 16:
        longest *= ABSENT_TOKENS[cut]
    free = max(0.0, 1 - split.programs / most)
    return costs.start + longest * (costs.unit - costs.idle * free) + pieces * costs.piece + joined


def _one(m: int, n: int, units: int, family: str, half: bool, most: int) -> tuple[float, FusedTile, WorkSplit]:
    """The best single launch."""
    best: tuple[float, FusedTile, WorkSplit] | None = None
    for tile, costs in _candidates(family, half).items():
        if tile.tokens >= 2 * max(m, 32) and best is not None:
            continue
        for split in divisions(m, n, units, tile, most):
            us = time_us(m, n, units, tile, split, most, costs)
            if best is None or us < best[0]:
                best = us, tile, split
    assert best is not None
    return best


@functools.lru_cache(maxsize=1 << 16)
def _plan(m: int, n: int, units: int, family: str, half: bool, most: int) -> tuple[Step, ...]:
    measured = MEASURED.get((family, half, n, units, m)) if most == MEASURED_ON else None
    if measured is not None:
        tile, (programs, rest, sharing) = FusedTile(*measured[0]), measured[1]
        partials = 128 * tile.rows * tile.groups * tile.tokens * sharing if sharing > rest > 0 else 0
        return (Step(0, m, tile, WorkSplit(programs, rest, sharing, partials)),)
    us, tile, split = _one(m, n, units, family, half, most)
    steps: tuple[Step, ...] = (Step(0, m, tile, split),)
    for whole in sorted({tile.tokens for tile in _candidates(family, half)}):
        first = m // whole * whole
        if whole >= 64 and 0 < first < m:
            a, b = _one(first, n, units, family, half, most), _one(m - first, n, units, family, half, most)
            if a[0] + b[0] < us:
                us = a[0] + b[0]
                steps = Step(0, first, *a[1:]), Step(first, m, *b[1:])
    return steps


def plan(m: int, n: int, units: int, family: str, half: bool, most: int) -> tuple[Step, ...]:
    """The launches for m tokens, n outputs and rows of `units` units of 64 inputs."""
    whole = bucket(m)
    steps = _plan(whole, n, units, family, half, most)
    return steps if whole == m else (*steps[:-1], steps[-1]._replace(end=m))


def warming_tokens(first: int, last: int, n: int, units: int, family: str, half: bool, most: int) -> list[int]:
    """Numbers of tokens from `first` to `last` among whose plans is every tile that a plan between
    them has.
    """
    seen: set[FusedTile] = set()
    out = []
    for m in sorted({min(bucket(m), last) for m in range(first, last + 1)}):
        tiles = {step.tile for step in plan(m, n, units, family, half, most)}
        if not tiles <= seen:
            seen |= tiles
            out.append(m)
    return out
