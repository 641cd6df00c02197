"""The rules of the test suite itself: skips, marks, imports, and the table of public fault cases."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from support.producers import environments
from support.producers.environments import ENVIRONMENTS, WRITERS, files_of, main

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
CONFTEST = (TESTS / "conftest.py").read_text("utf-8")


@pytest.mark.parametrize("no_skips", [True, False])
def test_a_module_skipped_at_collection_fails_where_nothing_may_skip(pytester, monkeypatch, no_skips):
    """An importorskip on module level skips every test of a file: as severe as skipping each of
    them.
    """
    monkeypatch.setenv("HALFBYTE_NO_SKIPS", "1" if no_skips else "")
    pytester.syspathinsert(TESTS)
    pytester.makeconftest(CONFTEST.replace('pytest_plugins = ["pytester"]', ""))
    pytester.makepyfile(
        test_absent='import pytest\npytest.importorskip("no_such_package")\ndef test_one(): pass\n',
        test_present='import pytest\ndef test_two(): pass\n@pytest.mark.skip(reason="no tool")\ndef test_three(): pass\n',
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    if no_skips:
        assert result.ret != 0
        result.stdout.fnmatch_lines(["*skipped where nothing may be skipped*no_such_package*"])
        present = pytester.runpytest_inprocess("-p", "no:cacheprovider", "test_present.py")
        assert present.parseoutcomes() == {"passed": 1, "errors": 1}
    else:
        assert result.ret == 0
        assert result.parseoutcomes() == {"passed": 1, "skipped": 2}


@pytest.mark.parametrize(("environment", "passed"), [("mlx", 2), ("hqq", 1), ("vllm", 0), (None, 3)])
def test_an_environment_runs_the_tests_that_name_it(pytester, monkeypatch, environment, passed):
    monkeypatch.delenv("HALFBYTE_ECOSYSTEM", raising=False)
    if environment:
        monkeypatch.setenv("HALFBYTE_ECOSYSTEM", environment)
    pytester.syspathinsert(TESTS)
    pytester.makeconftest(CONFTEST.replace('pytest_plugins = ["pytester"]', ""))
    pytester.makeini("[pytest]\nmarkers =\n    ecosystem: environments\n")
    pytester.makepyfile(
        'import pytest\n@pytest.mark.ecosystem("mlx")\ndef test_one(): pass\n'
        '@pytest.mark.ecosystem("mlx", "hqq")\ndef test_two(): pass\ndef test_plain(): pass\n'
    )
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes().get("passed", 0) == passed


@pytest.mark.parametrize("mark", ["ecosystem", 'ecosystem("no-such-environment")'])
def test_a_mark_without_a_known_environment_is_an_error(pytester, mark):
    pytester.syspathinsert(TESTS)
    pytester.makeconftest(CONFTEST.replace('pytest_plugins = ["pytester"]', ""))
    pytester.makeini("[pytest]\nmarkers =\n    ecosystem: environments\n")
    pytester.makepyfile(f"import pytest\n@pytest.mark.{mark}\ndef test_one(): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*it takes names of tests/support/producers/environments.py: gptqmodel*"])


def test_every_environment_has_tests_or_a_writer():
    assert {name for name in ENVIRONMENTS if files_of(name)} | set(WRITERS) == set(ENVIRONMENTS)
    assert all((TESTS / "support" / "producers" / f"{name}_write.py").exists() for name in WRITERS)


def test_an_environment_that_does_not_install_fails_the_run(tmp_path, monkeypatch):
    def refused(venvs: Path, name: str) -> Path:
        raise subprocess.CalledProcessError(1, ["pip", "install", name])

    monkeypatch.setattr(environments, "python_of", refused)
    log = tmp_path / "log"
    assert main(["--venvs", str(tmp_path), "--only", "mlx", "--log", str(log)]) == 1
    text = log.read_text("utf-8")
    assert "== mlx: NOT INSTALLED" in text
    assert "# did not run: gptqmodel" in text


def modules_imported(tree: ast.AST) -> set[str]:
    """The last components of all module names that a file imports, and the names it imports from
    packages.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(alias.name for alias in node.names)}
    return {name.rpartition(".")[2] for name in names}


