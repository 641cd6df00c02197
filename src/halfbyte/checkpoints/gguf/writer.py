"""Write a GGUF file a tensor at a time, under a temporary name that is renamed at the end.

    with GGUFWriter(path, pairs, names_and_dims) as out:
        for name in ...:
            out.add(name, "Q4_0", blocks)

The header's length depends on keys, names and numbers of axes only, so its size is known before the
types are: data are streamed after it, types and offsets are filled in at the end. Version 3,
little-endian, after the GGUF specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedError, plural
from ...formats.ggml.types import ggml_type
from ..io.resumable_file import ResumableFile
from .file import GGUFFile

ALIGNMENT = 32
_DROPPED = ("split.no", "split.count", "split.tensors.count", "general.alignment", "general.file_type")
"""Keys that describe the file, not the model."""
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17,
    "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "MXFP4": 38, "NVFP4": 39,
}  # fmt: skip
"""Type of most weights -> llama.cpp's file type (`LLAMA_FTYPE_MOSTLY_…`), where it has one."""
UINT32 = 4

Pair = tuple[str, int, bytes]
"""(key, value type, bytes of the value)."""


def pairs_of(file: GGUFFile) -> list[Pair]:
    """The key-values of a file that describe its model, bytes unchanged.

    Raises UnsupportedError for a big-endian file.
    """
    if any(header.order == ">" for _, header in file.shard_headers):
        raise UnsupportedError(f"[convert] {file.path} is big-endian, and its key-values are not copied; swap its bytes first")
    return [(key, *file.metadata.raw(key)) for key in file.metadata if key not in _DROPPED]


def uint32_pair(key: str, value: int) -> Pair:
    """A uint32 key-value."""
    return key, UINT32, struct.pack("<I", value)


class GGUFWriter(ResumableFile):
    """Writes `path`. Leaving it normally finishes the file, leaving it by an exception removes what
    was written.

    pairs    key-values; `general.file_type` is added when the tensors say one
    tensors  name -> shape in NumPy's order, of every tensor of the file
    file_type  llama.cpp's number of the mix, where there is one
    work     identifies a run that can be resumed (`io/resumable_file.py`)
    Raises CheckpointError when a tensor is missing, unknown, or of another size, and when the file
    cannot be written.
    """

    def __init__(
        self,
        path: Path,
        pairs: Sequence[Pair],
        tensors: Mapping[str, Sequence[int]],
        work: Mapping[str, Any] | None = None,
        file_type: int | None = None,
    ) -> None:
        self._pairs = list(pairs)
        self._shapes = {name: tuple(shape) for name, shape in tensors.items()}
        self._entries = {}
        self._stated_type = file_type
        super().__init__(path, _aligned(len(self._header())), "convert", work)

    def add(self, name: str, kind: str, blocks: Iterable[NDArray[Any]]) -> None:
        """Append a tensor of ggml type `kind`, its bytes in order."""
        shape = self._shapes.get(name)
        if shape is None or name in self._entries:
            raise CheckpointError(f"[convert] {self.path}: tensor {name!r} {'is added twice' if shape else 'was not announced'}")
        t = ggml_type(kind)
        nbytes = int(np.prod(shape[:-1], dtype=np.int64)) * t.row_bytes(shape[-1] if shape else 1)
        if not self._write(name, blocks, nbytes):
            raise CheckpointError(f"[convert] {self.path}: the blocks of {name!r} do not make up {kind} {list(shape)}")
        self._write(name, [np.zeros(_aligned(nbytes) - nbytes, np.uint8)], _aligned(nbytes) - nbytes)
        self._enter(name, (t.id, self._end, nbytes))
        self._end += _aligned(nbytes)

    def _file_type(self) -> int:
        """The stated number, else llama.cpp's for the type that holds most bytes."""
        if self._stated_type is not None:
            return self._stated_type
        sizes: dict[int, int] = {}
        for name, (kind, _, nbytes) in self._entries.items():
            if len(self._shapes[name]) > 1:
                sizes[kind] = sizes.get(kind, 0) + nbytes
        most = max(sizes, key=lambda k: sizes[k], default=0)
        return FILE_TYPES.get(ggml_type(most).name, 0)

    def _header(self) -> bytes:
        pairs = [*self._pairs, uint32_pair("general.file_type", self._file_type())]
        out = [b"GGUF", struct.pack("<IQQ", 3, len(self._shapes), len(pairs))]
        for key, kind, value in pairs:
            out += [struct.pack("<Q", len(key.encode())), key.encode(), struct.pack("<I", kind), value]
        for name, shape in self._shapes.items():
            kind, offset, _ = self._entries.get(name, (0, 0, 0))
            dims = tuple(reversed(shape))
            out += [struct.pack("<Q", len(name.encode())), name.encode()]
            out.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        return b"".join(out)

    def finish(self) -> None:
        """Write the header and rename the file to `path`. CheckpointError when an announced tensor
        was not added.
        """
        missing = [name for name in self._shapes if name not in self._entries]
        if missing:
            self.abandon()
            raise CheckpointError(f"[convert] {self.path}: not added: {plural(len(missing), 'tensor')}, first {missing[0]!r}")
        super().finish()

    def _complete(self) -> None:
        offsets = [self._entries[name][1] for name in self._shapes]
        if offsets != sorted(offsets):
            self._shapes = {name: self._shapes[name] for name in self._entries}  # programs want entries in the order of data
        self._file.seek(0)
        header = self._header()
        self._file.write(header + bytes(self._start - len(header)))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
