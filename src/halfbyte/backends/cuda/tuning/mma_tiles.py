"""Tiles by shape. Those of a card that was measured come from its file (table.py); the rules here
serve every other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .table import found


@dataclass(frozen=True)
class Tile:
    """rows of the weight and words of eight inputs a step; tokens a program; warps; pipeline
    stages; programs that share the inputs.
    """

    rows: int
    words: int
    warps: int
    tokens: int = 1
    stages: int = 3
    split: int = 1


def _power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def matvec_tile(words: int, n: int, m: int) -> Tile:
    """Tile of the matrix-vector kernel."""
    columns = min(512, _power_of_2(words))
    return Tile(rows=8 if n >= 2048 else 4, words=columns, warps=4)


def matmul_tile(words: int, n: int, m: int) -> Tile:
    """Tile of the small-m kernel: measured on an H200 at n = 4096 and 14336, k = 4096, for 3 to 6
    bits.
    """
    columns = min(16, _power_of_2(words))
    split = 1
    while split < 8 and words // columns >= 4 * split:
        split *= 2
    if m <= 16:
        return Tile(rows=16, words=columns, warps=2, tokens=16, stages=3, split=split)
    return Tile(rows=64, words=min(8, columns), warps=4, tokens=32, stages=3, split=split)


@dataclass(frozen=True)
class FragmentTile:
    """Tiles of 16 rows a warp, blocks of 8 columns a warp, warps along the inputs, warps along the
    rows, units a step, programs a multiprocessor (0: as many as there are turns), when words are
    asked for (`Plan.ahead`), weights finished in float16 before the product where that is
    exact or one rounding.
    """

    rows: int
    columns: int
    input_warps: int
    row_warps: int
    step: int = 4
    programs: int = 0
    ahead: int = 1
    scaled: bool = False


MANY_ROWS = 8192
"""Outputs from which a weight counts as tall; the table was measured at n = 4096 and 14336, k =
4096, on an H100.
"""

LANE_TILES: dict[int, dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]] = {
    2: dict.fromkeys(("planes", "supers", "fine supers"), ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1))),
    8: {
        "planes": ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1)),
        "supers": ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1)),
        "fine supers": ((2, 1, 8, 1, 2, 2), (1, 1, 16, 1, 4, 1)),
    },
    16: {
        "planes": ((2, 2, 8, 1, 4), (1, 2, 16, 1, 4, 1)),
        "supers": ((2, 2, 8, 1, 2), (2, 2, 8, 1, 2)),
        "fine supers": ((2, 2, 8, 1, 2), (2, 2, 8, 1, 2)),
    },
}
"""Tiles of lane order with one level of scales, and of two levels, in groups of 16 `fine`; measured
at n = 4096 and 14336, k = 4096 on an H200.
"""
FRAGMENT_TILES: dict[int, dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]] = {
    # tokens up to: {family (launch.family_of; `biased` without a row is `affine`): (tile for few
    # rows, tile for many rows)}
    2: {"wide": ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1)),
        "int": ((1, 1, 16, 1, 4, 1), (1, 1, 8, 1, 8, 2)), "affine": ((1, 1, 16, 1, 4, 1), (1, 1, 8, 1, 8, 2)),
        "e2m1": ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1)), **LANE_TILES[2]},
    8: {"wide": ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1)),
        "int": ((1, 1, 16, 1, 4, 1), (2, 1, 16, 1, 4, 1)), "affine": ((1, 1, 16, 1, 4, 1), (2, 1, 16, 1, 4, 1)),
        "e2m1": ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1)), **LANE_TILES[8]},
    16: {"wide": ((1, 2, 8, 1, 2), (1, 2, 16, 1, 2, 1)),
        "int": ((2, 2, 8, 1, 4), (1, 2, 16, 1, 4, 1)), "affine": ((2, 2, 8, 1, 4), (1, 2, 16, 1, 4, 1)),
         "e2m1": ((2, 2, 8, 1, 4), (1, 2, 16, 1, 4, 1, 1, True)), **LANE_TILES[16]},
    32: {"wide": ((2, 4, 4, 2, 1), (2, 4, 4, 2, 1)),
        "int": ((2, 4, 4, 2, 2), (2, 4, 4, 2, 2)), "affine": ((2, 4, 4, 2, 2), (2, 4, 4, 1, 2, 0, 1, True)),
         "e2m1": ((2, 4, 4, 2, 2, 0, 1, True), (2, 4, 4, 2, 2, 0, 1, True))},
    64: {"wide": ((2, 4, 4, 2, 1), (2, 4, 4, 2, 1)),
        "int": ((2, 8, 8, 1, 1, 0, 1, True), (2, 8, 4, 1, 1)),
         "affine": ((2, 4, 4, 1, 2, 0, 1, True), (2, 8, 2, 2, 1, 0, 1, True)),
         "e2m1": ((2, 4, 4, 2, 2, 0, 1, True), (2, 8, 2, 2, 1, 0, 1, True))},
}  # fmt: skip


def warp_units(units: int, warps: int, step: int, buffers: int) -> int:
    """Units of a warp: one step, or as many whole rounds of `buffers` steps as it needs."""
    need = -(-units // warps)
    return step if need <= step else -(-need // (step * buffers)) * step * buffers


def fragment_work(k: int, tile: tuple[Any, ...]) -> float:
    """Units that the warps of a fragment tile do, over the units that k inputs have."""
    t, units = FragmentTile(*tile), -(-k // 64)
    step = t.step
    while step > 1 and step >= 2 * -(-units // t.input_warps):
        step //= 2
    return warp_units(units, t.input_warps, step, 2 if t.ahead == 2 else 1) * t.input_warps / units


def fragment_tile(units: int, n: int, m: int, family: str = "int", card: str = "") -> FragmentTile:
    """Tile of the fragment kernel. A warp's inputs fit one step up to 64 units (k = 4096) only, so
    longer rows get no staying programs.
    """
    best = found(card, "fragments", family, n, 64 * units, m, fragment_work) if card and n else None
    if best:
        return FragmentTile(*best)
    row = FRAGMENT_TILES[min((limit for limit in FRAGMENT_TILES if m <= limit), default=64)]
    tile = FragmentTile(*row.get("e2m1" if family == "fine" else family, row["affine"])[n >= MANY_ROWS])
    if units <= 64:
        return tile
    if m <= 8:
        return FragmentTile(2, 1, 8, 1, 4, 2) if m <= 4 else FragmentTile(1, 1, 8, 1, 4, 2)
    return FragmentTile(2, 2, 8, 1, 4) if m <= 16 else tile


@dataclass(frozen=True)
class BlockTile:
    """tokens and rows of a tile, words of eight inputs a step, warps, steps in flight, programs a
    multiprocessor (striped).
    """

    tokens: int
    rows: int
    words: int
    warps: int
    stages: int = 3
    programs: int = 1


def block_tile(n: int, m: int, width: int, schedule: str) -> BlockTile:
    """Tile of the decoded-tile schedules for activations of `width` bytes."""
    if width == 4:
        return BlockTile(16, 32, 4, 4, 2, 2)
    tokens = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128
    return BlockTile(tokens, 64 if m <= 64 else 128, 8, 4 if m <= 64 else 8, 3, 2 if m <= 64 else 1)


def expert_tile(units: int, n: int, m: int, family: str = "e2m1", card: str = "") -> FragmentTile:
    """Tile of the fragment kernel over a stack of experts, m tokens a block."""
    best = found(card, "experts", family, n, 64 * units, m) if card and n else None
    if best:
        return FragmentTile(*best)
    if m > 8:
        return FragmentTile(2, 2, 2, 1, 2, 8, 1, True)
    return FragmentTile(2, 1, 2, 1, 4, 6) if m > 4 else FragmentTile(2, 1, 4, 1, 4, 3)


def steps(group: int, units: int, m: int, tile: FragmentTile) -> tuple[int, int, int]:
    """(units a step, groups an accumulator, tokens a group) nearest to the tile's wish that the
    kernel takes for groups of `group` inputs.

    Groups share an accumulator where columns are left: 8 tokens take all eight. A step is a power
    of two units, no more than a warp has, and whole sets of groups, or a whole part of one group.
    """
    step = tile.step
    while step > 1 and step >= 2 * -(-units // tile.input_warps):
        step //= 2
    tokens = 8 if m > 4 or tile.columns > 1 else 4 if m > 2 else m
    groups = 8 // tokens
    while groups > 1 and (64 * step) % (groups * group):
        groups //= 2
    while step > 1 and (64 * step) % group and group % (64 * step):
        step //= 2
    return step, groups, tokens
