"""Canonical integer tensors and foreign words, drawn at random for the layouts' tests."""

from __future__ import annotations

import numpy as np

from halfbyte.formats import family_of, format_named
from halfbyte.layouts import Header
from halfbyte.numerics.bits import pack
from halfbyte.numerics.exact import DTYPES
from halfbyte.tensor.qtensor import QTensor


def integer_tensor(
    bits: int,
    shape: tuple[int, ...],
    group_size: int,
    seed: int = 0,
    *,
    zeros: tuple[int, int] | None = None,
    scale_dtype: str = "float16",
    act_order: bool = False,
    rows: int | None = None,
) -> QTensor:
    """A `uintN` with zero points drawn from `zeros` (both ends included), an `intN` without; codes
    and scale bits are random.
    """
    rng = np.random.default_rng(seed)
    options = {} if rows is None else {"rows": rows}
    fmt = format_named(f"{'' if zeros is None else 'u'}int{bits}", group_size, scale_dtype=scale_dtype, **options)
    k = shape[-1]
    groups = family_of(fmt).geometry(fmt, shape)["scales"].shape
    parts = {
        "codes": pack(rng.integers(0, 1 << bits, shape, dtype=np.uint8), bits),
        "scales": rng.standard_normal(groups).astype(DTYPES[scale_dtype]),
    }
    if zeros is not None:
        parts["zeros"] = rng.integers(zeros[0], zeros[1] + 1, groups).astype(np.int16)
    if act_order and k:
        parts["group_index"] = rng.integers(0, fmt.groups(k), k).astype(np.int32)
    return QTensor(fmt, shape, parts)


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random int32 words."""
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.int32)


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random float16 bit patterns, NaN and infinity among them."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(np.float16)


def headers(tensors: dict[str, np.ndarray], peek: tuple[str, ...] = ()) -> dict:
    """Shapes and dtypes only, but for the tensors whose data `describe` may read."""
    return {s: t if s in peek else Header(t.shape, t.dtype) for s, t in tensors.items()}


def field(word_column: np.ndarray, bits: int, j: int) -> int:
    """Code j of a column of 32-bit words read as one long little-endian integer."""
    whole = int.from_bytes(np.ascontiguousarray(word_column).astype("<i4").tobytes(), "little")
    return (whole >> (bits * j)) & ((1 << bits) - 1)
