"""Rows a few at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.numerics.row_slices import row_slices


@given(st.integers(0, 40), st.integers(0, 12), st.integers(0, 30))
def test_every_row_is_in_one_slice_in_order_and_no_slice_could_be_longer(rows, width, most):
    pieces = list(row_slices((rows, width), most))
    assert [row for piece in pieces for row in range(rows)[piece]] == list(range(rows))
    lengths = [piece.stop - piece.start for piece in pieces]
    assert all(length == 1 or length * width <= most for length in lengths)
    assert all((length + 1) * max(width, 1) > most for length in lengths[:-1])
