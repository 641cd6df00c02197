"""Write a safetensors file one tensor at a time, under a temporary name that is renamed at the end.

Tensors are written as they come, so a file of any size needs the memory of one tensor. The header
comes first in the file and its length depends on all tensors, so space is reserved for it. When
that is too small, or the order of tensors leaves one unaligned for its dtype, the data are copied
once, largest elements first. A writer that is not finished leaves no file, except a partial one to
resume from where `work` is given (`io/resumable_file.py`).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ..io.home import expanded
from ..io.resumable_file import ResumableFile
from ..io.safe_files import create
from .file import NUMPY_DTYPES
from .header import MAX_HEADER, MAX_NAME, MAX_TENSORS

WORDS = {dtype: word for word, dtype in NUMPY_DTYPES.items() if word not in ("F4", "F6_E2M3", "F6_E3M2")}
"""NumPy dtype -> dtype word."""
ALIGNMENT = 64
"""Bytes to which the data section is aligned."""
ENTRY_ROOM = 224
"""Bytes of header reserved for each expected tensor: a name of 100 and an entry of 90, with some to
spare.
"""
BUFFER = 1 << 20


class Written(NamedTuple):
    """A tensor on disk: dtype word, shape, first byte in the data, bytes, bytes of an element."""

    word: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    itemsize: int


class SafetensorsWriter(ResumableFile):
    """Writes `path`. A context manager: leaving it normally finishes the file, leaving it by an
    exception removes what was written.

        with SafetensorsWriter(path, {"format": "pt"}, expected=len(tensors)) as out:
            for name, array in tensors:
                out.add(name, array)

    metadata  strings for the header
    expected  number of tensors; a good estimate avoids copying the data at the end
    work      identifies a run that can be resumed, private: see `io/resumable_file.py`
    sums      after `finish`: bytes of the header, its CRC-32 and that of the data; None when they
              were not computed
    Raises CheckpointError when a name is given twice, a dtype has no word, or the file cannot be
    written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
        expected: int = 1024,
        work: Mapping[str, Any] | None = None,
        private: bool = False,
    ) -> None:
        self.metadata = dict(metadata or {})
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in self.metadata.items()):
            raise CheckpointError(f"[save] {path}: metadata {self.metadata!r:.120}; a safetensors header holds strings only")
        room = _aligned(512 + len(json.dumps(self.metadata)) + ENTRY_ROOM * expected)
        super().__init__(expanded(path), room, "save", work, private)
        self.sums: list[int] | None = None

    @staticmethod
    def _entry(recorded: Any) -> Written:
        return Written(recorded[0], tuple(recorded[1]), *recorded[2:])

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Append a tensor."""
        array = np.asarray(array)
        self.add_blocks(name, array.dtype, array.shape, [array])

    def add_blocks(self, name: str, dtype: np.dtype[Any], shape: Sequence[int], blocks: Iterable[NDArray[Any]]) -> None:
        """Append a tensor given as blocks of `dtype` in C order: a dense matrix is never in
        memory as a whole.
        """
        word = WORDS.get(dtype.newbyteorder("="))
        if word is None:
            raise CheckpointError(f"[save] {self.path}: tensor {name!r} is {dtype}; a file holds {', '.join(map(str, WORDS))}")
        if name in self._entries:
            raise CheckpointError(f"[save] {self.path}: tensor {name!r} comes twice; allowed: each name once")
        if not name or not name.isprintable() or len(name.encode()) > MAX_NAME or name == "__metadata__":
            raise CheckpointError(
                f"[save] {self.path}: tensor name {name!r:.80}; names are printable and of 1 to {MAX_NAME} bytes"
            )
        if len(self._entries) == MAX_TENSORS:
            raise CheckpointError(f"[save] {self.path}: over {MAX_TENSORS:,} tensors; write several files")
        nbytes = dtype.itemsize * math.prod(shape)
        if not self._write(name, _little(blocks, dtype), nbytes):
            raise CheckpointError(f"[save] {self.path}: the blocks of {name!r} do not make up {dtype} {list(shape)}")
        self._enter(name, Written(word, tuple(shape), self._end, nbytes, dtype.itemsize))
        self._end += nbytes

    def _complete(self) -> None:
        header = self._header(self._entries)
        if len(header) + 8 <= self._start and not any(t.start % t.itemsize for t in self._entries.values()):
            head = _padded(header, self._start)
            self._file.seek(0)
            self._file.write(head)
            self.sums = [len(head), zlib.crc32(head), self._checksum]
        else:
            self._copy_sorted()

    def _copy_sorted(self) -> None:
        """Copy the data into a new file behind a header of its own length, largest elements first
        so that all are aligned.
        """
        order = sorted(self._entries, key=lambda name: -self._entries[name].itemsize)
        moved, end = {}, 0
        for name in order:
            moved[name] = self._entries[name]._replace(start=end)
            end += moved[name].nbytes
        header = self._header(moved)
        self._file.flush()
        with self._temporary.open("rb") as source:
            # The old file stays readable through its handle after its name is unlinked for the new
            # one.
            self._temporary.unlink()
            self._file.close()
            self._file = create(self._temporary)
            self._file.write(_padded(header, _aligned(len(header) + 8)))
            for name in order:
                source.seek(self._start + self._entries[name].start)
                _copy(source, self._file, moved[name].nbytes)

    def _header(self, tensors: Mapping[str, Written]) -> bytes:
        """The JSON of `tensors`."""
        entries: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        for name, t in tensors.items():
            entries[name] = {"dtype": t.word, "shape": list(t.shape), "data_offsets": [t.start, t.start + t.nbytes]}
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        if len(header) > MAX_HEADER:
            raise CheckpointError(f"[save] {self.path}: a header of {len(header):,} bytes; the format allows {MAX_HEADER:,}")
        return header


def _little(blocks: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Little-endian blocks; a block of another dtype ends them."""
    for block in blocks:
        if block.dtype != dtype:
            return
        yield block.astype(dtype.newbyteorder("<"), copy=False) if dtype.itemsize > 1 else block


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padded(header: bytes, size: int) -> bytes:
    """Length and header, filled with spaces to `size` bytes."""
    return (size - 8).to_bytes(8, "little") + header + b" " * (size - 8 - len(header))


def _copy(source: IO[bytes], target: IO[bytes], nbytes: int) -> None:
    while nbytes:
        piece = source.read(min(nbytes, BUFFER))
        if not piece:
            raise OSError("the temporary file ended early")
        target.write(piece)
        nbytes -= len(piece)
