"""The multiple-choice knapsack: one choice a group, least total value within a budget of cost.

    minimize Σ value[g][c_g]   subject to   Σ cost[g][c_g] ≤ budget

The linear relaxation follows the lower convex hulls of the groups: its steps are taken in order of
value per cost (the Lagrangian), and its value is a lower bound. The rest is dynamic programming
over the groups, those farthest from the multiplier first; a partial choice is dropped when another
one costs no more and is worth no more, or when its bound is no better than the best solution known.
Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems", chapter 11.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

STATES = 20_000
"""Partial choices that are kept after a group; more than these make the result an approximation."""
CLOSE = 1e-6
"""Relative difference of values that is not worth another partial choice."""


class Solution(NamedTuple):
    """choices  index of each group's choice
    cost     Σ cost
    value    Σ value
    bound    no solution has a smaller value
    """

    choices: tuple[int, ...]
    cost: int
    value: float
    bound: float


class _Steps(NamedTuple):
    """Steps along the convex hulls, best first: group, the choice after it, added cost and value."""

    group: NDArray[np.int64]
    choice: NDArray[np.int64]
    cost: NDArray[np.int64]
    value: NDArray[np.float64]


def solve(costs: Sequence[Sequence[int]], values: Sequence[Sequence[float]], budget: int) -> Solution | None:
    """The best choices; None when the cheapest cost more than the budget.

    costs, values  of each choice of each group; equal input gives equal output
    """
    if not costs:
        return Solution((), 0, 0.0, 0.0)
    cost = [np.asarray(c, np.int64) for c in costs]
    value = [np.asarray(v, np.float64) for v in values]
    kept = [_undominated(c, v) for c, v in zip(cost, value, strict=True)]
    start = np.array([k[0] for k in kept])
    least = int(sum(c[s] for c, s in zip(cost, start, strict=True)))
    if least > budget:
        return None
    steps = _steps(cost, value, kept)
    slope, choices, bound = _relaxed(steps, start, cost, value, budget)
    best = _finish(cost, value, kept, steps, slope, budget, choices)
    total = int(sum(c[i] for c, i in zip(cost, best, strict=True)))
    reached = float(sum(v[i] for v, i in zip(value, best, strict=True)))
    return Solution(tuple(int(i) for i in best), total, reached, min(bound, reached))


def _undominated(cost: NDArray[np.int64], value: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of choices by rising cost, each with a smaller value than all before it."""
    order = np.lexsort((np.arange(len(cost)), value, cost))
    lowest = np.minimum.accumulate(value[order])
    first = np.concatenate([[True], lowest[1:] < lowest[:-1]])
    indices: NDArray[np.int64] = order[first]
    return indices


def _steps(cost: list[Any], value: list[Any], kept: list[Any]) -> _Steps:
    found: list[tuple[float, int, int, int, float]] = []
    for g, indices in enumerate(kept):
        hull: list[int] = []
        for i in indices:
            while len(hull) > 1 and _slope(cost[g], value[g], hull[-2], hull[-1]) >= _slope(cost[g], value[g], hull[-2], i):
                hull.pop()
            hull.append(i)
        for a, b in itertools.pairwise(hull):
            found.append((_slope(cost[g], value[g], a, b), g, b, int(cost[g][b] - cost[g][a]), float(value[g][b] - value[g][a])))
    found.sort(key=lambda s: (s[0], s[1], s[3]))
    columns = list(zip(*found, strict=True)) if found else [(), (), (), (), ()]
    return _Steps(
        np.array(columns[1], np.int64),
        np.array(columns[2], np.int64),
        np.array(columns[3], np.int64),
        np.array(columns[4], np.float64),
    )


def _slope(cost: Any, value: Any, a: int, b: int) -> float:
    return float((value[b] - value[a]) / (cost[b] - cost[a]))


def _relaxed(
    steps: _Steps, start: NDArray[np.int64], cost: list[Any], value: list[Any], budget: int
) -> tuple[float, NDArray[np.int64], float]:
    """(multiplier, a solution, bound): the steps that fit, first those of the relaxation."""
    choices = start.copy()
    room = budget - int(sum(c[s] for c, s in zip(cost, start, strict=True)))
    at = float(sum(v[s] for v, s in zip(value, start, strict=True)))
    slope, bound = 0.0, None
    closed: set[int] = set()
    for g, choice, c, v in zip(*(s.tolist() for s in steps), strict=True):
        if c > room and bound is None:
            slope = v / c
            bound = at + slope * room
        if c > room or g in closed:
            closed.add(g)
            continue
        choices[g], room, at = choice, room - c, at + v
    return slope, choices, at if bound is None else bound


def _finish(
    cost: list[Any], value: list[Any], kept: list[Any], steps: _Steps, slope: float, budget: int, known: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The best solution by dynamic programming, not worse than `known`."""
    incumbent = float(sum(v[i] for v, i in zip(value, known, strict=True)))
    groups = len(cost)
    away = np.full(groups, np.inf)
    np.minimum.at(away, steps.group, np.abs(steps.value - slope * steps.cost))
    order = np.argsort(-away, kind="stable")
    position = np.empty(groups, np.int64)
    position[order] = np.arange(groups)
    cheapest = np.array([c[k[0]] for c, k in zip(cost, kept, strict=True)])
    dearest = np.array([v[k[0]] for v, k in zip(value, kept, strict=True)])
    spent, worth = np.zeros(1, np.int64), np.zeros(1)
    parents: list[NDArray[np.int64]] = []
    taken: list[NDArray[np.int64]] = []
    for i, g in enumerate(order):
        c = (spent[:, None] + cost[g][kept[g]][None]).ravel()
        v = (worth[:, None] + value[g][kept[g]][None]).ravel()
        later = position[steps.group] > i
        base, offset = int(cheapest[order[i + 1 :]].sum()), float(dearest[order[i + 1 :]].sum())
        x = np.concatenate([[0], np.cumsum(steps.cost[later])])
        y = np.concatenate([[0.0], np.cumsum(steps.value[later])])
        room = budget - c - base
        lower = v + offset + np.interp(room, x, y)
        good = np.flatnonzero((room >= 0) & (lower < incumbent - CLOSE * abs(incumbent)))
        if not len(good):
            return known
        good = good[np.lexsort((v[good], c[good]))]
        least = np.minimum.accumulate(v[good])
        good = good[np.concatenate([[True], least[1:] < least[:-1]])]
        if len(good) > STATES:
            good = np.sort(good[np.argsort(lower[good], kind="stable")[:STATES]])
        spent, worth = c[good], v[good]
        parents.append(good // len(kept[g]))
        taken.append(kept[g][good % len(kept[g])])
    best = int(np.argmin(worth))
    result = known.copy()
    for i in range(groups - 1, -1, -1):
        result[order[i]] = taken[i][best]
        best = int(parents[i][best])
    return result
