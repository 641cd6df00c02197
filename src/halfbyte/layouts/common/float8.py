"""Bytes under other names: a scale byte is stored as U8, F8_E8M0 or F8_E4M3 by different writers,
the canonical parts hold uint8.

bytes_of(a) and view_as(bytes, dtype) are inverse views; no value is converted, so no NaN or sign is
lost.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...numerics.exact import bfloat16

U8 = np.dtype(np.uint8)
I8 = np.dtype(np.int8)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
BF16 = bfloat16
FLOATS = (F16, BF16, F32)
"""Dtypes of float group scales."""

_BY_NAME = {d.name: d for d in (U8, I8, E8M0, E4M3, E5M2, *FLOATS)}


def dtype_by_name(name: str) -> np.dtype[Any]:
    """The dtype called `name`, one of those that packed files hold."""
    return _BY_NAME[name]


def bytes_of(a: NDArray[Any]) -> NDArray[np.uint8]:
    """An array of one-byte elements seen as uint8."""
    return a.view(np.uint8)


def view_as(data: NDArray[np.uint8], dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """uint8 seen as the one-byte `dtype` ("uint8", "float8_e8m0fnu", "float8_e4m3fn", ...)."""
    return data.view(_BY_NAME[dtype] if isinstance(dtype, str) else dtype)


def signed_codes(a: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two's complement bytes q -> codes q + 128; its own inverse on the bytes."""
    return a.view(np.uint8) ^ np.uint8(0x80)


def swap_nibbles(a: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """High nibble first -> low nibble first, and back."""
    return (a << np.uint8(4)) | (a >> np.uint8(4))


def cast(values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """`values` in another float dtype, without NumPy's remarks on NaN and overflow."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values.astype(dtype)


def exact_cast(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """`values` in `dtype`, or None when that changes one of them. NaN is NaN whatever its bits: a
    cast may set others.
    """
    out = cast(values, dtype)
    return out if np.array_equal(cast(out, np.float64), cast(values, np.float64), equal_nan=True) else None
