"""Concatenation and stacking of packed weights, without a change to any bit.

    concat_rows([q, k, v])   (n₁ + n₂ + n₃, k)     rows of several matrices
    stack([e₀, e₁, ...])     (e, n, k)             matrices as one stack of experts
    take_rows(q, index)      (len(index), k)       rows in another order
    take_inputs(q, index)    (n, len(index))       whole groups of inputs in another order

Weights can be concatenated when they have one format, one k, one order of groups and, where rows
share it, one global scale. `incompatibility(weights)` gives the reason when they cannot. Two global
scales are never merged: taking one of them would multiply the other weight's rows by a wrong
factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError, plural
from ..spec import Format
from .qtensor import QTensor

_SHARED_BY_ROWS = ("group_index", "global_scale")
"""Parts that all rows of a matrix share."""


def incompatibility(weights: Sequence[QTensor], stacked: bool = False) -> str | None:
    """The reason why the weights cannot be concatenated along rows (or stacked), as a clause; None
    when they can.
    """
    first = weights[0]
    if any(w.format.composite for w in weights):
        return f"{next(w.format for w in weights if w.format.composite)} has parts that all of its rows share"
    for w in weights[1:]:
        if w.format != first.format:
            return f"their formats differ: {first.format} and {w.format}"
        if w.ndim != first.ndim or w.shape[-1] != first.shape[-1] or (stacked and w.shape != first.shape):
            return f"their shapes differ: {first.shape} and {w.shape}"
        for part in ("group_index",) if stacked else _SHARED_BY_ROWS:
            a, b = first.parts.get(part), w.parts.get(part)
            if (a is None) != (b is None) or (a is not None and b is not None and a.tobytes() != b.tobytes()):
                return f"each has a {part.replace('_', ' ')} of its own"
    fmt = first.format
    if fmt.grouping in ("flat", "strided") or fmt.scale == "nested":
        return f"groups of {fmt} run over the flattened matrix"
    if any(w.window is not None for w in weights):
        return "one of them is a slice whose groups depend on its position in the whole tensor"
    if (
        fmt.grouping == "block"
        and not stacked
        and (fmt.group_rows == -1 or any(w.shape[-2] % fmt.group_rows for w in weights[:-1]))
    ):
        return f"tiles of {fmt.group_rows} rows would straddle two of them"
    return None


def concat_rows(weights: Sequence[QTensor]) -> QTensor:
    """Rows of all weights in order: matrices give a matrix, stacks a stack. ShapeError with the
    reason when they do not fit.
    """
    _check("concat_rows", weights, stacked=False)
    first = weights[0]
    parts: dict[str, NDArray[Any]] = {}
    for name, array in first.parts.items():
        parts[name] = array if name in _SHARED_BY_ROWS else np.concatenate([w.parts[name] for w in weights], axis=-2)
    shape = (*first.shape[:-2], sum(w.shape[-2] for w in weights), first.shape[-1])
    return QTensor(first.format, shape, parts, origin=_common_origin(weights), details=_common_details(weights))


def stack(weights: Sequence[QTensor]) -> QTensor:
    """One stack (e, n, k) of e matrices (n, k). ShapeError with the reason when they do not fit."""
    _check("stack", weights, stacked=True)
    first = weights[0]
    parts = {name: a if name == "group_index" else np.stack([w.parts[name] for w in weights]) for name, a in first.parts.items()}
    shape = (len(weights), *first.shape)
    return QTensor(first.format, shape, parts, origin=_common_origin(weights), details=_common_details(weights))


def take_rows(q: QTensor, index: NDArray[np.integer]) -> QTensor:
    """Rows `index` of a matrix, or of every matrix of a stack. ShapeError where scales are not a
    row's own.
    """
    if q.format.grouping != "row" or q.format.scale == "nested" or q.format.composite:
        raise ShapeError(f"[take_rows] rows of {q.format} cannot be reordered: rows share its scales")
    parts = {p: a if p in _SHARED_BY_ROWS else np.ascontiguousarray(a[..., index, :]) for p, a in q.parts.items()}
    return QTensor(q.format, (*q.shape[:-2], len(index), q.shape[-1]), parts, origin=q.origin)


def moved_units(order: NDArray[np.integer], fmt: Format) -> NDArray[np.int64] | None:
    """What an order of inputs is to blocks of inputs that share every scale and begin at a byte:
    the order of those blocks; None where it divides one, or where a format has none.
    """
    if fmt.grouping != "row" or fmt.scale == "nested" or fmt.composite or fmt.group_size < 1:
        return None
    unit = math.lcm(fmt.super_size or fmt.group_size, 8 // math.gcd(8, fmt.bits))
    if fmt.opaque or len(order) % unit:
        return None
    blocks = np.asarray(order, np.int64).reshape(-1, unit)
    first = blocks[:, :1]
    return first[:, 0] // unit if (blocks == first + np.arange(unit)).all() and not (first % unit).any() else None


def take_inputs(q: QTensor, index: NDArray[np.integer]) -> QTensor:
    """Inputs `index` of a matrix, or of every matrix of a stack: whole blocks (`moved_units`).
    ShapeError for another order, or where groups have an order of their own.
    """
    units = None if "group_index" in q.parts else moved_units(index, q.format)
    if units is None:
        raise ShapeError(f"[take_inputs] inputs of {q.format} are moved by whole groups; this order divides some")
    total = q.shape[-1] // (len(index) // len(units))
    parts = {}
    for name, array in q.parts.items():
        if name in _SHARED_BY_ROWS:
            parts[name] = array
            continue
        cut = array.reshape(*array.shape[:-1], total, -1)
        parts[name] = np.ascontiguousarray(cut[..., units, :]).reshape(*array.shape[:-1], -1)
    return QTensor(q.format, (*q.shape[:-1], len(index)), parts, origin=q.origin)


def _check(op: str, weights: Sequence[QTensor], stacked: bool) -> None:
    reason = incompatibility(weights, stacked) if weights else "the list is empty"
    if reason is not None:
        raise ShapeError(f"[{op}] {plural(len(weights), 'weight')} cannot be joined: {reason}")


def _common_origin(weights: Sequence[QTensor]) -> str:
    """The origin that all weights have, "" when they differ."""
    return weights[0].origin if len({w.origin for w in weights}) == 1 else ""


def _common_details(weights: Sequence[QTensor]) -> dict[str, Any]:
    """Entries of `details` that all weights have with the same value."""
    return {k: v for k, v in weights[0].details.items() if all(k in w.details and w.details[k] == v for w in weights)}
