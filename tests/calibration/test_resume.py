"""A walk that is interrupted: at every moment, what a later run gives is what one run gives, bit
for bit, and nothing is left.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.calibration import Spool
from halfbyte.calibration import spool as spooling
from halfbyte.calibration import walk as walking
from halfbyte.checkpoints.io import journal
from halfbyte.checkpoints.io.journal import Journal
from halfbyte.cli import main
from halfbyte.errors import CheckpointError
from support.calibration_models import write_model, write_text

LAYERS = 3
FEW = {"num_hidden_layers": LAYERS}
KINDS = {
    "llama awq": ("llama", "awq", FEW),
    "llama learned": ("llama", "learned", FEW),
    "mixtral gptq": ("mixtral", "gptq", {**FEW, "num_local_experts": 8, "num_experts_per_tok": 1}),
}  # fmt: skip


class Killed(BaseException):
    """Stands for the end of the process."""


def arguments(tmp_path: Path, method: str, *more: str) -> list[str]:
    text = ["--method", method, "--calibration", str(tmp_path / "text.txt"), "--context", "24", "--sequences", "3"]
    more = (*more, *(("--steps", "2") if method == "learned" else ()))
    return ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "halfbyte:int4:g32", *text, "--workers", "1", *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def sources(tmp_path: Path, kind: str) -> str:
    """Model and text; returns the method."""
    name, method, more = KINDS[kind]
    write_model(tmp_path / "in", name, **more)
    write_text(tmp_path / "text.txt", 200)
    return method


MOMENTS = {
    "in a layer": (walking, "round_searched", 0), "rounding": (walking.InputRounder, "round", 10),
    "weights": (spooling, "save", 2),
    "hidden states": (spooling, "save", 3), "line": (Journal, "append", 1), "last line": (Journal, "append", 2),
    "behind a line": (Spool, "_done", 1), "writing": (walking.Calibrated, "rounder", 5),
}  # fmt: skip
"""Moment -> (where, function, calls that go well)."""


IN_A_LAYER = ("rounding", "hidden states", "last line")
"""Moments at which what is written depends on the method and the model; `make test-slow` tries the
others with Mixtral too.
"""


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        ("llama awq", tuple(MOMENTS)),
        ("mixtral gptq", IN_A_LAYER),
        ("llama learned", ("line",)),
        pytest.param("mixtral gptq", tuple(m for m in MOMENTS if m not in IN_A_LAYER), marks=pytest.mark.slow),
    ],
    ids=["llama awq", "mixtral gptq", "llama learned", "mixtral gptq, the others"],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch, capsys, kind, moments):
    method = sources(tmp_path, kind)
    assert main(arguments(tmp_path, method)) == 0
    wanted, said = contents(tmp_path / "out"), capsys.readouterr()
    (tmp_path / "out").rename(tmp_path / "wanted")
    assert not (tmp_path / ".out.calibration").exists()
    resumed = {}
    for moment in moments:
        owner, name, well = MOMENTS[moment]
        calls, plain = 0, getattr(owner, name)

        def dying(*a, well=well, plain=plain, **k):
            nonlocal calls
            calls += 1
            if calls > well:
                raise Killed
            return plain(*a, **k)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying)
            # A process that is killed tidies nothing up; the system takes its locks back.
            patch.setattr(Spool, "__exit__", lambda self, *a: os.close(self._lock._descriptor))
            try:
                main(arguments(tmp_path, method))
            except Killed:
                assert not (tmp_path / "out").exists()
            else:
                assert moment == "in a layer"  # no expert was uncalibrated
                (tmp_path / "out").rename(tmp_path / "whole")
        capsys.readouterr()
        assert main(arguments(tmp_path, method, "--json")) == 0
        printed = capsys.readouterr()
        resumed[moment] = json.loads(printed.out.splitlines()[-1])["layers_resumed"]
        assert contents(tmp_path / "out") == wanted, moment
        assert [n for n in printed.err.splitlines() if n.startswith("note")] == [
            n for n in said.err.splitlines() if n.startswith("note")
        ]
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".out")) == []
        (tmp_path / "out").rename(tmp_path / f"out {moment}")
    in_layer = 0 if kind.startswith("mixtral") else LAYERS
    wanted_layers = {
        "in a layer": in_layer,
        "weights": 1,
        "hidden states": 1,
        "line": 1,
        "last line": LAYERS - 1,
        "behind a line": 2,
        "writing": LAYERS,
    }
    assert {m: n for m, n in resumed.items() if m != "rounding"} == {m: wanted_layers[m] for m in moments if m != "rounding"}


def test_a_killed_process_leaves_what_the_next_goes_on_with(tmp_path):
    """SIGKILL while the second layer is rounded, its lock and all."""
    method = sources(tmp_path, "llama awq")
    code = """
