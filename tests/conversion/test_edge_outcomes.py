"""Every target of small weights with hard values: the same outcome as in data/edge_outcomes.txt,
exact or lossy, and the same tensors where the values are kept.
"""

from __future__ import annotations

import pytest

from support.edge_outcomes import TABLE


@pytest.mark.parametrize("label", TABLE.labels)
def test_every_target_has_the_outcome_that_it_had(label):
    TABLE.assert_as_recorded(label)
