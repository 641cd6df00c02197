"""Shared test setup: with HALFBYTE_NO_SKIPS set (continuous integration), a skipped test is a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"

# Scripts that tests start in a process of their own import `support` as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])

settings.register_profile(
    "halfbyte", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("halfbyte")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the producers' files."""
    return GOLDEN


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch):
    """Tables take COLUMNS for a terminal's width, and parallel test workers set it; a test that wants a width sets its own."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("HALFBYTE_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"
