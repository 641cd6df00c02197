"""Expansion of group values, and the significant bits that allow float32, against loops over every
element.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from halfbyte import QTensor, format_named, quantize
from halfbyte.formats import family_of
from halfbyte.formats.decode import element_values, group_expander, nested_factors, significant_bits
from halfbyte.spec import Format

ROW = Format("integer", "int4", 4, "int", 4, "float16")


def slow(fmt: Format, shape: tuple[int, ...], window, a: np.ndarray) -> np.ndarray:
    """The group value of each element, one at a time, by the definitions of
    docs/design/layering.md.
    """
    *_, n, k = shape
    out = np.empty(shape, a.dtype)
    rows = math.prod(shape[:-1])
    first, total = window or (0, rows if fmt.grouping in ("flat", "strided") else n)
    for index in np.ndindex(shape):
        *lead, row, column = index
        flat = int(np.ravel_multi_index(index, shape)) + first * k
        along = 0 if fmt.group_size == -1 else column // fmt.group_size
        if fmt.grouping == "row":
            out[index] = a[(*lead, row, along)]
        elif fmt.grouping == "block":
            out[index] = a[(*lead, (first + row) // (total if fmt.group_rows == -1 else fmt.group_rows), along)]
        elif fmt.grouping == "flat":
            out[index] = a[flat // fmt.group_size]
        else:
            out[index] = a[flat % math.ceil(total * k / fmt.group_size)]
    return out


@pytest.mark.parametrize(("changes", "shape", "window", "scales"), [
    ({}, (3, 10), None, (3, 3)), ({}, (2, 3, 8), None, (2, 3, 2)), ({"group_size": -1}, (3, 10), None, (3, 1)),
    ({"grouping": "block", "group_rows": 2}, (5, 8), None, (3, 2)),
    ({"grouping": "block", "group_rows": 2}, (2, 5, 6), None, (2, 3, 2)),
    ({"grouping": "block", "group_rows": 2}, (3, 8), (3, 6), (3, 2)),
    ({"grouping": "block", "group_rows": -1, "group_size": -1}, (3, 8), (1, 5), (1, 1)),
    ({"grouping": "flat"}, (3, 10), None, (8,)), ({"grouping": "flat"}, (2, 3, 6), None, (9,)),
    ({"grouping": "flat"}, (2, 10), (1, 4), (10,)),
    ({"grouping": "strided"}, (3, 10), None, (8,)), ({"grouping": "strided"}, (2, 10), (3, 5), (13,)),
    ({"grouping": "strided"}, (1, 3), None, (1,)), ({"grouping": "strided"}, (1, 4), None, (1,)),
    ({"grouping": "strided"}, (2, 3), None, (2,)), ({"grouping": "flat"}, (1, 3), None, (1,)),
])  # fmt: skip
def test_group_values_reach_their_elements(changes, shape, window, scales):
    fmt = ROW.with_(**changes)
    a = np.arange(1, 1 + math.prod(scales), dtype=np.float64).reshape(scales)
    got = np.broadcast_to(group_expander(fmt, shape, window, None)(a), shape)
    np.testing.assert_array_equal(got, slow(fmt, shape, window, a))


def test_a_wrong_group_would_be_seen():
    a = np.arange(9.0).reshape(3, 3)
    wrong = slow(ROW, (3, 10), None, a)
    wrong[1, 3] = a[1, 1]
    assert not np.array_equal(group_expander(ROW, (3, 10), None, None)(a), wrong)


def test_a_group_index_overrides_the_order():
    index = np.array([2, 0, 0, 1, 2, 1])
    a = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(group_expander(ROW.with_(group_size=2), (2, 6), None, index)(a), a[:, index])


@pytest.mark.parametrize("bits", range(1, 9))
def test_integer_elements(bits):
    codes = np.arange(1 << bits, dtype=np.uint8)
    np.testing.assert_array_equal(element_values(ROW.with_(bits=bits), codes), np.arange(1 << bits) - (1 << bits) // 2)
    np.testing.assert_array_equal(element_values(ROW.with_(bits=bits, element="uint"), codes), np.arange(1 << bits))


@pytest.mark.parametrize(("codec", "want"), [
    ("mxfp4", 2 + 1), ("nvfp4", 2 + 4 + 24), ("int4:g32", 4 + 11), ("fp8_e4m3", 4 + 24), ("fp4", 2 + 11),
    ("q4_K", 4 + 6 + 11), ("q6_K", 6 + 8 + 11), ("q3_K", 3 + 6 + 11), ("q2_K", 2 + 4 + 11), ("mxint8", 8 + 1),
])  # fmt: skip
def test_significant_bits_are_the_sum_of_the_factors(codec, want):
    q = quantize(np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32), codec)
    assert significant_bits(q.format, q.parts) == want


@pytest.mark.parametrize(("zero", "want"), [(0, 5), (15, 5), (16, 6), (-16, 6), (1000, 11)])
def test_stored_zero_points_count(zero, want):
    fmt = format_named("uint4:g32")
    parts = {
        "codes": np.zeros((1, 16), np.uint8),
        "scales": np.ones((1, 1), np.float16),
        "zeros": np.full((1, 1), zero, np.int16),
    }
    assert significant_bits(fmt, parts) == want + 11


def test_nested_factors_of_a_slice_know_their_blocks():
    fmt = format_named("nf4:g32", nested=True)
    n, k = 40, 256
    rng = np.random.default_rng(1)
    scales = rng.integers(0, 256, (n, k // 32), dtype=np.uint8)
    parts = {
        "codes": np.zeros((n, k // 2), np.uint8),
        "scales": scales,
        "nested_map": rng.standard_normal(256).astype(np.float32),
        "nested_absmax": np.array([2.0, 3.0], np.float32),
        "nested_offset": np.array(0.5, np.float32),
    }
    whole = QTensor(fmt, (n, k), parts)
    mapped, absmax = nested_factors(parts, (n, k), None)
    np.testing.assert_array_equal(mapped, parts["nested_map"].astype(np.float64)[scales])
    np.testing.assert_array_equal(absmax.reshape(-1), np.where(np.arange(n * k // 32) < 256, 2.0, 3.0))
    np.testing.assert_array_equal(whole[30:36].dequantize("float64"), whole.dequantize("float64")[30:36])


def test_a_slice_of_rows_that_share_blocks_keeps_the_scales_of_all():
    fmt = format_named("nf4:g32", nested=True)
    rng = np.random.default_rng(2)
    n, k = 300, 40  # 375 blocks of 32, the 257th on of the second scale
    parts = {
        "codes": rng.integers(0, 256, (n, k // 2), dtype=np.uint8),
        "scales": rng.integers(0, 256, 375, dtype=np.uint8),
        "nested_map": rng.standard_normal(256).astype(np.float32),
        "nested_absmax": np.array([2.0, 3.0], np.float32),
        "nested_offset": np.array(0.5, np.float32),
    }
    whole = QTensor(family_of(fmt).fit(fmt, (n, k)), (n, k), parts)
    values = whole.dequantize("float64")
    for start, stop in ((0, 5), (1, 3), (200, 210), (299, 300)):
        np.testing.assert_array_equal(whole[start:stop].dequantize("float64"), values[start:stop])
