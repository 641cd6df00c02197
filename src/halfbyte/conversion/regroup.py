"""Move values per group (scales, zero points) from one grouping to another without changing any
element.

Input j of a row is in source group s(j) and in target group t(j). A target group can have one value
if all source groups that intersect it have the same value: always when one source group covers it,
otherwise depending on the data. An act-order index is another s(j): it can be dropped exactly when
each target group has one value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import Format
from ..tensor.qtensor import QTensor
from .outcome import Checks, MisfitError


class Regrouping:
    """The map from the groups of `q` to groups of `target` along its rows.

    source   group of each input, [k]
    first    source group of the first input of each target group, [G']
    also     (target group, source group) pairs that must agree with it
    """

    def __init__(self, q: QTensor, target: Format) -> None:
        fmt, k = q.format, q.shape[-1]
        if fmt.grouping not in ("row", "block") or q.window is not None:
            raise MisfitError(f"its groups are {fmt.grouping}, and the target's run along rows")
        self._q = q
        self.index = q.parts.get("group_index")
        size = max(k, 1) if fmt.group_size == -1 else fmt.group_size
        new = max(k, 1) if target.group_size == -1 else target.group_size
        inputs = np.arange(k)
        self.source: NDArray[np.intp] = inputs // size if self.index is None else self.index.astype(np.intp)
        self.target = inputs // new
        starts = np.arange(0, k, new)
        self.first = self.source[starts] if k else starts
        pairs = np.stack([self.target, self.source], axis=1)
        self.also = np.unique(pairs[self.source != self.first[self.target]], axis=0)
        alike = not len(self.also) and np.array_equal(self.first, np.arange(fmt.groups(k)))
        self.same = self.index is None and fmt.grouping == "row" and alike
        self.monotone = self.index is None

    def rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of source groups as [*lead, n, G]: tiles spread over their rows."""
        fmt, n = self._q.format, self._q.shape[-2]
        if fmt.grouping != "block" or values.ndim < 2:
            return values
        size = max(1, n if fmt.group_rows == -1 else fmt.group_rows)
        return values[..., np.arange(n) // size, :]

    def uniform(self, values: NDArray[Any]) -> bool:
        """True when every target group sees one value of [*lead, n, G]."""
        for start in range(0, len(self.also), 256):
            t, s = self.also[start : start + 256].T
            if not np.array_equal(values[..., s], values[..., self.first[t]]):
                return False
        return True

    def take(self, values: NDArray[Any], what: str, checks: Checks) -> NDArray[Any]:
        """Values of target groups [*lead, n, G']. MisfitError when a target group would need
        several.
        """
        values = self.rows(values)
        if values.ndim < 2 or self.same:
            return values
        if not self.uniform(values):
            raise MisfitError(self.reason(what))
        if self.index is not None:
            checks.add("the act-order index can be dropped: each group has one scale")
        elif len(self.also):
            checks.add(f"{what} of joined groups are equal")
        out: NDArray[Any] = np.ascontiguousarray(values[..., self.first])
        return out

    def reason(self, what: str) -> str:
        """The clause for groups that cannot be joined."""
        if self.index is not None:
            return f"its act-order index mixes groups of different {what}, and the target's groups are in order"
        return f"groups that would be joined have different {what}"

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of target groups at each input: [*lead, n, G'] -> [*lead, n, k]."""
        return values if values.ndim == 0 else values[..., self.target]
