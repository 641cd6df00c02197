"""Single files that were interrupted: killed at any moment nothing opens as complete, a later run
goes on to the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import halfbyte
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.gguf.writer import GGUFWriter
from halfbyte.checkpoints.io.journal import WriteError
from halfbyte.checkpoints.io.resumable_file import ResumableFile
from halfbyte.conversion import convert
from halfbyte.errors import CheckpointError, HalfbyteError
from support.conversion_models import identical, write_model
from support.gguf_models import dense_model, write
from support.other_run import other_run


def sources(tmp_path: Path, kind: str) -> tuple[Path, str, str]:
    """(checkpoint, target, name of the file to write)."""
    if kind == "gguf":
        (tmp_path / "in").mkdir()
        return write(tmp_path / "in" / "in.gguf", "llama", dense_model("llama"), True), "gguf", "out.gguf"
    return write_model(tmp_path / "in", "int4:g128", layers=4), "gptq", "out.safetensors"


def left_behind(folder: Path, but: tuple[str, ...] = ("in",)) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in but)


class Stopped(BaseException):
    """An interrupt that no handler takes for an error."""


def interrupted(source: Path, out: Path, to: str, after: int) -> None:
    """A run that ends after so many keys."""
    count = 0

    def stop(done: int, total: int, key: str) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise Stopped

    with pytest.raises(Stopped):
        convert(source, out, to=to, workers=1, progress=stop)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("after", [1, 3, 7])
def test_an_interrupted_file_goes_on_to_the_same_bytes(tmp_path, kind, after):
    source, to, name = sources(tmp_path, kind)
    interrupted(source, tmp_path / name, to, after)
    assert left_behind(tmp_path) == [f".{name}.partial", f".{name}.partial.journal"]
    done = convert(source, tmp_path / name, to=to, workers=1)
    assert done.resumed >= after
    assert left_behind(tmp_path) == [name]
    fresh = convert(source, tmp_path / f"fresh-{name}", to=to, workers=1)
    assert fresh.resumed == 0
    assert fresh.records == done.records
    assert (tmp_path / name).read_bytes() == (tmp_path / f"fresh-{name}").read_bytes()
    assert identical(source, tmp_path / name)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("damage", ["flip", "cut", "journal cut", "journal lies", "no file", "other work"])
def test_what_is_not_there_any_more_is_written_again(tmp_path, kind, damage):
    """Bytes that a power cut lost or changed, a journal cut in a line: the run goes on behind what
    is whole.
    """
    source, to, name = sources(tmp_path, kind)
    out, partial, journal = tmp_path / name, tmp_path / f".{name}.partial", tmp_path / f".{name}.partial.journal"
    interrupted(source, out, to, 6)
    lines = journal.read_text().splitlines()
    whole = len(lines) - 1
    last, before = json.loads(lines[-1])["end"], json.loads(lines[-2])["end"]
    start = json.loads(lines[0])["start"]
    if damage == "flip":
        raw = bytearray(partial.read_bytes())
        raw[start + before] ^= 1
        partial.write_bytes(raw)
    elif damage == "cut":
        os.truncate(partial, start + last - 1)
    elif damage == "journal cut":
        journal.write_text("\n".join(lines)[:-9])
    elif damage == "journal lies":
        journal.write_text("\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "end": last + 32})]) + "\n")
    elif damage == "no file":
        partial.unlink()
    else:
        journal.write_text("\n".join([json.dumps({**json.loads(lines[0]), "to": "awq"}), *lines[1:]]) + "\n")
    done = convert(source, out, to=to, workers=1)
    assert done.resumed == (0 if damage in ("no file", "other work") else whole - 1)
    convert(source, tmp_path / f"fresh-{name}", to=to, workers=1)
    assert out.read_bytes() == (tmp_path / f"fresh-{name}").read_bytes()
    assert left_behind(tmp_path, ("in", f"fresh-{name}")) == [name]


def _killed(source: Path, out: Path, to: str, moment: str) -> None:
    """A conversion whose process kills itself at a moment of its writing."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    count = 0
    writer = SafetensorsWriter if out.suffix == ".safetensors" else GGUFWriter
    plain_write, plain_complete = ResumableFile._write, writer._complete

    def write(self, name, blocks, nbytes):
        nonlocal count
        count += 1
        if moment == f"tensor {count}":
            first = np.ascontiguousarray(next(iter(blocks))).reshape(-1).view(np.uint8)
            self._file.write(first[: first.size // 2].data)
            self._file.flush()
            die()
        return plain_write(self, name, blocks, nbytes)

    def complete(self):
        if moment == "before the header":
            self._file.flush()
            die()
        plain_complete(self)
        self._file.flush()
        if moment == "after the header":
            die()

    ResumableFile._write = write
    writer._complete = complete
    convert(source, out, to=to, workers=1)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("moment", ["tensor 1", "tensor 5", "tensor 9", "before the header", "after the header"])
def test_after_a_kill_at_a_given_moment_nothing_opens_and_the_next_run_is_complete(tmp_path, kind, moment):
    source, to, name = sources(tmp_path, kind)
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(source, tmp_path / name, to, moment))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL  # it was killed at that moment, not finished
    assert not (tmp_path / name).exists()
    assert f".{name}.partial" in left_behind(tmp_path)
    for path in tmp_path.iterdir():
        if path.name != "in":
            with pytest.raises(HalfbyteError):
                halfbyte.open(path)
    done = convert(source, tmp_path / name, to=to, workers=1)
    assert done.resumed > 0 or moment == "tensor 1"
    assert identical(source, tmp_path / name)
    assert left_behind(tmp_path) == [name]


def test_a_disk_that_is_full_at_the_end_keeps_the_tensors(tmp_path, monkeypatch):
    """The header's turn comes last: its failure costs no tensor."""
    source, to, name = sources(tmp_path, "safetensors")
    plain = SafetensorsWriter._complete
    full = OSError(28, "No space left on device")

    def refuse(self) -> None:
        raise full

    monkeypatch.setattr(SafetensorsWriter, "_complete", refuse)
    said = r"No space left on device; 22 tensors kept: run again to resume, or delete .*\.out\.safetensors\.partial"
    with pytest.raises(WriteError, match=said):
        convert(source, tmp_path / name, to=to, workers=1)
    monkeypatch.setattr(SafetensorsWriter, "_complete", plain)
    done = convert(source, tmp_path / name, to=to, workers=1)
    assert done.resumed == len(done.records)
    assert identical(source, tmp_path / name)
    assert left_behind(tmp_path) == [name]


def test_two_processes_at_one_file(tmp_path):
    source, to, name = sources(tmp_path, "gguf")
    lock = tmp_path / f".{name}.partial.lock"
    with other_run(lock) as pid, pytest.raises(CheckpointError, match=f"process {pid} is writing it; wait for it, or end it"):
        convert(source, tmp_path / name, to=to)
    assert lock.exists()  # that process was killed
    convert(source, tmp_path / name, to=to)
    assert left_behind(tmp_path) == [name]


def test_a_refusal_leaves_nothing_to_go_on_with(tmp_path):
    """What would be refused again is not kept."""
    source, _, name = sources(tmp_path, "safetensors")
    with pytest.raises(HalfbyteError):
        convert(source, tmp_path / name, to="mlx:mxfp4")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("writer", ["safetensors", "gguf"])
def test_writers_without_work_leave_nothing(tmp_path, writer):
    path = tmp_path / f"x.{writer}"

    def stop_within() -> None:
        out = SafetensorsWriter(path) if writer == "safetensors" else GGUFWriter(path, [], {"a": (4, 32), "b": (4, 32)})
        with out:
            if writer == "safetensors":
                out.add("a", np.zeros((4, 32), np.float32))
            else:
                out.add("a", "F32", [np.zeros((4, 32), np.float32)])
            out.unit_done(None)
            raise Stopped

    with pytest.raises(Stopped):
        stop_within()
    assert left_behind(tmp_path) == []


def test_entries_of_a_gguf_stand_in_the_order_of_their_data(tmp_path):
    path = tmp_path / "x.gguf"
    with GGUFWriter(path, [], dict.fromkeys("abc", (1, 8))) as out:
        for name in "cab":
            out.add(name, "F32", [np.full((1, 8), ord(name), np.float32)])
    tensors = gguf.GGUFReader(path).tensors
    assert [t.name for t in tensors] == ["c", "a", "b"]
    assert [int(t.data.ravel()[0]) for t in tensors] == [ord(name) for name in "cab"]


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="a small disk is made by Linux's tmpfs")
def test_a_full_disk_is_reported_and_what_is_written_is_kept(tmp_path):
    """A disk that holds part of the result; with room made, the run goes on. A folder and a file,
    in one process.
    """
    source = write_model(tmp_path / "in", "int4:g128", layers=8)
    small = tmp_path / "small"
    small.mkdir()
    script = f"""
import os, sys
from halfbyte.conversion import convert
from halfbyte.checkpoints.io.journal import WriteError
from halfbyte.checkpoints.io.resumable_file import ResumableFile
for name, size in (("out", "900k"), ("out.safetensors", "300k")):
    assert os.system("mount -t tmpfs -o size=" + size + " tmpfs {small}") == 0
    out = os.path.join({str(small)!r}, name)
    try:
        convert({str(source)!r}, out, to="gptq", workers=1, max_shard_size=150_000)
    except WriteError as error:
        print("error", error)
        print("left", sorted(os.listdir({str(small)!r})))
        os.system("mount -o remount,size=64m {small}")
        print("resumed", convert({str(source)!r}, out, to="gptq", workers=1, max_shard_size=150_000).resumed)
        print("left", sorted(os.listdir({str(small)!r})))
    os.system("umount {small}")
"""
    run = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Operation not permitted" in run.stderr or "permission denied" in run.stderr.lower():
        pytest.skip(f"no mount here: {run.stderr.strip()}")
    lines = run.stdout.splitlines()
    assert len(lines) == 8, run.stdout + run.stderr
    for name, (error, left, resumed, last) in (("out", lines[:4]), ("out.safetensors", lines[4:])):
        assert "No space left on device" in error
        assert f".{name}.partial" in left
        assert int(resumed.split()[1]) > 0
        assert last == f"left ['{name}']"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    source, to, _ = sources(tmp_path, "gguf")
    (tmp_path / "file").write_text("")
    for out in ("out.gguf", "deeper/out.gguf"):
        with pytest.raises(WriteError, match=r"out\.gguf: cannot be written: (File exists|Not a directory): .*/file"):
            convert(source, tmp_path / "file" / out, to=to)
