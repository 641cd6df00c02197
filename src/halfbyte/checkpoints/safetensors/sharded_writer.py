"""A folder of safetensors shards, written under a temporary name, resumable after a kill, renamed
when complete.

    .OUT.partial/00001.shard        finished shards; their names keep them from being opened as a
                                    checkpoint
    .OUT.partial.journal            the work, then one line for each finished shard with its size
                                    and checksums, then what the end does
    .OUT.partial.lock               locked by the run that writes
    OUT/model-00001-of-00003.safetensors …

A run that finds a journal of the same work resumes after its last whole shard; any other run for
OUT deletes what the journal lists. At the end JSON files are written first and shards renamed last,
so that a folder that opens is always complete. Then the folder takes the place of OUT
(`io/rename.py`); a run that was killed there is completed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ..io.journal import Journal, Lock, WriteError, make_folder, plain
from ..io.output_path import foreign_entry
from ..io.rename import exchange, identity
from ..io.resumable_file import checksum
from ..io.safe_files import (
    check_name,
    check_ours,
    copy_file,
    delete,
    delete_folder,
    foreign,
    not_ours,
    sync_folder,
    write_file,
    write_json,
)
from .folder import INDEX_NAME
from .writer import SafetensorsWriter

Tensor = tuple[str, np.dtype[Any], tuple[int, ...], Iterable[NDArray[Any]]]
"""Name, dtype, shape and blocks in C order."""

_SHARD = re.compile(r"\d{5,6}\.shard|\.\d{5,6}\.shard\.partial")


class ResumableFolder:
    """Writes the folder `out`. A context manager: leaving it by an exception keeps what can be
    resumed.

    work      identifies the run: another value starts anew
    limit     bytes of a shard; a unit that is larger has a shard of its own
    metadata  of every shard
    expected  tensors of a shard, an estimate
    notes     the values given to `add`, for units of finished shards of this run and the one it
              resumes
    Raises CheckpointError when another process writes it, NotOursError when a temporary name is
    taken by something this program did not write.
    """

    def __init__(self, out: Path, work: Mapping[str, Any], limit: int, metadata: Mapping[str, str], expected: int = 2048) -> None:
        self.out = Path(os.path.abspath(out))  # "." has no name to write beside
        self.limit = limit
        self.metadata = metadata
        self.expected = expected
        self.partial = self.out.with_name(f".{self.out.name}.partial")
        self.replaced = self.out.with_name(f".{self.out.name}.replaced")
        self.notes: list[Any] = []
        self._shards: list[dict[str, Any]] = []
        self._writer: SafetensorsWriter | None = None
        self._current: dict[str, Any] = {}
        self._names: list[str] = []
        make_folder(self.out.parent, self.out)
        self._lock = Lock(self.out.with_name(f".{self.out.name}.partial.lock"), self.out)
        self._journal = Journal(self.out.with_name(f".{self.out.name}.partial.journal"), self.out)
        try:
            self._resume(plain(work))
            self._had = self._old_names()
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise self._refused(error) from error
            raise

    @property
    def resumed(self) -> int:
        """Units that an earlier run had finished."""
        return len(self.notes)

    def _resume(self, work: Any) -> None:
        known = self._journal.exists()
        check_ours(self.partial, self.out, folder=True)
        if not known and self.partial.is_dir() and any(self.partial.iterdir()):
            raise not_ours(self.partial, self.out, "has no journal beside it")
        lines = self._journal.read()
        put = next((x["put"] for x in lines[1:] if "put" in x), None)
        if put and self._complete_put(put):
            lines, known = [], False
        shards = [x for x in lines[1:] if "file" in x]
        names = [name for x in lines[1:] for name in x.get("names", [])]
        if lines[:1] == [work]:
            self._shards = self._whole(shards, names)
        self.notes = [note for shard in self._shards for note in shard["notes"]]
        self._journal.start([work, *self._shards, *([{"names": names}] if names else [])])
        if not self.partial.exists():
            self.partial.mkdir()
        self._delete_rest({s["file"] for s in self._shards}, names)
        self._journal.start([work, *self._shards])

    def _whole(self, shards: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
        """The shards of a journal, up to the first that is not on disk as it was written. Those
        that have their final names already get the temporary ones back.
        """
        final = [name for name in names if name.endswith(".safetensors")]
        kept: list[dict[str, Any]] = []
        for number, shard in enumerate(shards):
            path = self.partial / shard["file"]
            if not path.exists() and number < len(final) and not foreign(self.partial / final[number]):
                path = self.partial / final[number]
            if not _as_written(path, shard):
                break
            path.replace(self.partial / shard["file"])
            kept.append(shard)
        return kept

    def _delete_rest(self, kept: set[str], names: Iterable[str]) -> None:
        """Delete what an interrupted run left in the folder and this one does not continue."""
        mine = set(names)
        for path in sorted(self.partial.iterdir()):
            if path.name in kept:
                continue
            if not (_SHARD.fullmatch(path.name) or path.name in mine):
                raise not_ours(path, self.out, "is in the temporary folder, and its journal does not list it")
            check_ours(path, self.out)
            delete([path])

    def add(self, tensors: Iterable[Tensor], nbytes: int, note: Any) -> None:
        """Append a unit of tensors, which stays together in one shard."""
        if self._writer is not None and self._current["nbytes"] + nbytes > self.limit:
            self.end_shard()
        if self._writer is None:
            self._current = {"file": f"{len(self._shards) + 1:05d}.shard", "nbytes": 0, "tensors": [], "notes": []}
            path = self.partial / self._current["file"]
            self._writer = SafetensorsWriter(path, self.metadata, expected=self.expected, private=True)
        for name, dtype, shape, blocks in tensors:
            self._writer.add_blocks(name, dtype, shape, blocks)
            self._current["tensors"].append(name)
        self._current["nbytes"] += nbytes
        self._current["notes"].append(note)
        self.notes.append(note)

    def note(self, note: Any) -> None:
        """Replace the note of the unit that was added last, which its tensors decided."""
        self._current["notes"][-1] = self.notes[-1] = note

    def end_shard(self) -> None:
        """Finish the current shard; the next unit begins another."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.finish()
        path = self.partial / self._current["file"]
        self._current["size"] = path.stat().st_size
        if writer.sums is None:
            with path.open("rb") as f:
                self._current["sums"] = [self._current["size"], checksum(f, 0, self._current["size"]), 0]
        else:
            self._current["sums"] = writer.sums
        self._shards.append(self._current)
        self._journal.append(self._current)

    def finish(self, files: Mapping[str, Any], carried: Mapping[str, Path]) -> list[str]:
        """Rename the folder to `out`, over what is there.

        files    by name: text as it is, any other value as JSON
        carried  files to copy, by name
        Returns all names.
        """
        if self._writer is not None or not self._shards:
            if self._writer is None:
                self.add([], 0, None)
            self.end_shard()
        try:
            return self._put(files, carried)
        except OSError as error:
            raise self._refused(error) from error

    def _put(self, files: Mapping[str, Any], carried: Mapping[str, Path]) -> list[str]:
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
        values = dict(files)
        if count > 1:
            weight_map = {t: n for n, s in zip(names, self._shards, strict=True) for t in s["tensors"]}
            values[INDEX_NAME] = {"metadata": {"total_size": sum(s["nbytes"] for s in self._shards)}, "weight_map": weight_map}
        copied = {name: path for name, path in carried.items() if name not in values}
        self._names = [check_name(n) for n in (*copied, *values, *names)]
        self._journal.append({"names": self._names})
        for name, path in copied.items():
            copy_file(path, self.partial / name)
        for name, value in values.items():
            if isinstance(value, str):
                write_file(self.partial / name, value.encode("utf-8", "surrogatepass"))
            else:
                write_json(self.partial / name, value)
        for name, shard in zip(names, self._shards, strict=True):
            (self.partial / shard["file"]).replace(self.partial / name)
        sync_folder(self.partial)
        self._replace()
        self._journal.remove()
        self._lock.release()
        return sorted(self._names)

    def _old_names(self) -> list[str]:
        """Names of the files of the checkpoint that is to be replaced."""
        return sorted(p.name for p in self.out.iterdir()) if self.out.is_dir() and not self.out.is_symlink() else []

    def _replace(self) -> None:
        """Put the complete folder in the place of `out`, and delete what was there."""
        old = self._old_names()
        if os.path.lexists(self.out) and (not self.out.is_dir() or self.out.is_symlink()):
            raise CheckpointError(
                f"[save] {self.out} is no folder any more; the result is kept in {self.partial}, rename it yourself"
            )
        if old and (stray := [n for n in old if n not in self._had]):
            raise CheckpointError(
                f"[save] {self.out} holds {stray[0]!r}, which came while the result was written; nothing is replaced, the result "
                f"is kept. Empty {self.out.name} and run the same command again"
            )
        if not old:
            self.partial.rename(self.out)  # to a free name, or over an empty folder
            sync_folder(self.out.parent)
            return
        if foreign_entry(self.out):
            raise CheckpointError(f"[save] {self.out} holds {foreign_entry(self.out)}; --force replaces checkpoints only")
        put = {"inode": identity(self.partial), "old": old}
        self._journal.append({"put": put})
        if exchange(self.partial, self.out):
            sync_folder(self.out.parent)
            delete_folder(self.partial, old)
            return
        if why := foreign(self.replaced, folder=True) or ("exists" if self.replaced.exists() else ""):
            raise not_ours(self.replaced, self.out, why)
        self.out.rename(self.replaced)
        try:
            self.partial.rename(self.out)
        except OSError:
            self.replaced.rename(self.out)
            raise
        sync_folder(self.out.parent)
        delete_folder(self.replaced, old)

    def _complete_put(self, put: Mapping[str, Any]) -> bool:
        """Complete a replacement that was interrupted; False when it had not begun."""
        inode, old = put["inode"], put["old"]
        check_ours(self.replaced, self.out, folder=True)
        if not os.path.lexists(self.out) and self.replaced.is_dir() and identity(self.partial) == inode:
            self.partial.rename(self.out)
            sync_folder(self.out.parent)
        if identity(self.out) != inode:
            return False
        for folder in (self.partial, self.replaced):
            if left := delete_folder(folder, old):
                raise not_ours(folder / left[0], self.out, "is in the replaced output, and its journal does not list it")
        return True

    def discard(self) -> None:
        """Delete everything that was written."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._shards = []
        self._empty()

    def _empty(self) -> None:
        names = set(self._names)
        with contextlib.suppress(OSError):  # a disk that refuses: what is left has a journal
            if not foreign(self.partial, folder=True) and self.partial.is_dir():
                names |= {p.name for p in self.partial.iterdir() if _SHARD.fullmatch(p.name)}
            if not delete_folder(self.partial, names):
                self._journal.remove()

    def __enter__(self) -> ResumableFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        if kind is not None and not self._shards:
            self._empty()
        self._lock.release()

    def _refused(self, error: OSError) -> WriteError:
        at = f": {error.filename}" if error.filename and Path(str(error.filename)) != self.out else ""
        return WriteError(f"[save] {self.out}: cannot be written: {error.strerror or error}{at}")


def _as_written(path: Path, shard: Mapping[str, Any]) -> bool:
    """Whether a shard on disk has the size and checksums of its line."""
    if foreign(path) or not path.exists() or path.stat().st_size != shard["size"]:
        return False
    head, first, rest = shard["sums"]
    with path.open("rb") as f:
        return bool(checksum(f, 0, head) == first and checksum(f, head, shard["size"] - head) == rest)
