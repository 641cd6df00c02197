"""Integer weights as layouts want them: which ones a layout holds, with stored or with implicit
zero points.

    intN   (code − 2^(N−1)) · scale        uintN  (code − zero) · scale

The two are the same numbers when every zero point is the middle code, so a layout that stores zero
points holds both, and one that stores none holds a `uintN` whose zero points all are 2^(N−1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import LayoutError
from ...spec import FLOAT_SCALES, Format
from ...tensor.qtensor import QTensor
from ..base import cannot_hold


def integer_misfit(
    fmt: Format,
    shape: tuple[int, ...],
    bits: Sequence[int],
    scales: Sequence[str] = FLOAT_SCALES,
    groupings: Sequence[str] = ("row",),
    ndims: Sequence[int] = (2,),
) -> str:
    """Why this is no plain integer weight of these widths, scale dtypes, groupings and numbers of
    axes, "" when it is one.
    """
    if fmt.family != "integer" or fmt.inverse or fmt.divisor != 1.0:
        return "the layout holds integers times a scale only; requantize to int or uint with --lossy"
    if fmt.bits not in bits:
        return f"the layout holds {', '.join(map(str, bits))} bits, not {fmt.bits}"
    if fmt.scale not in scales:
        return f"its scales are {fmt.scale}; the layout holds {', '.join(scales)}"
    if fmt.grouping not in groupings:
        return f"its groups are {fmt.grouping}; the layout holds {', '.join(groupings)}"
    if len(shape) not in ndims:
        return "the layout holds matrices (n, k); write the experts of a stack one by one"
    return ""


def check_no_group_index(layout: str, q: QTensor) -> None:
    """LayoutError for a weight in act-order, for layouts that store no group index."""
    if "group_index" in q.parts:
        why = "it has an act-order group index, which the layout cannot store"
        raise cannot_hold(layout, q, why, "write gptq, or sort the inputs first")


def stored_zeros(q: QTensor) -> NDArray[np.int16]:
    """Zero points [*lead, n, G] of a `uintN`, or the middle code for an `intN`."""
    if q.format.zero == "int":
        return q.parts["zeros"]
    return np.full(q.parts["scales"].shape, 1 << (q.format.bits - 1), np.int16)


def check_middle_zeros(layout: str, q: QTensor) -> None:
    """LayoutError when a zero point differs from the middle code: the layout stores none."""
    if q.format.zero != "int":
        return
    zeros, middle = q.parts["zeros"], 1 << (q.format.bits - 1)
    off = zeros != middle
    if off.any():
        at = tuple(int(i) for i in np.argwhere(off)[0])
        raise cannot_hold(
            layout,
            q,
            f"{int(off.sum())} zero points are not {middle} (the first, at group {at}, is {zeros[at]}); the layout stores none",
        )


def check_zero_range(layout: str, q: QTensor, zeros: NDArray[Any], low: int, high: int, instead: str = "") -> None:
    """LayoutError when a zero point lies outside low … high, the ones the layout can store."""
    bad = (zeros < low) | (zeros > high)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise cannot_hold(
            layout,
            q,
            f"{int(bad.sum())} zero points lie outside {low} to {high}, the first, at group {at}, is {zeros[at]}",
            instead,
        )


def check_index(layout: str, where: str, index: NDArray[Any], groups: int) -> None:
    """LayoutError when a group index names a group that is not there."""
    if index.size and (int(index.min()) < 0 or int(index.max()) >= groups):
        at = int(np.flatnonzero((index < 0) | (index >= groups))[0])
        raise LayoutError(
            f"[{layout}] {where} has {index[at]} at input {at}; there are {groups} groups, 0 to {groups - 1}. "
            "The file is damaged, or group_size in its config is not the one it was written with"
        )


def monotone(k: int, group_size: int) -> NDArray[np.int32]:
    """The group index of groups in order: input j is in group j // group_size."""
    return (np.arange(k, dtype=np.int64) // (group_size if group_size != -1 else max(k, 1))).astype(np.int32)
