"""Values of groups to groups of another format: by sets of the values that the inputs of a group
see.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.conversion.outcome import Checks, MisfitError
from halfbyte.conversion.regroup import Regrouping
from halfbyte.formats import format_named
from halfbyte.tensor.qtensor import QTensor
from support.layout_tensors import integer_tensor

SIZES = (1, 2, 3, 4, 6, 8, 12, -1)


def source(size: int, rows: int | None, order: str, n: int, k: int) -> QTensor:
    """int4 in groups of `size` and tiles of `rows`, with an index where `order` names one."""
    q = integer_tensor(4, (n, k), size, rows=rows)
    if not order:
        return q
    index = np.arange(k) // (k if size == -1 else size)
    index = index[::-1] if order == "reversed" else index
    return QTensor(q.format, q.shape, {**q.parts, "group_index": index.astype(np.int32)})


def seen(q: QTensor, values: np.ndarray) -> np.ndarray:
    """The value that each element is under, [n, k]."""
    n, k = q.shape
    size = k if q.format.group_size == -1 else q.format.group_size
    rows = {"row": 1}.get(q.format.grouping, n if q.format.group_rows == -1 else q.format.group_rows)
    index = q.parts.get("group_index", np.arange(k) // size)
    return np.array([[values[r // rows, index[c]] for c in range(k)] for r in range(n)])


@pytest.mark.parametrize("distinct", [1, 2, 100])
@pytest.mark.parametrize(
    ("rows", "order"), [(None, ""), (None, "in order"), (None, "reversed"), (1, ""), (2, ""), (3, ""), (-1, "")]
)
def test_a_group_takes_the_value_that_all_its_inputs_see(rows: int | None, order: str, distinct: int):
    n, k = 5, 12
    rng = np.random.default_rng(distinct)
    for size in SIZES:
        q = source(size, rows, order, n, k)
        values = rng.integers(0, distinct, q.parts["scales"].shape).astype(np.float64)
        elements = seen(q, values)
        for new in SIZES:
            groups, checks = Regrouping(q, format_named("int4", new)), Checks()
            step = k if new == -1 else new
            pieces = [elements[:, at : at + step] for at in range(0, k, step)]
            wanted = np.stack([p[:, 0] for p in pieces], axis=1)
            if any((p != p[:, :1]).any() for p in pieces):
                with pytest.raises(MisfitError, match="its act-order index mixes" if order else "that would be joined have"):
                    groups.take(values, "scales", checks)
                continue
            got = groups.take(values, "scales", checks)
            assert np.array_equal(got, wanted), (size, new)
            assert np.array_equal(groups.spread(got), elements)
            joined = any(len(set(groups.source[at : at + step])) > 1 for at in range(0, k, step))
            said = (
                "the act-order index can be dropped: each group has one scale" if order else "scales of joined groups are equal"
            )
            assert checks.met == ([said] if order or joined else [])
            assert groups.monotone == (not order)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_tensors_without_inputs_have_no_groups(n: int):
    groups = Regrouping(integer_tensor(4, (n, 0), 4), format_named("int4", 8))
    assert groups.take(np.zeros((n, 0)), "scales", Checks()).shape == (n, 0)


def test_one_value_of_a_tensor_stays_one():
    groups = Regrouping(integer_tensor(4, (2, 8), 4), format_named("int4", 8))
    one = np.array(3.0)
    assert groups.take(one, "scales", Checks()) is one
    assert groups.spread(one) is one
