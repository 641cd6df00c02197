"""The support page, the test workflow and the package agree on the versions of ci/versions.json;
the page of supported models and formats is that of the tables.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = json.loads((ROOT / "ci" / "versions.json").read_text("utf-8"))
COMBINATIONS = VERSIONS["combinations"]


def test_the_page_has_the_matrix():
    page = (ROOT / "docs" / "reference" / "support.md").read_text("utf-8")
    rows = re.findall(r"^\| (3\.\d+) \| (\S+) \| (\S+) \| (yes|not yet) \|$", page, re.M)
    want = [(c["python"], c["torch"], c["transformers"], "yes" if c["run"] else "not yet") for c in COMBINATIONS]
    assert rows == want
    assert {c["python"] for c in COMBINATIONS} == set(VERSIONS["python"])


def test_the_workflow_reads_the_file():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    assert "jq -c .combinations ci/versions.json" in workflow
    assert not re.search(r"\d\.\d+\.\d+", workflow), "versions are in ci/versions.json alone"
    assert all(f"matrix.{name}" in workflow for name in ("python", "torch", "transformers"))


def test_the_oldest_is_what_the_package_allows():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    oldest = COMBINATIONS[0]
    assert f'requires-python = ">={oldest["python"]}"' in project
    extra = re.search(r"^transformers = \[(.*)\]$", project, re.M)[1]
    for name in ("torch", "transformers"):
        assert oldest[name].startswith(re.search(rf'"{name}>=([\d.]+)"', extra)[1])


def test_what_counts_as_run_is_what_is_installed_for_the_tests():
    """A row says "yes" for the versions that the constraints of `make test` give."""
    ran = [c for c in COMBINATIONS if c["run"]]
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    for combination in ran:
        for name in ("torch", "transformers"):
            pinned = re.search(rf"^{name}==([\d.]+)", pins, re.M)
            assert pinned is None or pinned[1] == combination[name]


@pytest.mark.parametrize("name", ["slow", "wrong-result"])
def test_the_issue_templates_ask_for_doctor(name):
    assert "`halfbyte doctor`" in (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.md").read_text("utf-8")


def test_the_page_of_models_and_formats_is_that_of_the_tables():
    module = runpy.run_path(str(ROOT / "tools" / "supported_page.py"))
    assert module["PAGE"].read_text("utf-8") == module["page"](), "run tools/supported_page.py"
