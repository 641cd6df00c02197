"""The orders of a weight on the GPU are bijections, and tiles keep the kernel's rules. (What the
decoders make of the words: test_decoders.py.)
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.backends.cuda.order import (
    PLANES,
    by_tiles,
    from_fragments,
    from_lanes,
    gather_e2m1,
    join,
    split,
    spread_e2m1,
    to_fragments,
    to_lanes,
)
from halfbyte.backends.cuda.tuning.mma_tiles import FRAGMENT_TILES, FragmentTile, fragment_tile, steps
from halfbyte.numerics.bits import pack


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_planes_are_a_bijection(bits, n, k, seed):
    codes = pack(np.random.default_rng(seed).integers(0, 1 << bits, (n, k), dtype=np.uint8), bits)
    planes = split(codes, bits, k)
    assert tuple(planes) == PLANES[bits]
    np.testing.assert_array_equal(join(planes, bits, k), codes)


@given(st.integers(1, 40), st.integers(1, 200), st.booleans(), st.sampled_from(["uint", "e2m1"]), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_fragments_are_a_bijection(n, k, by_16, element, seed):
    codes = pack(np.random.default_rng(seed).integers(0, 16, (n, k), dtype=np.uint8), 4)
    words = to_fragments(codes, k, by_16, element)
    assert words.shape == (-(-n // 16), -(-k // 64), 32, 4)
    np.testing.assert_array_equal(from_fragments(words, n, k, by_16, element), codes)


@given(st.integers(1, 40), st.integers(1, 200), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_fragments_of_octets_are_a_bijection(n, k, by_16, seed):
    codes = np.random.default_rng(seed).integers(0, 256, (n, k), dtype=np.uint8)
    words = to_fragments(codes, k, by_16, bits=8)
    assert words.shape == (-(-n // 16), -(-k // 64) * 2, 32, 4)
    np.testing.assert_array_equal(from_fragments(words, n, k, by_16, bits=8), codes)


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_tiles_of_2_bits_are_a_bijection(n, k, seed):
    codes = pack(np.random.default_rng(seed).integers(0, 4, (n, k), dtype=np.uint8), 2)
    words = to_fragments(codes, k, bits=2)
    assert words.shape == (-(-n // 16), -(-k // 64), 16, 4)
    np.testing.assert_array_equal(from_fragments(words, n, k, bits=2), codes)
    np.testing.assert_array_equal(from_fragments(words.view(np.int16), n, k, bits=2), codes)  # as a weight holds them


@given(
    st.integers(1, 40), st.integers(1, 200), st.booleans(), st.sampled_from([(2, "int"), (4, "uint"), (4, "e2m1"), (8, "uint")]),
    st.integers(1, 4), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_torch_makes_the_same_words(n, k, by_16, coded, at_once, seed):
    """What a GPU does to the bytes of the file, in pieces of any number of tiles."""
    torch, arrange = pytest.importorskip("torch"), importlib.import_module("halfbyte.backends.cuda.arrange")
    bits, element = coded
    codes = pack(np.random.default_rng(seed).integers(0, 1 << bits, (n, k), dtype=np.uint8), bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrange, "CODES_AT_ONCE", at_once << 10)
        got = arrange.to_fragments(torch.from_numpy(codes), k, by_16, element, bits)
    np.testing.assert_array_equal(got.numpy(), to_fragments(codes, k, by_16, element, bits))


@given(st.integers(1, 7), st.integers(1, 40), st.integers(1, 200), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_lanes_are_a_bijection_and_torch_makes_the_same(bits, n, k, at_once, seed):
    torch, arrange = pytest.importorskip("torch"), importlib.import_module("halfbyte.backends.cuda.arrange")
    codes = pack(np.random.default_rng(seed).integers(0, 1 << bits, (n, k), dtype=np.uint8), bits)
    planes = to_lanes(codes, bits, k)
    assert {width: p.shape for width, p in planes.items()} == {w: (-(-n // 16), -(-k // 64), 32, w) for w in PLANES[bits]}
    np.testing.assert_array_equal(from_lanes(planes, bits, n, k), codes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrange, "CODES_AT_ONCE", at_once << 12)
        got = arrange.to_lanes(torch.from_numpy(codes), bits, k)
    for width, plane in planes.items():
        np.testing.assert_array_equal(got[width].numpy(), plane)


def test_a_lane_has_the_inputs_that_its_operand_wants():
    """Row 8 h + g, input 8 c + 2 t + p lies with lane 4 g + t: nibbles in word 2 h + c / 4, pairs
    in word h, bits in the only word.
    """
    q = np.random.default_rng(1).integers(0, 128, (16, 64), dtype=np.uint8)
    planes = {width: plane.view(np.uint32)[0, 0] for width, plane in to_lanes(pack(q, 7), 7, 64).items()}
    for row in range(16):
        for j in range(64):
            h, c, lane, p = row // 8, j // 8, 4 * (row % 8) + j // 2 % 4, j % 2
            low = planes[4][lane, 2 * h + c // 4] >> np.uint32(4 * (c % 4) + 16 * p) & 15
            pair = planes[2][lane, h] >> np.uint32(2 * c + 16 * p) & 3
            bit = planes[1][lane, 0] >> np.uint32(8 * h + c + 16 * p) & 1
            assert low | pair << 4 | bit << 6 == q[row, j]


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (20, 3), (0, 17, 2), (3, 33, 5)])
def test_torch_lays_the_same_tiles(shape):
    torch, arrange = pytest.importorskip("torch"), importlib.import_module("halfbyte.backends.cuda.arrange")
    scales = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    got = arrange.by_tiles(torch.from_numpy(scales)).numpy()
    assert got.shape == (*shape[:-2], -(-shape[-2] // 16), shape[-1], 16)
    for index in np.ndindex(shape[:-2]):
        np.testing.assert_array_equal(got[index], by_tiles(scales[index]))


def test_an_octet_lies_where_its_operand_wants_it():
    """Row 8 h + g, input 32 s + 8 t + 4 b + 2 i + p: half s, lane 4 g + t, word 2 b + i, byte 2 h +
    p.
    """
    q = np.random.default_rng(1).integers(0, 256, (16, 64), dtype=np.uint8)
    words = to_fragments(q, 64, bits=8).view(np.uint32)[0]
    for row in range(16):
        for j in range(64):
            h, g, s, t, b, i, p = row // 8, row % 8, j // 32, j // 8 % 4, j // 4 % 2, j // 2 % 2, j % 2
            assert (words[s, 4 * g + t, 2 * b + i] >> np.uint32(8 * (2 * h + p))) & 255 == q[row, j]


def test_a_word_is_one_lanes_operand():
    """Row 8 h + g, input 32 s + 8 t + 4 b + 2 i + p lies with lane 4 g + t, word 2 s + b, nibble 4
    p + 2 i + h.
    """
    rng = np.random.default_rng(1)
    q = rng.integers(0, 16, (16, 64), dtype=np.uint8)
    words = to_fragments(pack(q, 4), 64).view(np.uint32)[0, 0]
    for row in range(16):
        for j in range(64):
            h, g, s, t, b, i, p = row // 8, row % 8, j // 32, j // 8 % 4, j // 4 % 2, j // 2 % 2, j % 2
            assert (words[4 * g + t, 2 * s + b] >> np.uint32(4 * (4 * p + 2 * i + h))) & 15 == q[row, j]


def test_spreading_bits_is_a_bijection_of_words():
    words = np.random.default_rng(2).integers(-(2**31), 2**31, 4096).astype(np.int32)
    np.testing.assert_array_equal(gather_e2m1(spread_e2m1(words)), words)
    np.testing.assert_array_equal(spread_e2m1(gather_e2m1(words)), words)


def test_scales_of_rows_g_and_g_plus_8_are_neighbours():
    scales = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
    tiled = by_tiles(scales)
    assert tiled.shape == (2, 3, 16)
    for row in range(20):
        np.testing.assert_array_equal(tiled[row // 16, :, row % 8 * 2 + row % 16 // 8], scales[row])
    assert not tiled[1, :, 8:].any()
    assert not tiled[1, :, 1::2].any()


@given(
    st.sampled_from([16, 32, 64, 128, 192, 256, 448, 2880, 4096]), st.integers(1, 300), st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 8]),
)  # fmt: skip
def test_steps_keep_the_kernels_rules(group, units, m, warps, step, columns):
    got, groups, tokens = steps(group, units, m, FragmentTile(1, columns, warps, 1, step))
    assert 1 <= got <= step
    assert got & (got - 1) == 0
    assert groups * tokens <= 8
    assert groups == 1 or (64 * got) % (groups * group) == 0
    assert (64 * got) % group == 0 or group % (64 * got) == 0
    assert columns == 1 or tokens == 8
    assert tokens >= min(m, 8)


@pytest.mark.parametrize("family", ["int", "affine", "biased", "e2m1", "fine", "wide", "planes", "supers", "fine supers"])
def test_every_m_and_shape_has_a_tile(family):
    for m in range(1, 300):
        for units, n in ((1, 16), (45, 2880), (64, 4096), (64, 14336), (224, 4096)):
            tile = fragment_tile(units, n, m, family)
            assert tile.input_warps * tile.row_warps <= 16
            assert tile.columns == 1 or m > 8
    assert sorted(FRAGMENT_TILES) == list(FRAGMENT_TILES)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_words_past_the_last_input_are_zero(bits):
    codes = np.full((3, -(-10 * bits // 8)), 255, np.uint8)
    words = split(codes, bits, 10)[bits]
    assert words.shape == (3, 2 * bits)
    assert (words[:, : codes.shape[1]] == 255).all()
    assert not words[:, codes.shape[1] :].any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_planes_of_a_stack_are_those_of_its_matrices(bits):
    """Rows of 5 codes end inside a word of every plane."""
    codes = pack(np.random.default_rng(bits).integers(0, 1 << bits, (3, 9, 5), dtype=np.uint8), bits)
    planes = split(codes, bits, 5)
    for e in range(3):
        one = split(codes[e], bits, 5)
        assert list(planes) == list(one)
        assert all(np.array_equal(planes[width][e], one[width]) for width in one)
    np.testing.assert_array_equal(join(planes, bits, 5), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_that_are_made_one_after_another_are_those_made_alone(bits):
    """Rows so long that memory is bounded tile by tile."""
    k = 1 << 18
    codes = np.random.default_rng(bits).integers(0, 256, (40, k * bits // 8), dtype=np.uint8)
    tiles = to_fragments(codes, k, bits=bits)
    assert len(tiles) == 3
    for tile in range(3):
        np.testing.assert_array_equal(tiles[tile : tile + 1], to_fragments(codes[tile * 16 : tile * 16 + 16], k, bits=bits))
