"""A run that fails or is killed at any system call that changes files: the old output is there or
the new one is whole, nothing else opens as complete, the next run gives the same bytes and leaves
nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from support import faults
from support.conversion_models import write_model
from support.gguf_models import dense_model, write

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="the shim is compiled and preloaded as Linux does it"
)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with faults.Process(faults.built(tmp_path_factory.mktemp("shim"))) as process:
        yield process


def source_of(command: str, folder: Path) -> Path:
    """A tiny input of a command."""
    if command == "gguf":
        folder.mkdir()
        return write(folder / "in.gguf", "llama", dense_model("llama"), True)
    return write_model(folder, "int4:g128", layers=1)


def explored(
    process: faults.Process, tmp_path: Path, command: str, mode: str, numbers: int | list[int], exchange: bool = True
) -> dict:
    """What the faults led to."""
    source = source_of(command, tmp_path / "in")
    work = tmp_path / "work"
    work.mkdir()
    task = {
        "command": command,
        "source": str(source),
        "folder": str(work),
        "mode": mode,
        "numbers": numbers,
        "exchange": exchange,
    }
    return process.run(task)


def test_the_shim_notices_a_writer_with_a_fault(process, tmp_path):
    """It writes in place: killed there, half a file is at the output's name."""
    found = explored(process, tmp_path, "planted", "cut", list(range(24, 36)))
    assert any("the output is {'': 0}" in p for p in found["problems"])


SAMPLE = [
    ("convert", "kill", [7, 31, 46]), ("convert", "cut", [28, 45]), ("dequantize", "kill", [12, 33]),
    ("save", "full", [9, 15]), ("convert file", "error", [18]), ("convert", "read-only", [16, 40]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "mode", "numbers"), SAMPLE)
def test_a_sample_of_faults(process, tmp_path, command, mode, numbers):
    assert explored(process, tmp_path, command, mode, numbers)["problems"] == []


def test_a_kill_at_each_step_of_the_end_where_names_cannot_be_exchanged(process, tmp_path):
    assert explored(process, tmp_path, "convert", "kill", [47, 48, 49], exchange=False)["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("mode", faults.MODES)
@pytest.mark.parametrize("command", [c for c in faults.COMMANDS if c != "planted"])
def test_every_call(process, tmp_path, command, mode, exchange):
    if not exchange and faults.COMMANDS[command][1] != "out":
        pytest.skip("one file is renamed over another")
    found = explored(process, tmp_path, command, mode, 1, exchange)
    assert found["tried"] > 2 * found["calls"]
    assert found["problems"] == []


def _run(command: str, source: Path, out: Path) -> None:
    faults.COMMANDS[command][0](source, out)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in faults.COMMANDS if c != "planted"])
def test_kills_at_random_moments(tmp_path, command):
    """25 kills a command, 200 in all, anywhere between the start of the run and its end; a run that
    ends before its kill is none.
    """
    source = source_of(command, tmp_path / "in")
    name = faults.COMMANDS[command][1]
    (tmp_path / "fresh").mkdir()
    _run(command, source, tmp_path / "fresh" / f"first-{name}")  # imports what the forked runs have
    start = time.perf_counter()
    _run(command, source, tmp_path / "fresh" / name)
    length = time.perf_counter() - start
    new = faults.contents(tmp_path / "fresh" / name)
    rng = random.Random(command)
    context = multiprocessing.get_context("fork")
    killed = i = 0
    while killed < 25:
        i += 1
        assert i < 200
        work = tmp_path / f"{i}"
        work.mkdir()
        child = context.Process(target=_run, args=(command, source, work / name))
        child.start()
        time.sleep(rng.uniform(0, length))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        assert faults.contents(work / name) in (None, new)
        for path in work.iterdir():
            if path != work / name:
                assert not faults.opens(path) or faults.contents(path) == new
        _run(command, source, work / name)
        assert faults.contents(work / name) == new
        assert [p.name for p in work.iterdir()] == [name]
        shutil.rmtree(work)
