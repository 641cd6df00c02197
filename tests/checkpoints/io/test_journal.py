"""The journal of a run and the lock against a second one."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import pytest

from halfbyte.checkpoints.io import journal as journals
from halfbyte.checkpoints.io.journal import Journal, Lock, make_folder, plain
from halfbyte.checkpoints.io.safe_files import NotOursError, WriteError
from halfbyte.errors import CheckpointError

posix = pytest.mark.skipif(os.name != "posix", reason="locks as Unix has them")
GONE = 1 << 23
"""Above every system's largest process id."""


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / ".out.partial.lock", tmp_path / "out"


def test_each_line_has_the_crc_of_all_before_it(tmp_path):
    journal = Journal(tmp_path / "j", tmp_path / "out")
    assert (journal.exists(), journal.read()) == (False, [])
    values = [{"a": 1}, {"b": "ü"}, {"c": [None]}]
    journal.start(values[:2])
    journal.append(values[2], sync=False)
    total, lines = 0, journal.path.read_text().split("\n")
    for line, value in zip(lines, [{"halfbyte": "journal", "a": 1}, *values[1:]], strict=False):
        total = zlib.crc32(json.dumps(value).encode(), total)
        assert json.loads(line) == {**value, "crc": total}
    assert lines[3:] == [""]
    again = Journal(tmp_path / "j", tmp_path / "out")
    assert (again.exists(), again.read()) == (True, values)
    again.start(values[:1])  # replaces it, and counts from the start
    again.append(values[1])
    assert Journal(tmp_path / "j", tmp_path / "out").read() == values[:2]
    assert [p.name for p in tmp_path.iterdir()] == ["j"]
    (tmp_path / "j.new").write_text("left by a kill")
    again.remove(), again.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"\0\0\0", b'{"halfb', b'{"halfbyte": "journal"'])
def test_a_journal_whose_first_line_did_not_reach_the_disk_is_an_empty_one(text, tmp_path):
    (tmp_path / "j").write_bytes(text)
    assert Journal(tmp_path / "j", tmp_path / "out").read() == []


@pytest.mark.parametrize("text", [b"x", b'{"halfbyte": "x', b"\0{}", b'{"halfbyte":"journal"}\n'])
def test_another_file_is_no_journal(text, tmp_path):
    (tmp_path / "j").write_bytes(text)
    with pytest.raises(NotOursError, match="is no journal of this program"):
        Journal(tmp_path / "j", tmp_path / "out").read()
    assert (tmp_path / "j").read_bytes() == text


@pytest.mark.parametrize("name", ["j", "j.new"])
def test_a_folder_at_a_journals_name_is_not_ours(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(NotOursError, match=rf"{name} is not a file"):
        Journal(tmp_path / "j", tmp_path / "out").exists()


def test_a_refusal_of_the_file_system_names_the_output(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "no" / "j", tmp_path / "out")
    with pytest.raises(WriteError, match=r"\[save\] .*out: .*j: No such file"):
        journal.start([{}])
    with pytest.raises(WriteError, match=r"\[save\] .*out: .*j: No such file"):
        journal.append({})
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"out: cannot be written: (Not a directory|File exists): .*file"):
        make_folder(tmp_path / "file" / "a", tmp_path / "out")
    make_folder(tmp_path / "a" / "b", tmp_path / "out"), make_folder(tmp_path / "a" / "b", tmp_path / "out")
    assert (tmp_path / "a" / "b").is_dir()


def test_values_are_compared_as_json_has_them():
    assert plain({"a": (1, 2), 3: None}) == {"a": [1, 2], "3": None}


@posix
def test_a_line_is_added_where_the_file_system_gives_another_owner(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j", tmp_path / "out")
    journal.start([{"a": 1}])
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)  # as some network file systems do
    journal.append({"b": 2})
    monkeypatch.undo()
    assert Journal(tmp_path / "j", tmp_path / "out").read() == [{"a": 1}, {"b": 2}]


@posix
def test_a_lock_is_held_until_it_is_released_once(paths):
    path, out = paths
    lock = Lock(path, out)
    assert path.read_text() == str(os.getpid())
    with pytest.raises(CheckpointError, match=r"\[convert\] .*out: this process is writing it; wait for it, or end it"):
        Lock(path, out)
    path.write_text(f"{GONE}")  # what a message says of the run that has it
    with pytest.raises(CheckpointError, match=rf"process {GONE} is writing it"):
        Lock(path, out)
    path.write_text("")
    with pytest.raises(CheckpointError, match=r"another run is writing it"):
        Lock(path, out)
    lock.release()
    assert not path.exists()
    other = Lock(path, out)
    lock.release()  # deletes no lock of another run
    assert path.exists()
    other.release()


@posix
def test_a_lock_whose_descriptor_is_0_is_released(paths):
    path, out = paths
    kept = os.dup(0)
    os.close(0)
    try:
        lock = Lock(path, out)
        lock.release()
        assert not path.exists()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@posix
@pytest.mark.parametrize("text", ["12 34", "x", "-5", "1.5"])
def test_a_file_without_a_number_is_no_lock(text, paths):
    path, out = paths
    path.write_text(text)
    with pytest.raises(NotOursError, match="is no lock of this program"):
        Lock(path, out)
    assert path.read_text() == text


@posix
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL])
@pytest.mark.parametrize(
    ("text", "free"),
    [("", True), (" \n", True), (f"{GONE}", True), (f"{os.getpid()}", True), (f"{os.getppid()}\n", False), ("1", False)],
    ids=["new", "blank", "gone", "own", "parent", "first"],
)
def test_without_locks_of_the_file_system_the_process_in_the_file_decides(code, text, free, paths, monkeypatch):
    path, out = paths
    path.write_text(text)

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(journals.fcntl, "flock", refuse)
    if not free:
        with pytest.raises(CheckpointError, match=f"process {text.strip()} is writing it"):
            Lock(path, out)
        return
    with Lock(path, out):
        assert path.read_text() == str(os.getpid())
    assert not path.exists()


@posix
@pytest.mark.parametrize(("code", "says"), [(errno.EIO, "cannot be written: Input/output error"), (errno.EAGAIN, "is writing"),
                                           (errno.EACCES, "is writing")])  # fmt: skip
def test_a_lock_that_is_refused_is_another_runs_or_an_error(code, says, paths, monkeypatch):
    def refuse(descriptor: int, how: int) -> None:
        assert how == journals.fcntl.LOCK_EX | journals.fcntl.LOCK_NB
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(journals.fcntl, "flock", refuse)
    with pytest.raises(CheckpointError, match=says):
        Lock(*paths)
    with pytest.raises(WriteError, match="cannot be written: No such file"):
        Lock(paths[0].parent / "no" / "lock", paths[1])


@posix
def test_a_lock_that_was_deleted_while_it_was_opened_is_made_anew(paths, monkeypatch):
    path, out = paths
    real, calls = journals.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        real(descriptor, how)
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()  # by the run that had it
        elif len(calls) == 2:
            path.unlink(), path.write_text("")  # and a third one's file took its name

    monkeypatch.setattr(journals.fcntl, "flock", late)
    with Lock(path, out):
        assert len(calls) == 3
        assert path.read_text() == str(os.getpid())
