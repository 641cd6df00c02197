"""Open regular files only: a pipe or a device in the place of a checkpoint file would block the
reader, or never end.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import threading
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, MemoryLimitError
from ...numerics.memory_limit import check_memory

_MOST = 1 << 30
"""Bytes of one read; systems refuse more than 2 GB."""
TEXT_BYTES = 1 << 28
"""Most bytes of a text to evaluate or calibrate with: WikiText's test set has 1.3 million."""
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""O_NONBLOCK: opening a pipe returns at once instead of waiting for a writer."""


LFS_POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer."""
LFS_ADVICE = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository, or download the file from the hub"
_PIECE = re.compile(r"(?P<whole>.+\.(?:gguf|safetensors))[.-](?:part[-.]?(?P<number>\w+?)(?:of\d+)?|split-\w+|\d{2,3})")


def pieces_advice(name: str, beside: list[str]) -> str:
    """What to do with a byte piece `X.gguf.part1of2` of a larger file, as a clause; "" for other
    names.

    beside  names of the files in the same folder
    """
    match = _PIECE.fullmatch(name)
    if match is None:
        return ""
    pieces = sorted(n for n in beside if (m := _PIECE.fullmatch(n)) and m["whole"] == match["whole"]) or [name]
    joined = " ".join(pieces[:6]) + (" ..." if len(pieces) > 6 else "")
    return f"is a byte piece of {match['whole']}, not a whole file; join all pieces in order: cat {joined} > {match['whole']}"


def open_regular(path: Path) -> BinaryIO:
    """`path` opened for reading bytes. OSError, with a sentence, when it is a folder, a pipe, a
    device or a socket.
    """
    return _Waitless(io.FileIO(_open_descriptor(path)))


class _Waitless(io.BufferedReader):
    """A file whose bytes are there: where the system would wait for some, as in /proc, an OSError."""

    def read(self, size: int | None = -1, /) -> bytes:
        data: bytes | None = super().read(size)
        if data is None:
            raise OSError(errno.EAGAIN, "it has no bytes yet, so it is no plain file")
        return data


def read_given(path: Path, limit: int) -> bytes:
    """A file that a user names, a pipe too. OSError, with the path, for more than `limit` bytes."""
    pieces, size = [], 0
    with path.open("rb") as f:
        try:
            while piece := f.read(1 << 20):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise OSError(errno.EFBIG, f"more than {limit:,} bytes; a file of this kind is read up to that")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    return b"".join(pieces)


def _open_descriptor(path: Path) -> int:
    descriptor = os.open(path, _FLAGS)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe, a device or a socket", str(path))


class Reader(Protocol):
    """Ranges of one file, wherever it is."""

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file, uint8 [nbytes], read-only."""

    def prefetch(self, start: int, nbytes: int) -> None:
        """Start to read a range ahead, without waiting for it."""

    def close(self) -> None:
        """Close the file."""


class FileReader:
    """Reads ranges of one file into memory.

    A map of the file would end the process by a signal when another program truncates the file; a
    read gives a short answer, which is an error here. The copy costs 0.2 s a GB of a cached file in
    tensors of 8 MB and 0.6 s in one of 256 MB (CPU time, AMD EPYC); touching a map costs 0.07 s.

    reader = FileReader(path, status)      status: of the file whose header was checked
    reader.read(start, nbytes)             uint8 [nbytes], read-only
    CheckpointError, naming the file, when it was changed, replaced or truncated since then.

    A reader that is no longer used closes its file by itself.
    """

    def __init__(self, path: Path, status: os.stat_result) -> None:
        self.path, self._status = path, status
        self._descriptor: int | None = None
        self._opening = threading.Lock()

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file, in memory of their own. MemoryLimitError where they are more than the
        process may take.
        """
        what = f"[open] {self.path}: a tensor"
        check_memory(nbytes, what)
        try:
            out = np.empty(nbytes, np.uint8)
        except MemoryError:
            raise MemoryLimitError(
                f"{what} takes {nbytes:,} bytes, which the system refuses; free memory, or raise its limit"
            ) from None
        try:
            descriptor = self._opened()
            at, left = 0, out.data
            while at < nbytes:
                count = self._read_at(descriptor, left[at : at + _MOST], start + at)
                if not count:
                    raise CheckpointError(f"[open] {self.path}: the file was truncated while it was read; open it again")
                at += count
            self._check(descriptor)
        except OSError as error:
            raise CheckpointError(f"[open] {self.path}: cannot be read: {error.strerror or error}") from error
        out.flags.writeable = False
        return out

    def prefetch(self, start: int, nbytes: int) -> None:
        """Let the system read a range ahead, where it can."""
        if nbytes and hasattr(os, "posix_fadvise"):  # 0 would mean: to the end of the file
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._opened(), start, nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # AttributeError: the constructor failed
            self.close()

    def _opened(self) -> int:
        """The file's descriptor. Threads share one: a second one in its place would be closed under
        the first.
        """
        with self._opening:
            if self._descriptor is None:
                descriptor = _open_descriptor(self.path)
                try:
                    self._check(descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._descriptor = descriptor
            return self._descriptor

    def _check(self, descriptor: int) -> None:
        if file_version(os.fstat(descriptor)) != file_version(self._status):
            raise CheckpointError(f"[open] {self.path}: the file was changed since it was opened; open it again")

    def _read_at(self, descriptor: int, into: memoryview, position: int) -> int:
        """Bytes read at a position; 0 at the file's end."""
        if hasattr(os, "preadv"):
            return os.preadv(descriptor, [into], position)
        with self._opening:  # the position is the descriptor's, which threads share
            os.lseek(descriptor, position, os.SEEK_SET)
            part = os.read(descriptor, min(len(into), 1 << 24))
        into[: len(part)] = part
        return len(part)


def file_version(status: os.stat_result) -> tuple[int, ...]:
    """Values that change when a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def stays_inside(folder: Path, path: Path) -> bool:
    """Whether `path`, links followed, is inside `folder`, or in the hub's store of the snapshot
    that `folder` is.
    """
    home, real = folder.resolve(), path.resolve()
    if real.is_relative_to(home):
        return True
    blobs = home.parent.parent / "blobs"
    return home.parent.name == "snapshots" and real.parent == blobs and re.fullmatch(r"[0-9a-f]{40,64}", real.name) is not None
