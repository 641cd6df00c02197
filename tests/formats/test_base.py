"""Checks that every family of formats shares."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.errors import FormatError
from halfbyte.formats import format_named
from halfbyte.formats.base import check_group


@pytest.mark.parametrize("size", [-1, 1, 2, 128, (1 << 31) - 1, np.int64(64)])
def test_group_sizes(size):
    got = check_group("int4", size)
    assert (type(got), got) == (int, size)


@pytest.mark.parametrize("size", [0, -2, 1 << 31])
def test_group_sizes_out_of_range(size):
    with pytest.raises(FormatError, match=rf"int4 with group size {size}; allowed: 1 to 2\^31 - 1, or -1 for the whole row"):
        check_group("int4", size)


@pytest.mark.parametrize("size", [True, 32.0, "32", None])
def test_group_sizes_that_are_no_whole_number(size):
    with pytest.raises(FormatError, match=r"a whole number is allowed"):
        check_group("int4", size)


def test_group_sizes_of_a_list():
    assert check_group("mxfp4", 64, (16, 32, 64)) == 64
    with pytest.raises(FormatError, match="group size 8; allowed: 16, 32, 64"):
        check_group("mxfp4", 8, (16, 32, 64))


@pytest.mark.parametrize("rows", [-1, 1, 128, (1 << 31) - 1])
def test_rows_of_a_scale(rows):
    fmt = format_named("fp8_e4m3", 64, rows=rows)
    assert (fmt.grouping, fmt.group_rows) == ("block", rows)


@pytest.mark.parametrize("rows", [0, -2, 1 << 31, True, 2.0, "2"])
def test_rows_of_a_scale_out_of_range(rows):
    with pytest.raises(FormatError, match=rf"fp8_e4m3 with rows {rows!r}; allowed: 1 to 2\^31 - 1, or -1 for all rows"):
        format_named("fp8_e4m3", 64, rows=rows)
