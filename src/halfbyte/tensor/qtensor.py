"""QTensor: a packed weight with a format, a logical shape and named parts in canonical order
(docs/design/layering.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, ShapeError
from ..formats import EXTRA_PARTS, Composite, family_of
from ..numerics import opaque_call
from ..numerics.bits import padding_is_zero
from ..numerics.exact import dtype_named
from ..numerics.memory_limit import check_memory
from ..spec import SMALL_SCALES, Format, Size
from .notebook import html

BLOCK_ELEMENTS = 1 << 20
"""Elements that `dequantize` decodes at a time: each temporary takes about 8 MB."""

_SHARED = ("group_index", "nested_absmax", "nested_map", "nested_offset")
"""Parts without a row axis: a slice keeps them whole."""
_GROUPED = ("scales", "zeros", "biases")
"""Parts that a slice also keeps whole when groups do not run along rows."""


def _flattened(fmt: Format) -> bool:
    """True when groups, or nested blocks of groups, are counted over the flattened tensor, so that
    a slice needs its position.
    """
    return fmt.grouping in ("flat", "strided") or fmt.scale == "nested"


class QTensor:
    """A packed weight.

    format   what the codes mean
    shape    logical (n, k) or (e, n, k)
    parts    name -> array, canonical order, read-only mapping; arrays may be memory-mapped views
    origin   producer whose decoder `arithmetic="producer"` reproduces ("mlx", "gguf", ...), "" when
             there is none
    details  further facts that decoder needs (compute dtype, ...): small strings and numbers
    window   (first row, rows of the whole) for a slice of a tensor in `flat`, `strided` or `block`
             groups, with nested scales or of a composite format, else None; rows of the flattened
             tensor, for `block` rows of the matrix

    Raises ShapeError or FormatError when the parts do not fit the format and shape.
    """

    __slots__ = ("__weakref__", "details", "format", "origin", "parts", "shape", "window")
    graph_name = opaque_call.graph_name

    def __init__(
        self,
        format: Format,
        shape: tuple[int, ...],
        parts: Mapping[str, NDArray[Any]],
        *,
        origin: str = "",
        details: Mapping[str, Any] | None = None,
        window: tuple[int, int] | None = None,
        name: str = "",
    ) -> None:
        self.format = format
        self.shape = tuple(int(d) for d in shape)
        self.parts: Mapping[str, NDArray[Any]] = MappingProxyType(dict(parts))
        self.origin = origin
        self.details: Mapping[str, Any] = MappingProxyType(dict(details or {}))
        self.window = window
        self._check(name)

    def _check(self, name: str) -> None:
        where = f"{name}: " if name else ""
        if len(self.shape) < 2 or any(d < 0 for d in self.shape):
            raise ShapeError(f"[QTensor] {where}shape {self.shape}; a weight is (n, k) or (experts, n, k)")
        family = family_of(self.format)
        if self.format.composite and len(self.shape) != 2:
            raise ShapeError(
                f"[QTensor] {where}{self.format} of shape {self.shape}; only a matrix (n, k) has a {self.format.extra}"
            )
        whole_rows = self.window[1] if self.format.composite and self.window is not None else self.shape[-2]
        required = family.geometry(self.format, (*self.shape[:-2], whole_rows, self.shape[-1]))
        if self.window is not None and not self.format.composite:
            whole = family.geometry(self.format, (self.window[1], self.shape[-1]))
            kept = _SHARED if self.format.grouping == "row" else (*_SHARED, *_GROUPED)
            required |= {p: s for p, s in whole.items() if p in kept}
        optional = family.optional_parts(self.format, self.shape)
        free = EXTRA_PARTS.get(self.format.extra, ())  # whose sizes the composite family checks
        missing = sorted(set(required) - set(self.parts))
        unknown = sorted(set(self.parts) - set(required) - set(optional) - set(free))
        if missing or unknown:
            raise FormatError(
                f"[QTensor] {where}{self.format} of shape {self.shape} has parts {sorted(self.parts)}; "
                f"missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        if isinstance(family, Composite):
            family.check_extra(self.format, (whole_rows, self.shape[-1]), self.parts, name)
        for part, array in self.parts.items():
            if part in free and part not in required:
                continue
            want = required[part] if part in required else optional[part]
            if array.shape != want.shape or array.dtype != want.dtype:
                raise ShapeError(
                    f"[QTensor] {where}part {part!r} is {array.dtype} {list(array.shape)}; "
                    f"{self.format} of shape {self.shape} wants {want.dtype} {list(want.shape)}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(a.nbytes for a in self.parts.values())

    @property
    def size(self) -> int:
        """Logical elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """8 · nbytes / size; 0 for an empty tensor."""
        return Size(self.nbytes, self.size).bits_per_weight

    def __repr__(self) -> str:
        origin = f", origin={self.origin!r}" if self.origin else ""
        return (
            f"QTensor({self.format}, shape={self.shape}, {self.bits_per_weight:.3g} bits/weight, {self.nbytes:,} bytes{origin})"
        )

    def _repr_html_(self) -> str:
        """HTML for notebooks: format, shape, bits a weight, bytes, origin, and a histogram of codes
        (`tensor/notebook.py`).
        """
        facts = {
            "format": str(self.format),
            "shape": " × ".join(map(str, self.shape)),
            "bits per weight": f"{self.bits_per_weight:.3g}",
            "bytes": f"{self.nbytes:,}",
        }
        return html(self, facts | ({"origin": self.origin} if self.origin else {}))

    __array_ufunc__ = None
    """Arithmetic with an array raises TypeError: no operator makes a dense copy. `np.asarray` does,
    since it was asked to.
    """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """`dequantize(dtype)`, float32 unless given: what `np.asarray(w)` returns. ValueError for
        copy=False.
        """
        if copy is False:
            raise ValueError("[QTensor] an array without a copy; the codes are packed, so its values are always a new array")
        return self.dequantize("float32" if dtype is None else dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> QTensor:
        """Rows of a matrix (`w[a:b]`) or experts of a stack (`w[e]`, `w[a:b]`), as views: no bytes
        are copied.
        """
        if self.ndim == 2:
            if not isinstance(index, slice):
                raise ShapeError("[QTensor] an (n, k) weight is sliced by rows, w[a:b]; a single row is w[i:i+1]")
            return self.rows(*self._bounds(index, self.shape[0]))
        kept = (*_SHARED, *_GROUPED) if self.format.grouping in ("flat", "strided") else _SHARED
        if isinstance(index, slice):
            start, stop = self._bounds(index, self.shape[0])
            parts = {p: a if p in kept else a[start:stop] for p, a in self.parts.items()}
            return self._like((stop - start, *self.shape[1:]), parts, self._window(start))
        if not -self.shape[0] <= index < self.shape[0]:
            raise IndexError(f"[QTensor] expert {index} of {self.shape[0]}")
        # `a[i, ...]` stays a 0-d view where a[i] would be a scalar copy.
        parts = {p: a if p in kept else a[index, ...] for p, a in self.parts.items()}
        return self._like(self.shape[1:], parts, self._window(index % self.shape[0]))

    def _window(self, expert: int) -> tuple[int, int] | None:
        """`window` of a slice that starts at an expert, None where groups do not need it."""
        if not _flattened(self.format):
            return None
        first, total = self.window or (0, math.prod(self.shape[:-1]))
        return first + expert * math.prod(self.shape[1:-1]), total

    @staticmethod
    def _bounds(index: slice, length: int) -> tuple[int, int]:
        start, stop, step = index.indices(length)
        if step != 1:
            raise ShapeError(f"[QTensor] slice step {step}; only contiguous ranges of rows or experts are views")
        return start, max(start, stop)

    def rows(self, start: int, stop: int) -> QTensor:
        """Rows start to stop of every matrix, as views."""
        n = self.shape[-2]
        if not 0 <= start <= stop <= n:
            raise ShapeError(f"[QTensor] rows {start}:{stop} of {n}")
        window = None
        kept: tuple[str, ...] = _SHARED
        if self.format.composite:
            first, total = self.window or (0, n)
            return self._like((stop - start, self.shape[-1]), self.parts, (first + start, total))
        if self.format.grouping != "row" or _flattened(self.format):
            if self.ndim != 2:
                raise ShapeError(f"[QTensor] rows of a stack of {self.format} cannot be sliced at once; take an expert first")
            first, total = self.window or (0, n)
            window = (first + start, total)
            kept = _SHARED if self.format.grouping == "row" else (*_SHARED, *_GROUPED)
        parts: dict[str, NDArray[Any]] = {}
        for p, a in self.parts.items():
            if p in kept or p == "global_scale":
                parts[p] = a
            else:
                parts[p] = a[..., start:stop, :]
        return self._like((*self.shape[:-2], stop - start, self.shape[-1]), parts, window)

    def _like(self, shape: tuple[int, ...], parts: Mapping[str, NDArray[Any]], window: tuple[int, int] | None = None) -> QTensor:
        return QTensor(self.format, shape, parts, origin=self.origin, details=self.details, window=window)

    def dequantize(self, dtype: Any = "float32", arithmetic: str = "exact") -> NDArray[Any]:
        """Dense [*shape] array of `dtype` ("float32", "float16", "bfloat16").

        arithmetic  "exact": the real value rounded once to nearest even. "producer": bit for bit
                    what the decoder of `origin`
        returns. Raises FormatError for an unknown dtype or arithmetic, or "producer" on a tensor
        that has no origin.
        """
        kind = dtype_named(dtype)
        check_memory(math.prod(self.shape) * kind.itemsize, f"[dequantize] a weight of shape {self.shape} in {kind.name}")
        out = np.empty(self.shape, kind)
        self.dequantize_into(out, arithmetic)
        return out

    def dequantize_into(self, out: NDArray[Any], arithmetic: str = "exact") -> None:
        """`dequantize` into an existing array of this shape, one block of rows at a time."""
        if out.shape != self.shape:
            raise ShapeError(f"[dequantize] out has shape {out.shape}; the weight has {self.shape}")
        if arithmetic not in ("exact", "producer"):
            raise FormatError(f"[dequantize] arithmetic {arithmetic!r}; allowed: exact, producer")
        if arithmetic == "producer" and not self.origin:
            raise FormatError('[dequantize] arithmetic="producer" on a tensor without a producer; use arithmetic="exact"')
        if self.ndim > 2:
            for e in range(self.shape[0]):
                self[e].dequantize_into(out[e], arithmetic)
            return
        step = max(1, BLOCK_ELEMENTS // max(1, self.shape[1]))
        if self.format.composite and self.format.group_rows > 1:
            step = -(-step // self.format.group_rows) * self.format.group_rows  # none is computed twice
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            block = self.rows(start, stop) if stop - start < self.shape[0] else self
            self._decode_block(block, out[start:stop], arithmetic)

    @staticmethod
    def _decode_block(block: QTensor, out: NDArray[Any], arithmetic: str) -> None:
        if arithmetic == "producer":
            from ..producers import decode_as

            out[...] = decode_as(block, out.dtype)
        else:
            out[...] = family_of(block.format).decode(block.format, block.shape, block.parts, out.dtype, block.window)

    def identical(self, other: QTensor) -> bool:
        """Same format, shape and bytes in every part (NaN bit patterns included)."""
        return (
            self.format == other.format
            and self.shape == other.shape
            and self.parts.keys() == other.parts.keys()
            and all(_same_bytes(a, other.parts[p]) for p, a in self.parts.items())
        )

    def __eq__(self, other: object) -> bool:
        return self.identical(other) if isinstance(other, QTensor) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.format, self.shape, dict(self.parts), self.origin, dict(self.details), self.window)

    def validate(self, name: str = "") -> None:
        """Check the contents that shapes do not show: zero padding bits, small-integer scales and
        group indices within range.
        """
        if "codes" in self.parts and not padding_is_zero(self.parts["codes"], self.format.bits, self.shape[-1]):
            raise FormatError(f"[QTensor] {name}: padding bits after code {self.shape[-1] - 1} are not zero")
        for part, kind in (("scales", self.format.scale), ("mins", self.format.minimum)):
            low, high = SMALL_SCALES.get(kind, (0, 0))
            values = self.parts[part] if kind in SMALL_SCALES else np.empty(0)
            if values.size and not low <= int(values.min()) <= int(values.max()) <= high:
                raise FormatError(
                    f"[QTensor] {name}: {part} run from {values.min()} to {values.max()}; {kind} holds {low} to {high}"
                )
        index = self.parts.get("group_index")
        if index is not None and index.size:
            groups = self.format.groups(self.shape[-1])
            if int(index.min()) < 0 or int(index.max()) >= groups:
                raise FormatError(
                    f"[QTensor] {name}: group index runs from {index.min()} to {index.max()}; there are {groups} groups"
                )


def _rebuild(
    fmt: Format,
    shape: tuple[int, ...],
    parts: dict[str, Any],
    origin: str,
    details: dict[str, Any],
    window: tuple[int, int] | None,
) -> QTensor:
    """The QTensor that `__reduce__` described."""
    return QTensor(fmt, shape, parts, origin=origin, details=details, window=window)


def _same_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equality of dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return bool(np.array_equal(np.ascontiguousarray(a).view(unsigned), np.ascontiguousarray(b).view(unsigned)))
