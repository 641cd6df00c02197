"""Rounding to ggml's tables and the search for a scale, against loops over all codes."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import quantize
from halfbyte.formats.ggml.scale_search import float16_reaching, line_search, nearest, safe_divide, scale_search
from halfbyte.numerics.bits import unpack
from halfbyte.numerics.minifloat import element_table
from halfbyte.spec import Format

FORMAT = Format("ggml_iq4", "iq4_nl", 4, "iq4_nl", 32, "float16")


def test_codes_of_iq4_are_the_nearest_values_and_ties_go_up():
    values = element_table("iq4_nl", 4)
    y = np.concatenate([np.arange(-140, 130, 0.125), values, (values[:-1] + values[1:]) / 2])
    want = [max(range(16), key=lambda c: (-abs(values[c] - v), c)) for v in y]
    assert nearest(y, "iq4_nl", 4).tolist() == want


@pytest.mark.parametrize(("element", "zero"), [("int", 8), ("uint", 0)])
def test_codes_of_integers_are_the_nearest_and_saturate(element, zero):
    y = np.arange(-20, 20, 0.25)
    want = [min(max(round(v) + zero, 0), 15) for v in y.tolist()]
    assert nearest(y, element, 4).tolist() == want


def test_a_divisor_below_the_normal_numbers_counts_as_zero():
    by = np.array([0.0, 2.0**-127, 2.0**-126, -(2.0**-126), -(2.0**-127), 2.0], np.float32)
    with np.errstate(all="raise"):  # what is not divided gives no warning
        assert safe_divide(np.float32(2.0**-126), by).tolist() == [0, 0, 1, -1, 0, 2.0**-127]
        assert safe_divide(np.ones((2, 1)), np.zeros(3)).tolist() == [[0.0] * 3] * 2
    assert np.isnan(safe_divide(1.0, np.array([np.nan]))).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_scale_that_misses_the_peak_by_over_half_a_step_is_the_next_larger(sign):
    step = 2.0**-24  # of subnormal float16 numbers
    scale = np.float32(sign * 1.25 * step)  # 127 steps of it are 158.75, of the nearest 127, of the next 254
    for peak, want in ((127.5, 1), (127.6, 2)):
        got = float16_reaching(np.array([scale]), np.array([np.float32(peak * step)]), 127, FORMAT)
        assert got.tolist() == [sign * want * step]
    assert float16_reaching(np.array([np.float32(0.2 * step)]), np.array([np.float32(0.9 * step)]), 127, FORMAT).tolist() == [0]


def test_the_scale_of_iq4_reaches_its_peak():
    """127.8 steps of the smallest float16 are over half a step beyond 127 of them: the scale is 2."""
    x = np.zeros((1, 64), np.float32)
    x[0, 3], x[0, 40] = -127.8 * 2.0**-24, -127.3 * 2.0**-24
    scales = quantize(x, "iq4_nl", scale="extreme").parts["scales"]
    assert scales.tolist() == [[2 * 2.0**-24, 2.0**-24]]


def groups_of(rng, count):
    normal = rng.standard_normal((4, count, 32))
    kinds = [normal[0], np.abs(normal[1]) + 0.5, -np.abs(normal[2]), np.abs(normal[3]) + 1]
    kinds[3][:, 5] = -0.1  # a line through most of the values would have an offset above 0
    return np.concatenate(kinds).astype(np.float32)


def least_error(x, levels, below_zero):
    """The least squared error of a group x ~ s q + o over the codes of 19 positions, and those
    codes.
    """
    low = min(x.min(), 0) if below_zero else x.min()
    unit = (x - low) / (x.max() - low)
    errors, tried = [], []
    for shift in np.linspace(-0.9, 0.9, 19):
        q = np.clip(np.rint(unit * (levels + shift)), 0, levels)
        s, o = np.linalg.lstsq(np.stack([q, np.ones_like(q)], 1), x, rcond=None)[0]
        if below_zero and o > 0:
            s, o = (x @ q) / (q @ q), 0.0
        errors.append(np.square(x - s * q - o).sum())
        tried.append(q)
    return min(errors), tried


@pytest.mark.parametrize("below_zero", [True, False])
@pytest.mark.parametrize("levels", [3, 15])
def test_a_line_has_the_least_error_of_19_positions(levels, below_zero):
    x = groups_of(np.random.default_rng(1), 12)
    slope, offset = (a.astype(np.float64) for a in line_search(x, levels, below_zero=below_zero))
    assert (slope > 0).all()
    assert not below_zero or (offset <= 0).all()
    for group, s, o in zip(x.astype(np.float64), slope, offset, strict=True):
        best, tried = least_error(group, levels, below_zero)
        assert min(np.square(group - s * q - o).sum() for q in tried) == pytest.approx(best, rel=1e-4)


def test_a_scale_has_a_smaller_error_than_mapping_the_peak_to_the_end():
    x = groups_of(np.random.default_rng(2), 40)
    values = element_table("iq4_nl", 4)

    def error(s):
        s = s.astype(np.float64)
        return np.square(x - s * values[nearest(x / s, "iq4_nl", 4)]).sum(-1)

    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    found = error(scale_search(x, "iq4_nl", 4))
    assert (found <= error(peak / values[0]) * (1 + 1e-6)).all()
    assert found.sum() < 0.9 * error(peak / values[0]).sum()


def test_a_group_of_zeros_of_nvfp4_has_scale_byte_0():
    x = np.zeros((1, 64), np.float32)
    x[0, 20] = 1e-30  # beside a group whose values are 1e30 times larger: the least byte, not 0
    x[0, 40] = 1.0
    q = quantize(x, "nvfp4_ue4m3")
    assert (q.parts["scales"] == 0).tolist() == [[True, False, False, True]]
    assert q.parts["scales"][0, 1] == 1
    assert not unpack(q.parts["codes"], 4, 64)[0, :40].any()
