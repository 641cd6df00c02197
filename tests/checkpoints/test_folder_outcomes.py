"""Small checkpoints of every producer with one thing changed at a time: `inspect` says the same of
each as in data/folder_outcomes.txt.
"""

from __future__ import annotations

import pytest

from support.folder_outcomes import FOLDERS, TABLE, outcomes, said, summary, write_folder

EXPECTED = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_same_is_said_of_every_change(name):
    expected = [line for line in EXPECTED if line.split(" | ")[0] == name]
    changes = list(outcomes(name))
    found = summary(name, changes)
    other = {line.split(" | ")[1] for line in {*expected} ^ {*found}}
    now = ["\n    ".join([f"{subject} {change}", *lines]) for subject, change, lines in changes if subject in other]
    assert found == expected, "\n".join([f"[{name}] is now said (before: run support.folder_outcomes there):", *now])


@pytest.mark.parametrize("name", FOLDERS)
def test_the_unchanged_folder_is_read_without_an_error(name, tmp_path):
    lines = said(write_folder(name, tmp_path / "whole"))
    assert [line for line in lines if '"severity": "error"' in line] == []
    assert any('"kind": "quantized"' in line for line in lines)
