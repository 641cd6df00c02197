"""Transposition by the native core and by NumPy, against `ndarray.T`."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.layouts.awq.gemm import ORDER
from halfbyte.numerics import transpose as turning
from halfbyte.numerics.bits import pack, unpack
from halfbyte.numerics.transpose import NATURAL_ORDER, transpose, transpose_nibbles, transpose_nibbles_numpy, transpose_tiled

needs_native = pytest.mark.skipif(turning.native() is None, reason="the native core is not built")
SHAPES = [(0, 5), (3, 0), (1, 1), (1, 7), (7, 1), (15, 17), (16, 16), (63, 65), (64, 64), (129, 31), (700, 513), (128, 4096)]
"""Of both sides of a cache line of elements of every size, and of a tile of the twin."""
NIBBLES = [(r, c) for r in (0, 1, 7, 8, 31, 127, 128, 129, 1031) for c in (0, 1, 2, 9, 16, 127, 128, 130, 1040)]
BACKWARDS = (7, 6, 5, 4, 3, 2, 1, 0)


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "numpy"])
def way(request, monkeypatch):
    """Both ways of turning."""
    if request.param == "numpy":
        monkeypatch.setattr(turning, "native", lambda: None)
    return request.param


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "c16"])
def test_transpose_is_the_transposed_matrix(way, shape, dtype):
    size = np.dtype(dtype).itemsize
    x = random_bytes(shape[0], shape[1] * size).view(dtype).reshape(shape)
    for matrix in (x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2]):
        out = transpose(matrix)
        assert out.flags.c_contiguous
        assert out.dtype == x.dtype
        assert out.shape == shape[::-1]
        assert out.tobytes() == np.ascontiguousarray(x.T).tobytes()


@pytest.mark.parametrize("lead", [(0,), (1,), (3,), (2, 2)])
@pytest.mark.parametrize("shape", [(5, 3), (300, 700)])
def test_a_stack_is_transposed_matrix_by_matrix(way, lead, shape):
    x = random_bytes(*lead, *shape, 4).view(np.int32)[..., 0]
    assert np.array_equal(transpose(np.ascontiguousarray(x)), x.swapaxes(-1, -2))


def by_code(x: np.ndarray, columns: int, order=NATURAL_ORDER, out_order=NATURAL_ORDER) -> np.ndarray:
    """`transpose_nibbles`, a code at a time."""
    rows = np.arange(len(x))
    codes = unpack(x, 4, columns)
    if order != NATURAL_ORDER:
        codes = codes[rows // 8 * 8 + np.array(order)[rows % 8]]
    out = np.empty((columns, len(x)), np.uint8)
    at = np.arange(columns)
    out[at if out_order == NATURAL_ORDER else at // 8 * 8 + np.array(out_order)[at % 8]] = codes.T
    return pack(out, 4)


@pytest.mark.parametrize(("rows", "columns"), NIBBLES)
def test_nibbles_of_any_shape(way, rows, columns):
    """Bytes at random: what lies in the padding of an odd row is read past, and written as zero."""
    x = random_bytes(rows, -(-columns // 2))
    out = transpose_nibbles(x, columns)
    assert out.flags.c_contiguous
    assert out.shape == (columns, -(-rows // 2))
    assert np.array_equal(out, by_code(x, columns))


@pytest.mark.parametrize("order", [ORDER[4], BACKWARDS])
@pytest.mark.parametrize(("eights", "others"), [(1, 1), (2, 8), (3, 37), (16, 128), (17, 130), (130, 1031), (0, 4), (4, 0)])
def test_eights_in_another_order(way, order, eights, others):
    """A layout's order of eight on the side that has whole eights, any number on the other; there
    and back.
    """
    x = random_bytes(8 * eights, -(-others // 2))
    if others % 2 and x.size:
        x[:, -1] &= 0x0F
    words = transpose_nibbles(x, others, order=order)
    assert np.array_equal(words, by_code(x, others, order))
    back = transpose_nibbles(words, 8 * eights, out_order=order)
    assert np.array_equal(back, by_code(words, 8 * eights, NATURAL_ORDER, order))
    assert np.array_equal(back, x)


@needs_native
@pytest.mark.parametrize("order", [NATURAL_ORDER, ORDER[4]])
def test_the_twins_give_the_same_bytes(order):
    """The native core and NumPy on what a layer has, in both directions and both orders."""
    x = random_bytes(1064, 516)
    assert np.array_equal(transpose_nibbles(x, 1032, order), transpose_nibbles_numpy(x, 1032, order))
    assert np.array_equal(
        transpose_nibbles(x, 1032, NATURAL_ORDER, order), transpose_nibbles_numpy(x, 1032, NATURAL_ORDER, order)
    )
    words = x.view(np.int32)
    assert np.array_equal(transpose(words), transpose_tiled(words))


def test_views_are_transposed_by_their_strides(way):
    x = random_bytes(64, 64)
    assert np.array_equal(transpose_nibbles(x[::2, ::2], 64), by_code(np.ascontiguousarray(x[::2, ::2]), 64))
    x.flags.writeable = False  # as a mapped file
    assert np.array_equal(transpose_nibbles(x, 128), by_code(x, 128))
    assert np.array_equal(transpose(x), x.T)


def test_an_older_build_of_the_core_is_passed_over(monkeypatch):
    import halfbyte

    monkeypatch.setitem(__import__("sys").modules, "halfbyte._native", object())
    monkeypatch.setattr(halfbyte, "_native", object(), raising=False)
    turning.native.cache_clear()
    try:
        assert turning.native() is None
    finally:
        turning.native.cache_clear()


def test_a_byte_is_two_codes_whatever_part_of_a_word_is_there(way):
    for rows in range(1, 18):
        for columns in range(1, 20):
            x = random_bytes(rows, -(-columns // 2))
            turned = unpack(transpose_nibbles(x, columns), 4, rows)
            assert np.array_equal(turned, unpack(x, 4, 2 * x.shape[1])[:, :columns].T)
