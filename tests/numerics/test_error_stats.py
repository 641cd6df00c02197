"""The error statistics of verify, evaluation and benchmarks; they are shown to report wrong arrays."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import ShapeError
from halfbyte.numerics.error_stats import ErrorStats, error_stats


def test_equal_arrays_are_identical():
    a = np.array([[1.0, -2.0], [0.0, np.nan], [np.inf, -np.inf]])
    d = error_stats(a, a.copy())
    assert (d.identical, d.differing, d.relative_rms, d.cosine, d.worst, d.count) == (True, 0, 0.0, 1.0, None, 6)


def test_equality_is_by_value():
    assert error_stats(np.array([[-0.0, 0.0]]), np.array([[0.0, -0.0]])).identical
    a = np.array([[1.5]], np.float32)
    assert error_stats(a, a.astype(ml_dtypes.bfloat16)).identical


def test_statistics_by_hand():
    a = np.array([[3.0, 4.0], [0.5, -1.0]])
    b = np.array([[3.0, 5.0], [0.5, -1.0]])
    d = error_stats(a, b)
    assert d.differing == 1
    assert d.max_abs_error == 1.0
    assert d.max_relative_error == 0.25
    assert d.worst == (0, 1)
    assert d.relative_rms == math.sqrt(1 / (9 + 16 + 0.25 + 1))
    assert d.cosine == pytest.approx((9 + 20 + 1.25) / math.sqrt(26.25 * (9 + 25 + 1.25)), abs=1e-15)


def test_worst_is_relative_to_its_row():
    a = np.array([[100.0, 100.0], [0.001, 0.001]])
    b = np.array([[101.0, 100.0], [0.001, 0.002]])
    d = error_stats(a, b)
    assert d.worst == (1, 1)
    assert d.max_abs_error == 1.0


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-30, 1e30])
def test_case_57_shuffled_weights_fail_at_any_magnitude(scale):
    """Outputs near 1e-6 with shuffled weights: an absolute bound of 1.0 passes them, the relative
    measures do not.
    """
    rng = np.random.default_rng(57)
    w = rng.standard_normal((64, 128)) * scale
    x = rng.standard_normal((8, 128))
    right = x @ w.T
    wrong = x @ rng.permuted(w, axis=1).T
    assert np.allclose(right, wrong, atol=1.0) == (scale < 1e-3), "the vacuous check this guards against"
    d = error_stats(right, wrong)
    assert not d.within(0.5)
    assert d.relative_rms > 1
    assert abs(d.cosine) < 0.4
    assert error_stats(right, right).within(0.0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([[1.0, 2.0]], [[1.0, np.nan]]),
        ([[1.0, np.nan]], [[1.0, 2.0]]),
        ([[1.0, np.inf]], [[1.0, -np.inf]]),
        ([[1.0, 2.0]], [[1.0, np.inf]]),
        ([[0.0, 0.0]], [[0.0, 1e-300]]),
    ],
)
def test_a_non_finite_difference_is_never_within_a_tolerance(a, b):
    d = error_stats(np.array(a), np.array(b))
    assert d.differing == 1
    assert not d.within(1e9)
    assert d.relative_rms == math.inf


def test_numbers_whose_squares_underflow_still_differ():
    a = np.full((1, 4), 1e-200)
    d = error_stats(a, 2 * a)
    assert d.differing == 4
    assert not d.within(0.5)


def test_integers_past_float64_still_differ():
    a = np.array([[2**60]], np.int64)
    d = error_stats(a, a + 1)
    assert (d.differing, d.max_abs_error) == (1, 1.0)


def test_one_value_in_a_million():
    a = np.random.default_rng(0).standard_normal((1000, 1000)).astype(np.float32)
    b = a.copy()
    b[617, 3] = np.nextafter(b[617, 3], np.float32(np.inf))
    d = error_stats(a, b)
    assert (d.differing, d.worst) == (1, (617, 3))


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 4))
def test_blocks_add_up(heights, k):
    rng = np.random.default_rng(1)
    a = rng.integers(-3, 4, (sum(heights), k)).astype(np.float64)
    b = rng.integers(-3, 4, a.shape).astype(np.float64)
    whole, blocks = error_stats(a, b), ErrorStats()
    row = 0
    for h in heights:
        blocks.add(a[row : row + h], b[row : row + h])
        row += h
    assert (whole.count, whole.differing, whole.max_abs_error) == (blocks.count, blocks.differing, blocks.max_abs_error)
    assert (whole.relative_rms, whole.cosine, whole.max_relative_error) == (
        blocks.relative_rms,
        blocks.cosine,
        blocks.max_relative_error,
    )
    assert whole.differing == np.count_nonzero(a != b)


def test_shapes_must_agree():
    with pytest.raises(ShapeError, match=r"\[error_stats\] shapes \(2, 3\) and \(3, 2\); arrays of one shape are compared"):
        error_stats(np.zeros((2, 3)), np.zeros((3, 2)))


def test_empty_arrays_are_identical_and_count_nothing():
    d = error_stats(np.zeros((0, 4)), np.zeros((0, 4)))
    assert d.identical
    assert d.count == 0


def test_nothing_compared_is_identical():
    empty = ErrorStats()
    assert empty.identical
    assert (empty.relative_rms, empty.cosine, empty.max_abs_error, empty.max_relative_error) == (0.0, 1.0, 0.0, 0.0)


def test_each_sum_starts_at_zero():
    stats = error_stats(np.array([[3.0, 4.0]]), np.array([[3.0, 3.0]]))
    assert stats.relative_rms == 0.2
    assert stats.cosine == 21 / (5 * math.sqrt(18))
    assert (stats.max_abs_error, stats.max_relative_error, stats.worst, stats.differing, stats.count) == (1.0, 0.25, (0, 1), 1, 2)
    assert not stats.within(0.24)
    assert stats.within(0.25)


def test_a_reference_of_norm_1_is_no_special_case():
    stats = error_stats(np.array([[1.0, 0.0]]), np.array([[1.0, 0.5]]))
    assert (stats.relative_rms, stats.max_relative_error) == (0.5, 0.5)
    assert error_stats(np.array([[0.0, 0.0]]), np.array([[0.0, 0.5]])).relative_rms == math.inf


def test_errors_whose_squares_underflow_beside_a_norm_of_1():
    stats = error_stats(np.array([[1.0, 0.0]]), np.array([[1.0, 1e-200]]))
    assert stats.relative_rms == stats.max_relative_error == 1e-200


def test_single_numbers_and_empty_arrays():
    d = error_stats(np.float32(2.0), np.float32(1.5))
    assert (d.count, d.differing, d.max_abs_error, d.worst) == (1, 1, 0.5, (0, 0))
    for shape in ((0,), (0, 3), (3, 0)):
        assert error_stats(np.zeros(shape), np.zeros(shape)).count == 0


def test_the_worst_element_is_the_first_of_the_largest_error_over_all_rows():
    stats = ErrorStats()
    stats.add(np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]]))
    stats.add(np.array([[1.0, 2.0]]), np.array([[1.25, 2.0]]))
    assert (stats.worst, stats.max_relative_error) == ((0, 1), 0.5)
    stats.add(np.array([[1.0, 2.0]]), np.array([[4.0, 2.0]]))
    assert (stats.worst, stats.max_relative_error) == ((2, 0), 1.5)


def test_rows_that_are_equal_count_in_the_cosine_of_the_whole():
    a, b = np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([[1.0, 2.0], [2.0, 5.0]])
    by_rows = ErrorStats()
    for i in range(2):
        by_rows.add(a[i : i + 1], b[i : i + 1])
    assert by_rows.cosine == error_stats(a, b).cosine == pytest.approx((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))
