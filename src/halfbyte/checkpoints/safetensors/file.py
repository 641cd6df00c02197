"""One safetensors file: the header is checked on opening, a tensor is read when it is asked for."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ..io.regular_file import LFS_ADVICE, LFS_POINTER, FileReader, Reader, open_regular
from .header import DTYPE_BITS, Entry, FileHeader, header_length, parse_header

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    word: np.dtype(dtype)
    for word, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "I32": np.int32, "U32": np.uint32,
        "I64": np.int64, "U64": np.uint64, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64,
        "C64": np.complex64, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        # Elements narrower than a byte: the array holds the bytes, and its last axis counts bytes.
        "F4": np.uint8, "F6_E2M3": np.uint8, "F6_E3M2": np.uint8,
    }.items()
}  # fmt: skip
"""NumPy dtype of each dtype word of the format."""


class SafetensorsFile:
    """A safetensors file opened for reading.

    path      its path
    entries   name -> Entry(dtype word, shape, start, stop), in header order
    metadata  the header's `__metadata__`
    mapped    True: arrays are views of the mapped file. A program that truncates the file meanwhile
              then ends this process by a signal, so that only `load(mapped=True)` reads this way

    Raises CheckpointError naming file and tensor when the file does not hold what its header says.
    """

    def __init__(self, path: Path) -> None:
        where = str(path)
        try:
            with open_regular(path) as f:
                status = os.fstat(f.fileno())
                size = status.st_size
                first = f.read(8)
                if first == LFS_POINTER[:8]:
                    raise CheckpointError(f"[open] {path} {LFS_ADVICE}")
                length = header_length(first, size, where)
                data = f.read(length)
        except OSError as error:
            raise CheckpointError(f"[open] {path}: cannot be read: {error.strerror or error}") from error
        if len(data) != length:
            raise CheckpointError(
                f"[open] {path}: ended while its header was read; allowed: a file that nothing shortens meanwhile"
            )
        header = parse_header(data, size - 8 - length, where)
        self._begin(path, header, FileReader(path, status))

    def _begin(self, path: Path, header: FileHeader, reader: Reader) -> None:
        """The state of a newly opened file."""
        self.path = path
        self.entries: dict[str, Entry] = header.entries
        self.metadata = header.metadata
        self._data_start = header.data_start
        self._reader = reader
        self._map: mmap.mmap | None = None
        self.mapped = False
        self._closed = False

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """(shape, dtype) of the array `array(name)` returns."""
        entry = self.entries[name]
        dtype = NUMPY_DTYPES[entry.dtype]
        bits = DTYPE_BITS[entry.dtype]
        if bits % 8 == 0:
            return entry.shape, dtype
        if not entry.shape or entry.shape[-1] * bits % 8:
            raise CheckpointError(
                f"[open] {self.path}: tensor {name!r}: rows of {list(entry.shape)} {entry.dtype} elements are not whole bytes; "
                f"not read"
            )
        return (*entry.shape[:-1], entry.shape[-1] * bits // 8), dtype

    def array(self, name: str) -> NDArray[Any]:
        """The tensor, read-only, in memory of its own; a view of the mapped file when `mapped`."""
        shape, dtype = self.header(name)
        entry = self.entries[name]
        if entry.start == entry.stop:
            return np.empty(shape, dtype)
        if self._closed:
            raise CheckpointError(f"[open] {self.path}: closed; open the checkpoint again to read from it")
        start, nbytes = self._data_start + entry.start, entry.stop - entry.start
        flat = self._mapped_range(start, nbytes) if self.mapped else self._reader.read(start, nbytes)
        if flat.ctypes.data % dtype.alignment:
            flat = flat.copy()
            flat.flags.writeable = False
        return flat.view(dtype).reshape(shape)

    def _mapped_range(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        if self._map is None:
            self._reader.read(0, 1)  # the file is the one whose header was checked
            try:
                with open_regular(self.path) as f:
                    self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"[open] {self.path}: cannot be mapped: {error}") from error
        if start + nbytes > len(self._map):
            raise CheckpointError(f"[open] {self.path}: the file was truncated since it was opened; open it again")
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        entry = self.entries[name]
        return entry.stop - entry.start

    def fetch(self, name: str) -> None:
        """Prefetch the tensor: the system reads it in long runs, without blocking."""
        entry = self.entries[name]
        self._reader.prefetch(self._data_start + entry.start, entry.stop - entry.start)

    def close(self) -> None:
        """Close the file; arrays already taken stay valid."""
        self._reader.close()
        self._map = None
        self._closed = True
