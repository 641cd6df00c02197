"""Tables at every width, the first screen, completion, and `halfbyte doctor`."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import typing
from enum import EnumMeta

import pytest

import halfbyte
from halfbyte.cli import doctor as doctor_module
from halfbyte.cli import main
from halfbyte.cli import terminal as t
from halfbyte.cli.app import app
from halfbyte.cli.terminal import Column, print_table
from support.second_model import write_smollm2
from support.tiny_models import write_tiny

COLUMNS = (
    Column("tensor"), Column("why"), Column("bits", True), Column("a long heading", True), Column("dtype", optional=2),
    Column("bytes", True, optional=1), Column("mx.quantized_matmul us", True, optional=3),
)  # fmt: skip
ROWS = [
    ["model.layers.0.self_attn.q_proj", "scales are NaN and the sum is lost", "4.25", "17", "bfloat16", "4,352 B", "12.3"],
    ["lm_head", "", "8.5", "3", "float16", "1 B", "45.6"],
]


def table(capsys, monkeypatch, width, columns=COLUMNS, rows=ROWS):
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(columns, rows)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_a_table_of_at_least_72_columns_fits_and_says_what_it_leaves_out(width, capsys, monkeypatch):
    lines = table(capsys, monkeypatch, width)
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    for i, column in enumerate(COLUMNS):
        body, _, note = text.partition("not shown here")
        assert (column.heading in note) != all(row[i][:4] in body for row in ROWS)
    assert ("not shown here: mx.quantized_matmul us;" in text) == (width < 85)


def test_headings_of_numbers_wrap_before_text_does():
    columns = (Column("name"), Column("one two", True))
    assert t.fitted(columns, [20, 3], 29) == ([0, 1], [20, 7])
    assert t.fitted(columns, [20, 3], 25) == ([0, 1], [20, 3])
    assert t.fitted(columns, [20, 3], 20) == ([0, 1], [15, 3])


def test_the_most_optional_column_goes_first_then_the_last():
    columns = (Column("n"), Column("a", True, 1), Column("b", True, 2), Column("c", True))
    assert t.fitted(columns, [5, 9, 9, 9], 30)[0] == [0, 1, 3]
    assert t.fitted(columns, [5, 9, 9, 9], 19)[0] == [0, 3]
    plain = (Column("n"), Column("a", True), Column("b", True))
    assert t.fitted(plain, [5, 9, 9], 20)[0] == [0, 1]


def test_wrapped_cells_keep_their_rows_apart(capsys, monkeypatch):
    columns = (Column("k"), Column("sentence"))
    lines = table(capsys, monkeypatch, 72, columns, [["a", "one two " * 12], ["b", "x"]])
    assert [line[0] for line in lines[2:]] == ["a", " ", "b"]
    assert " ".join(" ".join(lines[2:4]).split()) == "a " + ("one two " * 12).strip()


def test_without_arguments_one_screen_answers(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert err == ""
    for words in (f"halfbyte {halfbyte.__version__}", "What it does", "For whom", "halfbyte inspect PATH", "halfbyte chat PATH"):
        assert words in out


COMMANDS = {command.name or command.callback.__name__: command.callback for command in app.registered_commands}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_of_a_command_has_every_word_whole_at_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: " in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    kinds = typing.get_type_hints(COMMANDS[command]).values()
    choices = {choice.value for kind in kinds if isinstance(kind, EnumMeta) for choice in kind}
    assert choices <= set(re.findall(r"[a-z]+", out))


@pytest.mark.parametrize("option", ["--version", "-v"])
def test_version(option, capsys):
    assert main([option]) == 0
    assert capsys.readouterr().out == f"halfbyte {halfbyte.__version__}\n"


@pytest.mark.parametrize(("shell", "words"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete --command halfbyte")])
def test_shell_completion_is_printed(shell, words, capsys, monkeypatch):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell, raising=False)
    assert main(["--show-completion", *([shell] if _takes_a_shell() else [])]) == 0
    out = capsys.readouterr().out
    assert words in out
    assert "_HALFBYTE_COMPLETE" in out


def _takes_a_shell() -> bool:
    """typer without shellingham wants the shell's name."""
    import typer.core

    return not getattr(typer.core, "HAS_SHELLINGHAM", True)


