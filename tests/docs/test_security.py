"""SECURITY.md: every promise names tests that exist, and nothing is promised without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def promises(text: str) -> list[tuple[str, list[str]]]:
    """(promise, names of its tests) of each row of the tables."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [(r[0].strip(), re.findall(r"`([^`]+)`", r[-1])) for r in rows if r[0].strip() not in ("promise", "---")]


def missing(names: list[str], root: Path = ROOT) -> list[str]:
    """Names of no test: a module `tests/x.py`, a function `tests/x.py::test_y`, a target `make z`."""
    makefile = (root / "Makefile").read_text()
    out = []
    for name in names:
        if name.startswith("make "):
            there = re.search(rf"^{name.removeprefix('make ')}:", makefile, re.MULTILINE)
        else:
            file, _, function = name.partition("::")
            path = root / file
            there = path.is_file() and re.search(rf"^def {function or 'test_'}", path.read_text(), re.MULTILINE)
        if not there:
            out.append(name)
    return out


PROMISES = promises((ROOT / "SECURITY.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("promise", "names"), PROMISES, ids=[p[:50] for p, _ in PROMISES])
def test_a_promise_names_tests_that_exist(promise, names):
    assert names, promise
    assert missing(names) == []


def test_the_check_can_fail():
    assert len(PROMISES) > 12
    [(promise, names)] = promises("| promise | test |\n|---|---|\n| never crashes | `tests/no_such.py`, `make nothing` |")
    assert (promise, missing(names)) == ("never crashes", ["tests/no_such.py", "make nothing"])
    assert missing(["tests/docs/test_security.py::test_no_such"]) == ["tests/docs/test_security.py::test_no_such"]


def test_the_tests_that_the_figures_name_exist():
    """benchmarks/trust.md names them below tests/, or by the name of the file alone."""
    text = (ROOT / "benchmarks" / "trust.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)`", text))
    known = [path.as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 10
    assert {name for name in names if not any(k.endswith(f"/{name}") for k in known)} == set()
