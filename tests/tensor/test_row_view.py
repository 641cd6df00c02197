"""Row views read the rows that NumPy indexing gives, whatever they are assembled from."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import quantize
from halfbyte.errors import ShapeError
from halfbyte.tensor import row_view
from halfbyte.tensor.row_view import RowView, Source

RNG = np.random.default_rng(3)
X = RNG.standard_normal((12, 32)).astype(np.float32)
Q = quantize(X, "mxfp4")
VALUES = Q.dequantize("float64")
ORDERS = {
    "all": np.arange(12), "even": np.arange(0, 12, 2), "odd": np.arange(1, 12, 2), "first": np.arange(6),
    "second": np.arange(6, 12),
}  # fmt: skip


@pytest.mark.parametrize("rows", ORDERS)
@pytest.mark.parametrize("tensor", [Q, X], ids=["packed", "dense"])
def test_rows_of_one_tensor(rows, tensor):
    want = (VALUES if tensor is Q else X)[ORDERS[rows]]
    view = RowView([Source(tensor, rows=rows)])
    assert view.shape == want.shape
    for start, stop in ((0, len(want)), (1, 4), (2, 3), (3, 3)):
        np.testing.assert_array_equal(view.read(start, stop), want[start:stop])


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_rotary_order_is_undone(heads):
    """GGUF stores rows i and i + d/2 of a head next to each other."""
    d = 12 // heads
    stored = np.empty_like(X)
    for head in range(heads):
        for i in range(d // 2):
            stored[head * d + 2 * i] = X[head * d + i]
            stored[head * d + 2 * i + 1] = X[head * d + d // 2 + i]
    np.testing.assert_array_equal(RowView([Source(stored, rows="rotary", heads=heads)]).read(0, 12), X)


@pytest.mark.parametrize(("rows", "heads", "n"), [("rotary", 0, 12), ("rotary", 4, 12), ("rotary", 6, 6), ("even", 0, 11)])
def test_rows_that_do_not_split_are_refused(rows, heads, n):
    with pytest.raises(ShapeError, match=r"\[rows\] "):
        RowView([Source(X[:n], rows=rows, heads=heads)])


def test_sources_follow_each_other():
    view = RowView([Source(X[:5]), Source(Q, rows="odd"), Source(X[5])])
    want = np.concatenate([X[:5], VALUES[1::2], X[5:6]])
    assert view.shape == (12, 32)
    for start in range(12):
        for stop in range(start, 13):
            np.testing.assert_array_equal(view.read(start, stop), want[start:stop])


def test_widths_must_agree():
    with pytest.raises(ShapeError, match=r"joined tensors have \[16, 32\] columns"):
        RowView([Source(X), Source(X[:, :16])])


def test_no_source_has_no_rows():
    assert RowView([]).shape == (0, 0)
    assert RowView([]).read(0, 0).shape == (0, 0)


@pytest.mark.parametrize("codec", ["mxfp4", "hqq4:g64", "nf4"])
@pytest.mark.parametrize("rows", ["all", "even", "second"])
def test_rows_of_a_stack_are_each_experts(codec, rows):
    x = RNG.standard_normal((3, 6, 64)).astype(np.float32)
    q = quantize(x, codec, **({"axis": 0} if codec == "hqq4:g64" else {}))
    index = {"all": slice(None), "even": slice(0, None, 2), "second": slice(3, None)}[rows]
    dense = q.dequantize("float64")
    np.testing.assert_array_equal(
        RowView([Source(q, rows=rows)]).read(0, 18 if rows == "all" else 9), dense[:, index].reshape(-1, 64)
    )
    np.testing.assert_array_equal(
        RowView([Source(x, rows=rows)]).read(0, 18 if rows == "all" else 9), x[:, index].reshape(-1, 64)
    )
    np.testing.assert_array_equal(RowView([Source(x, expert=1)]).read(0, 6), x[1])


def test_a_transposed_matrix_and_stack():
    np.testing.assert_array_equal(RowView([Source(X, transposed=True)]).read(3, 9), X.T[3:9])
    x = RNG.standard_normal((2, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(RowView([Source(x, transposed=True)]).read(0, 12), x.swapaxes(1, 2).reshape(12, 4))


def test_one_is_added_in_float32():
    x = np.array([0.1, 1e-9, -1.0], np.float16)
    got = RowView([Source(x, add_one=True)]).read(0, 1, None)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got[0], (x.astype(np.float32) + np.float32(1)).astype(np.float16))


@pytest.mark.parametrize(("x", "dtype", "want"), [
    (X, None, np.float32), (X, "float16", np.float16), (X, "float64", np.float64),
    (np.arange(6, dtype=np.int64).reshape(2, 3), "float32", np.int64), (np.ones((2, 3), bool), "float32", bool),
])  # fmt: skip
def test_dtypes_of_dense_rows(x, dtype, want):
    got = RowView([Source(x)]).read(0, 2, dtype)
    assert got.dtype == want
    np.testing.assert_array_equal(got, x[:2].astype(want))


def test_blocks_cover_all_rows_once(monkeypatch):
    monkeypatch.setattr(row_view, "BLOCK_ELEMENTS", 100)
    blocks = list(RowView([Source(X)]).blocks())
    assert blocks == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert list(RowView([Source(X[:4])]).blocks()) == [(0, 3), (3, 4)]
