"""A growing file is sent to the disk while it grows, and a disk that refuses is heard of."""

from __future__ import annotations

import _thread
import errno
import os
import threading
import time

import numpy as np
import pytest

from halfbyte.checkpoints.io import background_flush as flushing
from halfbyte.checkpoints.io.journal import WriteError
from halfbyte.checkpoints.safetensors.file import SafetensorsFile
from halfbyte.checkpoints.safetensors.writer import SafetensorsWriter

DATASYNC = "fdatasync" if hasattr(os, "fdatasync") else "fsync"
ROW = np.arange(256, dtype=np.float32)


@pytest.fixture
def flushed(monkeypatch) -> list[int]:
    """Identifiers of the threads that flush, every 4 KiB."""
    monkeypatch.setattr(flushing, "STEP", 4096)
    seen: list[int] = []
    real = getattr(os, DATASYNC)

    def noted(descriptor: int) -> None:
        seen.append(threading.get_ident())
        real(descriptor)

    monkeypatch.setattr(os, DATASYNC, noted)
    return seen


def test_a_file_is_flushed_by_a_thread_of_its_own_as_it_grows(tmp_path, flushed):
    before = _thread._count()
    with SafetensorsWriter(tmp_path / "a.safetensors", expected=64) as out:
        for i in range(64):
            out.add(f"t{i}", ROW + i)
            time.sleep(0.001)  # for the thread to start
    assert set(flushed) - {threading.get_ident()}
    deadline = time.monotonic() + 20
    while _thread._count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert _thread._count() == before
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert all(np.array_equal(file.array(f"t{i}"), ROW + i) for i in range(64))


def test_a_small_file_has_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(flushing, "Background", None)
    with SafetensorsWriter(tmp_path / "a.safetensors") as out:
        out.add("t", ROW)
    assert SafetensorsFile(tmp_path / "a.safetensors").entries.keys() == {"t"}


@pytest.mark.parametrize("count", [4, 40])
def test_a_refusal_in_the_background_is_the_writers_own(tmp_path, monkeypatch, count):
    """Told of at the next write or at the end: the file does not appear, and nothing of it stays."""
    monkeypatch.setattr(flushing, "STEP", 4096)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", refuse, raising=False)

    def write() -> None:
        with SafetensorsWriter(tmp_path / "a.safetensors", expected=count) as out:
            for i in range(count):
                out.add(f"t{i}", ROW)

    with pytest.raises(WriteError, match="No space left on device"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_abandoning_waits_for_the_flush(tmp_path, monkeypatch):
    """A descriptor is not closed under a thread that flushes it."""
    monkeypatch.setattr(flushing, "STEP", 1024)
    closed_before: list[bool] = []
    begun, go = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        begun.set()
        go.wait(5)
        os.fstat(descriptor)  # OSError when it is closed
        closed_before.append(False)

    monkeypatch.setattr(os, "fdatasync", slow, raising=False)
    out = SafetensorsWriter(tmp_path / "a.safetensors")
    out.add("t", ROW)
    out.add("u", ROW)
    assert begun.wait(5)
    threading.Timer(0.1, go.set).start()
    out.abandon()
    assert closed_before == [False]
    assert list(tmp_path.iterdir()) == []
