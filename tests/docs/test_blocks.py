"""Every code block of the pages: Python and commands run on a small model in the order of the page;
what installs programs names extras and targets that exist.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

import torch
from support import page_runner
from support.page_runner import FENCE, LANGUAGES, NOT_RUN, reason_not_to_run, steps
from support.second_model import write_smollm2

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ("adding-a-format", "adding-a-kernel", "adding-a-layout")
"""Pages whose blocks have tests of their own beside this file."""
HERE = [p for p in PAGES if p.stem not in ELSEWHERE and any(steps(p))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.mark.parametrize("page", HERE, ids=name)
def test_the_code_of_a_page_runs(page, model, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(key, value)
    runnable = [text for kind, text in steps(page) if kind == "python" or not reason_not_to_run(text)]
    assert page_runner.run(page, model, tmp_path) == len(runnable)
    assert not torch.distributed.is_initialized()


GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
MEASURED = re.compile(r"(\d+) s with\s+SmolLM2\s+135M and\s+(\d+) s\s+with\s+Gemma\s+3\s+270M")


def time_of(page: Path) -> str:
    """The paragraph that says how long a guide takes, above its first section and block."""
    head = re.split(r"^(?:## |```)", page.read_text("utf-8"), maxsplit=1, flags=re.M)[0]
    found = re.findall(r"^Time: (?:.+\n)+", head, re.M)
    assert len(found) == 1, f"{page}: one paragraph `Time: ...` above the first section"
    return found[0]


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_guide_says_how_long_it_takes(page):
    """In words, and in the seconds of both models that benchmarks/guides.md has, which also names
    each guide with code that was not followed to its end.
    """
    said = time_of(page)
    assert re.match(r"Time: [\w ]*(?:minutes?|hour)\b", said)
    table, _, left_out = (ROOT / "benchmarks" / "guides.md").read_text("utf-8").partition("## Not followed")
    row = re.search(rf"^\| {page.stem} \| ([^|]+) \| ([^|]+) \|", table, re.M)
    assert row, f"benchmarks/guides.md has no row of {page.stem}"
    measured = MEASURED.search(said)
    assert (measured.groups() if measured else ("–", "–")) == tuple(cell.split()[0] for cell in row.groups())
    runs = any(kind == "python" or not reason_not_to_run(text) for kind, text in steps(page))
    assert measured or f"`{page.stem}`" in left_out or not runs


def test_the_first_guide_says_how_to_get_what_all_start_from():
    first = (ROOT / "docs" / "guides" / "run-a-model.md").read_text("utf-8")
    commands = "".join(code for language, code in FENCE.findall(first) if language == "sh")
    for file in page_runner.GIVEN:
        assert re.search(rf"(?:[ ]|assemble\('){re.escape(file)}", commands), f"run-a-model.md: how to get {file}"


def test_every_block_is_run_or_has_a_test():
    for page in PAGES:
        if page.stem in ELSEWHERE:
            assert (ROOT / "tests" / "docs" / f"test_{page.stem.replace('-', '_')}.py").exists()
            continue
        for language, code in FENCE.findall(page.read_text("utf-8")):
            assert language in LANGUAGES, f"{page}: a block of {language}"
            known = ("halfbyte ", "git clone ", "make ", "pip install ", "curl ", "  -d ", "#")
            if language == "":
                other = [line for line in code.splitlines() if line.strip() and not line.startswith(known)]
                assert other == [], f"{page}: lines that nothing runs"


def test_what_is_not_run_has_a_reason_that_applies():
    lines = [text for page in HERE for kind, text in steps(page) if kind == "command"]
    lines += [line for page in PAGES for _, code in FENCE.findall(page.read_text("utf-8")) for line in code.splitlines()]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for line in lines), f"{pattern}: no page has such a command"


def test_what_is_installed_exists():
    """Extras of `pip install halfbyte[...]` in pages and messages, and targets of `make`."""
    project, makefile = (ROOT / "pyproject.toml").read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    extras = set(re.findall(r"^(\w+) = \[", project[project.index("[project.optional-dependencies]") :], re.M))
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    for page in [*PAGES, *(ROOT / "src").rglob("*.py")]:
        text = page.read_text("utf-8")
        for given in re.findall(r"(?:halfbyte|pip install '?\.)\[([\w,]+)\]", text):
            assert set(given.split(",")) <= extras, f"{page}: {given}"
        for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.M):
            assert target in targets, f"{page}: make {target}"


def test_a_command_that_fails_is_seen(model, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\nhalfbyte inspect model.gguf\nhalfbyte inspect nothing.gguf\n```\n", "utf-8")
    (tmp_path / "run").mkdir()
    with pytest.raises(AssertionError, match=r"nothing\.gguf' ended with status 2"):
        page_runner.run(page, model, tmp_path / "run")
