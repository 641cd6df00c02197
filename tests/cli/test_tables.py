"""Every table of every command at 60, 80 and 120 columns, where the output is no terminal.

Each command that prints a table runs once; the test that reads the sources fails when a call of
`print_table` was not reached.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import halfbyte.cli
from halfbyte.backends import backend_named
from halfbyte.bench.cpu import linear as cpu_linear
from halfbyte.bench.cpu import sweep
from halfbyte.bench.model import race as model
from halfbyte.cli import main, terminal
from halfbyte.cli.terminal import GAP, NARROWEST, Column
from support import calibration_models
from support.conversion_models import write_model
from support.tiny_models import write_tiny
from support.tiny_tokenizer import write_tokenizer

RUNS = {
    "backends": "backends",
    "bench": "bench --shape 32,64 --m 1 --format mxfp4 --peers= --rounds 1 --backend reference --activations exact",
    "bench of a model": "bench --model PATH/m.gguf --rounds 1 --activations int8",
    "bench, a sweep": "bench --sweep --rounds 1",
    "convert, a plan": "convert PATH/packed PATH/out --to mlx:mxfp4 --plan",
    "doctor": "doctor",
    "eval": "eval PATH/tiny --text PATH/tiny/text.txt --context 16 --baseline PATH/tiny",
    "inspect": "inspect PATH/packed",
    "inspect, each tensor": "inspect PATH/odd --tensors",
    "inspect for engines": "inspect PATH/packed --for all",
    "plan": "plan PATH/tiny --context 32",
    "quantize, a plan": "quantize PATH/packed PATH/out --to halfbyte:int4:g32 --from-packed --plan",
    "quantize, an allocation": (
        "quantize PATH/dense PATH/out --to mlx --bits 5 --calibration PATH/words.txt --context 16 --sequences 1 --plan"
    ),
    "selftest": "selftest --device cpu --format mxfp4 --shape 0",
    "verify": "verify PATH/packed PATH/other",
}
Table = tuple[list[Column], list[list[str]]]


def modules() -> list[ModuleType]:
    names = [m.name for m in pkgutil.iter_modules(halfbyte.cli.__path__)]
    return [m for n in names if hasattr(m := importlib.import_module(f"halfbyte.cli.{n}"), "print_table") and m is not terminal]


def calls() -> set[str]:
    """file:function of every call of `print_table` below cli/."""
    found = set()
    for path in Path(halfbyte.cli.__path__[0]).glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef) and path.stem != "terminal":
                within = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
                found |= {f"{path.stem}:{function.name}" for f in within if isinstance(f, ast.Name) and f.id == "print_table"}
    return found


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> dict[str, list[Table]]:
    """The tables that each command prints, under file:function."""
    where = tmp_path_factory.mktemp("tables")
    write_model(where / "packed", "uint4:g64")
    write_model(where / "other", "uint4:g64", seed=1)
    write_tiny(where / "tiny", "llama", "halfbyte")
    write_tokenizer(where / "tiny")
    calibration_models.write_model(where / "dense", "llama")
    calibration_models.write_text(where / "words.txt", 100)
    (where / "tiny" / "text.txt").write_text(" ".join(f"<tok{i}>" for i in range(6, 60)) + "\n", "utf-8")
    write_model(where / "odd", "uint4:g64", config={"model_type": "llama"})  # which has more modules
    (where / "m.gguf").write_bytes(b"GGUF")
    found: dict[str, list[Table]] = {}

    def keep(columns, rows):
        frame = sys._getframe(1)
        site = f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_name}"
        found.setdefault(site, []).append((list(columns), [list(r) for r in rows]))

    with pytest.MonkeyPatch.context() as patch:
        for module in modules():
            patch.setattr(module, "print_table", keep)
        limits = {"read_gbps": 10.0, "gflops": 50.0, "gops": 200.0}
        patch.setattr(model, "find_spec", lambda name: None)
        patch.setattr(model, "run_one", lambda *_: {"engine": "native"} | dict.fromkeys(model.MEASURED, 1234.5))
        for timed in (sweep, cpu_linear):
            patch.setattr(timed, "last_cache_bytes", lambda: 0)
            patch.setattr(timed, "limits", lambda threads, clock: limits)
            patch.setattr(timed, "ROTATE_BYTES", 1e4)
        patch.setattr(sweep.sweep, "__defaults__", ((sweep.Case("small k", "int4:g32", 48, 32),), (1, 3)))
        for name, line in RUNS.items():
            if name != "bench, a sweep" or backend_named("cpu").reason() is None:
                assert main([word.replace("PATH", str(where)) for word in line.split()]) in (0, 1), name
    return found


def test_every_call_that_prints_a_table_is_run(tables):
    assert set(tables) == calls() - (set() if backend_named("cpu").reason() is None else {"bench:_sweep"})
    assert all(rows for found in tables.values() for _, rows in found)


def edges(rule: str) -> list[tuple[int, int]]:
    """First column and end of each column of a table, from the line below its headings."""
    return [match.span() for match in re.finditer("[─-]+", rule)]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("site", sorted(calls()))
def test_a_table_is_a_table(tables, site, width, capsys, monkeypatch):
    """No line is wider, every cell is within its column, and what is left out is named."""
    monkeypatch.setenv("COLUMNS", str(width))
    for columns, rows in tables.get(site, []):
        terminal.print_table(columns, rows)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width
        body, _, left_out = out.partition("not shown here: ")
        lines = body.splitlines()
        at = next(i for i, line in enumerate(lines) if re.fullmatch("[─-][─ -]*", line))
        spans = edges(lines[at])
        assert len(spans) >= 2
        for line in lines:
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert start - end == GAP
                assert not line[end:start].strip(), (line, "a cell reaches into the gap between columns")
        heads = [" ".join(" ".join(line[a:b] for line in lines[:at]).split()) for a, b in spans]
        shown = [i for i, c in enumerate(columns) if c.heading in heads]
        assert [columns[i].heading for i in shown] == heads
        for i, column in enumerate(columns):
            if i not in shown and any(row[i] for row in rows):
                assert column.heading in " ".join(left_out.split())
        text = "".join("".join(line[a:b].strip() for line in lines[at + 1 :]) for a, b in spans[:1])
        assert text.replace(" ", "") == "".join(terminal.printable(row[0]) for row in rows).replace(" ", "")


@pytest.mark.parametrize("site", sorted(calls()))
def test_a_row_is_a_paragraph_at_60_columns_and_a_line_in_a_file(tables, site, capsys, monkeypatch):
    for columns, rows in tables.get(site, []):
        monkeypatch.setenv("COLUMNS", "60")
        terminal.print_table(columns, rows)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 60
        everything = "".join(out.split())
        assert all(
            "".join(terminal.printable(cell).split()) in everything for row in rows for cell in row if len(cell) < NARROWEST
        )
        monkeypatch.delenv("COLUMNS")
        terminal.print_table(columns, rows)
        assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2


@pytest.mark.parametrize("width", ["40", "80", "200", None])
def test_a_column_without_a_value_is_not_printed(width, capsys, monkeypatch):
    if width is not None:
        monkeypatch.setenv("COLUMNS", width)
    columns = [Column("tensor"), Column("empty", True), Column("status"), Column("half", True)]
    terminal.print_table(columns, [["a", "", "missing", "1"], ["b", "", "missing", ""]])
    out = capsys.readouterr().out
    assert "empty" not in out
    assert {"a", "b", "missing", "1"} <= set(out.split())
    terminal.print_table(columns, [])
    assert "empty" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80])
def test_the_lines_of_doctor_fit(width, capsys, monkeypatch):
    """What is longer without a space is one word."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["doctor"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("packages: ") for line in lines)
    assert all(len(line) <= width or " " not in line.strip() for line in lines)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("model.layers.0.self_attn.q_proj", 16, ["model.layers.0.", "self_attn.q_proj"]),
        ("different scales (affine6:g32)", 16, ["different scales", "(affine6:g32)"]),
        ("x" * 30, 14, ["x" * 14, "x" * 14, "xx"]),
        ("", 5, [""]),
    ],
)
def test_names_break_behind_their_dots(text, width, lines):
    assert terminal.wrapped(text, width) == lines


