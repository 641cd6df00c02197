"""Elements by group: which go together, said by loops over the matrix."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.formats import format_named
from halfbyte.formats.rounding.grouping import group_length, grouped, row_blocks, ungrouped
from halfbyte.spec import Format

LEADS = [(), (2,), (2, 3)]
SIZES = [(1, 1), (1, 8), (5, 7), (4, 8), (3, 10)]


def formats() -> list[Format]:
    """Groups of a part of a row, of a whole one, and of more than there is; tiles of one row, some
    and all.
    """
    row = format_named("int4", 4)
    sizes = [row.with_(group_size=g) for g in (1, 2, 4, 16, -1)]
    tiles = [f.with_(grouping="block", group_rows=rows) for f in sizes for rows in (1, 2, 3, 8, -1)]
    return sizes + tiles + [f.with_(grouping=word) for f in sizes[:-1] for word in ("flat", "strided")]


def members(fmt: Format, lead: tuple[int, ...], n: int, k: int) -> list[list[int]]:
    """Positions in the flattened tensor of the elements of each group, in order; a place that a
    short group lacks has the last before it.
    """
    size = int(np.prod(lead, dtype=int)) * n * k
    if fmt.grouping in ("flat", "strided"):
        g = fmt.group_size
        count = -(-size // g)
        places = [[i * g + j if fmt.grouping == "flat" else j * count + i for j in range(g)] for i in range(count)]
        return [[min(p, size - 1) for p in places_of_one] for places_of_one in places]
    g = k if fmt.group_size == -1 else fmt.group_size
    rows = 1 if fmt.grouping == "row" else n if fmt.group_rows == -1 else fmt.group_rows
    out = []
    for matrix in range(size // (n * k)):
        for top in range(0, n, rows):
            for left in range(0, k, g):
                places = [(min(top + r, n - 1), min(left + c, k - 1)) for r in range(rows) for c in range(g)]
                out.append([matrix * n * k + r * k + c for r, c in places])
    return out


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("size", SIZES)
def test_groups_are_the_elements_that_the_table_says(lead: tuple[int, ...], size: tuple[int, int]):
    shape = (*lead, *size)
    x = np.arange(np.prod(shape)).reshape(shape)
    for fmt in formats():
        got = grouped(x, fmt)
        assert got.reshape(-1, got.shape[-1]).tolist() == members(fmt, lead, *size), fmt
        assert np.array_equal(ungrouped(got, fmt, shape), x), fmt
        if fmt.grouping == "row":
            assert got.shape[:-1] == (*lead, size[0], fmt.groups(size[1]))
        assert got.shape[-1] % group_length(fmt, size[1]) == 0


@pytest.mark.parametrize(("n", "k"), [(0, 8), (1, 1), (7, 1 << 18), (3, 1 << 21), (5, 3 << 18)])
def test_blocks_of_rows_have_about_a_million_elements_or_one_row(n: int, k: int):
    parts = list(row_blocks(n, k))
    assert [i for part in parts for i in range(n)[part]] == list(range(n))
    rows = max(1, (1 << 20) // k)
    assert [len(range(n)[part]) for part in parts] == [rows] * (n // rows) + ([n % rows] if n % rows else [])
