"""A GGUF model on disk: one file or all shards of a split one, read a tensor at a time.

    f = GGUFFile("model.gguf")
    f.metadata["general.architecture"]        decoded on access
    f.headers["blk.0.attn_q.weight"]          type, shape, offset, nbytes
    f.rows("blk.0.attn_q.weight")             uint8 [*lead, n, bytes a row]

Shards are named NAME-00001-of-000NN.gguf and carry split.no, split.count and split.tensors.count
(llama.cpp's gguf-split). Opening any of them opens all; the first holds the metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedError, plural
from ..architecture import required_gguf
from ..io.regular_file import FileReader, Reader, open_regular
from .header import MAGIC, Header, TensorHeader, read_header
from .metadata import Metadata, ShortHeaderError

SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
BIG_ENDIAN_HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Byte offsets, within a block, of the float16 fields that a big-endian file stores high byte
first. These are the types that ggml's own endianness converter defines; the byte order of the other
types' fields is undefined.
"""


FIRST_READ = 8 << 20
"""Bytes of the file's start that are read first: the headers of most models."""
MOST_HEADER = 256 << 20
"""Largest header: a vocabulary of 262,144 tokens takes 10 MB."""


class Shard:
    """One file and its header; tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as f:
                status = os.fstat(f.fileno())

                def read(start: int, stop: int) -> bytes:
                    f.seek(start)
                    return f.read(stop - start)

                self.header: Header = header_from(read, str(path), status.st_size, FIRST_READ)
        except OSError as e:
            raise CheckpointError(f"[gguf] {path}: cannot be read: {e.strerror or e}") from None
        self._reader: Reader = FileReader(path, status)

    def bytes(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file, read-only, in memory of their own."""
        return self._reader.read(start, nbytes)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


def header_from(read: Callable[[int, int], bytes], path: str, size: int, first: int) -> Header:
    """The header of a file of `size` bytes, from as much of its start as it takes.

    read   read(start, stop) -> bytes of the file
    first  bytes that are read first
    """
    if size == 0:
        raise CheckpointError(f"[gguf] {path}: the file is empty; fetch it again")
    data, wanted = b"", min(first, size)
    while True:
        more = read(len(data), wanted)
        data += more
        try:
            return read_header(data, path, size)
        except ShortHeaderError as error:
            if error.needed > size or not more or data[:4] not in (MAGIC, MAGIC[::-1]):
                raise
            if error.needed > MOST_HEADER:
                raise CheckpointError(
                    f"[gguf] {path}: its header takes {error.needed:,} bytes or more; up to {MOST_HEADER:,} are read, so it is "
                    "damaged"
                ) from None
            wanted = min(max(2 * wanted, error.needed), size, MOST_HEADER)


class Files(Protocol):
    """How the files of a model are found and opened where they are not on disk."""

    def __contains__(self, path: Path, /) -> bool: ...
    def __call__(self, path: Path, /) -> Shard: ...


