"""What each engine is expected to do with checkpoints that differ in one word or number, at every
version at which a rule begins or ends: the same as in data/engine_outcomes.txt.
"""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.engines import FINE, REFUSED, WRONG
from support.engine_outcomes import KINDS_OF_CASES, TABLE, outcomes, summary

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("kind", KINDS_OF_CASES)
def test_every_case_has_the_predictions_that_it_had(kind):
    expected = [line for line in EXPECTED if line.split(" | ")[0] == kind]
    cases = list(outcomes(kind))
    found = summary(kind, cases)
    other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = [f"{subject} | {case} -> {outcome}" for subject, case, outcome in cases if subject in other]
    assert found == expected, "\n".join([f"[{kind}] is now (before: run support.engine_outcomes there):", *now])


def test_the_cases_have_every_verdict():
    said = "".join(outcome for kind in KINDS_OF_CASES for _, _, outcome in outcomes(kind))
    assert all(f" {verdict} " in said for verdict in (FINE, REFUSED, WRONG))
