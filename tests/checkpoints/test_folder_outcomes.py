"""Small checkpoints of every producer with one thing changed at a time: `inspect` says the same of
each as in data/folder_outcomes.txt.
"""

from __future__ import annotations

import pytest

from support.folder_outcomes import FOLDERS, TABLE, said, write_folder


@pytest.mark.parametrize("name", TABLE.labels)
def test_the_same_is_said_of_every_change(name):
    TABLE.assert_as_recorded(name)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_unchanged_folder_is_read_without_an_error(name, tmp_path):
    lines = said(write_folder(name, tmp_path / "whole"))
    assert [line for line in lines if '"severity": "error"' in line] == []
    assert any('"kind": "quantized"' in line for line in lines)
