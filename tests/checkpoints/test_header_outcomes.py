"""Headers of safetensors and GGUF files of which one byte or number is another: the same outcomes
as in data/header_outcomes.txt.
"""

from __future__ import annotations

import pytest

from support.header_outcomes import TABLE


@pytest.mark.parametrize("kind", TABLE.labels)
def test_every_change_has_the_outcome_that_it_had(kind):
    TABLE.assert_as_recorded(kind)
