"""Rows a few at a time: what bounds the memory of a pass over a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def row_slices(shape: Sequence[int], most: int) -> Iterator[slice]:
    """Slices that cover the rows of a matrix [rows, width] in order, each of as many rows as have
    at most `most` elements, or of one.

    >>> list(row_slices((5, 3), 7))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows, width = shape
    step = max(1, most // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
