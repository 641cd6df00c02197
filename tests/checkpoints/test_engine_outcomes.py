"""What each engine is expected to do with checkpoints that differ in one word or number, at every
version at which a rule begins or ends: the same as in data/engine_outcomes.txt.
"""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.engines import FINE, REFUSED, WRONG
from support.engine_outcomes import KINDS_OF_CASES, TABLE, outcomes


@pytest.mark.parametrize("kind", TABLE.labels)
def test_every_case_has_the_predictions_that_it_had(kind):
    TABLE.assert_as_recorded(kind)


def test_the_cases_have_every_verdict():
    missing = {FINE, REFUSED, WRONG}
    for kind in KINDS_OF_CASES:
        for _, _, outcome in outcomes(kind):
            missing -= {verdict for verdict in missing if f" {verdict} " in outcome}
            if not missing:
                return
    assert not missing
