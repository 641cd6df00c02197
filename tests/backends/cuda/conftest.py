"""Fixtures of the CUDA tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def poisoned(monkeypatch):
    """Every tensor that a launch allocates holds NaN, so that an output that is not written shows."""
    torch = pytest.importorskip("torch")
    original = torch.empty

    def nan(*shape, **options):
        out = original(*shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", nan)
