"""Packed weights side by side: rows joined into one matrix, matrices stacked into one tensor of experts, without a bit changed.

    join_rows([q, k, v])  (n₁ + n₂ + n₃, k)    stack([e₀, e₁, ...])  (e, n, k)    take_rows(q, index)  in another order

Only what reads the same way can be joined: one format, one k, one order of groups, and one global scale where rows share it.
`apart(weights)` says why some cannot be; a caller then keeps them apart, since to pick one of two global scales would multiply
the others' rows by the wrong factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from .qtensor import QTensor

_WHOLE = ("group_index", "global_scale")
"""Parts that the rows of a matrix share."""


def apart(weights: Sequence[QTensor], stacked: bool = False) -> str | None:
    """None when the weights can be joined (or stacked), else the sentence why not."""
    first = weights[0]
    for w in weights[1:]:
        if w.format != first.format:
            return f"their formats differ: {first.format} and {w.format}"
        if w.ndim != first.ndim or w.shape[-1] != first.shape[-1] or (stacked and w.shape != first.shape):
            return f"their shapes differ: {first.shape} and {w.shape}"
        for part in ("group_index",) if stacked else _WHOLE:
            a, b = first.parts.get(part), w.parts.get(part)
            if (a is None) != (b is None) or (a is not None and b is not None and a.tobytes() != b.tobytes()):
                return f"they have a {part.replace('_', ' ')} each"
    fmt = first.format
    if fmt.grouping in ("flat", "strided") or fmt.scale == "nested":
        return f"groups of {fmt} run over the flattened matrix"
    if any(w.window is not None for w in weights):
        return "one of them is a slice that must know where it lay"
    if (
        fmt.grouping == "block"
        and not stacked
        and (fmt.group_rows == -1 or any(w.shape[-2] % fmt.group_rows for w in weights[:-1]))
    ):
        return f"tiles of {fmt.group_rows} rows would straddle two of them"
    return None


def join_rows(weights: Sequence[QTensor]) -> QTensor:
    """The rows of all of them, in order, of matrices or of stacks. ShapeError with the reason when they cannot be joined."""
    _check("join_rows", weights, stacked=False)
    first = weights[0]
    parts: dict[str, NDArray[Any]] = {}
    for name, array in first.parts.items():
        parts[name] = array if name in _WHOLE else np.concatenate([w.parts[name] for w in weights], axis=-2)
    shape = (*first.shape[:-2], sum(w.shape[-2] for w in weights), first.shape[-1])
    return QTensor(first.format, shape, parts, origin=_origin(weights), details=_details(weights))


def stack(weights: Sequence[QTensor]) -> QTensor:
    """(e, n, k) of e matrices (n, k). ShapeError with the reason when they cannot be stacked."""
    _check("stack", weights, stacked=True)
    first = weights[0]
    parts = {name: a if name == "group_index" else np.stack([w.parts[name] for w in weights]) for name, a in first.parts.items()}
    return QTensor(first.format, (len(weights), *first.shape), parts, origin=_origin(weights), details=_details(weights))


def take_rows(q: QTensor, index: NDArray[np.integer]) -> QTensor:
    """Rows of a matrix, or of each matrix of a stack, in the order of `index`. ShapeError where scales do not follow rows."""
    if q.format.grouping != "row" or q.format.scale == "nested":
        raise ShapeError(f"[take_rows] rows of {q.format} cannot change places: its scales do not follow them")
    parts = {p: a if p in _WHOLE else np.ascontiguousarray(a[..., index, :]) for p, a in q.parts.items()}
    return QTensor(q.format, (*q.shape[:-2], len(index), q.shape[-1]), parts, origin=q.origin)


def _check(op: str, weights: Sequence[QTensor], stacked: bool) -> None:
    why = apart(weights, stacked) if weights else "there is none"
    if why is not None:
        raise ShapeError(f"[{op}] {len(weights)} weights cannot be joined: {why}")


def _origin(weights: Sequence[QTensor]) -> str:
    """The origin they share, "" when they differ."""
    return weights[0].origin if len({w.origin for w in weights}) == 1 else ""


def _details(weights: Sequence[QTensor]) -> dict[str, Any]:
    """What their details agree in."""
    return {k: v for k, v in weights[0].details.items() if all(k in w.details and w.details[k] == v for w in weights)}
