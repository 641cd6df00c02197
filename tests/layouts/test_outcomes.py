"""Every layout and every reader of a config, with one thing changed at a time: the same outcome as
in data/outcomes.txt, whether it is a weight or a refusal.
"""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.quant_config import read_config
from halfbyte.layouts import LAYOUTS, config_readers
from support.outcomes import MODULES, TABLE, outcomes_of
from support.quant_configs import CONFIGS, MORE


@pytest.mark.parametrize("label", TABLE.labels)
def test_every_change_has_the_outcome_that_it_had(label):
    TABLE.assert_as_recorded(label)


def test_every_layout_and_reader_is_among_them():
    assert {name for name, _, _ in MODULES.values()} == set(LAYOUTS)
    configs = [*(config for config, _ in CONFIGS.values()), *MORE.values()]
    assert {type(read_config(config, "")) for config in configs} == set(config_readers())


@pytest.mark.parametrize("label", MODULES)
def test_the_unchanged_module_is_read_and_written_back(label):
    subject, _, was_read, outcome = next(outcomes_of(label))
    assert (subject, was_read) == ("nothing", True)
    assert outcome.endswith("; written the same")
