"""The `backends` command: everything there is, with a sentence for what cannot run."""

from __future__ import annotations

import json

import pytest

from halfbyte import backends
from halfbyte.cli import main


def records(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["backends", "--json"]) == 0
    return {r["backend"]: r for r in map(json.loads, capsys.readouterr().out.splitlines())}


def test_every_backend_is_listed_in_order_with_a_reason_or_a_description(capsys):
    found = records(capsys)
    assert tuple(found) == backends.names()
    for r in found.values():
        assert set(r) == {"record", "backend", "device", "available", "reason", "description"}
        assert (r["reason"] is None) == r["available"]
        assert r["available"] or len(str(r["reason"]).split()) > 3, "a reason is a sentence"
    assert found["reference"]["available"]


def test_the_table_says_the_same(capsys):
    found = records(capsys)
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    for name, r in found.items():
        row = next(line for line in out.splitlines() if line.startswith(name))
        assert str(r["reason"] or r["description"]) in row


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_light_installation_is_told_what_to_install(package, capsys, monkeypatch):
    original = backends.backend_named

    def absent(name: str) -> backends.Backend:
        if name == "cuda":
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return original(name)

    monkeypatch.setattr(backends, "backend_named", absent)
    assert records(capsys)["cuda"]["reason"] == f"{package} is not installed; pip install 'halfbyte[cuda]'"
    assert main(["doctor"]) == 0
    assert "no known problem" in capsys.readouterr().out


def test_one_broken_backend_does_not_hide_the_others(capsys, monkeypatch):
    original = backends.backend_named

    def broken(name: str) -> backends.Backend:
        if name == "cuda":
            raise OSError("libcuda.so.1: file too short")
        return original(name)

    monkeypatch.setattr(backends, "backend_named", broken)
    found = records(capsys)
    assert found["cuda"]["reason"] == "it could not be loaded: OSError: libcuda.so.1: file too short"
    assert found["reference"]["available"]
