"""Headers of safetensors and GGUF files of which one byte or number is another: the same outcomes
as in data/header_outcomes.txt.
"""

from __future__ import annotations

import pytest

from support.header_outcomes import FILES, TABLE, summary

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("kind", FILES)
def test_every_change_has_the_outcome_that_it_had(kind):
    expected = [line for line in EXPECTED if line.split(" | ")[0] == kind]
    changes = list(FILES[kind]())
    found = summary(kind, changes)
    other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = [f"{subject} | {change} -> {outcome}" for subject, change, _, outcome in changes if subject in other]
    assert found == expected, "\n".join([f"[{kind}] is now (before: run support.header_outcomes there):", *now])
