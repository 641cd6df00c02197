"""A matrix assembled from rows of tensors: of a packed or dense tensor, of one expert, every other
row, or several in sequence.

    view = RowView([Source(w, rows="even")])        view.read(0, 64, "float32") -> array [64, k]

Reading decodes only the requested rows, so that a pass over a view needs memory for one block, not
for a dense tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..numerics.exact import round_once
from .qtensor import QTensor

BLOCK_ELEMENTS = 1 << 20
"""Values read at a time: 8 MB in float64."""

Tensor = QTensor | NDArray[Any]


@dataclass(frozen=True)
class Source:
    """Rows taken from one tensor.

    tensor      QTensor, or array of any number of axes
    expert      index along the first axis of a stack, None for the whole tensor
    rows        "all", "even", "odd", "first" or "second" (halves), or "rotary": undo the row order
                that GGUF gives to q and k of LLaMA-like models, which interleaves rows i and i +
                d/2 of each head of d rows
    heads       heads of a "rotary" tensor
    transposed  the dense matrix is [k, n] and its transpose is the weight
    add_one     add 1 to each value, in float32: the file stores Gemma's norms minus 1
    """

    tensor: Tensor
    expert: int | None = None
    rows: str = "all"
    heads: int = 0
    transposed: bool = False
    add_one: bool = False

    @cached_property
    def matrix(self) -> Tensor:
        """The source as (n, k): a vector is one row, and the leading axes of a dense array join its
        rows.
        """
        t: Tensor = self.tensor if self.expert is None else self.tensor[self.expert]
        if isinstance(t, QTensor):
            return t
        t = np.asarray(t)
        if t.ndim < 2:
            t = t.reshape(1, -1)
        elif t.ndim > 2:
            t = t.reshape(-1, t.shape[-1])
        return t.T if self.transposed else t

    @cached_property
    def index(self) -> NDArray[np.int64] | None:
        """Row numbers of the matrix in the order of the view, None for all in order."""
        n = self.matrix.shape[0]
        if self.rows == "all":
            return None
        if self.rows == "rotary":
            if self.heads < 1 or n % (2 * self.heads):
                raise ShapeError(f"[rows] {n} rows in {self.heads} heads; a rotary order needs an even number of rows a head")
            return np.arange(n).reshape(self.heads, n // self.heads // 2, 2).swapaxes(1, 2).reshape(-1)
        if n % 2:
            raise ShapeError(f"[rows] {n} rows do not split in two")
        start, stop, step = {"even": (0, n, 2), "odd": (1, n, 2), "first": (0, n // 2, 1), "second": (n // 2, n, 1)}[self.rows]
        return np.arange(start, stop, step)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k) of the view."""
        n, k = self.matrix.shape
        return (n if self.index is None else len(self.index)), k

    def read(self, start: int, stop: int, dtype: str | None, arithmetic: str) -> NDArray[Any]:
        """Rows start to stop as an array [rows, k]; see `RowView.read`."""
        if self.index is None or start == stop:
            block = _values(self.matrix, start, stop, dtype, arithmetic)
        else:
            wanted = self.index[start:stop]
            low, high = int(wanted.min()), int(wanted.max()) + 1
            block = _values(self.matrix, low, high, dtype, arithmetic)[wanted - low]
        if self.add_one:
            one = (block.astype(np.float32) + np.float32(1)).astype(block.dtype)
            return one
        return block


def _values(matrix: Tensor, start: int, stop: int, dtype: str | None, arithmetic: str) -> NDArray[Any]:
    if isinstance(matrix, QTensor):
        block = matrix if (start, stop) == (0, matrix.shape[0]) else matrix.rows(start, stop)
        return block.dequantize(dtype or "float64", arithmetic)
    rows = np.asarray(matrix[start:stop])
    if dtype in (None, rows.dtype.name) or rows.dtype.kind in "biu":
        return rows
    return round_once(rows.astype(np.float64), dtype)


class RowView:
    """Sources concatenated along rows, as one (rows, k) matrix. Raises ShapeError when their k
    differ.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = [part for source in sources for part in _experts(source)]
        widths = {s.shape[1] for s in self.sources}
        if len(widths) > 1:
            raise ShapeError(f"[rows] joined tensors have {sorted(widths)} columns; one width is allowed")
        self.starts = np.cumsum([0, *(s.shape[0] for s in self.sources)])
        self.shape = (int(self.starts[-1]), widths.pop() if widths else 0)

    def read(self, start: int, stop: int, dtype: str | None = "float64", arithmetic: str = "exact") -> NDArray[Any]:
        """Rows start to stop as an array [rows, k].

        dtype  what packed and floating values are rounded to, once; None keeps a dense array's own.
               Integers stay integers.
        """
        parts = [
            source.read(max(start, low) - low, min(stop, low + source.shape[0]) - low, dtype, arithmetic)
            for source, low in zip(self.sources, self.starts.tolist(), strict=False)
            if low < stop and start < low + source.shape[0]
        ]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.shape[1]), np.float64)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of blocks of whole rows, about `BLOCK_ELEMENTS` values each."""
        step = max(1, BLOCK_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])


def _experts(source: Source) -> list[Source]:
    """One source for each matrix of a stack (e, n, k), so that `rows` selects from each expert's
    rows.
    """
    t = source.tensor
    stacked = t.ndim == 3 and source.expert is None and (isinstance(t, QTensor) or source.rows != "all" or source.transposed)
    if not stacked:
        return [source]
    if isinstance(t, QTensor) and t.format.grouping in ("flat", "strided"):
        # Groups run over the whole stack, so that one expert cannot be decoded separately.
        t = t.dequantize("float64")
    return [
        Source(t, expert=e, rows=source.rows, heads=source.heads, transposed=source.transposed, add_one=source.add_one)
        for e in range(t.shape[0])
    ]