class GGUFFile:
    """All tensors of a GGUF model.

    path      the file given
    files     opens it and its other parts where they are not on disk
    paths     every file it consists of, in order
    metadata  key-values of the first file
    headers   tensor name -> TensorHeader, in file order

    Raises CheckpointError naming file and tensor when something does not fit; UnsupportedError for
    what is known and not read.
    """

    def __init__(self, path: str | Path, files: Files | None = None) -> None:
        self.path = Path(path)
        first = (files or Shard)(self.path)
        self._shards = _all_shards(self.path, first, files)
        self._of: dict[str, Shard] = {}
        headers: dict[str, TensorHeader] = {}
        for shard in self._shards:
            for name, header in shard.header.tensors.items():
                if name in headers:
                    raise CheckpointError(
                        f"[gguf] {shard.path}: tensor {name!r} is in {self._of[name].path.name} too; "
                        "allowed: each tensor in one file"
                    )
                headers[name] = header
                self._of[name] = shard
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(headers)
        declared = self.metadata.typed("split.tensors.count", "integer")
        if declared is not None and len(self._shards) > 1 and declared != len(headers):
            raise CheckpointError(
                f"[gguf] {self.path}: split.tensors.count is {declared}; "
                f"{plural(len(self._shards), 'file')} with {len(headers)} in all{self._miscounted()}"
            )

    def _miscounted(self) -> str:
        """The tensors that a model of the architecture needs and the files lack, and those that it
        does not need, as a clause.
        """
        architecture = self.metadata.typed("general.architecture", "string", "")
        blocks = self.metadata.typed(f"{architecture}.block_count", "integer")
        have = {name.removesuffix(".weight") for name in self.headers}
        needs = required_gguf(architecture, blocks, "output" not in have, len(have))
        if isinstance(needs, str):
            return ""
        lacking = [need.name for need in needs if not any(all(n in have for n in names) for names in need.names)]
        named = {n for need in needs for names in need.names for n in names} | {"output", "rope_freqs"}
        more = sorted(have - named)
        lacking = lacking or (["output (or token_embd is the head)"] if "output" not in have else [])
        clauses = [f"missing: {', '.join(lacking[:6])}"] if lacking else []
        clauses += [f"not among those of {architecture}: {', '.join(more[:6])}"] if more else []
        return "".join(f"; {clause}" for clause in clauses)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(s.path for s in self._shards)

    @property
    def metadata(self) -> Metadata:
        return self._shards[0].header.metadata if self._shards else self._closed()

    @property
    def shard_headers(self) -> tuple[tuple[Path, Header], ...]:
        """Path and header of each file."""
        return tuple((s.path, s.header) for s in self._shards)

    def _closed(self) -> Any:
        raise CheckpointError(f"[gguf] {self.path}: the file is closed; open it again")

    def _header(self, name: str) -> tuple[Shard, TensorHeader]:
        if not self._shards:
            self._closed()
        if name not in self.headers:
            raise CheckpointError(f"[gguf] {self.path}: no tensor {name!r}; there are {len(self.headers)}, see .headers")
        return self._of[name], self.headers[name]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._header(name)[0].path

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as stored, uint8 [nbytes], a read-only view."""
        shard, h = self._header(name)
        return shard.bytes(h.offset, h.nbytes)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """Blocks of a quantized tensor, uint8 [*lead, n, bytes a row]; a vector is one row. A view,
        or a copy when big-endian. With `stop`, rows start to stop of a matrix.

        Raises UnsupportedError for a big-endian file with a type whose byte order is not defined.
        """
        shard, h = self._header(name)
        shape = h.shape if len(h.shape) > 1 else (1, *h.shape)
        row_bytes = h.type.row_bytes(shape[-1])
        if stop is None:
            blocks = self.raw(name)
        else:
            shape = (stop - start, shape[-1])
            blocks = shard.bytes(h.offset + start * row_bytes, (stop - start) * row_bytes)
        if shard.header.order == ">":
            halves = BIG_ENDIAN_HALVES.get(h.type.name)
            if halves is None:
                raise UnsupportedError(
                    f"[gguf] {shard.path}: {h} in a big-endian file; its blocks' byte order is defined for "
                    f"{', '.join(BIG_ENDIAN_HALVES)} only. Make a little-endian file with llama.cpp"
                )
            blocks = blocks.reshape(-1, h.type.nbytes).copy()
            for at in halves:
                blocks[:, [at, at + 1]] = blocks[:, [at + 1, at]]
        return blocks.reshape(*shape[:-1], row_bytes)

    def dense(self, name: str) -> NDArray[Any]:
        """A tensor of plain numbers in its stored dtype: a read-only view, or a native-order copy
        from a big-endian file.
        """
        shard, h = self._header(name)
        if h.quantized:
            raise CheckpointError(f"[gguf] {shard.path}: {h} is quantized; read it with rows()")
        raw = self.raw(name)
        if shard.header.order == ">":
            words = raw.view(np.dtype(f">u{h.type.nbytes}"))
            raw = words.astype(words.dtype.newbyteorder("=")).view(np.uint8)
        array = raw.view(h.dtype).reshape(h.shape)
        array.flags.writeable = False
        return array

    def close(self) -> None:
        """Close the files; arrays already taken stay valid. Reading afterwards raises
        CheckpointError.
        """
        for shard in self._shards:
            shard.close()
        self._shards = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _all_shards(path: Path, first: Shard, files: Files | None) -> list[Shard]:
    """Every shard in order, the opened one among them; CheckpointError when one is missing or
    belongs elsewhere.
    """
    meta = first.header.metadata
    count = meta.typed("split.count", "integer")
    if count is None or count <= 1:
        return [first]
    match = SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"[gguf] {path}: it is one of {count} shards (split.count), which are named NAME-00001-of-{count:05d}.gguf; "
            "give the files back their names"
        )
    shards = []
    for number in range(count):
        sibling = path.with_name(f"{match['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        if sibling.name == path.name:
            shard = first
        elif sibling in files if files is not None else sibling.exists():
            shard = (files or Shard)(sibling)
        else:
            raise CheckpointError(f"[gguf] {path}: shard {number + 1} of {count} is missing: {sibling}")
        has = shard.header.metadata
        if has.typed("split.no", "integer") != number or has.typed("split.count", "integer") != count:
            raise CheckpointError(
                f"[gguf] {sibling}: split.no is {has.get('split.no')} (from 0) and split.count {has.get('split.count')}; "
                f"its name says {number} of {count}"
            )
        shards.append(shard)
    return shards
