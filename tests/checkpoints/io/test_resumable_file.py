"""A file of tensors under a temporary name: units that are kept, and what a failure leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoints.io import resumable_file
from halfbyte.checkpoints.io.resumable_file import ResumableFile
from halfbyte.checkpoints.io.safe_files import NotOursError, WriteError
from halfbyte.errors import CheckpointError

START = 16
UNITS = [np.arange(5, dtype=np.float32), np.arange(12, dtype=np.uint8).reshape(3, 4), np.zeros(0, np.int16), np.arange(7.0)]


class Plain(ResumableFile):
    """Its header is the names of the tensors, in order."""

    def _complete(self) -> None:
        self._file.seek(0)
        self._file.write(",".join(self._entries).encode().ljust(self._start))

    def add(self, name: str, value: np.ndarray, nbytes: int | None = None) -> bool:
        whole = self._write(name, [value[:1], value[1:]], value.nbytes if nbytes is None else nbytes)
        self._enter(name, [self._end, value.nbytes])
        self._end += value.nbytes
        return whole


def write(path: Path, units: list[np.ndarray], **options: Any) -> Plain:
    """A file in which the units that it does not resume are written, not finished."""
    out = Plain(path, START, "convert", **options)
    for i in range(out.resumed, len(units)):
        assert out.add(f"t{i}", units[i])
        out.unit_done(i)
    return out


def whole(units: list[np.ndarray]) -> bytes:
    return ",".join(f"t{i}" for i in range(len(units))).encode().ljust(START) + b"".join(u.tobytes() for u in units)


@pytest.mark.parametrize("options", [{}, {"private": True}, {"work": {"a": (1, 2)}}], ids=["plain", "private", "resumed"])
@pytest.mark.parametrize("buffer", [1, 1 << 22])
def test_a_finished_file_is_whole_and_alone(options, buffer, tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "BUFFER", buffer)  # above it checksums have a thread
    (tmp_path / "out").write_text("the old one")
    with write(tmp_path / "out", UNITS, **options) as out:
        assert out.notes == [0, 1, 2, 3]
        assert (tmp_path / "out").read_text() == "the old one"
    assert (tmp_path / "out").read_bytes() == whole(UNITS)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("done", range(5))
@pytest.mark.parametrize("buffer", [1, 1 << 22])
def test_a_run_resumes_after_the_units_of_the_one_before(done, buffer, tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "BUFFER", buffer)
    out = write(tmp_path / "out", UNITS[:done], work={"w": 1})
    out.add("half", UNITS[3])  # of no unit
    out.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    kept = {".out.partial", ".out.partial.journal"} if done else set()
    assert {p.name for p in tmp_path.iterdir()} == kept
    with write(tmp_path / "out", UNITS, work={"w": 1}) as out:
        assert out.resumed == done
        assert out.notes == [0, 1, 2, 3]
    assert (tmp_path / "out").read_bytes() == whole(UNITS)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("changed", "resumed"), [(START, 0), (START + 19, 0), (START + 20, 1), (START + 31, 1), (START + 32, 3)])
def test_a_unit_whose_bytes_are_not_on_disk_is_written_again(changed, resumed, tmp_path):
    """The third unit is empty; bytes 32 on belong to the fourth."""
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "out", UNITS, work={"w": 1}):
        raise KeyboardInterrupt
    raw = bytearray((tmp_path / ".out.partial").read_bytes())
    raw[changed] ^= 1
    (tmp_path / ".out.partial").write_bytes(raw)
    with write(tmp_path / "out", UNITS, work={"w": 1}) as out:
        assert out.resumed == resumed
    assert (tmp_path / "out").read_bytes() == whole(UNITS)


@pytest.mark.parametrize("other", [{"work": {"w": 2}}, {"work": None}, {}])
def test_another_run_for_the_name_starts_anew(other, tmp_path):
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "out", UNITS, work={"w": 1}):
        raise KeyboardInterrupt
    with write(tmp_path / "out", UNITS[:1], **other) as out:
        assert (out.resumed, out.notes) == (0, [0])
    assert (tmp_path / "out").read_bytes() == whole(UNITS[:1])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_was_left_at_another_start_is_not_resumed(tmp_path):
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "out", UNITS, work={"w": 1}):
        raise KeyboardInterrupt
    out = Plain(tmp_path / "out", START + 8, "convert", {"w": 1})
    assert out.resumed == 0
    out.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [-1, 1])
def test_blocks_that_are_not_as_many_bytes_as_said_are_told(more, tmp_path):
    out = Plain(tmp_path / "out", START, "convert")
    assert out.add("a", UNITS[0])
    assert not out.add("b", UNITS[0], UNITS[0].nbytes + more)
    out.abandon(), out.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("private", [False, True])
def test_a_file_that_cannot_be_opened_leaves_no_lock(private, tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(resumable_file, "create", refuse)
        with pytest.raises(WriteError, match=r"\[convert\] .*out: cannot be written: No space left on device$"):
            Plain(tmp_path / "out", START, "convert", private=private)
    assert not (tmp_path / ".out.partial.lock").exists()
    with write(tmp_path / "out", UNITS, private=private):
        pass


def test_a_partial_file_without_a_journal_is_somebody_elses(tmp_path):
    (tmp_path / ".out.partial").write_text("mine")
    with pytest.raises(NotOursError, match="has no journal beside it"):
        Plain(tmp_path / "out", START, "convert")
    assert [p.name for p in tmp_path.iterdir()] == [".out.partial"]


def test_two_runs_do_not_write_one_output(tmp_path):
    with write(tmp_path / "out", UNITS), pytest.raises(CheckpointError, match="this process is writing it"):
        write(tmp_path / "out", UNITS)
    assert (tmp_path / "out").read_bytes() == whole(UNITS)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_refused_write_says_what_is_kept(resumes, count, tmp_path):
    out = write(tmp_path / "out", UNITS[:count], work={"w": 1} if resumes else None)
    error = out._refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), " while x")
    kept = f"; {count} tensor{'s' * (count != 1)} kept: run again to resume, or delete {tmp_path / '.out.partial'}"
    said = f"[convert] {tmp_path / 'out'}: cannot be written: No space left on device while x"
    assert str(error) == said + (kept if resumes and count else "")
    out.abandon()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, WriteError, MemoryError, CheckpointError, ValueError])
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("work", [None, {"w": 1}])
def test_an_error_that_would_repeat_leaves_nothing(error, count, work, tmp_path):
    with pytest.raises(error), write(tmp_path / "out", UNITS[:count], work=work):
        raise error("x")
    kept = work and count and error in (KeyboardInterrupt, OSError, WriteError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ([".out.partial", ".out.partial.journal"] if kept else [])


@pytest.mark.parametrize(("size", "resumed"), [(START, 0), (START + 19, 0), (START + 20, 1), (START + 87, 3), (START + 88, 4)])
def test_a_file_that_ends_within_a_unit_is_continued_before_it(size, resumed, tmp_path):
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "out", UNITS, work={"w": 1}):
        raise KeyboardInterrupt
    os.truncate(tmp_path / ".out.partial", size)
    with write(tmp_path / "out", UNITS, work={"w": 1}) as out:
        assert out.resumed == resumed
    assert (tmp_path / "out").read_bytes() == whole(UNITS)
