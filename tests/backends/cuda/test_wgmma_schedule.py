"""How the fused schedule deals out its tiles: every unit of every tile once, and parts meet as the
kernel expects.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from halfbyte import QTensor, format_named

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

from halfbyte.backends.cuda.tuning.wgmma_tiles import (  # fmt: skip
    E2M1_TILES,
    EXPERT_TILES,
    FUSED_TILES,
    SHARED_BYTES,
    FusedTile,
    expert_tile,
    fused_tile,
    parts,
    stages,
)
from halfbyte.backends.cuda.weight import to_device


def owner(step, sharing, units):
    """wgmma._owner."""
    return ((step + 1) * sharing + units - 1) // units - 1


def pieces(p, programs, whole, sharing, units, k):
    """wgmma._piece for every piece of program p: tile and its units."""
    low, high = (min(q * units // sharing, units) for q in (p, p + 1))
    for j in (low // k, low // k + 1):
        first = max(low - j * k, 0)
        yield whole * programs + j, first, max(min(high - j * k, k), first)
    for turn in range(whole):
        yield turn * programs + p, 0, k


@pytest.mark.parametrize("tiles", [1, 2, 3, 31, 64, 112, 131, 132, 133, 200, 448])
@pytest.mark.parametrize("k", [1, 3, 8, 45, 64])
@pytest.mark.parametrize("most", [132, 114, 7])
@pytest.mark.parametrize("wish", [0, 1, 2, 5])
def test_every_unit_is_done_once_and_parts_meet(tiles, k, most, wish):
    split = min(wish, k) or parts(tiles % most if tiles >= most else tiles, most, k)
    programs = min(most, tiles * split)  # as fused.fused
    rest = tiles % programs
    sharing = max(1, min(programs, rest * split))
    whole = tiles // programs
    units = rest * k
    seen, together = set(), {}
    for p in range(programs):
        for tile, first, last in pieces(p, programs, whole, sharing, units, k):
            done = {(tile, unit) for unit in range(first, last)}
            assert not done & seen
            seen |= done
            if 0 < last - first < k:
                together.setdefault(tile - whole * programs, set()).add(p)
    assert len(seen) == tiles * k
    for j, programs_of in together.items():
        assert programs_of == set(range(owner(j * k, sharing, units), owner(j * k + k - 1, sharing, units) + 1))


@pytest.mark.parametrize("deep", [1, 2, 3, 4])
@pytest.mark.parametrize(("tiles", "k", "wish"), [(112, 64, 2), (224, 64, 1), (3, 5, 0), (31, 45, 5), (448, 64, 3), (133, 1, 1)])
def test_warpgroups_that_share_rows_take_turns_across_pieces(tiles, k, wish, deep):
    """wgmma._consume counts the units before a piece in closed form; the producer fills one stage
    after the other.
    """
    most = 132
    split = min(wish, k) or parts(tiles % most if tiles >= most else tiles, most, k)
    programs = min(most, tiles * split)
    rest = tiles % programs
    sharing = max(1, min(programs, rest * split))
    whole, units = tiles // programs, rest * k
    for p in range(programs):
        low = min(p * units // sharing, units)
        share = min((p + 1) * units // sharing, units) - low
        done = 0
        for seg, (_, first, last) in enumerate(pieces(p, programs, whole, sharing, units, k)):
            before = max((low // k + seg) * k - low, 0) if seg < 2 else share + (seg - 2) * k
            for turn in range(deep):
                early = before + deep - 1 - turn
                mine = range(early // deep, (early + last - first) // deep)
                if last > first:
                    assert [turn + deep * i for i in mine] == [i for i in range(done, done + last - first) if i % deep == turn]
                else:
                    assert not mine
            done += last - first
        assert done == share + whole * k


def test_tiles_for_every_number_of_tokens():
    for n in (64, 4096, 14336):
        for m in range(1, 2000, 7):
            assert fused_tile(n, m) in FUSED_TILES.values()
            assert fused_tile(n, m).tokens < 2 * max(32, m)
    for pairs in (1, 8, 300, 16384, 10**6):
        assert expert_tile(pairs, 32) in EXPERT_TILES.values()


def test_every_tile_of_the_tables_fits_with_every_format():
    """Two bytes a word of padding aside: stages, outputs, sums of warpgroups that share rows."""
    for tile in {*FUSED_TILES.values(), *E2M1_TILES.values(), *EXPERT_TILES.values()}:
        for bits in (2, 4, 8):
            for groups, scale, zeros in ((1, 2, False), (4, 1, False), (4, 2, True)):
                held = stages(tile, bits, groups, scale, zeros)
                assert 2 <= max(2, tile.deep) <= held <= tile.stages
    assert stages(FusedTile(256, 1, 2, 4), 8, 4, 2, True) == 3
    assert SHARED_BYTES < 232448


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
