"""ONNX models of which one attribute, input or initializer is another: the same outcomes as in
data/onnx_outcomes.txt.
"""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")

from support.onnx_outcomes import TABLE


@pytest.mark.parametrize("name", TABLE.labels)
def test_every_change_has_the_outcome_that_it_had(name):
    TABLE.assert_as_recorded(name)
