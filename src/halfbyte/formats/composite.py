"""Weights that are more than one code under its scales: a format of another family, and `extra`.

| `Format.extra` | value | parts beside those of the format |
|---|---|---|
| `low-rank` | W + B · A | `lora_a` [r, k], `lora_b` [n, r] float |
| `transform` | Uᵀ · W · Vᵀ / √(norms) | `input_transform` V, `output_transform` U, square, float |

U and V stand for block-diagonal matrices: a square of size s on the k inputs (or n outputs) is
repeated k / s times. `transform_norms`, int32 [2], are what the squares of the input's and the
output's divisor are: 1 for a matrix as it is, s for a Hadamard matrix of ±1. Either transform may
be absent, and its norm is 1 then.

Sums are exact: factors are cut into slices of so few bits that products of slices add without
rounding in float64 (Ozaki et al. 2012), and the sum of all is rounded once. The square root of a
norm that is no power of four is taken to twice float64's precision.

Only matrices have them, and a slice of rows keeps every part whole (`Format.composite`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, ShapeError, UnsupportedError
from ..numerics.exact import F64, Exact, bfloat16, distil, dtype_named, two_product
from ..numerics.row_slices import row_slices
from ..spec import Format
from .base import Family, PartSpec
from .decode import Parts

EXTRA_PARTS: dict[str, tuple[str, ...]] = {
    "low-rank": ("lora_a", "lora_b"),
    "transform": ("input_transform", "output_transform", "transform_norms"),
}
"""`Format.extra` -> the parts that it adds."""
DTYPES = (np.dtype(np.float16), bfloat16, np.dtype(np.float32), np.dtype(np.float64))
ROWS = 1 << 18
"""Elements of a block of rows whose low-rank product is computed at a time."""


class Composite(Family):
    """A family's format with an `extra`."""

    name = "composite"
    codecs = ()

    def __init__(self, base: Family) -> None:
        self.base = base

    def format(self, codec: str, group_size: int | None = None, **options: Any) -> Format:
        return self.base.format(codec, group_size, **options)

    def geometry(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        specs = dict(self.base.geometry(fmt.with_(extra=""), shape))
        if fmt.extra == "transform":
            specs["transform_norms"] = PartSpec((2,), np.dtype(np.int32))
        return specs

    def optional_parts(self, fmt: Format, shape: Sequence[int]) -> dict[str, PartSpec]:
        return dict(self.base.optional_parts(fmt.with_(extra=""), shape))

    def check_extra(self, fmt: Format, shape: Sequence[int], parts: Parts, name: str = "") -> None:
        """FormatError or ShapeError for parts of the extra that are missing or do not fit.

        shape  (n, k) of the whole matrix
        """
        n, k = shape
        known = EXTRA_PARTS[fmt.extra]
        have = [p for p in known if p in parts]
        floats = [p for p in have if p != "transform_norms"]
        for part in floats:
            if parts[part].ndim != 2 or parts[part].dtype not in DTYPES:
                raise ShapeError(
                    f"[QTensor] {name}: part {part!r} is {parts[part].dtype} {list(parts[part].shape)}; wanted a float matrix"
                )
        if fmt.extra == "low-rank":
            if len(have) < 2:
                raise FormatError(f"[QTensor] {name}: {fmt} has {', '.join(have) or 'neither factor'}; wanted {', '.join(known)}")
            a, b = parts["lora_a"].shape, parts["lora_b"].shape
            if a[1] != k or b[0] != n or a[0] != b[1]:
                raise ShapeError(f"[QTensor] {name}: lora_a {list(a)} and lora_b {list(b)}; wanted [r, {k}] and [{n}, r]")
            return
        if not floats:
            raise FormatError(f"[QTensor] {name}: {fmt} has neither input_transform nor output_transform")
        for part in floats:
            rows, columns = parts[part].shape
            size = k if part == "input_transform" else n
            if rows != columns or not rows or size % rows:
                raise ShapeError(f"[QTensor] {name}: {part} is {[rows, columns]}; wanted a square whose size divides {size}")
        if (parts["transform_norms"] < 1).any():
            raise FormatError(f"[QTensor] {name}: transform_norms are {parts['transform_norms'].tolist()}; wanted 1 or more")

    def decode(
        self, fmt: Format, shape: tuple[int, ...], parts: Parts, dtype: Any, window: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Exact values rounded once to `dtype`."""
        first, total = window or (0, shape[0])
        if fmt.extra == "low-rank":
            return self._low_rank(fmt, (first, first + shape[0]), total, parts, dtype)
        return self._transformed(fmt, (first, first + shape[0]), (total, shape[1]), parts, dtype)

    def base_rows(self, fmt: Format, start: int, stop: int, shape: Sequence[int], parts: Parts) -> F64:
        """Rows of the format without its extra, float64: exact where 53 bits hold the value."""
        n, k = shape
        plain = fmt.with_(extra="")
        own = {p: a for p, a in parts.items() if p not in EXTRA_PARTS[fmt.extra]}
        if plain.grouping != "row":
            return self.base.decode(plain, (n, k), own, np.float64, None)[start:stop]
        shared = ("group_index", "global_scale")
        rows = {p: a if p in shared else a[start:stop] for p, a in own.items()}
        return self.base.decode(plain, (stop - start, k), rows, np.float64, None)

    def _low_rank(self, fmt: Format, rows: tuple[int, int], n: int, parts: Parts, dtype: Any) -> NDArray[Any]:
        a, b = parts["lora_a"].astype(np.float64), parts["lora_b"].astype(np.float64)
        start, stop = rows
        k = a.shape[1]
        out = np.empty((stop - start, k), dtype_named(dtype))
        for part in row_slices(out.shape, ROWS):
            at, end = start + part.start, start + part.stop
            out[part] = Exact([self.base_rows(fmt, at, end, (n, k), parts), *exact_product(b[at:end], a)]).round(dtype)
        return out

    def _transformed(self, fmt: Format, rows: tuple[int, int], shape: tuple[int, int], parts: Parts, dtype: Any) -> NDArray[Any]:
        n = shape[0]
        start, stop = rows
        v, u = parts.get("input_transform"), parts.get("output_transform")
        size = 1 if u is None else u.shape[0]
        low, high = start // size * size, min(-(-stop // size) * size, n)
        terms = [self.base_rows(fmt, low, high, shape, parts)]
        if v is not None:
            terms = _blockwise(terms, v.astype(np.float64).T)
        if u is not None:
            terms = [t.T for t in _blockwise([t.T for t in terms], u.astype(np.float64))]
        terms = [t[start - low : stop - low] for t in terms]
        norm = math.prod(int(x) for x in parts["transform_norms"])
        return _over_root(terms, norm).round(dtype)

    def encode(self, x: NDArray[np.floating], fmt: Format, **policy: Any) -> dict[str, NDArray[Any]]:
        raise UnsupportedError(f"[quantize] a {fmt.extra} part is decoded only; quantize to {fmt.with_(extra='')}")


def slices(x: F64, bits: int) -> list[F64]:
    """x as a sum of matrices whose entries are, row by row, whole numbers of at most `bits` bits
    times one power of two. Exact; entries that are not finite stay in the first.
    """
    out = []
    rest = np.where(np.isfinite(x), x, 0.0)
    bad = ~np.isfinite(x)
    while True:
        top = np.abs(rest).max(axis=1, initial=0.0, keepdims=True)
        if not top.any():
            break
        exponent = np.frexp(top)[1]
        unit = np.ldexp(1.0, np.maximum(exponent - bits, -1074))
        part = np.rint(rest / unit) * unit
        part = np.where(top > 0, part, 0.0)
        out.append(part)
        rest = rest - part
    if not out:
        out = [np.zeros_like(x)]
    if bad.any():
        out[0] = np.where(bad, x, out[0])
    return out


def exact_product(a: F64, b: F64) -> list[F64]:
    """Terms whose real sum is a · b, for finite a [n, s] and b [s, k] within float64's range."""
    bits = max(1, (52 - max(1, a.shape[1]).bit_length()) // 2)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        with np.errstate(invalid="ignore", over="ignore"):
            return [a @ b]  # NaN and infinities follow ordinary addition
    return [x @ y for x in slices(a, bits) for y in (t.T for t in slices(np.ascontiguousarray(b.T), bits))]


def _blockwise(terms: list[F64], square: F64) -> list[F64]:
    """The sum of terms [m, k] times a block-diagonal matrix of `square` [s, s], exact, as few
    terms.
    """
    size = len(square)
    out: list[F64] = []
    for term in terms:
        rows = np.ascontiguousarray(term).reshape(-1, size)
        out += [p.reshape(term.shape) for p in exact_product(rows, square)]
    if len(out) > 2 and all(np.isfinite(t).all() for t in out):
        out = [t for t in distil(out) if t.any()] or out[:1]
    return out


def _over_root(terms: list[F64], norm: int) -> Exact:
    """Terms over √norm: exact where the root is whole, else to some 100 bits."""
    root = math.isqrt(norm)
    if root * root == norm:
        return Exact(terms, None if root == 1 else np.asarray(root, np.float64))
    scaled = math.isqrt((1 << 400) // norm)  # 2^200 / √norm, rounded down
    high = float(scaled)
    low = float(scaled - int(high))
    out: list[F64] = []
    with np.errstate(invalid="ignore", over="ignore"):
        for term in terms:
            out += [np.ldexp(p, -200) for p in two_product(term, np.asarray(high))] + [np.ldexp(term * low, -200)]
    return Exact(out)
