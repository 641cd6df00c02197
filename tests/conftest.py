"""Shared test setup: hypothesis profiles, environments of ecosystem tests, and skips that are
failures.

HALFBYTE_NO_SKIPS=1 (continuous integration) turns a skipped test, and a module skipped while it is
collected, into a failure. HALFBYTE_ECOSYSTEM=NAME selects the tests marked `ecosystem("NAME")`,
those that need that environment (`make test-ecosystem`). HALFBYTE_HYPOTHESIS=explore draws new
examples at random (`make test-explore`); without it every run draws the same ones.
HALFBYTE_EVERY_COMMAND=1 runs every command on what the tests of the published cases open, 0 on
nothing; without it on a sample.
"""

from __future__ import annotations

import gc
import os
import re
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.producers.environments import ENVIRONMENTS

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"

# Scripts that tests start in a process of their own import `support` as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])

settings.register_profile(
    "halfbyte", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow], derandomize=False, print_blob=True
)
settings.load_profile(os.environ.get("HALFBYTE_HYPOTHESIS", "halfbyte"))


def pytest_sessionstart() -> None:
    """No collector while tests are collected: all that is made then stays. Files are not flushed to
    the disk: no test of this process ends the machine (test_faults.py has processes of its own).
    """
    gc.disable()
    os.fsync = lambda descriptor: os.fstat(descriptor) and None


def pytest_collection_finish() -> None:
    """What was imported and collected, millions of objects, is not searched again in every
    test.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the producers' files."""
    return GOLDEN


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch):
    """Tables take COLUMNS for a terminal's width, and parallel test workers set it; a test that
    wants a width sets its own.
    """
    monkeypatch.delenv("COLUMNS", raising=False)


CASE = re.compile(r"test_case_(\d\d)_")
FIRST_CASE, LAST_CASE = 1, 85
SAMPLE = 48
"""Of so many tests of published cases one runs every command."""


@pytest.fixture(autouse=True)
def _every_command(request, tmp_path_factory):
    """Every command on each checkpoint that the test of a published case opens, as its reporter
    would have met it (`support/every_command.py`).
    """
    match, wanted = CASE.match(request.node.name), os.environ.get("HALFBYTE_EVERY_COMMAND", "")
    chosen = wanted == "1" or (not wanted and zlib.crc32(request.node.name.encode()) % SAMPLE == 0)
    if match is None or not FIRST_CASE <= int(match[1]) <= LAST_CASE or not chosen:
        yield
        return
    from support import every_command

    folder = tmp_path_factory.mktemp("every-command")
    with every_command.recorded(folder / "in", 3) as opened:
        yield
    found = []
    for i, path in enumerate(opened):
        whole = every_command.completed(path, folder / f"whole{i}")
        work = folder / f"out{i}"
        found += every_command.model_faults(*whole, work) if whole else every_command.faults(path, work)
    assert not found, "\n".join(found)


def environments_of(item: pytest.Item) -> set[str]:
    """Names of the environments that a test's `ecosystem` marks give. Raises UsageError for none
    and for unknown ones.
    """
    names: set[str] = set()
    for mark in item.iter_markers("ecosystem"):
        unknown = [name for name in mark.args if name not in ENVIRONMENTS]
        if not mark.args or unknown:
            raise pytest.UsageError(
                f"{item.nodeid}: mark ecosystem({', '.join(map(repr, unknown))}); it takes names of tests/support/producers/"
                f"environments.py: {', '.join(ENVIRONMENTS)}"
            )
        names |= set(mark.args)
    return names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check every mark; with HALFBYTE_ECOSYSTEM keep the tests of that environment alone."""
    wanted = os.environ.get("HALFBYTE_ECOSYSTEM")
    kept, dropped = [], []
    for item in items:
        names = environments_of(item)
        (kept if wanted is None or wanted in names else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _no_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome == "skipped" and os.environ.get("HALFBYTE_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _no_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module-level importorskip skips a whole file before any of its tests exists."""
    report = yield
    _no_skip(report)
    return report
