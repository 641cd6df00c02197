"""`~` is the home folder in every path that a command or a call takes, for inputs and outputs."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.hub import local_copy
from halfbyte.checkpoints.io.home import expanded
from halfbyte.cli import app as cli
from halfbyte.cli.failures import guarded
from halfbyte.cli.opening import config_of
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.evaluation.texts import read_text
from halfbyte.generation.memory_plan import Planner
from halfbyte.generation.templates import template_named
from halfbyte.verification.names import read_rules
from support.tiny_models import write_tiny

COMMANDS = {name: inspect.unwrap(cli.app.registered_commands[i].callback) for i, name in enumerate(cli.COMMANDS)}


def path_parameters():
    """(command, parameter) of every path: those whose annotation has Path in it."""
    for name, command in COMMANDS.items():
        for parameter, kind in typing.get_type_hints(command).items():
            if kind is Path or Path in typing.get_args(kind) or any(Path in typing.get_args(a) for a in typing.get_args(kind)):
                yield name, parameter, kind


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert list((tmp_path / "here").iterdir()) == [], "nothing is written to a folder named ~"


def test_there_are_paths_of_every_kind():
    found = {(command, parameter) for command, parameter, _ in path_parameters()}
    assert {("convert", "path"), ("convert", "out"), ("convert", "like"), ("quantize", "calibration"), ("eval", "paths"),
            ("eval", "report"), ("inspect", "report"), ("verify", "b"), ("tune", "out")} <= found  # fmt: skip


@pytest.mark.parametrize(("command", "parameter", "kind"), list(path_parameters()))
def test_every_path_of_a_command(home, command, parameter, kind):
    seen = {}
    several = "list" in str(kind)
    given = [Path("~/a"), Path("b")] if several else Path("~/a")
    run = guarded(command, lambda **options: seen.update(options))
    with pytest.raises(cli.typer.Exit):
        run(**{parameter: given})
    assert seen[parameter] == ([home / "a", Path("b")] if several else home / "a")


def test_calls_that_read_and_write_weights(home):
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype("f")
    hb.save("~/dense.safetensors", {"up_proj.weight": weight})
    with hb.open("~/dense.safetensors") as dense:
        quantize_checkpoint(dense, "~/packed.safetensors", recipe_of("mlx:affine4:g32", []), "rtn")
    with hb.open("~/packed.safetensors") as packed:
        dequantize_checkpoint(packed, "~/again")
        convert_checkpoint(packed, "~/other.safetensors", "halfbyte")
    hb.convert("~/packed.safetensors", "~/third.safetensors", to="halfbyte")
    names = {"again", "dense.safetensors", "other.safetensors", "packed.safetensors", "third.safetensors"}
    assert {p.name for p in home.iterdir()} == names
    assert set(hb.load("~/dense.safetensors")) == {"up_proj.weight"}


def test_calls_that_read_other_files(home):
    write_tiny(home / "model", "llama", "mlx")
    (home / "text.txt").write_text("a text")
    (home / "rules.txt").write_text("a=b\n")
    (home / "config.json").write_text('{"bits": 4}')
    assert read_text("~/text.txt") == "a text"
    assert template_named("~/text.txt")[0] == "a text"
    assert read_rules(["~/rules.txt"])
    assert config_of("~/config.json") == {"bits": 4}
    assert local_copy("~/model") == home / "model"
    assert Planner("~/model").plan(16).total > 0
    assert hb.load_model("~/model")[0] is not None


def test_a_user_who_is_not_there_is_left_as_written(capsys):
    """`Path.expanduser` raises RuntimeError, which no caller expects."""
    assert expanded("~no_such_user/x") == Path("~no_such_user/x")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        hb.open("~no_such_user/x")
    assert cli.main(["inspect", "~no_such_user/x"]) == 2
    assert "fault" not in capsys.readouterr().err
    sources = Path(hb.__file__).parent.rglob("*.py")
    assert [p.name for p in sources if ".expanduser()" in p.read_text("utf-8")] == []


def test_an_interruption_before_a_command_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_command_line", interrupted)
    assert cli.main(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "halfbyte: interrupted\n"
