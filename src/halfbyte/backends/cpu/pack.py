"""From a canonical QTensor to the order the CPU kernels read, and back.

Panel order takes rows sixteen at a time, codes in bit planes, group entries as [panel, group, 16];
native/weight.h has the picture. It stores the same bits in the same number of bytes (rows padded to
sixteen, groups to eight inputs), so it is a bijection; `unpack.canonical_parts` is its inverse.
Weights whose scales do not fit panels (groups over the flattened matrix, float zero points, nested
scales) stay in canonical order and are decoded row by row.
"""

from __future__ import annotations

import functools
import math
import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...numerics.activations import INTEGRAL_TABLES, activation_span, product_bits, segment_length
from ...numerics.exact import bfloat16
from ...numerics.minifloat import MINIFLOATS, element_table
from ...spec import Format
from ...tensor.qtensor import QTensor

PANEL_ROWS = 16
HUGE_PAGE = 1 << 21
SHARED_PAGES = 4  # huge pages of which one allocation of several small weights consists
SMALL = 1 << 14  # bytes from which an array is put on them
CHUNK = 32  # inputs in which the planes of every width have whole units
SHORTEST_GROUP = 8  # shorter groups would be mostly padding

_SCALE = {
    "none": "none", "e8m0": "e8m0", "e4m3": "e4m3", "ue4m3": "ue4m3", "float16": "f16", "bfloat16": "bf16", "float32": "f32",
    "u4": "u8", "u6": "u8", "i6": "i8", "i8": "i8", "nested": "nested",
}  # fmt: skip
"""Scale words of a Format -> `_native.Scale`."""
_ENUMERATIONS = {"element": "Element", "scale": "Scale", "grouping": "Grouping", "global_op": "Global"}
"""Fields that are members of an enumeration of the core, spelled by name here."""
_LAST_FINITE = {"e4m3": 0x7E, "e5m2": 0x7B}
_ENTRIES = ("scales", "zeros", "biases", "mins", "super_scales", "super_mins")


