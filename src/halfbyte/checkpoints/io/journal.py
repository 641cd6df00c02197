"""The journal of a run that can be resumed, and the lock against a second run: two files beside the
output path.

    .NAME.partial.journal   JSON lines: the run, then one line for each part that is on disk
    .NAME.partial.lock      locked by the run that writes; its text is that process's id

Each line carries a CRC-32 of itself and of the CRC before it, so that a line that is damaged,
missing, repeated or in another place ends the journal: what follows it counts as not written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CheckpointError
from .safe_files import WriteError, alive, check_ours, create, delete, not_ours, reopen

if sys.platform != "win32":
    import fcntl

__all__ = ["Journal", "Lock", "WriteError", "make_folder", "plain"]

MAX_JOURNAL = 1 << 28
"""Bytes of a journal that is read: a line a tensor, a thousand bytes a line, is 260,000 tensors."""
_FIRST = b'{"halfbyte": "journal"'
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
Own = TypeVar("Own", bound="Lock")


def make_folder(folder: Path, out: Path) -> None:
    """Create `folder`, in which `out` is written, and its parents. WriteError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"[save] {out}: cannot be written: {error.strerror or error}: {error.filename or folder}") from error


def plain(value: Any) -> Any:
    """`value` after a round trip through JSON, for comparison with a line that was read."""
    return json.loads(json.dumps(value))


class Journal:
    """The journal at `path` of a run that writes `out`.

    lines = journal.read()        of an earlier run; [] when there is none
    journal.start(lines)          replaces the file by these lines in one step
    journal.append(value)
    journal.remove()
    Values are JSON objects. WriteError when the file system refuses, NotOursError when the file was
    not written by a run of this program.
    """

    def __init__(self, path: Path, out: Path) -> None:
        self.path, self.out = path, out
        self._new = path.with_name(f"{path.name}.new")
        self._sum = 0

    def exists(self) -> bool:
        """Whether an earlier run left a journal; NotOursError for anything else under its name."""
        check_ours(self.path, self.out)
        check_ours(self._new, self.out)
        return self.path.exists()

    def read(self) -> list[Any]:
        """The values of the lines, up to the first that is damaged or incomplete."""
        if not self.exists():
            return []
        try:
            with os.fdopen(reopen(self.path, self.out), "rb") as f:
                data = f.read(MAX_JOURNAL)
        except OSError as error:
            raise WriteError(f"[save] {self.out}: {self.path}: {error.strerror or error}") from error
        if data.strip(b"\0") and not data.startswith(_FIRST[: len(data)]):
            raise not_ours(self.path, self.out, "is no journal of this program")
        out, total = [], 0
        for line in data.split(b"\n")[:-1]:
            try:
                value = json.loads(line)
                crc = value.pop("crc")
                total = _crc(value, total)
            except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
                break
            if crc != total:
                break
            out.append(value)
        if out:
            del out[0]["halfbyte"]
        return out

    def start(self, lines: Iterable[Any]) -> None:
        """Replace the journal by `lines`; after a kill or a full disk the old one or the new one is
        there.
        """
        self._sum = 0
        text = b"".join(self._line(value) for value in _marked(lines))
        try:
            delete([self._new])
            with create(self._new) as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            self._new.replace(self.path)
        except OSError as error:
            raise WriteError(f"[save] {self.out}: {self.path}: {error.strerror or error}") from error

    def append(self, value: Any, sync: bool = True) -> None:
        """Add a line; `sync`: on disk when this returns."""
        try:
            with os.fdopen(reopen(self.path, self.out, checked=True), "ab") as f:
                f.write(self._line(value))
                f.flush()
                if sync:
                    os.fsync(f.fileno())
        except OSError as error:
            raise WriteError(f"[save] {self.out}: {self.path}: {error.strerror or error}") from error

    def remove(self) -> None:
        """Delete the journal."""
        delete([self._new, self.path])

    def _line(self, value: Any) -> bytes:
        self._sum = _crc(value, self._sum)
        return json.dumps({**value, "crc": self._sum}).encode() + b"\n"


def _marked(lines: Iterable[Any]) -> Iterable[Any]:
    for i, value in enumerate(lines):
        yield {"halfbyte": "journal", **value} if i == 0 else value


def _crc(value: Any, before: int) -> int:
    return zlib.crc32(json.dumps(value).encode(), before)


class Lock:
    """Keeps a second run from writing `out`, in this process or another; a killed process's lock is
    free. A context manager.

    CheckpointError when a run has it. On file systems without locks the process's id in the file
    decides.
    """

    def __init__(self, path: Path, out: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        try:
            while True:
                try:
                    descriptor = reopen(path, out, create_missing=True)
                except FileNotFoundError:
                    if not path.parent.is_dir():
                        raise
                    continue  # deleted by the run that had it
                text = os.read(descriptor, 32)
                if text.strip() and not text.strip().isdigit():
                    os.close(descriptor)
                    raise not_ours(path, out, "is no lock of this program")
                if not self._take(descriptor, text):
                    os.close(descriptor)
                    owner = text.decode("ascii").strip() or "another run"
                    who = f"process {owner}" if owner != str(os.getpid()) else "this process"
                    raise CheckpointError(f"[convert] {out}: {who} is writing it; wait for it, or end it")
                # The run that had the lock may have deleted the file while this one opened it.
                if _same(descriptor, path):
                    break
                os.close(descriptor)
        except OSError as error:
            raise WriteError(f"[save] {out}: cannot be written: {error.strerror or error}") from error
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # the id is for messages
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, str(os.getpid()).encode())

    @staticmethod
    def _take(descriptor: int, text: bytes) -> bool:
        if sys.platform != "win32":
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return False
                if error.errno not in _NO_LOCKS:
                    raise
            else:
                return True
        owner = text.strip()
        return not (owner and int(owner) != os.getpid() and alive(int(owner)))

    def release(self) -> None:
        """Delete the file and give the lock back; nothing to do the second time."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if sys.platform == "win32":  # deletes no open file
            os.close(descriptor)
        with contextlib.suppress(OSError):
            self.path.unlink()
        if sys.platform != "win32":
            os.close(descriptor)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
