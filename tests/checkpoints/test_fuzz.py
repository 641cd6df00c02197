"""The fuzzer of `make fuzz`: a short run, and that it notices what it looks for."""

from __future__ import annotations

import pytest

from halfbyte.checkpoints.io.journal import Journal
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from support.fuzz import fuzz


def test_a_short_run_finds_nothing(capsys):
    found = fuzz(2.0, seed=1, crashers=None)
    assert found["faults"] == []
    assert found["cases"] > 20
    assert found["places"] > 3


def test_wrong_values_are_noticed(monkeypatch):
    plain = SafetensorsFile.array
    monkeypatch.setattr(SafetensorsFile, "array", lambda self, name: plain(self, name) + (name == "n.weight"))
    with pytest.raises(AssertionError, match=r"a seed fails: n\.weight differs"):
        fuzz(0.1, seed=1, crashers=None)


def test_foreign_errors_are_noticed_and_kept(monkeypatch, tmp_path, capsys):
    def read(self):
        if self.path.stat().st_size < 100:
            raise KeyError("line")
        return []

    monkeypatch.setattr(Journal, "read", read)
    found = fuzz(2.0, seed=1, crashers=tmp_path)["faults"]
    assert [f for f in found if f.startswith("KeyError at test_fuzz.py")]
    assert (tmp_path / "001" / "journal").exists()