@pytest.mark.parametrize(
    "line", ["convert PATH/m PATH/out --to mlx --plan", "quantize PATH/m PATH/out --to mlx:affine4:g64 --from-packed"]
)
def test_layers_share_a_row_unless_each_tensor_is_asked_for(line, tmp_path, capsys):
    write_model(tmp_path / "m", "uint4:g64", layers=3)
    words = [word.replace("PATH", str(tmp_path)) for word in line.split()]
    assert main([*words, "--tensors", "--force"]) in (0, 1)
    each = [r.split() for r in capsys.readouterr().out.split("\n\n")[0].splitlines()[2:]]
    assert main([*words, "--force"]) in (0, 1)
    kinds = [r.split() for r in capsys.readouterr().out.split("\n\n")[0].splitlines()[2:]]
    counts = {r[0]: int(r[1]) for r in kinds if "*" in r[0]}
    assert counts["model.layers.*.mlp.down_proj"] == 3
    assert sum(counts.values()) + len(kinds) - len(counts) == len(each)
    assert [r[0] for r in each if r[0].endswith("mlp.down_proj")] == [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    if "quantize" in words:
        largest = max(float(r[-1]) for r in each if r[0].endswith("mlp.down_proj"))
        assert float(next(r[-1] for r in kinds if r[0] == "model.layers.*.mlp.down_proj")) == largest > 0
