"""The cost model of the fused schedule: which launches serve m tokens; no GPU needed."""

from __future__ import annotations

import itertools

import pytest

from halfbyte.backends.cuda.tuning import wgmma_model as model
from halfbyte.backends.cuda.tuning.wgmma_tiles import FusedTile, WorkSplit
from halfbyte.backends.cuda.weight import WORKSPACE_BYTES

SHAPES = ((8192, 8192), (13824, 5120), (2880, 4096), (1856, 2688), (64, 64))


def modelled(m, n, k, steps, most=132):
    costs = model.candidates("int", True)
    units = -(-k // 64)
    return sum(model.time_us(s.end - s.first, n, units, s.tile, s.split, most, costs[s.tile]) for s in steps)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_launches_cover_every_token_once(n, k):
    for m in (*range(1, 300, 3), 384, 777, 1500, 3001, 10000):
        steps = model.plan(m, n, -(-k // 64), "int", True, 132)
        assert [s.first for s in steps] == [0, *(s.end for s in steps[:-1])]
        assert steps[-1].end == m
        assert all(s.first % 16 == 0 < s.end - s.first for s in steps)
        assert all(4 * s.split.partials <= WORKSPACE_BYTES for s in steps)


def test_a_plan_divides_the_tiles_that_its_m_has():
    """A bucket of m has as many tiles as each m in it, whatever the tile."""
    for tokens in (32, 64, 96, 128, 160, 192, 256):
        for m in range(1, 4097):
            assert -(-m // tokens) == -(-model.bucket(m) // tokens)


@pytest.mark.parametrize(("n", "k"), SHAPES[:-1])
def test_more_tokens_never_cost_much_less(n, k):
    """Over whole tiles the model is monotone but for what cutting saves. 114 multiprocessors: no
    shape was measured there.
    """
    units = -(-k // 64)
    times = [modelled(m, n, k, model.plan(m, n, units, "int", True, 114), 114) for m in range(128, 2049, 128)]
    assert all(b > 0.9 * a for a, b in itertools.pairwise(times))


def test_rounds_that_are_not_full_are_counted():
    tile, costs = FusedTile(256, 1, 2, 4), model.Costs(0, 1, 0, 0, 0, 0)
    full = model.time_us(256, 128 * 132, 64, tile, WorkSplit(132, 0, 1), 132, costs)
    one_more = model.time_us(256, 128 * 133, 64, tile, WorkSplit(132, 1, 1), 132, costs)
    cut = model.time_us(256, 128 * 133, 64, tile, WorkSplit(132, 1, 4, 4), 132, costs)
    assert (full, one_more, cut) == (64, 128, 80)


def test_a_remainder_takes_a_smaller_tile():
    """9 tokens beyond whole tiles of 256 do not cost a tile of 256."""
    steps = model.plan(256 * 12 + 9, 28672, 128, "int", True, 132)
    alone = model.plan(256 * 12, 28672, 128, "int", True, 132)
    extra = modelled(256 * 12 + 9, 28672, 8192, steps) / modelled(256 * 12, 28672, 8192, alone)
    assert extra < 1.04


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_warm_up_meets_every_tile(n, k):
    units = -(-k // 64)
    steps = model.warming_tokens(17, 1024, n, units, "int", True, 132)
    met = {s.tile for m in steps for s in model.plan(m, n, units, "int", True, 132)}
    needed = {s.tile for m in range(17, 1025) for s in model.plan(m, n, units, "int", True, 132)}
    assert needed == met
    assert len(steps) <= len(met)


def test_measured_launches_are_launches_that_the_model_knows():
    """Of a bucket's m, with a tile of the family, divided as `divisions` or the former rule divide."""
    assert model.MEASURED
    for (family, half, n, units, m), (fields, split) in model.MEASURED.items():
        assert model.bucket(m) == m
        tile = FusedTile(*fields)
        assert tile in model.candidates(family, half)
        (step,) = model.plan(m, n, units, family, half, model.MEASURED_ON)
        assert (step.tile, tuple(step.split[:3])) == (tile, split)
        tiles = model.tiles_of(m, n, tile)
        assert split[1] == tiles % split[0]
        assert 4 * step.split.partials <= WORKSPACE_BYTES
        cuts = {(w.programs, w.rest, w.sharing if w.rest else 1, w.partials) for w in model.divisions(m, n, units, tile, 132)}
        assert (*split[:2], split[2] if split[1] else 1, step.split.partials) in cuts
        other = model.plan(m, n, units, family, half, 114)
        assert sum(s.end - s.first for s in other) == m


@pytest.mark.parametrize(("family", "square", "tall"), [
    ("int", 9, 7), ("e2m1", 7, 5), ("fine", 10, 6), ("affine", 11, 7), ("wide", 10, 5), ("planes", 8, 5), ("supers", 9, 5),
])  # fmt: skip
def test_few_kernels_serve_every_number_of_tokens(family, square, tall):
    """A tile is a kernel, which m is no part of: so many are compiled for 17 to 4096 tokens."""
    for n, most in ((4096, square), (14336, tall)):
        lengths = {model.bucket(m) for m in range(17, 4097)}
        tiles = {step.tile for m in lengths for step in model.plan(m, n, 64, family, True, 132)}
        assert len(tiles) <= most
