"""The canonical bit stream, against Python's own big integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import ShapeError
from halfbyte.numerics.bits import _BLOCK, pack, padding_is_zero, unpack

BITS = range(1, 9)


def by_hand(codes, bits: int) -> list[int]:
    """Row of codes -> bytes: one integer, least significant code first."""
    stream = int("0" + "".join(f"{int(c):0{bits}b}" for c in reversed(codes)), 2)
    return list(stream.to_bytes(-(-len(codes) * bits // 8), "little"))


@pytest.mark.parametrize("bits", BITS)
@given(lead=st.lists(st.integers(0, 3), max_size=3), k=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_every_row_is_one_little_endian_integer(bits, lead, k, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (*lead, k)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (*lead, -(-k * bits // 8))
    assert packed.flags.c_contiguous
    for row, wanted in zip(packed.reshape(-1, packed.shape[-1]), codes.reshape(-1, k), strict=True) if codes.size else ():
        assert row.tolist() == by_hand(wanted, bits)
    assert np.array_equal(unpack(packed, bits, k), codes)
    assert padding_is_zero(packed, bits, k)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("extra", [0, 1, 8])
def test_blocks_do_not_show(bits, extra):
    """More codes than one block of the loop, whole and not."""
    k = _BLOCK + extra
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (2, k)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed[1].tobytes() == bytes(by_hand(codes[1], bits))
    assert np.array_equal(unpack(packed, bits, k), codes)


@pytest.mark.parametrize("bits", BITS)
def test_all_ones_and_strided_input(bits):
    """Every bit set next to every bit clear: a field that leaks into its neighbour shows."""
    codes = np.zeros((3, 64), np.uint8)
    codes[:, ::2] = (1 << bits) - 1
    assert pack(codes, bits)[0].tolist() == by_hand(codes[0], bits)
    assert np.array_equal(pack(codes.T, bits), pack(np.ascontiguousarray(codes.T), bits))
    wide = np.repeat(pack(codes, bits), 2, axis=1)[:, ::2]
    assert np.array_equal(unpack(wide, bits, 64), codes)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint32])
def test_any_integer_dtype(dtype):
    assert pack(np.array([[1, 2, 3]], dtype), 4).tolist() == [[33, 3]]


@pytest.mark.parametrize(("codes", "bits"), [([0, 16], 4), ([-1, 3], 4), ([2], 1), ([256], 8)])
def test_codes_that_do_not_fit(codes, bits):
    with pytest.raises(ShapeError, match=rf"\[pack\] codes run from .*; a {bits}-bit code is 0 to {(1 << bits) - 1}$"):
        pack(np.array([codes]), bits)


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_the_wrong_length(bits):
    with pytest.raises(ShapeError, match=rf"\[unpack\] {bits + 1} bytes a row; 8 codes of {bits} bits take {bits}$"):
        unpack(np.zeros((1, bits + 1), np.uint8), bits, 8)


def test_padding_that_is_not_zero_is_seen_and_read_past():
    packed = pack(np.array([[1, 2, 3]], np.uint8), 3)
    packed[0, -1] |= 0x80
    assert not padding_is_zero(packed, 3, 3)
    assert unpack(packed, 3, 3).tolist() == [[1, 2, 3]]
