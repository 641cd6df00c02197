"""A folder of safetensors shards, written under a temporary name, resumable after a kill, renamed
when complete.

    .OUT.partial/journal.jsonl      the work, then one line for each finished shard
    .OUT.partial/00001.shard        finished shards; their names keep them from being opened as a
                                    checkpoint
    OUT/model-00001-of-00003.safetensors …

A run that finds a journal of the same work resumes after its last finished shard; a journal of
other work is deleted. At the end JSON files are written first and shards renamed last, so that a
folder that opens is always complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.journal import WriteError, append_line, make_folder, plain, read_lines, take_lock
from ..io.output_path import replace_output
from .folder import INDEX_NAME
from .writer import SafetensorsWriter

Tensor = tuple[str, np.dtype[Any], tuple[int, ...], Iterable[NDArray[Any]]]
"""Name, dtype, shape and blocks in C order."""

JOURNAL = "journal.jsonl"
LOCK = "lock"


class ResumableFolder:
    """Writes the folder `out`. A context manager: leaving it by an exception keeps what can be
    resumed.

    work      identifies the run: another value starts anew
    limit     bytes of a shard; a unit that is larger has a shard of its own
    metadata  of every shard
    notes     the values given to `add`, for units of finished shards of this run and the one it
              resumes
    Raises CheckpointError when another process writes it.
    """

    def __init__(self, out: Path, work: Mapping[str, Any], limit: int, metadata: Mapping[str, str]) -> None:
        self.out = Path(os.path.abspath(out))  # "." has no name to write beside
        self.limit = limit
        self.metadata = metadata
        self.partial = self.out.with_name(f".{self.out.name}.partial")
        self.notes: list[Any] = []
        self._shards: list[dict[str, Any]] = []
        self._writer: SafetensorsWriter | None = None
        self._current: dict[str, Any] = {}
        make_folder(self.partial, self.out)
        take_lock(self.partial / LOCK, self.out)
        self._resume(plain(work))

    @property
    def resumed(self) -> int:
        """Units that an earlier run had finished."""
        return len(self.notes)

    def _resume(self, work: Any) -> None:
        journal = self.partial / JOURNAL
        lines = read_lines(journal)
        if not lines or lines[0] != work:
            for path in self.partial.iterdir():
                if path.name != LOCK:
                    path.unlink()
            append_line(journal, work)
            return
        for line in lines[1:]:
            path = self.partial / line["file"]
            if not path.is_file() or path.stat().st_size != line["size"]:
                break
            self._shards.append(line)
            self.notes += line["notes"]
        kept = {s["file"] for s in self._shards} | {JOURNAL, LOCK}
        for path in self.partial.iterdir():
            if path.name not in kept:
                path.unlink()
        # Lines after the last complete shard are dropped.
        journal.write_text("".join(json.dumps(x) + "\n" for x in (work, *self._shards)), encoding="utf-8")

    def add(self, tensors: Iterable[Tensor], nbytes: int, note: Any) -> None:
        """Append a unit of tensors, which stays together in one shard."""
        if self._writer is not None and self._current["nbytes"] + nbytes > self.limit:
            self._close_shard()
        if self._writer is None:
            self._current = {"file": f"{len(self._shards) + 1:05d}.shard", "nbytes": 0, "tensors": [], "notes": []}
            self._writer = SafetensorsWriter(self.partial / self._current["file"], self.metadata, expected=2048)
        for name, dtype, shape, blocks in tensors:
            self._writer.add_blocks(name, dtype, shape, blocks)
            self._current["tensors"].append(name)
        self._current["nbytes"] += nbytes
        self._current["notes"].append(note)
        self.notes.append(note)

    def _close_shard(self) -> None:
        assert self._writer is not None
        self._writer.finish()
        self._writer = None
        self._current["size"] = (self.partial / self._current["file"]).stat().st_size
        self._shards.append(self._current)
        append_line(self.partial / JOURNAL, self._current)

    def finish(self, files: Mapping[str, Any], carried: Mapping[str, Path]) -> list[str]:
        """Rename the folder to `out`, over what is there.

        files    JSON files by name
        carried  files to copy, by name
        Returns all names.
        """
        if self._writer is not None or not self._shards:
            if self._writer is None:
                self.add([], 0, None)
            self._close_shard()
        try:
            return self._put(files, carried)
        except OSError as error:
            raise WriteError(f"[save] {self.out}: cannot be written: {error.strerror or error}") from error

    def _put(self, files: Mapping[str, Any], carried: Mapping[str, Path]) -> list[str]:
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
        for name, path in carried.items():
            shutil.copyfile(path, self.partial / name)
        for name, value in files.items():
            if isinstance(value, str):
                (self.partial / name).write_text(value, encoding="utf-8")
            else:
                _write_json(self.partial / name, value)
        if count > 1:
            weight_map = {t: n for n, s in zip(names, self._shards, strict=True) for t in s["tensors"]}
            index = {"metadata": {"total_size": sum(s["nbytes"] for s in self._shards)}, "weight_map": weight_map}
            _write_json(self.partial / INDEX_NAME, index)
        for name, shard in zip(names, self._shards, strict=True):
            (self.partial / shard["file"]).replace(self.partial / name)
        for name in (JOURNAL, LOCK):
            (self.partial / name).unlink()
        replace_output(self.partial, self.out)
        return sorted(p.name for p in self.out.iterdir())

    def discard(self) -> None:
        """Delete everything that was written."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> ResumableFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        (self.partial / LOCK).unlink(missing_ok=True)
        if not self._shards and self.partial.is_dir():
            shutil.rmtree(self.partial, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