class PackedWeight:
    """One (n, k) matrix in the kernels' order.

    fields  numbers of native/weight.h; enumerations by name
    arrays  its arrays, read-only from here on
    native  the core's weight, which has checked them against each other
    linear  the core's product of this weight: linear(x, bias, activations, out)
    """

    __slots__ = ("arrays", "fields", "linear", "native", "nbytes")

    def __init__(self, fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        from ... import _native

        self.fields = dict(fields)
        self.arrays = {name: _aligned(a) for name, a in arrays.items()}
        native = native_fields(self.fields, self.arrays)
        for name, a in self.arrays.items():
            if a.flags.writeable:
                self.arrays[name] = a = a.view()
                a.flags.writeable = False
        self.native = _native.Weight(native)
        self.linear = functools.partial(_native.linear, self.native)
        self.nbytes = sum(a.nbytes for name, a in self.arrays.items() if name != "values")

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeight, (self.fields, self.arrays)


def native_fields(fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Any:
    """The core's struct of a weight's numbers and arrays. AttributeError for a name that it does
    not have.
    """
    from ... import _native

    native = _native.WeightFields()
    for name, value in fields.items():
        enumeration = _ENUMERATIONS.get(name)
        setattr(native, name, getattr(getattr(_native, enumeration), value) if enumeration else value)
    for name, a in arrays.items():
        setattr(native, name, a)
    return native


def address(a: NDArray[Any]) -> int:
    """Address of an array's first element, to test its alignment."""
    return int(a.__array_interface__["data"][0])


def _aligned(a: NDArray[Any]) -> NDArray[Any]:
    """A contiguous copy on a cache line boundary, or `a` itself when it already is: a 64-byte load
    must not span two lines.
    """
    if a.flags.c_contiguous and (address(a) % 64 == 0 or a.nbytes < 64):
        return a
    out = aligned_empty(a.nbytes).view(a.dtype).reshape(a.shape)
    out[...] = a
    return out


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised bytes that start on a cache line, or on a huge page where they fill one.

    The streams of a panel are pages apart: on pages of 2 MiB a product of one token reads a third
    faster than on pages of 4 KiB, and a sixth faster with weights of about 1 MB, which share such
    pages (AMD EPYC, Zen 4).
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        if nbytes >= HUGE_PAGE:
            return _on_huge_pages(nbytes)
        if nbytes >= SMALL:
            return _shared.take(nbytes)
    raw = np.empty(nbytes + 64, np.uint8)
    start = -address(raw) % 64
    return raw[start : start + nbytes]


def _on_huge_pages(nbytes: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -address(np.frombuffer(memory, np.uint8)) % HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return np.frombuffer(memory, np.uint8, nbytes, start)


class _SharedPages:
    """Huge pages that small weights share, allocated from the front and freed with the last weight
    on them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` that start on a cache line."""
        whole = -(-nbytes // 64) * 64
        with self._lock:
            if whole > self._free.nbytes:
                self._free = _on_huge_pages(SHARED_PAGES * HUGE_PAGE)
            taken, self._free = self._free[:whole], self._free[whole:]
        return taken[:nbytes]


_shared = _SharedPages()


def fits_panels(fmt: Format) -> bool:
    """True when panel order can store the format, False when its rows are decoded one by one.

    A factor applied after the sums (global scale, divisor) must meet an exact product of element
    and group scale, or a value would be rounded twice.
    """
    if fmt.grouping not in ("row", "block") or fmt.zero == "float" or fmt.inverse or fmt.scale == "nested":
        return False
    if fmt.group_size != -1 and fmt.group_size < SHORTEST_GROUP:
        return False
    if fmt.global_op or fmt.divisor != 1.0:
        return product_bits(fmt) <= 24 and not fmt.super_size and not fmt.bias
    return True


def zero_shift(w: QTensor) -> int:
    """What panels subtract from both codes and zero points of unsigned codes.

    (c − h) − (z − h) with h half of the codes: a product with activations is summed for codes and
    zero points apart, and numbers around zero lose less there than numbers around h. 0 where z − h
    is no int16.
    """
    fmt = w.format
    if fmt.element != "uint" or fmt.zero != "int" or not fits_panels(fmt):
        return 0
    half = 1 << (fmt.bits - 1)
    return half if int(w.parts["zeros"].min(initial=0)) - half >= np.iinfo(np.int16).min else 0


def element_fields(fmt: Format) -> dict[str, Any]:
    """How codes become numbers: fields of native/weight.h."""
    half = 1 << (fmt.bits - 1)
    if fmt.element == "int":
        return {"element": "integer", "offset": half, "integral": True}
    if fmt.element == "uint":
        return {"element": "integer", "offset": 0, "integral": True}
    if fmt.element == "mxint":
        unit = 2.0 ** -(fmt.bits - 2) if fmt.bits > 1 else 1.0
        return {"element": "integer", "offset": half, "flip": half, "integral": True, "unit": unit}
    if fmt.bits == 4:
        unit, low = INTEGRAL_TABLES.get(fmt.element, (1.0, 0))
        return {"element": "table", "integral": fmt.element in INTEGRAL_TABLES, "unit": unit, "table_low": low}
    f = MINIFLOATS[fmt.element]
    return {
        "element": "minifloat",
        "mantissa_bits": f.mantissa_bits,
        "exponent_bias": f.bias,
        "last_finite": _LAST_FINITE.get(fmt.element, 0),
    }


def kernel_order(fmt: Format, k: int, index: NDArray[np.int32] | None) -> tuple[int, int, int, NDArray[np.int32] | None]:
    """Groups, padded group size, segment, and the input at each index of the kernels' order (None:
    input order).
    """
    if k == 0:
        return 0, 8, 8, None
    groups = max(fmt.groups(k), 1)
    size = k if fmt.group_size == -1 else min(fmt.group_size, max(k, 1))
    longest = size
    if index is not None:
        longest = int(np.bincount(index, minlength=groups).max(initial=1))
    segment = segment_length(longest)
    padded = -(-longest // segment) * segment
    if index is None and padded == size:
        return groups, padded, segment, None
    gather = np.full((groups, padded), -1, np.int32)
    if index is None:
        inputs = np.arange(groups * size, dtype=np.int32).reshape(groups, size)
        gather[:, :size] = np.where(inputs < k, inputs, -1)
    else:
        order = np.argsort(index, kind="stable").astype(np.int32)
        group = index[order]
        first = np.searchsorted(group, np.arange(groups))
        gather[group, np.arange(k) - first[group]] = order
    return groups, padded, segment, gather.reshape(-1)


def to_lanes(a: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """[n, G] -> [panels, G, 16], missing rows zero; into `out` where it is given."""
    n, groups = a.shape
    panels = -(-n // PANEL_ROWS)
    if out is None:
        out = _empty_lanes(n, groups, a.dtype)
    full = n // PANEL_ROWS
    out[:full] = a[: full * PANEL_ROWS].reshape(full, PANEL_ROWS, groups).transpose(0, 2, 1)
    if full < panels:
        out[full] = 0
        out[full, :, : n - full * PANEL_ROWS] = a[full * PANEL_ROWS :].T
    return out


def _empty_lanes(n: int, groups: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    shape = (-(-n // PANEL_ROWS), groups, PANEL_ROWS)
    return aligned_empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def from_lanes(a: NDArray[Any], n: int) -> NDArray[Any]:
    """[panels, G, 16] -> [n, G], the inverse of `to_lanes`."""
    panels, groups, _ = a.shape
    return np.ascontiguousarray(a.transpose(0, 2, 1).reshape(panels * PANEL_ROWS, groups)[:n])


def _plain(a: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 as its 16-bit words; other dtypes as they are."""
    return a.view(np.uint16) if a.dtype == bfloat16 else a


def pack_weight(w: QTensor) -> PackedWeight:
    """One (n, k) QTensor in the kernels' order."""
    return pack_pieces(w.format, (w.shape[0], w.shape[1]), iter([w]))


def pack_pieces(fmt: Format, shape: tuple[int, int], pieces: Iterator[QTensor]) -> PackedWeight:
    """A weight (n, k) from consecutive pieces of its rows: a large one need not be in memory twice.

    Every piece but the last has a multiple of `PANEL_ROWS` rows. A format that does not fit panels
    comes in one piece.
    """
    n, k = shape
    w = next(pieces)
    fields: dict[str, Any] = {
        "n": n, "k": k, "bits": fmt.bits, "scale": _SCALE[fmt.scale], "divisor": fmt.divisor, "inverse": fmt.inverse,
        "global_op": fmt.global_op or "none", "group_size": max(k if fmt.group_size == -1 else fmt.group_size, 1),
    }  # fmt: skip
    fields |= element_fields(fmt)
    if fmt.global_op:
        fields["global_scale"] = float(w.parts["global_scale"])
    if fmt.super_size:
        fields |= {"supers": k // fmt.super_size, "groups_per_super": fmt.super_size // fmt.group_size}
    shift = zero_shift(w)
    if shift:
        fields["offset"] = shift
    values = np.ascontiguousarray(element_table(fmt.element, fmt.bits) - shift, np.float64)
    arrays: dict[str, NDArray[Any]] = {"values": values}
    index = w.parts.get("group_index")
    if index is not None:
        arrays["group_index"] = np.ascontiguousarray(index, np.int32)
    if not fits_panels(fmt):
        assert w.shape == shape
        return _canonical_weight(w, fields, arrays)

    groups, padded, segment, gather = kernel_order(fmt, k, index)
    if gather is not None:
        arrays["gather"] = gather
    fields |= {"panel_order": True, "groups": groups, "group": padded, "seg": segment}
    if fields.get("integral"):
        fields["span"] = activation_span(fmt, segment)
    panel = PANEL_ROWS * (-(-groups * padded // CHUNK) * CHUNK)  # inputs
    planes = {f"plane{bits}": panel * bits // 8 for bits in ([8] if fmt.bits == 8 else [b for b in (4, 2, 1) if fmt.bits & b])}
    rows: dict[str, NDArray[Any]] = {name: aligned_empty(-(-n // PANEL_ROWS) * nbytes) for name, nbytes in planes.items()}
    at = 0
    while True:
        if zero_shift(w) < shift:
            found = w.parts["zeros"].min()
            raise FormatError(f"[cpu] rows {at} to {at + w.shape[0] - 1} have a zero point of {found}; allowed: -32640 to 32767")
        entries = _entries(w, shift)
        for name, part in entries.items():
            if name not in rows:
                rows[name] = _empty_lanes(n, part.shape[1], part.dtype)
        first, last = at // PANEL_ROWS, -(-(at + w.shape[0]) // PANEL_ROWS)
        own = {name: rows[name][first * nbytes : last * nbytes] for name, nbytes in planes.items()}
        for plane in own.values():
            plane[:] = 0
        own |= {name: to_lanes(part, rows[name][first:last]) for name, part in entries.items()}
        _pack_codes(fields | {"n": w.shape[0]}, arrays | own, np.ascontiguousarray(w.parts["codes"]))
        at += w.shape[0]
        if at >= n:
            return PackedWeight(fields, arrays | rows)
        w = next(pieces)


def _entries(w: QTensor, shift: int) -> dict[str, NDArray[Any]]:
    """Parts with an entry a group, [rows, G]; zero points less `shift`."""
    fmt, n = w.format, w.shape[0]
    out = {}
    for name in _ENTRIES:
        if name in w.parts:
            part = _plain(w.parts[name])
            if name == "zeros":
                part = part - part.dtype.type(shift)
            if fmt.grouping == "block" and name in ("scales", "zeros", "biases"):
                first, total = w.window or (0, n)
                rows = total if fmt.group_rows == -1 else fmt.group_rows
                part = part[(first + np.arange(n)) // max(rows, 1)]
            out[name] = part
    return out


def _pack_codes(fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], codes: NDArray[np.uint8]) -> None:
    """Canonical codes into the planes of `arrays`."""
    from ... import _native

    _native.pack(native_fields(fields, arrays), codes)


def _canonical_weight(w: QTensor, fields: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> PackedWeight:
    """A weight decoded row by row from its canonical parts."""
    fmt, (n, k) = w.format, w.shape
    first, total = w.window or (0, n)
    codes = np.ascontiguousarray(w.parts["codes"])
    fields |= {
        "panel_order": False, "row_bytes": codes.shape[1], "grouping": fmt.grouping, "groups": fmt.groups(k),
        "integral": False,
        "group_rows": max(total if fmt.group_rows == -1 else fmt.group_rows, 1), "first_row": first, "total_rows": total,
    }  # fmt: skip
    if fmt.scale == "nested":
        fields["nested_offset"] = float(w.parts["nested_offset"])
        arrays |= {name: np.ascontiguousarray(w.parts[name], np.float32) for name in ("nested_map", "nested_absmax")}
    arrays["codes"] = codes
    for name in _ENTRIES:
        if name in w.parts:
            native = "float_zeros" if name == "zeros" and fmt.zero == "float" else name
            arrays[native] = np.ascontiguousarray(_plain(w.parts[name]))
    return PackedWeight(fields, arrays)
