"""The demo: where its model comes from, and what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from halfbyte.cli import demo
from halfbyte.errors import UnsupportedError


def test_the_model_is_assembled_once_and_whole(tmp_path, monkeypatch):
    calls = []

    def assemble(path, overwrite):
        calls.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"model")

    monkeypatch.setitem(sys.modules, demo.PACKAGE, SimpleNamespace(MODEL_NAME="m.gguf", assemble=assemble))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.model_path() == demo.model_path() == tmp_path / "halfbyte" / "m.gguf"
    assert demo.model_path().read_bytes() == b"model"
    assert len(calls) == 1
    assert calls[0] != demo.model_path(), "written under another name until it is whole"


def test_a_failed_assembly_leaves_nothing(tmp_path, monkeypatch):
    def assemble(path, overwrite):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        raise ValueError("Assembled file sha256 did not match expected value")

    monkeypatch.setitem(sys.modules, demo.PACKAGE, SimpleNamespace(MODEL_NAME="m.gguf", assemble=assemble))
    with pytest.raises(ValueError, match="sha256"):
        demo.model_path(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_model")
    with pytest.raises(UnsupportedError, match=r"package no-such-model is not installed; pip install no-such-model"):
        demo.model_path()


def test_it_shows_the_model_a_text_and_its_cost_without_torch():
    """As `make demo` runs it, in a process that cannot import torch or transformers."""
    script = "import sys; sys.modules.update(torch=None, transformers=None); from halfbyte.cli import demo; sys.exit(demo.main())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "236 tensors in 1 file, 247 MB" in run.stdout
    assert demo.PROMPT in run.stdout
    *_, cost, share = run.stdout.splitlines()
    assert "7.37 bits/weight" in cost
    assert "64 tokens in" in cost
    assert re.fullmatch(
        r"A token reads 247 MB of weights: [\d.]+ GB/s, \d+% of the [\d.]+ GB/s that \d threads? read from memory here", share
    )
