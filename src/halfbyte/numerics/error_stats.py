"""Relative error statistics of one array against another, accumulated block by block.

    relative RMS        sqrt(Σ (b − a)² / Σ a²)
    max relative error  max over rows of max |b − a| / max |a|
    cosine              Σ a·b / sqrt(Σ a² · Σ b²)
    differing           number of unequal values

a is the reference. There is no absolute tolerance: numbers near 1e-6 are compared by the same
measures as numbers near 1, so that no bound passes for every input. Equality is by value: −0 equals
0, NaN equals NaN at the same position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError


@dataclass
class ErrorStats:
    """Statistics of b against a, accumulated over blocks of whole rows.

    count               values compared
    differing           values that are not equal
    max_abs_error       largest |b − a|; inf where only one side is finite, or both are and the
                        sides are different infinities
    max_relative_error  largest |b − a| of a row over that row's largest |a|; inf in a row of zeros
    worst               (row, column) of the largest relative error, None while everything is equal
    """

    count: int = 0
    differing: int = 0
    max_abs_error: float = 0.0
    max_relative_error: float = 0.0
    worst: tuple[int, int] | None = None
    _rows: int = 0
    _aa: float = 0.0
    _bb: float = 0.0
    _ab: float = 0.0
    _dd: float = 0.0

    @property
    def identical(self) -> bool:
        """Every value is equal."""
        return self.differing == 0

    @property
    def relative_rms(self) -> float:
        """sqrt(Σ (b − a)² / Σ a²); inf when a is all zeros and b is not, or when a non-finite value
        differs.
        """
        if self.identical:
            return 0.0
        if math.isinf(self.max_abs_error):
            return math.inf
        # Squares that underflow float64 would give an error of 0; the largest relative error is
        # reported instead.
        if self._aa == 0.0 or self._dd == 0.0:
            return math.inf if self._aa == 0.0 else self.max_relative_error
        return math.sqrt(self._dd / self._aa)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the finite values of a and b; 1 when identical, 0 when one of
        them is all zeros.
        """
        if self.identical:
            return 1.0
        norm = math.sqrt(self._aa) * math.sqrt(self._bb)
        return self._ab / norm if norm else 0.0

    def within(self, rtol: float) -> bool:
        """True when identical, or when the relative RMS and the largest relative error are both at
        most `rtol`.
        """
        return self.identical or (self.relative_rms <= rtol and self.max_relative_error <= rtol)

    def add(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        """Add the next rows: a and b are [rows, k] of any float, integer or boolean dtype.

        Raises ShapeError when the shapes differ or are not two-dimensional.
        """
        if a.shape != b.shape or a.ndim != 2:
            raise ShapeError(f"[error_stats] blocks of shape {a.shape} and {b.shape}; two of the same [rows, k] are compared")
        first, self._rows = self._rows, self._rows + a.shape[0]
        self.count += a.size
        if not a.size:
            return
        # Integers beyond 2^53 must not be rounded before they are compared.
        unequal = a != b
        x = a.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if not unequal.any():
                # The common case at a third of the cost: all three sums are the sum of squares.
                squares = float(np.vdot(x, x))
                if math.isfinite(squares):
                    self._aa, self._bb, self._ab = self._aa + squares, self._bb + squares, self._ab + squares
                    return
            unequal &= ~(_nan(a) & _nan(b))
            self._sum(x, b.astype(np.float64), unequal, first)

    def _sum(self, x: NDArray[np.float64], y: NDArray[np.float64], unequal: NDArray[np.bool_], first: int) -> None:
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
        self._aa += float(np.vdot(x, x))
        self._bb += float(np.vdot(y, y))
        self._ab += float(np.vdot(x, y))
        differing = int(np.count_nonzero(unequal))
        if not differing:
            return
        self.differing += differing
        error = y - x
        self._dd += float(np.vdot(error, error))
        size = np.abs(error)
        size[unequal & ~finite] = np.inf
        # Integers past 2^53 that are unequal may meet in float64: their error is at least 1.
        size[unequal & (size == 0)] = 1.0
        self.max_abs_error = max(self.max_abs_error, float(size.max()))
        self._worst(size, np.abs(x).max(axis=1), first)

    def _worst(self, size: NDArray[np.float64], row_max: NDArray[np.float64], first: int) -> None:
        row_error = size.max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            relative = np.where(row_error > 0, row_error / row_max, 0.0)
        row = int(relative.argmax())
        if self.worst is None or relative[row] > self.max_relative_error:
            self.max_relative_error = max(self.max_relative_error, float(relative[row]))
            self.worst = (first + row, int(size[row].argmax()))


def _nan(a: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a is NaN; integers never are."""
    if a.dtype.kind in "biu":
        return np.zeros(a.shape, np.bool_)
    result: NDArray[np.bool_] = np.isnan(a)
    return result


def error_stats(a: NDArray[Any], b: NDArray[Any]) -> ErrorStats:
    """`ErrorStats` of two whole arrays of one shape; the last axis is the row. Raises ShapeError
    when the shapes differ.

    >>> error_stats(np.array([[1e-6, 2e-6]]), np.array([[2e-6, 1e-6]])).within(0.1)
    False
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise ShapeError(f"[error_stats] shapes {a.shape} and {b.shape}; arrays of one shape are compared")
    k = a.shape[-1] if a.ndim else 1
    out = ErrorStats()
    out.add(a.reshape(-1, k) if a.size else a.reshape(0, k), b.reshape(-1, k) if b.size else b.reshape(0, k))
    return out
