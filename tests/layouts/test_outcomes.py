"""Every layout and every reader of a config, with one thing changed at a time: the same outcome as
in data/outcomes.txt, whether it is a weight or a refusal.
"""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.quant_config import read_config
from halfbyte.layouts import LAYOUTS, config_readers
from support.outcomes import LABELS, MODULES, TABLE, outcomes_of, summary
from support.quant_configs import CONFIGS, MORE

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("label", LABELS)
def test_every_change_has_the_outcome_that_it_had(label):
    expected = [line for line in EXPECTED if line.split(" | ")[0] == label]
    outcomes = list(outcomes_of(label))
    found = summary(label, outcomes)
    changed = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = [f"{subject} {change} -> {outcome}" for subject, change, _, outcome in outcomes if subject in changed]
    assert found == expected, "\n".join([f"[{label}] outcomes are now (before: run support.outcomes there):", *now])


def test_every_layout_and_reader_is_among_them():
    assert {name for name, _, _ in MODULES.values()} == set(LAYOUTS)
    configs = [*(config for config, _ in CONFIGS.values()), *MORE.values()]
    assert {type(read_config(config, "")) for config in configs} == set(config_readers())


@pytest.mark.parametrize("label", MODULES)
def test_the_unchanged_module_is_read_and_written_back(label):
    subject, _, was_read, outcome = next(outcomes_of(label))
    assert (subject, was_read) == ("nothing", True)
    assert outcome.endswith("; written the same")
