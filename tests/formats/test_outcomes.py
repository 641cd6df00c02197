"""Every codec in every group size and option: the same formats, refusals, rounded matrices and
values as in data/format_outcomes.txt.
"""

from __future__ import annotations

import pytest

from halfbyte.formats import codec_names
from support.format_outcomes import TABLE, outcomes, summary

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("codec", codec_names())
def test_every_case_has_the_outcome_that_it_had(codec):
    expected = [line for line in EXPECTED if line.split(" | ")[0] == codec]
    cases = list(outcomes(codec))
    found = summary(codec, cases)
    other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = [f"{subject} | {case} -> {outcome}" for subject, case, outcome in cases if subject in other]
    assert found == expected, "\n".join([f"[{codec}] is now (before: run support.format_outcomes there):", *now])


def test_every_line_is_of_a_codec():
    assert {line.split(" | ")[0] for line in EXPECTED} == set(codec_names())