import os, signal, sys
from halfbyte.checkpoints.io.journal import Journal
from halfbyte.cli import main
plain = Journal.append
def dying(self, *a, **k):
    plain(self, *a, **k)
    if self.path.read_text().count("\\n") == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.append = dying
main(sys.argv[1:])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    killed = subprocess.run([sys.executable, "-c", code, *arguments(tmp_path, method)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = {p.name for p in (tmp_path / ".out.calibration").iterdir()}
    assert left == {"00000.layer", "00000.hidden"}
    assert main(arguments(tmp_path, method)) == 0
    (tmp_path / "out").rename(tmp_path / "resumed")
    assert main(arguments(tmp_path, method)) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "resumed")


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_run_that_ends_before_its_walk_leaves_what_an_earlier_one_had_done(tmp_path, monkeypatch, capsys):
    """A text that is not there, the end in the model's first pass, a disk that takes no more."""
    method = sources(tmp_path, "llama awq")
    with monkeypatch.context() as patch:
        patch.setattr(walking._Calibration, "report_uncalibrated", None)
        assert main(arguments(tmp_path, method)) != 0
    text = tmp_path / "text.txt"
    text.rename(tmp_path / "elsewhere.txt")
    assert main(arguments(tmp_path, method)) != 0
    (tmp_path / "elsewhere.txt").rename(text)
    with monkeypatch.context() as patch:
        patch.setattr(walking, "first_inputs", None)
        assert main(arguments(tmp_path, method)) != 0

    def full(path, *a, **k):
        path.write_bytes(b"{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(journal, "create", full)
        capsys.readouterr()
        assert main(arguments(tmp_path, method)) == 2
        assert "No space left on device" in capsys.readouterr().err
    capsys.readouterr()
    assert main(arguments(tmp_path, method, "--json")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["layers_resumed"] == LAYERS
    assert not (tmp_path / ".out.calibration").exists()


def test_other_work_is_not_gone_on_with(tmp_path, monkeypatch, capsys):
    """Other options, another text, another source, a layer cut short: it starts anew, or behind
    what is whole.
    """
    sources(tmp_path, "llama awq")

    def interrupted(*more: str) -> None:
        with monkeypatch.context() as patch:
            plain = Spool.add

            def add(self, *a):
                done = plain(self, *a)
                if len(self._lines) == 2:
                    raise Killed
                return done

            patch.setattr(Spool, "add", add)
            with pytest.raises(Killed):
                main(arguments(tmp_path, "gptq", *more))

    def resumed(*more: str, method: str = "gptq") -> int:
        capsys.readouterr()
        assert main(arguments(tmp_path, method, "--json", "--force", *more)) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["layers_resumed"]

    interrupted()
    assert resumed() == 2
    for change in (["--act-order"], ["--rule", "down_proj=int8:g32"], ["--sequences", "4"]):
        (tmp_path / "out").rename(tmp_path / str(change))
        interrupted()
        assert resumed(*change) == 0
    touched = {
        "text": lambda: write_text(tmp_path / "text.txt", 200, seed=5),
        "model": lambda: os.utime(tmp_path / "in" / "model.safetensors"),
        "configuration": lambda: configure(tmp_path / "in", rms_norm_eps=1e-3),
    }
    for what, touch in touched.items():
        (tmp_path / "out").rename(tmp_path / f"out {what}")
        interrupted()
        touch()
        assert resumed() == 0
    (tmp_path / "out").rename(tmp_path / "out cut")
    interrupted()
    file = tmp_path / ".out.calibration" / "00001.layer"
    file.write_bytes(file.read_bytes()[:-1])
    assert resumed() == 0  # the hidden states before it are gone


def test_two_processes_do_not_walk_for_one_result(tmp_path):
    with Spool(tmp_path / "out"), pytest.raises(CheckpointError, match="this process is writing it; wait for it, or end it"):
        Spool(tmp_path / "out")


def test_a_result_that_may_not_be_written_is_refused_before_the_walk(tmp_path, capsys, monkeypatch):
    sources(tmp_path, "llama awq")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(walking._Calibration, "layer", None)
    assert main(arguments(tmp_path, "awq")) == 2
    assert "exists; give another path, or --force to replace it" in capsys.readouterr().err
    assert not (tmp_path / ".out.calibration").exists()
