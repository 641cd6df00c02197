"""Elements by group, and back: encoders work on arrays [*groups, g] for every grouping.

| grouping | groups | elements of a group |
|---|---|---|
| `row` | [*lead, n, G] | g neighbours of a row |
| `block` | [*lead, ceil(n/rows), G] | a tile of rows × g |
| `flat` | [ceil(size/g)] | g neighbours of the flattened tensor |
| `strided` | [ceil(size/g)] | every (size/g)-th element of the flattened tensor |

A short last group (row, tile or flat end) is padded with copies of its last element, which keeps
its minimum and maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...numerics.row_slices import row_slices
from ...spec import Format

BLOCK_ELEMENTS = 1 << 20
"""Elements encoded at a time where rows are independent."""


def group_length(fmt: Format, k: int) -> int:
    """Elements along k of one group: group_size, or k for the whole row."""
    return k if fmt.group_size == -1 else fmt.group_size


def _fill(x: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    """`x` lengthened to `size` along an axis by copies of its last slice."""
    missing = size - x.shape[axis]
    return x if missing == 0 else np.concatenate([x, np.repeat(np.take(x, [-1], axis), missing, axis)], axis)


def row_blocks(n: int, k: int) -> Iterator[slice]:
    """Slices of n rows of k elements, `BLOCK_ELEMENTS` or one row each."""
    return row_slices((n, k), BLOCK_ELEMENTS)


def grouped(x: NDArray[Any], fmt: Format) -> NDArray[Any]:
    """[*lead, n, k], not empty -> [*groups, g] as the table says."""
    *lead, n, k = x.shape
    if fmt.grouping in ("flat", "strided"):
        count = -(-x.size // fmt.group_size)
        flat = _fill(x.reshape(-1), 0, count * fmt.group_size)
        return flat.reshape(count, -1) if fmt.grouping == "flat" else flat.reshape(-1, count).T
    g, groups = group_length(fmt, k), fmt.groups(k)
    x = _fill(x, -1, groups * g)
    if fmt.grouping == "row":
        return x.reshape(*lead, n, groups, g)
    rows = n if fmt.group_rows == -1 else fmt.group_rows
    tiles = -(-n // rows)
    x = _fill(x, -2, tiles * rows).reshape(*lead, tiles, rows, groups, g)
    return np.moveaxis(x, -3, -2).reshape(*lead, tiles, groups, rows * g)


def ungrouped(x: NDArray[Any], fmt: Format, shape: tuple[int, ...]) -> NDArray[Any]:
    """[*groups, g] -> [*lead, n, k]: the inverse of `grouped`, without the padding of short groups."""
    *lead, n, k = shape
    if fmt.grouping in ("flat", "strided"):
        flat = x if fmt.grouping == "flat" else x.T
        return flat.reshape(-1)[: math.prod(shape)].reshape(shape)
    g, groups = group_length(fmt, k), fmt.groups(k)
    if fmt.grouping == "row":
        return x.reshape(*lead, n, groups * g)[..., :k]
    rows = n if fmt.group_rows == -1 else fmt.group_rows
    tiles = -(-n // rows)
    x = np.moveaxis(x.reshape(*lead, tiles, groups, rows, g), -2, -3)
    return x.reshape(*lead, tiles * rows, groups * g)[..., :n, :k]
