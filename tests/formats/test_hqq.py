"""HQQ's rules: which one a width has by default, and what a format takes."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import format_named, quantize
from halfbyte.errors import FormatError

X = np.random.default_rng(7).standard_normal((4, 64)).astype(np.float32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_edges_to_3_bits_and_the_range_above(bits):
    edge, whole = (quantize(X, f"hqq{bits}:g16", rule=rule) for rule in ("edge", "range"))
    assert edge != whole
    assert quantize(X, f"hqq{bits}:g16") == (edge if bits <= 3 else whole)


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("bits", range(3, 9))
def test_a_range_reaches_from_the_lowest_value_to_the_highest(bits, shift):
    """Half a step of the range, and what the stored scale and zero point round."""
    x = X + np.float32(shift)
    groups = x.reshape(4, 4, 16)
    step = (groups.max(-1) - groups.min(-1)) / (2**bits - 1)
    error = np.abs(quantize(x, f"hqq{bits}:g16", rule="range").dequantize("float32").reshape(groups.shape) - groups)
    assert (error <= 0.51 * step[..., None] + 2.0**-9 * np.abs(groups).max(-1, keepdims=True)).all()


@pytest.mark.parametrize("axis", [2, -1, "0", None])
def test_an_axis_is_0_or_1(axis):
    with pytest.raises(FormatError, match=r"hqq4 with axis .*; allowed: 0, 1"):
        format_named("hqq4", axis=axis)


def test_a_row_is_a_group_of_rows_only():
    assert format_named("hqq4", -1, grouping="row").group_size == -1
    for options in ({"axis": 0}, {"grouping": "flat"}):
        with pytest.raises(FormatError, match=r"group size -1 in (flat|strided) groups; give the number of elements a group"):
            format_named("hqq4", -1, **options)
