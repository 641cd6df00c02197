"""One safetensors file: the header is checked on opening, the data are mapped on first use, arrays
are views of the map.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ..io.regular_file import LFS_ADVICE, LFS_POINTER, open_regular
from .header import DTYPE_BITS, Entry, header_length, parse_header

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

    Raises CheckpointError naming file and tensor when the file does not hold what its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
            raise CheckpointError(f"[open] {path}: ended while its header was read")
        header = parse_header(data, size - 8 - length, where)
        self._identity = _identity(status)
        self.entries: dict[str, Entry] = header.entries
        self.metadata = header.metadata
        self._data_start = header.data_start
        self._map: mmap.mmap | None = None
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
        """The tensor, a read-only view of the mapped file; a copy only when its bytes are not
        aligned for their dtype.
        """
        shape, dtype = self.header(name)
        entry = self.entries[name]
        if entry.start == entry.stop:
            return np.empty(shape, dtype)
        flat = np.frombuffer(self._mapped(), np.uint8, entry.stop - entry.start, self._data_start + entry.start)
        if (self._data_start + entry.start) % dtype.alignment:
            flat = flat.copy()
            flat.flags.writeable = False
        return flat.view(dtype).reshape(shape)

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        entry = self.entries[name]
        return entry.stop - entry.start

    def fetch(self, name: str) -> None:
        """Prefetch the pages of the tensor: the system reads them in long runs, without blocking."""
        if self.entries[name].start < self.entries[name].stop:
            self._mapped()
            self._advise(name, "MADV_WILLNEED")

    def release(self, name: str) -> None:
        """The pages of the tensor stop counting as resident memory; they come back from the file
        when touched.
        """
        self._advise(name, "MADV_DONTNEED")

    def _advise(self, name: str, word: str) -> None:
        """madvise the pages that belong to this tensor alone: its neighbours' pages may be in use."""
        entry = self.entries[name]
        if self._map is None or not hasattr(mmap, word):
            return
        start = -(-(self._data_start + entry.start) // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (self._data_start + entry.stop) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            self._map.madvise(getattr(mmap, word), start, length)

    def _mapped(self) -> mmap.mmap:
        if self._closed:
            raise CheckpointError(f"[open] {self.path}: closed; open the checkpoint again to read from it")
        if self._map is None:
            try:
                with open_regular(self.path) as f:
                    if _identity(os.fstat(f.fileno())) != self._identity:
                        raise CheckpointError(f"[open] {self.path}: the file was changed since it was opened; open it again")
                    self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise CheckpointError(f"[open] {self.path}: cannot be mapped: {error.strerror or error}") from error
        return self._map

    def close(self) -> None:
        """Drop the map; it is unmapped when the last array taken from it is freed."""
        self._map = None
        self._closed = True


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Values that change when a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
