"""Files of a repository as the readers of the two formats use them: headers are read on opening,
each tensor by one range request when it is asked for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..gguf.file import Shard, header_from
from ..gguf.header import Header
from ..safetensors.file import SafetensorsFile
from ..safetensors.header import header_length, parse_header
from .repository import RemoteFile, Repository

FIRST_BYTES = 1 << 16
"""Of a safetensors file: the headers of most shards fit, so that one request is enough."""
FIRST_GGUF = 1 << 18
"""Of a GGUF file: doubled until the header, which holds the vocabulary, is complete."""


class RangeReader:
    """Reads ranges of a file on the hub, as `FileReader` reads those of a local one."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file, read-only."""
        return np.frombuffer(self._file.data(start, start + nbytes), np.uint8)

    def prefetch(self, start: int, nbytes: int) -> None:
        """Nothing: a range is requested when it is read."""

    def close(self) -> None:
        """Nothing: no file is open."""


class RemoteSafetensors(SafetensorsFile):
    """A safetensors file on the hub."""

    def __init__(self, file: RemoteFile) -> None:
        data = file.read(0, FIRST_BYTES)
        length = header_length(data[:8], file.size, str(file.path))
        if len(data) < 8 + length:
            data += file.read(len(data), 8 + length)
        header = parse_header(data[8 : 8 + length], file.size - 8 - length, str(file.path))
        self._begin(file.path, header, RangeReader(file))


class RemoteShard(Shard):
    """A GGUF file on the hub."""

    def __init__(self, file: RemoteFile) -> None:
        self.path = file.path
        self.header: Header = header_from(file.read, str(file.path), file.size, FIRST_GGUF)
        self._reader = RangeReader(file)


class RemoteGGUF:
    """The files of a GGUF model on the hub, by the name that a path ends in."""

    def __init__(self, repository: Repository, files: list[str]) -> None:
        self._repository = repository
        self._files = {file.rpartition("/")[2]: file for file in files}

    def __contains__(self, path: Path) -> bool:
        return path.name in self._files

    def __call__(self, path: Path) -> Shard:
        return RemoteShard(self._repository.file(self._files[path.name]))
