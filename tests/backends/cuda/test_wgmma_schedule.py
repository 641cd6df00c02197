"""How the schedule `fused` divides its tiles: every unit of every tile once, and parts of a cut
tile lie where the program that adds them looks. The kernel's own functions run on integers.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import types

import numpy as np
import pytest

from halfbyte import QTensor, format_named

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

from halfbyte.backends.cuda.tuning import wgmma_model as model
from halfbyte.backends.cuda.tuning.wgmma_tiles import (
    EXPERT_TILES,
    SHARED_BYTES,
    FusedTile,
    expert_tile,
    second_tokens,
    stages,
)
from halfbyte.backends.cuda.weight import WORKSPACE_BYTES, to_device
from halfbyte.backends.cuda.wgmma import epilogue, kernel
from halfbyte.backends.cuda.wgmma.schedule import split_tiles


class Numbers:
    """Gluon's operations on plain integers."""

    minimum, maximum = min, max

    @staticmethod
    def where(condition, yes, no):
        return yes if condition else no


def plain(function):
    """A function of the kernel, run on integers."""
    return types.FunctionType(function.fn.__code__, {**function.fn.__globals__, "gl": Numbers})


PIECE, UNITS_BEFORE, OWNER, TILE_POSITION = map(plain, (kernel.piece, kernel.units_before, epilogue.owner, kernel.tile_position))


def divided(tiles, units, most, wish):
    """`split_tiles` of a weight of one row of `tiles` tiles: programs, whole rounds, programs that
    share the rest, and the kernel's record of it.
    """
    tile = FusedTile(32, 1, 1, 4, split=wish)
    return as_kernel(split_tiles(32 * tiles, 64, units, tile, most), tiles, units)


def as_kernel(work, tiles, units):
    """A division, its whole rounds, and the kernel's record of it."""
    whole = tiles // work.programs
    rest = tiles - whole * work.programs
    assert rest == work.rest
    return work, whole, kernel.Split(tiles, whole, work.sharing, rest * units)


@pytest.mark.parametrize("tiles", [1, 2, 31, 112, 131, 132, 133, 448])
@pytest.mark.parametrize("units", [1, 3, 8, 45])
@pytest.mark.parametrize("most", [132, 7])
@pytest.mark.parametrize("wish", [0, 1, 2, 5])
def test_every_unit_is_done_once_and_parts_meet(tiles, units, most, wish):
    check_division(*divided(tiles, units, most, wish), tiles, units)


@pytest.mark.parametrize("tiles", [1, 5, 31, 90, 112, 132, 133, 200, 448])
@pytest.mark.parametrize("units", [1, 7, 45, 128])
def test_every_division_of_the_cost_model_does_every_unit_once(tiles, units):
    """Cuts that are no multiple of the tiles too, as far as the workspace goes."""
    for tile in (FusedTile(32, 1, 1, 4), FusedTile(256, 1, 2, 4)):
        n, m = 64 * tile.groups, tile.tokens * tiles
        works = list(model.divisions(m, n, units, tile, 132))
        assert len(set(works)) == len(works)
        for work in works:
            assert 4 * work.partials <= WORKSPACE_BYTES
            check_division(*as_kernel(work, tiles, units), tiles, units)


