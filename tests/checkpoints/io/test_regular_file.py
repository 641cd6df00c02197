"""Ranges of a file that stays as it was, and files given by name, within their bounds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halfbyte.checkpoints.io import regular_file
from halfbyte.checkpoints.io.regular_file import TEXT_BYTES, FileReader, file_version, open_regular, pieces_advice, read_given
from halfbyte.errors import CheckpointError, MemoryLimitError

BYTES = bytes(range(256)) * 4


@pytest.fixture
def reader(tmp_path: Path) -> FileReader:
    path = tmp_path / "m.gguf"
    path.write_bytes(BYTES)
    return FileReader(path, path.stat())


def test_a_text_is_of_at_most_256_mib():
    assert TEXT_BYTES == 268_435_456


@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_file_as_large_as_its_limit_is_read_and_one_byte_more_is_not(size, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * size)
    assert read_given(path, size) == b"x" * size
    path.write_bytes(b"x" * (size + 1))
    with pytest.raises(OSError, match=rf"more than {size} bytes; a file of this kind is read up to that: '.*a\.txt'"):
        read_given(path, size)


def test_any_range_is_read_in_memory_of_its_own(reader, monkeypatch):
    for most in (1 << 30, 100, 1):  # bytes of one read of the system's
        monkeypatch.setattr(regular_file, "_MOST", most)
        for start, count in ((0, 1024), (3, 0), (1023, 1), (200, 300)):
            got = reader.read(start, count)
            assert got.tobytes() == BYTES[start : start + count]
            assert not got.flags.writeable
    assert np.array_equal(reader.read(0, 4), [0, 1, 2, 3])
    reader.prefetch(0, 0), reader.prefetch(5, 100)


def test_any_range_is_read_on_a_system_without_preadv(reader, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    for start, count in ((0, 1024), (3, 0), (1023, 1), (200, 300)):
        assert reader.read(start, count).tobytes() == BYTES[start : start + count]


@pytest.mark.parametrize(("start", "count"), [(0, 1025), (1024, 1), (2000, 5)])
def test_a_range_beyond_the_end_is_an_error(reader, start, count):
    with pytest.raises(CheckpointError, match=r"m\.gguf: the file was truncated while it was read; open it again"):
        reader.read(start, count)


def test_a_file_that_changed_is_not_read(reader):
    reader.read(0, 1)
    reader.path.write_bytes(BYTES + b"x")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"m\.gguf: the file was changed since it was opened"):
            reader.read(0, 1)
        reader.close()  # the next read opens it anew, and closes what it opened


def test_a_reader_keeps_one_descriptor_and_none_after_close_or_a_refusal(reader):
    def opened() -> int:
        return sum(os.path.samefile(f"/proc/self/fd/{fd}", reader.path) for fd in os.listdir("/proc/self/fd") if alive(fd))

    def alive(fd: str) -> bool:
        return os.path.exists(f"/proc/self/fd/{fd}")

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("a process's open files are listed by Linux")
    assert opened() == 0
    threads = [threading.Thread(target=reader.read, args=(0, 16)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened() == 1
    reader.close(), reader.close()
    assert opened() == 0
    reader.read(0, 1)
    del threads
    reader.__del__()
    assert opened() == 0
    os.utime(reader.path, (1, 1))
    with pytest.raises(CheckpointError):
        reader.read(0, 1)
    assert opened() == 0


def test_what_the_process_may_not_take_is_refused_by_name(reader):
    with pytest.raises(MemoryLimitError, match=r"\[open\] .*m\.gguf: a tensor"):
        reader.read(0, 1 << 60)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are Unix's")
def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="it is a pipe, a device or a socket"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    (tmp_path / "file").write_bytes(b"abc")
    with open_regular(tmp_path / "file") as f:
        assert (f.read(2), f.read(), f.read(1)) == (b"ab", b"c", b"")


@pytest.mark.parametrize("field", ["st_dev", "st_ino", "st_size", "st_mtime_ns"])
def test_each_sign_of_another_file_counts(field):
    status = {"st_dev": 1, "st_ino": 2, "st_size": 3, "st_mtime_ns": 4}
    same, other = (SimpleNamespace(**{**status, field: status[field] + d}) for d in (0, 1))
    assert file_version(same) == file_version(SimpleNamespace(**status)) != file_version(other)


def test_pieces_of_a_file_are_joined_in_their_order():
    names = [f"m.gguf.part{i}of9" for i in range(1, 10)]
    text = pieces_advice(names[3], [*reversed(names), "other.gguf.part1of9", "m.gguf", "README.md"])
    assert text == (
        "is a byte piece of m.gguf, not a whole file; join all pieces in order: cat " + " ".join(names[:6]) + " ... > m.gguf"
    )
    text = pieces_advice(names[0], names[:6])
    assert text.endswith(f"cat {' '.join(names[:6])} > m.gguf")
    assert pieces_advice("a.safetensors-split-b", []).endswith("cat a.safetensors-split-b > a.safetensors")
    assert pieces_advice("m.gguf", names) == pieces_advice("m.part1", names) == ""
