"""A file written a tensor at a time under a temporary name and renamed when complete; an
interrupted run can be resumed.

    .NAME.partial           the data
    .NAME.partial.journal   the work, then one line for each unit of tensors: its end, its checksum,
                            its header entries
    .NAME.partial.lock      locked by the run that writes

A later run of the same `work` continues the data; any other run for NAME deletes them. A unit
counts as written when the journal has its line and the bytes on disk have its checksum: after a
kill, or a power cut that lost data, a run resumes after the last unit for which that holds. A
`.NAME.partial` without a journal, or one that is a link, is not this program's and is refused
(`safe_files`). Subclasses write the header (`_complete`).
"""

from __future__ import annotations

import contextlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import plural
from ...numerics.background import Background
from .background_flush import Flusher
from .journal import Journal, Lock, plain
from .safe_files import NotOursError, WriteError, check_ours, create, delete, not_ours, reopen, sync_folder

BUFFER = 1 << 22
Own = TypeVar("Own", bound="ResumableFile")


class ResumableFile(ABC):
    """Writes `path`. A context manager: leaving it normally finishes the file; leaving it by an
    exception removes what was written, unless it is to be resumed and has a unit.

    start    offset of the first tensor, after the space reserved for the header
    work     JSON values that identify the run; None writes a file that is not resumed
    op       the command, for messages
    private  the file is in a temporary folder of this program, which has a lock and a journal
    notes    the values given to `unit_done`, by this run and those it resumes
    Raises WriteError when the file system refuses, CheckpointError when another run writes the same
    file, NotOursError when a temporary name is taken by a file of somebody else.
    """

    def __init__(self, path: Path, start: int, op: str, work: Mapping[str, Any] | None = None, private: bool = False) -> None:
        self.path, self.op, self._start, self._end = path, op, start, 0
        self._entries: dict[str, Any] = {}
        self._unit: list[str] = []
        self.notes: list[Any] = []
        self.resumed = 0
        self._resumes = work is not None
        self._checksum = 0
        self._summing: Background | None = None
        self._temporary = path.with_name(f".{path.name}.partial")
        self._journal = None if private else Journal(path.with_name(f".{path.name}.partial.journal"), path)
        self._lock = None if private else Lock(path.with_name(f".{path.name}.partial.lock"), path)
        try:
            self._file = self._opened({**plain(work or {}), "start": start})
            self._file.truncate(start + self._end)
            self._file.seek(start + self._end)
            self._flusher = Flusher(self._file.fileno())
        except BaseException as error:
            if self._lock is not None:
                self._lock.release()
            raise (self._refused(error) if isinstance(error, OSError) else error) from None

    def _opened(self, work: Any) -> IO[bytes]:
        """The temporary file: continued after the units of an earlier run of the same work, else
        new.
        """
        if self._journal is None:
            delete([self._temporary])
            return create(self._temporary)
        known = self._journal.exists()
        check_ours(self._temporary, self.path)
        if self._temporary.exists() and not known:
            raise not_ours(self._temporary, self.path, "has no journal beside it")
        kept = self._kept(self._journal.read(), work) if self._resumes else []
        self._journal.start([work, *kept])
        if kept:
            return os.fdopen(reopen(self._temporary, self.path), "rb+")
        delete([self._temporary])
        return create(self._temporary)

    def _kept(self, lines: list[Any], work: Any) -> list[Any]:
        """Journal lines of an earlier run of the same work whose bytes are on disk."""
        kept: list[Any] = []
        if lines and lines[0] == work and self._temporary.exists():
            with os.fdopen(reopen(self._temporary, self.path), "rb") as f:
                for line in lines[1:]:
                    if checksum(f, self._start + self._end, line["end"] - self._end) != line["checksum"]:
                        break
                    kept.append(line)
                    self._end = line["end"]
        for line in kept:
            self._entries |= {name: self._entry(value) for name, value in line["entries"]}
            self.notes.append(line["note"])
        self.resumed = len(kept)
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
        if self._journal is not None and not self._resumes:
            return lambda: 0
        if len(raw) < BUFFER:
            value = zlib.crc32(raw, self._checksum)
            return lambda: value
        if self._summing is None:
            self._summing = Background(1)
        return self._summing.submit(zlib.crc32, raw, self._checksum).result

    def unit_done(self, note: Any) -> None:
        """End a unit: the tensors since the last call, which a resumed run need not write again."""
        self.notes.append(note)
        if self._journal is None or not self._resumes:
            return
        try:
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error
        entries = [[name, self._entries[name]] for name in self._unit]
        line = {"end": self._end, "checksum": self._checksum, "note": note, "entries": entries}
        self._journal.append(line, sync=False)
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
            if self._journal is not None:
                sync_folder(self.path.parent)
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
        with contextlib.suppress(OSError, NotOursError):
            delete([self._temporary])  # before the journal, which shows whose it is
            if self._journal is not None:
                self._journal.remove()
        if self._lock is not None:
            self._lock.release()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._end_threads()
        with contextlib.suppress(OSError):
            self._file.close()

    def _end_threads(self) -> None:
        if self._summing is not None:
            self._summing.close()
            self._summing = None
        self._flusher.wait()

    def _refused(self, error: OSError, doing: str = "") -> WriteError:
        kept = (
            f"; {plural(len(self.notes), 'tensor')} kept: run again to resume, or delete {self._temporary}"
            if self._resumable
            else ""
        )
        return WriteError(f"[{self.op}] {self.path}: cannot be written: {error.strerror or error}{doing}{kept}")

    @property
    def _resumable(self) -> bool:
        return self._resumes and self._journal is not None and bool(self.notes)

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
            if self._lock is not None:
                self._lock.release()
        else:
            self.abandon()


def checksum(file: IO[bytes], start: int, nbytes: int) -> int | None:
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