def check_division(work, whole, split, tiles, units):
    done, parts_of = np.zeros((tiles, units), int), {}
    for p in range(work.programs):
        for index in range(whole + 2):
            tile, first, last = PIECE(index, p, work.programs, split, units)
            if last > first:
                done[tile, first:last] += 1
            if 0 < last - first < units:
                parts_of.setdefault(tile - whole * work.programs, []).append((p, index))
    assert (done == 1).all()
    for j, pieces in parts_of.items():
        first, last = (OWNER(step, split.sharing, split.units) for step in (j * units, j * units + units - 1))
        assert [p for p, _ in pieces] == list(range(first, last + 1))
        # Where a part lies in memory: two slots a program, the second of its second piece.
        assert [index for _, index in pieces] == [j - (p * split.units // split.sharing) // units for p, _ in pieces]


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize(("tiles", "units", "wish"), [(112, 64, 2), (224, 64, 1), (3, 5, 0), (31, 45, 5), (448, 64, 3)])
def test_warpgroups_on_the_same_rows_alternate_across_pieces(tiles, units, wish, groups):
    """`consume` starts a piece with the units that `units_before` counts; the producer fills one
    stage after the other, whatever piece it belongs to.
    """
    work, whole, split = divided(tiles, units, 132, wish)
    for p in range(work.programs):
        low, high = (min(q * split.units // split.sharing, split.units) for q in (p, p + 1))
        done = 0
        for index in range(whole + 2):
            _, first, last = PIECE(index, p, work.programs, split, units)
            before = UNITS_BEFORE(index, low, high - low, units)
            assert last == first or before == done
            for number in range(groups):
                early = before + groups - 1 - number
                mine = [number + groups * i for i in range(early // groups, (early + last - first) // groups)]
                assert mine == [i for i in range(done, done + last - first) if i % groups == number]
            done += last - first
        assert done == high - low + whole * units


@pytest.mark.parametrize(("rows", "tokens", "adjacent"), [(1, 1, 8), (5, 3, 8), (7, 20, 8), (4, 9, 1), (3, 16, 4)])
def test_every_tile_has_one_position_and_neighbours_share_rows(rows, tokens, adjacent):
    at = [TILE_POSITION(tile, rows, tokens, adjacent) for tile in range(rows * tokens)]
    assert sorted(at) == [(r, t) for r in range(rows) for t in range(tokens)]
    assert [r for r, _ in at[: min(adjacent, tokens)]] == [0] * min(adjacent, tokens)


def test_tiles_for_every_number_of_tokens():
    for pairs in (1, 8, 300, 16384, 10**6):
        assert expert_tile(pairs, 32) in EXPERT_TILES.values()


def test_every_tile_of_the_tables_fits_with_every_format():
    """Two bytes a word of padding aside: stages, outputs, sums of warpgroups that share rows."""
    modelled = {tile for family, half in model.COSTS for tile in model.candidates(family, half)}
    for tile in {*modelled, *EXPERT_TILES.values()}:
        assert second_tokens(tile.tokens) in (0, 32, 64)
        assert tile.deep == 1 or not second_tokens(tile.tokens)
        for bits in (2, 4, 8):
            for groups, scale, zeros in ((1, 2, False), (4, 1, False), (4, 2, True)):
                held = stages(tile, bits, groups, scale, zeros)
                assert 2 * tile.deep <= held <= tile.stages
    assert stages(FusedTile(256, 1, 2, 4), 8, 4, 2, True) == 3
    assert SHARED_BYTES < 232448


@pytest.mark.parametrize("tile", [FusedTile(128, 1, 2, 6, deep=2, ahead=0), FusedTile(64, 2, 1, 8, deep=3)])
def test_a_stage_belongs_to_one_warpgroup(tile):
    """Unit u goes through stage u mod stages and to warpgroup u mod deep of those on the same rows.
    A barrier has one bit of its phase: who does not wait for every phase cannot count them. Eight
    bits leave the first tile room for five stages.
    """
    for bits in (2, 4, 8):
        count = stages(tile, bits, 4, 2, True)
        for stage in range(count):
            assert len({unit % tile.deep for unit in range(stage, 60 * count, count)}) == 1


def test_a_tile_of_fewer_than_two_stages_a_warpgroup_is_not_launched():
    """256 tokens beside the sums of two warpgroups leave room for three stages."""
    from triton.runtime.errors import OutOfResources

    import torch
    from halfbyte.backends.cuda.wgmma.launch import launch
    from halfbyte.bench.weights import random_weight

    tile = FusedTile(256, 1, 1, 6, deep=2)
    assert stages(tile, 4, 1, 2, False) == 2
    w = to_device(random_weight("int4:g128", 64, 256, 0), "cpu")
    x, y = (torch.zeros(256, width, dtype=torch.float16) for width in (256, 64))
    with pytest.raises(OutOfResources, match="stages of shared memory, Required: 4, Hardware limit: 2"):
        launch(x, w, None, y, tile, split_tiles(256, 64, w.tiled, tile, 132))


def test_copies_and_pickles_of_a_weight_leave_its_tensor_maps_behind():
    """Maps hold the weight's own memory: copied along, they would double it and describe what the
    copy no longer has.
    """
    parts_of = {"codes": np.zeros((16, 32), np.uint8), "scales": np.full((16, 2), 127, np.uint8)}
    w = to_device(QTensor(format_named("mxfp4"), (16, 64), parts_of), "cpu")
    w.launches["tile"] = w.planes[4]
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), dataclasses.replace(w)):
        assert other.launches == {}
    assert len(w.launches) == 1
