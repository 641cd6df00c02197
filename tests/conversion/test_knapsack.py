"""The multiple-choice knapsack: equal to trying every combination, and close to its bound where
there are too many of them.
"""

from __future__ import annotations

import itertools

import numpy as np

from halfbyte.conversion.knapsack import solve


def best_of_all(costs, values, budget):
    found = None
    for picks in itertools.product(*(range(len(c)) for c in costs)):
        cost = sum(costs[g][i] for g, i in enumerate(picks))
        value = sum(values[g][i] for g, i in enumerate(picks))
        if cost <= budget and (found is None or value < found):
            found = value
    return found


def test_small_ones_are_solved_exactly():
    rng = np.random.default_rng(0)
    feasible = 0
    for _ in range(150):
        sizes = rng.integers(1, 5, rng.integers(1, 6))
        costs = [rng.integers(1, 20, n).tolist() for n in sizes]
        values = [rng.random(n).tolist() for n in sizes]
        budget = int(rng.integers(len(sizes), 12 * len(sizes)))
        want, got = best_of_all(costs, values, budget), solve(costs, values, budget)
        assert (want is None) == (got is None)
        if got is not None and want is not None:
            feasible += 1
            assert got.value <= want * (1 + 1e-5)
            assert got.bound <= want * (1 + 1e-12)
            assert got.cost == sum(c[i] for c, i in zip(costs, got.choices, strict=True)) <= budget
    assert feasible > 50


def test_many_groups_come_within_a_thousandth_of_the_bound():
    rng = np.random.default_rng(1)
    bits = np.array([2.625, 3.4375, 4.25, 4.5, 5.5, 6.5625, 8.5])
    weights = rng.choice([4096, 65536, 1 << 20], 200)
    costs = [(n * bits / 8).astype(int).tolist() for n in weights]
    values = [(n * rng.lognormal() * np.exp(-1.4 * bits) * rng.uniform(0.8, 1.2, 7)).tolist() for n in weights]
    for share in (1.05, 1.4, 2.0, 4.0):
        budget = int(sum(c[0] for c in costs) * share)
        found = solve(costs, values, budget)
        assert found.cost <= budget
        assert found.bound <= found.value <= 1.001 * found.bound
        assert found == solve(costs, values, budget)