def test_no_file_imports_a_test_module():
    """What several test modules share lies in tests/support."""
    modules = {path.stem for path in FILES if path.stem.startswith("test_")}
    wrong = {
        str(path.relative_to(TESTS)): found
        for path in FILES
        if (found := modules_imported(ast.parse(path.read_text("utf-8"))) & modules)
    }
    assert wrong == {}
    assert modules_imported(ast.parse("from tensor.test_shard import MODELS")) & {"test_shard"}


def case_numbers(name: str) -> set[int]:
    """The cases that a test's name gives: test_case_06_34_every_byte is of cases 6 and 34."""
    given = re.match(r"test_case((?:_\d\d)+)_", name)
    return {int(n) for n in re.findall(r"\d\d", given[1])} if given else set()


def rows_of_cases() -> dict[int, list[str]]:
    """Case -> the tests that its row names, as file::function."""
    text = (TESTS / "cases.md").read_text("utf-8")
    return {int(n): re.findall(r"`([^`]+::\w+)`", line) for n, line in re.findall(r"^(?=\| (\d+) \|)(.*)$", text, re.MULTILINE)}


def test_every_case_has_a_row_and_a_test_that_exists():
    functions = {}
    for path in FILES:
        if path.stem.startswith("test_"):
            names = re.findall(r"^\s*def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
            functions |= dict.fromkeys((f"{path.relative_to(TESTS).as_posix()}::{name}" for name in names), True)
    rows = rows_of_cases()
    assert list(rows) == list(range(1, 86))
    assert [(case, test) for case, tests in rows.items() for test in tests if test not in functions] == []
    assert [(c, t) for c, tests in rows.items() for t in tests if c not in case_numbers(t.partition("::")[2])] == []
    assert [case for case, tests in rows.items() if not tests] == []
    assert set().union(*(case_numbers(f.partition("::")[2]) for f in functions)) <= set(rows)


def rows_of_readme() -> list[tuple[set[str], list[str]]]:
    """(modules and folders below src/halfbyte, files of tests) of each row of tests/README.md: a
    name without a folder is below the one before it.
    """
    rows = []
    for line in (TESTS / "README.md").read_text("utf-8").splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) == 2 and "`" in line and "src/halfbyte" not in line:
            found, folder = set(), ""
            for name in re.findall(r"`([^`]+)`", cells[0]):
                folder = name if name.endswith("/") else folder if "/" not in name else ""
                found.add(name if name.endswith("/") else folder + name)
            named = set(re.findall(r"`([^`]+/)`", cells[0]))
            alone = {f for f in named if not any(other != f and other.startswith(f) for other in found)}
            rows.append((found - (named - alone), re.findall(r"`([^`]+)`", cells[1])))
    return rows


def test_every_module_has_tests_of_its_name_or_a_row_of_the_readme():
    source = TESTS.parent / "src" / "halfbyte"
    modules = {p.relative_to(source).with_suffix("").as_posix() for p in source.rglob("*.py") if p.stem != "__init__"}
    names = {path.stem.removeprefix("test_") for path in FILES if path.stem.startswith("test_")}
    own = {m for m in modules if any(re.fullmatch(rf"{m.rpartition('/')[2]}(_\w+)?", name) for name in names)}
    rows = rows_of_readme()
    listed = set().union(*(found for found, _ in rows)) - {"native/"}
    assert sorted(m for m in modules - own if m not in listed and not any(m.startswith(f) for f in listed if f[-1] == "/")) == []
    assert sorted(f for f in listed if f not in modules and not (f[-1] == "/" and (source / f).is_dir())) == []
    assert [t for _, tests in rows for t in tests if not ((TESTS / t).is_file() or (TESTS.parent / t).is_file())] == []
    assert all(tests for _, tests in rows)


def test_files_of_more_than_800_lines_say_why():
    for folder in ("src", "tests", "tools", "examples"):
        for path in (TESTS.parent / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            if text.count("\n") > 800:
                assert "ore than 800 lines" in (ast.get_docstring(ast.parse(text)) or ""), path
