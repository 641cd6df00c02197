"""The tensors of all shards by name, sparse weights as dense ones (`sparse.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...errors import CheckpointError
from ...layouts import Header
from .file import SafetensorsFile
from .sparse import VALUES, SparseWeight, expand, find_sparse


class Shards:
    """Tensors of one or several safetensors files.

    paths       shard name -> path
    weight_map  tensor -> shard name as an index has it, {} without one; `index` names that file
    opened      shards that are open already
    unlisted    tensors that the shards hold and the index does not name
    sparse      weights that are stored as values and positions, by the name under which they are
                dense tensors here; the tensors that they are made of are not listed

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
        self.sparse: dict[str, SparseWeight] = {}
        self.sparse = find_sparse(self._shard_of, self.header, self.array)
        weights = {weight.tensors[VALUES]: name for name, weight in self.sparse.items()}
        inside = {t for weight in self.sparse.values() for t in weight.tensors.values()} - set(weights)
        self._names = {weights.get(tensor, tensor): None for tensor in self._shard_of if tensor not in inside}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._names

    def stored(self, tensor: str) -> tuple[str, ...]:
        """The names in the file that `tensor` is made of."""
        return tuple(self.sparse[tensor].tensors.values()) if tensor in self.sparse else (tensor,)

    def shard_of(self, tensor: str) -> str:
        """Name of the shard that holds `tensor`; of a sparse weight, its values."""
        return self._shard_of[self.stored(tensor)[0]]

    def shards_of(self, tensor: str) -> tuple[str, ...]:
        """Names of all shards that hold a part of `tensor`."""
        return tuple(dict.fromkeys(self._shard_of[t] for t in self.stored(tensor)))

    def path_of(self, tensor: str) -> Path:
        """Path of the file that holds `tensor`; of a sparse weight, its values."""
        return self.files[self.shard_of(tensor)].path

    def header(self, tensor: str) -> Header:
        """Shape and dtype."""
        if tensor in self.sparse:
            return self.sparse[tensor].header
        return Header(*self._file(tensor).header(tensor))

    def array(self, tensor: str) -> NDArray[Any]:
        """The tensor, read-only. CheckpointError for a sparse weight whose tensors disagree."""
        if tensor in self.sparse:
            weight = self.sparse[tensor]
            return expand(weight, {part: self._file(t).array(t) for part, t in weight.tensors.items()}, self.path_of(tensor))
        return self._file(tensor).array(tensor)

    def nbytes(self, tensor: str) -> int:
        """Bytes in the file."""
        return sum(self._file(t).nbytes(t) for t in self.stored(tensor))

    def fetch(self, tensor: str) -> None:
        """Prefetch the pages of `tensor`."""
        for t in self.stored(tensor):
            self._file(t).fetch(t)

    def _file(self, tensor: str) -> SafetensorsFile:
        return self.files[self._shard_of[tensor]]

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
