"""The tensors of all shards by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...errors import CheckpointError
from ...layouts import Header
from .file import SafetensorsFile


class Shards:
    """Tensors of one or several safetensors files.

    paths       shard name -> path
    weight_map  tensor -> shard name as an index has it, {} without one; `index` names that file
    opened      shards that are open already
    unlisted    tensors that the shards hold and the index does not name

    Raises CheckpointError for a damaged shard, a tensor in two shards, or one that its shard does
    not hold.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        weight_map: Mapping[str, str],
        index: str,
        opened: Mapping[str, SafetensorsFile] | None = None,
    ) -> None:
        self.files = {name: (opened or {}).get(name) or SafetensorsFile(path) for name, path in paths.items()}
        self._shard_of: dict[str, str] = {}
        for shard, file in self.files.items():
            for tensor in file.entries:
                first = self._shard_of.setdefault(tensor, shard)
                if first != shard:
                    raise CheckpointError(
                        f"[open] {file.path}: tensor {tensor!r} is in {first!r} too; a tensor belongs to one shard"
                    )
        for tensor, shard in weight_map.items():
            there = self._shard_of.get(tensor)
            if there != shard:
                where = f"is in {there!r} instead" if there else "is in no shard"
                raise CheckpointError(
                    f"[open] {self.files[shard].path}: tensor {tensor!r} is missing; {index} puts it here, but it {where}. "
                    f"The index is stale, or the shard belongs to another checkpoint"
                )
        self.unlisted = tuple(t for t in self._shard_of if t not in weight_map) if weight_map else ()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._shard_of

    def shard_of(self, tensor: str) -> str:
        """Name of the shard that holds `tensor`."""
        return self._shard_of[tensor]

    def path_of(self, tensor: str) -> Path:
        """Path of the file that holds `tensor`."""
        return self._file(tensor).path

    def header(self, tensor: str) -> Header:
        """Shape and dtype."""
        return Header(*self._file(tensor).header(tensor))

    def array(self, tensor: str) -> NDArray[Any]:
        """The tensor, read-only."""
        return self._file(tensor).array(tensor)

    def nbytes(self, tensor: str) -> int:
        """Bytes in the file."""
        return self._file(tensor).nbytes(tensor)

    def fetch(self, tensor: str) -> None:
        """Prefetch the pages of `tensor`."""
        self._file(tensor).fetch(tensor)

    def release(self, tensor: str) -> None:
        """The pages of `tensor` stop counting as resident memory; they come back when touched."""
        self._file(tensor).release(tensor)

    def _file(self, tensor: str) -> SafetensorsFile:
        return self.files[self._shard_of[tensor]]

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
