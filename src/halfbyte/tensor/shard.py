"""Sharding of packed weights over devices: by rows (outputs), by inputs, or by experts.

    shard_rows(w, a, b)      outputs a to b: y[a:b]                      (column parallel)
    shard_inputs(w, a, b)    inputs a to b: partial sums of all outputs  (row parallel)
    split(size, ranks, unit) where to cut, on multiples of `unit`

Inputs are cut at group boundaries, multiples of `input_unit`, so that each scale stays with its
codes. An act-order weight, whose groups are scattered over the inputs, may be cut at any byte: a
shard keeps the scales of every group that it has an input of. No code changes, and the values of
the shards are those of the whole weight.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError, UnsupportedError
from ..formats import family_of
from ..formats.ggml.types import GGML_BY_CODEC
from ..spec import Format
from .qtensor import QTensor

_GROUPED = ("scales", "zeros", "biases", "mins")


def split(size: int, ranks: int, unit: int = 1) -> list[tuple[int, int]]:
    """(start, stop) of each rank: multiples of `unit`, as equal as possible; the last one takes the
    remainder.

    ShapeError when there is not a unit for each rank.

    >>> split(640, 2, 256), split(10, 3)
    ([(0, 256), (256, 640)], [(0, 3), (3, 6), (6, 10)])
    """
    units = -(-size // unit)
    if ranks < 1 or units < ranks:
        raise ShapeError(f"[shard] {size} in units of {unit} over {ranks} ranks; each rank needs at least one unit")
    ends = [min(r * units // ranks * unit, size) for r in range(ranks + 1)]
    return [(ends[r], ends[r + 1]) for r in range(ranks)]


def shard_rows(w: QTensor, start: int, stop: int) -> QTensor:
    """Outputs start to stop of a matrix, or of every matrix of a stack."""
    if (
        w.format.grouping == "block"
        and not w.format.composite
        and w.ndim == 2
        and w.format.group_rows > 0
        and start % w.format.group_rows == 0
    ):
        return _block_rows(w, start, stop)
    return w.rows(start, stop)


def shard_experts(w: QTensor, start: int, stop: int) -> QTensor:
    """Experts start to stop of a stack."""
    if w.ndim != 3:
        raise ShapeError(f"[shard] a weight of shape {w.shape}; a stack (e, n, k) has experts")
    return w[start:stop]


def input_unit(w: QTensor) -> int:
    """Distance in inputs between positions where the weight may be cut along k.

    UnsupportedError for formats whose groups run over rows: they cannot be cut along k.
    """
    fmt = w.format
    if fmt.grouping in ("flat", "strided") or fmt.scale == "nested" or fmt.composite:
        what = "depends on whole rows" if fmt.composite else "has groups over the flattened matrix"
        raise UnsupportedError(f"[shard] {fmt} {what} and cannot be cut along its inputs; cut its rows, or convert it first")
    block = GGML_BY_CODEC[fmt.name].block if fmt.name in GGML_BY_CODEC else 1
    if fmt.opaque:
        return block
    byte = 8 // math.gcd(8, fmt.bits)
    if "group_index" in w.parts or fmt.group_size == -1:
        return byte
    return math.lcm(byte, fmt.super_size or fmt.group_size, block)


def shard_inputs(w: QTensor, start: int, stop: int) -> QTensor:
    """Inputs start to stop of a matrix, or of every matrix of a stack: multiples of `input_unit`,
    or the end.

    Raises ShapeError for other positions, UnsupportedError as `input_unit` does.
    """
    unit, k = input_unit(w), w.shape[-1]
    if not 0 <= start <= stop <= k or start % unit or (stop % unit and stop != k):
        raise ShapeError(f"[shard] inputs {start}:{stop} of {k}; {w.format} is cut at multiples of {unit}")
    fmt, parts = w.format, dict(w.parts)
    shape = (*w.shape[:-1], stop - start)
    if fmt.opaque:
        kind = GGML_BY_CODEC[fmt.name]
        parts["blocks"] = parts["blocks"][..., kind.row_bytes(start) : kind.row_bytes(stop)]
        return _piece(w, fmt, shape, parts)
    parts["codes"] = _codes(parts["codes"], fmt.bits, start, stop)
    if "group_index" in parts:
        fmt = _shard_act_order(fmt, parts, start, stop)
    elif fmt.group_size != -1:
        first, last = start // fmt.group_size, -(-stop // fmt.group_size)
        parts |= {p: parts[p][..., first:last] for p in _GROUPED if p in parts}
        if fmt.super_size:
            first, last = start // fmt.super_size, stop // fmt.super_size
            parts |= {p: parts[p][..., first:last] for p in ("super_scales", "super_mins") if p in parts}
    return _piece(w, fmt, shape, parts)


def _codes(codes: NDArray[np.uint8], bits: int, start: int, stop: int) -> NDArray[np.uint8]:
    """The bytes of codes start to stop, with the bits after the last code cleared."""
    out = codes[..., start * bits // 8 : -(-stop * bits // 8)]
    left = stop * bits % 8
    if left and out.shape[-1]:
        out = out.copy()
        out[..., -1] &= (1 << left) - 1
    return out


def _shard_act_order(fmt: Format, parts: dict[str, NDArray[Any]], start: int, stop: int) -> Format:
    """Keep the groups of inputs start to stop in `parts`; the format's new group size. The last
    group is repeated to reach its count.
    """
    index = parts["group_index"][start:stop]
    used, renumbered = np.unique(index, return_inverse=True)
    size = max((stop - start) // max(len(used), 1), 1)
    wanted = -(-(stop - start) // size)
    columns = np.concatenate([used, np.repeat(used[-1:], wanted - len(used))])
    parts["group_index"] = renumbered.astype(np.int32).reshape(-1)
    parts.update({p: parts[p][..., columns] for p in _GROUPED if p in parts})
    return fmt.with_(group_size=size)


def _block_rows(w: QTensor, start: int, stop: int) -> QTensor:
    """Rows that start at a tile boundary: a weight without a window."""
    size = w.format.group_rows
    parts = {p: a[start // size : -(-stop // size)] if p in _GROUPED else a[start:stop] for p, a in w.parts.items()}
    return _piece(w, w.format, (stop - start, w.shape[1]), parts)


def _piece(w: QTensor, fmt: Format, shape: tuple[int, ...], parts: dict[str, NDArray[Any]]) -> QTensor:
    # Other details (paddings, widths) describe the whole tensor.
    details = {k: v for k, v in w.details.items() if k == "dtype"}
    assert set(family_of(fmt).geometry(fmt, shape)) <= set(parts)
    return QTensor(fmt, shape, parts, origin=w.origin, details=details)