def test_doctor_reports_this_machine(capsys):
    status = main(["doctor", "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    system, *others = records
    assert system["record"] == "system"
    assert system["halfbyte"] == halfbyte.__version__
    assert {"python", "platform", "cpu", "cores", "features", "native", "gpus"} <= set(system)
    import numpy as np

    assert system["packages"]["numpy"] == np.__version__
    assert {r["backend"] for r in others if r["record"] == "backend"} == set(halfbyte.backends.names())
    assert status == int(any(r["record"] == "problem" for r in others))
    assert main(["doctor"]) == status
    out = capsys.readouterr().out
    for words in (f"halfbyte {halfbyte.__version__}, Python", "CPU: ", "GPUs: ", "packages: numpy", "reference"):
        assert words in out


@pytest.mark.parametrize(
    ("installed", "problem"),
    [({"transformers": "4.57.1"}, "transformers 4.57.1: load_model"), ({"torch": "2.5.1+cpu"}, "torch 2.5.1+cpu: "),
     ({"torch": "2.13.0", "transformers": "5.24.0", "numpy": "1.26.0", "triton": "3.10.1"}, None)],
)  # fmt: skip
def test_known_bad_versions_are_problems(installed, problem):
    found = doctor_module.problems(installed, [{"backend": "cpu", "reason": None}])
    assert len(found) == int(problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_a_backend_that_does_not_load_is_a_problem(monkeypatch, capsys):
    broken = {"record": "backend", "backend": "cuda", "device": "", "available": False, "description": ""}
    broken["reason"] = "it could not be loaded: OSError: libcuda.so.1: file too short"
    monkeypatch.setattr(doctor_module, "backend_records", lambda: iter([broken]))
    assert main(["doctor"]) == 1
    assert "problem: backend cuda: it could not be loaded" in capsys.readouterr().out


def test_a_terminal_that_says_0_columns_is_taken_for_80(capsys, monkeypatch):
    assert table(capsys, monkeypatch, 0) == table(capsys, monkeypatch, 80)


@pytest.mark.parametrize("width", [1, 13])
def test_a_terminal_next_to_no_width_gets_every_word(width, capsys, monkeypatch):
    lines = table(capsys, monkeypatch, width)
    assert max(map(len, lines)) <= t.NARROWEST + 8
    text = "".join("".join(lines).split())
    assert all(cell.replace(" ", "") in text for row in ROWS for cell in row[:5])


SENTENCE = "checked: 211 keep their values by rule; `halfbyte verify small.gguf folder` compares every value, with no tolerance"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_sentence_is_broken_at_spaces_and_a_command_is_not(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    t.print_wrapped(SENTENCE, "  ")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(width, len("    `halfbyte verify small.gguf folder`"))
    assert any("`halfbyte verify small.gguf folder`" in line for line in lines)
    assert [line[: len(line) - len(line.lstrip())] for line in lines] == ["  ", *["    "] * (len(lines) - 1)]
    assert " ".join(" ".join(lines).split()) == SENTENCE


def test_a_file_gets_a_sentence_on_one_line(capsys):
    t.print_wrapped(SENTENCE)
    assert capsys.readouterr().out == f"{SENTENCE}\n"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(("what", "total"), [("dequantizing", 538_100_000), ("converting", 987_654_321)])
def test_a_line_of_progress_fits(width, what, total):
    """In a terminal, with the longest name of a tensor: no line is wider, none is lost."""
    pty = pytest.importorskip("pty")
    key = "model.layers.17.post_feedforward_layernorm.weight"
    ours, theirs = pty.openpty()
    program = (
        f"from halfbyte.cli.terminal import progress\nwith progress({what!r}, True) as update:\n"
        f"    for i in range(1, 4):\n        update(i * {total} // 3, {total}, {key!r})"
    )
    environment = os.environ | {"COLUMNS": str(width), "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", program], stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the end of a pseudo terminal on Linux
                break
        assert process.wait(60) == 0
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).replace("\r", "\n").split("\n")
    bars = [line for line in lines if line.startswith(what)]
    assert max(map(len, lines)) <= width
    assert "MB" in bars[-1]
    assert bars[-1].rstrip().endswith("weight" if width > 60 else "t")


@pytest.mark.parametrize("command", ["plan", "serve", "eval"])
def test_without_torch_one_line_says_what_to_install(command, tmp_path):
    """And transformers, which would advise to install PyTorch, is not imported first."""
    write_tiny(tmp_path / "m", "llama", "halfbyte")
    (tmp_path / "text.txt").write_text("a b c")
    program = "import sys; sys.modules['torch'] = None; from halfbyte.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [command, str(tmp_path / "m"), *(["--text", str(tmp_path / "text.txt")] if command == "eval" else [])]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(rf"halfbyte: \[{command}\] a package is missing: torch, .*pip install 'halfbyte\[\w+\]'\n", done.stderr)


def test_transformers_does_not_advise_to_install_torch(tmp_path):
    """It is asked for the configuration of a folder that becomes a GGUF."""
    write_smollm2(tmp_path / "m.gguf")
    assert main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "m"), "--to", "halfbyte"]) == 0
    program = "import sys; sys.modules['torch'] = None; from halfbyte.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["convert", str(tmp_path / "m"), str(tmp_path / "out.gguf"), "--to", "gguf", "--plan"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert "would write" in done.stdout
    assert "[transformers]" not in done.stderr
