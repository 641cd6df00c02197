"""Sorting by group and restoring the order: a bijection of codes and group index, and the error for
incomplete groups.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.errors import BackendError
from halfbyte.formats import format_named
from halfbyte.numerics.bits import unpack
from halfbyte.tensor.act_order import group_index, restore_order, sort_by_group
from halfbyte.tensor.qtensor import QTensor
from support.random_tensors import finite_tensor


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 90)])  # 90: a last group of 26
def test_sorted_codes_are_each_groups_and_come_back(bits, shape):
    q = finite_tensor(format_named(f"int{bits}", 32), shape, 1)
    k = shape[-1]
    index = np.random.default_rng(bits).permutation(np.arange(k, dtype=np.int32) // 32)
    q = QTensor(q.format, q.shape, {**q.parts, "group_index": index})
    codes, order = sort_by_group(q, "somewhere")
    np.testing.assert_array_equal(index[order], np.arange(k) // 32)
    np.testing.assert_array_equal(unpack(codes, bits, k), unpack(q.parts["codes"], bits, k)[..., order])
    np.testing.assert_array_equal(restore_order(codes, bits, order), q.parts["codes"])
    back = group_index(order, 32)
    assert back.dtype == np.int32
    np.testing.assert_array_equal(back, index)


def test_without_an_index_nothing_moves():
    q = finite_tensor(format_named("int4", 32), (5, 96), 1)
    codes, order = sort_by_group(q, "somewhere")
    assert codes is q.parts["codes"]
    assert order is None


def test_one_group_a_row():
    np.testing.assert_array_equal(group_index(np.array([2, 0, 1]), -1), [0, 0, 0])


def test_groups_that_are_not_whole_are_refused_with_their_sizes():
    q = finite_tensor(format_named("int4", 32), (5, 96), 1)
    q = QTensor(q.format, q.shape, {**q.parts, "group_index": np.repeat(np.array([0, 1, 2], np.int32), (40, 24, 32))})
    with pytest.raises(BackendError, match=r"\[somewhere\] act-order groups hold 24 to 40 inputs; kernels take 32 each"):
        sort_by_group(q, "somewhere")
