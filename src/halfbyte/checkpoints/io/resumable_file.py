"""A file written a tensor at a time under a temporary name and renamed when complete; an
interrupted run can be resumed.

    .NAME.PID.partial       the data; with `work` it is .NAME.partial, and a later run of the same
                            work continues it
    .NAME.partial.journal   the work, then one line for each unit of tensors: its end, its checksum,
                            its header entries
    .NAME.partial.lock      the id of the process that writes it

A unit counts as written when the journal has its line and the bytes on disk have its checksum:
after a kill, or a power cut that lost data, a run resumes after the last unit for which that holds.
Subclasses write the header (`_complete`).
"""

from __future__ import annotations

import contextlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .background_flush import Flusher
from .journal import WriteError, append_line, plain, read_lines, take_lock

BUFFER = 1 << 22
Own = TypeVar("Own", bound="ResumableFile")


class ResumableFile(ABC):
    """Writes `path`. A context manager: leaving it normally finishes the file; leaving it by an
    exception removes what was written, unless it is to be resumed and has a unit.

    start  offset of the first tensor, after the space reserved for the header
    work   JSON values that identify the run; None writes a file that is not resumed
    op     the command, for messages
    notes  the values given to `unit_done`, by this run and those it resumes
    Raises WriteError when the file system refuses, CheckpointError when another process writes the
    same file.
    """

    def __init__(self, path: Path, start: int, op: str, work: Mapping[str, Any] | None = None) -> None:
        self.path, self.op, self._start, self._end = path, op, start, 0
        self._entries: dict[str, Any] = {}
        self._unit: list[str] = []
        self.notes: list[Any] = []
        self.resumed = 0
        self._checksum = 0
        self._summing: ThreadPoolExecutor | None = None
        middle = f".{os.getpid()}" if work is None else ""
        self._temporary = path.with_name(f".{path.name}{middle}.partial")
        self._journal = self._lock = None
        if work is not None:
            self._journal = path.with_name(f".{path.name}.partial.journal")
            self._lock = path.with_name(f".{path.name}.partial.lock")
            take_lock(self._lock, path)
        try:
            kept = self._kept({**plain(work), "start": start}) if work is not None else []
            self._file: IO[bytes] = self._temporary.open("rb+" if kept else "wb+")
            self._file.truncate(start + self._end)
            self._file.seek(start + self._end)
            self._flusher = Flusher(self._file.fileno())
        except OSError as error:
            self._unlock()
            raise self._refused(error) from error

    def _kept(self, work: Any) -> list[Any]:
        """Journal lines of an earlier run of the same work whose bytes are on disk; the journal is
        truncated after them.
        """
        assert self._journal is not None
        lines = read_lines(self._journal)
        kept: list[Any] = []
        if lines and lines[0] == work and self._temporary.is_file():
            with self._temporary.open("rb") as f:
                for line in lines[1:]:
                    if _checksum(f, self._start + self._end, line["end"] - self._end) != line["checksum"]:
                        break
                    kept.append(line)
                    self._end = line["end"]
        for line in kept:
            self._entries |= {name: self._entry(value) for name, value in line["entries"]}
            self.notes.append(line["note"])
        self.resumed = len(kept)
        self._journal.unlink(missing_ok=True)
        for line in (work, *kept):
            append_line(self._journal, line, sync=False)
        return kept

    def _enter(self, name: str, entry: Any) -> None:
        """Record the header entry of a tensor, JSON values."""
        self._entries[name] = entry
        self._unit.append(name)

    @staticmethod
    def _entry(recorded: Any) -> Any:
        """A header entry from its JSON form in the journal."""
        return recorded

    def _write(self, name: str, blocks: Iterable[NDArray[Any]], nbytes: int) -> bool:
        """Write a tensor's blocks; False when they are not `nbytes` in all."""
        left = nbytes
        for block in blocks:
            left -= block.nbytes
            if left < 0:
                return False
            raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
            checksum = self._sum(raw)
            try:
                self._file.write(raw)
                self._flusher.wrote(len(raw))
            except OSError as error:
                raise self._refused(error, f" while {name!r} was written") from error
            self._checksum = checksum()
        return left == 0

    def _sum(self, raw: memoryview) -> Callable[[], int]:
        """A function that returns the unit's checksum including `raw`, computed while a large block
        is written.
        """
        if self._journal is None:
            return lambda: 0
        if len(raw) < BUFFER:
            value = zlib.crc32(raw, self._checksum)
            return lambda: value
        if self._summing is None:
            self._summing = ThreadPoolExecutor(1, thread_name_prefix="halfbyte-checksum")
        return self._summing.submit(zlib.crc32, raw, self._checksum).result

    def unit_done(self, note: Any) -> None:
        """End a unit: the tensors since the last call, which a resumed run need not write again."""
        self.notes.append(note)
        if self._journal is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error
        entries = [[name, self._entries[name]] for name in self._unit]
        append_line(self._journal, {"end": self._end, "checksum": self._checksum, "note": note, "entries": entries}, sync=False)
        self._unit.clear()
        self._checksum = 0

    def finish(self) -> None:
        """Write the header and rename the file to `path`, over any that was there."""
        try:
            self._end_threads()
            self._complete()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self.path)
        except BaseException as error:
            self._leave(error)
            raise (self._refused(error) if isinstance(error, OSError) else error) from None
        self.abandon()

    @abstractmethod
    def _complete(self) -> None:
        """Write the header, before the tensors."""

    def abandon(self) -> None:
        """Remove what was written; nothing to do after `finish`."""
        self._close()
        for path in (self._temporary, self._journal):
            with contextlib.suppress(OSError):
                if path is not None:
                    path.unlink()
        self._unlock()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._end_threads()
        with contextlib.suppress(OSError):
            self._file.close()

    def _end_threads(self) -> None:
        if self._summing is not None:
            self._summing.shutdown()
            self._summing = None
        self._flusher.wait()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.unlink(missing_ok=True)

    def _refused(self, error: OSError, doing: str = "") -> WriteError:
        kept = f"; {len(self.notes)} tensors kept: run again to resume, or delete {self._temporary}" if self._resumable else ""
        return WriteError(f"[{self.op}] {self.path}: cannot be written: {error.strerror or error}{doing}{kept}")

    @property
    def _resumable(self) -> bool:
        return self._journal is not None and bool(self.notes)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        elif error is not None:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        """Keep the partial file for a later run; remove it when it is empty, or when the error
        would repeat.
        """
        if self._resumable and (isinstance(error, WriteError | OSError) or not isinstance(error, Exception)):
            self._close()
            self._unlock()
        else:
            self.abandon()


def _checksum(file: IO[bytes], start: int, nbytes: int) -> int | None:
    """CRC-32 of bytes of a file, None when it ends before them."""
    file.seek(start)
    value = 0
    while nbytes > 0:
        piece = file.read(min(nbytes, BUFFER))
        if not piece:
            return None
        value = zlib.crc32(piece, value)
        nbytes -= len(piece)
    return value
