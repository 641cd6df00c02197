"""Every codec in every group size and option: the same formats, refusals, rounded matrices and
values as in data/format_outcomes.txt.
"""

from __future__ import annotations

import pytest

from halfbyte.formats import codec_names
from support.format_outcomes import TABLE


@pytest.mark.parametrize("codec", TABLE.labels)
def test_every_case_has_the_outcome_that_it_had(codec):
    TABLE.assert_as_recorded(codec)


def test_every_line_is_of_a_codec():
    assert {line.split(" | ")[0] for line in TABLE.recorded()} == set(codec_names())
