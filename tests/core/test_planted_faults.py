"""The table of tools/plant.py fits the sources: every text that a fault replaces is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_planted_fault_has_its_place(monkeypatch):
    spec = importlib.util.spec_from_file_location("plant", ROOT / "tools" / "plant.py")
    assert spec is not None
    assert spec.loader is not None
    plant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plant", plant)
    spec.loader.exec_module(plant)
    for fault in (*plant.TRITON, *plant.METAL):
        assert fault.before in (ROOT / "src" / "halfbyte" / fault.file).read_text("utf-8"), fault.what
        assert fault.before != fault.after, fault.what
    texts: dict[str, str] = {}
    for fault in plant.NATIVE:
        text = texts.get(fault.file) or (ROOT / "native" / fault.file).read_text("utf-8")
        assert fault.before in text, fault.what
        texts[fault.file] = plant.replaced(text, fault, fault.after)
    assert len(plant.TRITON) >= 20
    assert len(plant.METAL) >= 15
    assert len(plant.NATIVE) >= 20
