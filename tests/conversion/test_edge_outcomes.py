"""Every target of small weights with hard values: the same outcome as in data/edge_outcomes.txt,
exact or lossy, and the same tensors where the values are kept.
"""

from __future__ import annotations

import pytest

from support.edge_outcomes import TABLE, WEIGHTS, outcomes, summary

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("label", WEIGHTS)
def test_every_target_has_the_outcome_that_it_had(label):
    expected = [line for line in EXPECTED if line.split(" | ")[0] == label]
    targets = list(outcomes(label))
    found = summary(label, targets)
    other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = [f"{subject} | {target} -> {outcome}" for subject, target, outcome in targets if subject in other]
    assert found == expected, "\n".join([f"[{label}] is now (before: run support.edge_outcomes there):", *now])
