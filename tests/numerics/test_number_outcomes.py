"""Hard input in functions of `numerics`, of `formats`, and in others: the same outcomes as in
data/number_outcomes.txt.
"""

from __future__ import annotations

import pytest

from support.number_outcomes import MODULES, TABLE, outcomes, summary

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("module", MODULES)
def test_every_case_has_the_outcome_that_it_had(module):
    if module == "orders":
        pytest.importorskip("triton")
    expected = [line for line in EXPECTED if line.split(" | ")[0] == module]
    cases = list(outcomes(module))
    found = summary(module, cases)
    other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = [f"{subject} | {case} -> {outcome}" for subject, case, outcome in cases if subject in other]
    assert found == expected, "\n".join([f"[{module}] is now (before: run support.number_outcomes there):", *now])
