"""ONNX models of which one attribute, input or initializer is another: the same outcomes as in
data/onnx_outcomes.txt.
"""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")

from support.onnx_outcomes import MODELS, TABLE, outcomes, summary

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", MODELS)
def test_every_change_has_the_outcome_that_it_had(name):
    expected = [line for line in EXPECTED if line.split(" | ")[0] == name]
    changes = list(outcomes(name))
    found = summary(name, changes)
    other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = [f"{subject} | {change} -> {outcome}" for subject, change, _, outcome in changes if subject in other]
    assert found == expected, "\n".join([f"[{name}] is now (before: run support.onnx_outcomes there):", *now])
