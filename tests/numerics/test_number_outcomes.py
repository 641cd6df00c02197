"""Hard input in functions of `numerics`, of `formats`, and in others: the same outcomes as in
data/number_outcomes.txt.
"""

from __future__ import annotations

import pytest

from support.number_outcomes import TABLE


@pytest.mark.parametrize("module", TABLE.labels)
def test_every_case_has_the_outcome_that_it_had(module):
    if module == "orders":
        pytest.importorskip("triton")
    TABLE.assert_as_recorded(module)
