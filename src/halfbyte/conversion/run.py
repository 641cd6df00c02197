"""A run of `convert` or `quantize` over the keys of a checkpoint: convert in order, collect losses,
count progress, resume.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.io.resumable_file import ResumableFile
from ..errors import LayoutError
from ..layouts import LAYOUTS
from ..numerics.background import Background, Task
from ..spec import Format
from ..tensor.qtensor import QTensor
from .edges import convert_weight, refusal
from .gguf_names import RenamedLike
from .outcome import KINDS, Outcome
from .source_files import source_files, source_identity
from .targets import Goal
from .unit import COPIED, QUANTIZED, Record, Rounding, Unit, blocks, convert_key, from_note

IN_FLIGHT = 1 << 27
"""Most bytes read ahead of the writer, or one tensor."""
FIRST_ROWS = 256
"""Rows of a weight that `try_first_rows` converts: whole words and tiles of every layout."""
Progress = Callable[[int, int, str], None]


@dataclass
class Converted:
    """The result of `convert_checkpoint`, or of its plan.

    records  one per key, in file order
    dropped  tensors that are not written: scales of activations, used by the source's own kernels
             only
    notes    remarks for the user of the result
    resumed  keys that an earlier, interrupted run had already written
    """

    path: Path
    goal: Goal
    records: list[Record] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resumed: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Keys of each kind, zeros included."""
        found = Counter(r.kind for r in self.records)
        return {k: found[k] for k in (*KINDS, QUANTIZED, COPIED) if k != QUANTIZED or found[k]}

    @property
    def nbytes(self) -> int:
        return sum(r.other_nbytes for r in self.records)

    def record(self) -> dict[str, Any]:
        """The summary as plain values."""
        return {
            "record": "converted", "path": str(self.path), "to": str(self.goal), "files": self.files, "nbytes": self.nbytes,
            **self.counts, "resumed": self.resumed, "dropped": self.dropped, "notes": self.notes,
        }  # fmt: skip


class ConversionRun:
    """Converts the keys of a checkpoint in order, several at a time.

    rounding  rounds dense weights (`quantize_checkpoint`); None leaves them as they are
    method    words that name how weights are rounded, part of the identity of a run that can be
              resumed
    lossy     allow the requantization of weights that no exact edge keeps
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        goal: Goal,
        keys: Sequence[str],
        workers: int,
        lossy: bool,
        progress: Progress | None,
        rounding: Rounding | None = None,
        method: Sequence[str] = (),
    ) -> None:
        self.checkpoint = checkpoint
        self.goal = goal
        self.keys = keys
        self.workers = workers
        self.lossy = lossy
        self.progress = progress
        self.rounding = rounding
        self.method = list(method)
        self.total = sum(checkpoint.info(k).nbytes for k in keys)
        self.done = 0
        self.lost: list[tuple[str, Outcome]] = []

    def units(self, keys: Sequence[str], write: bool = True) -> Iterator[Unit]:
        """Converted units in order. With `write`, nothing is yielded after the first loss that is
        not allowed, and the refusal is raised after the last key.
        """
        for unit in self._ordered(keys, write):
            if unit.record.kind == "lossy" and not self.lossy and write:
                self.lost += [(unit.record.key, o) for o in unit.outcomes if o.kind == "lossy"][:1]
            if not self.lost:
                yield unit
            self.step(unit.record)
        if self.lost:
            raise refusal(self.goal, self.lost)

    def try_first_rows(self) -> None:
        """LossyError when one weight of some format has no exact edge, found from its first rows.

        The smallest weight of each format is tried: a weight is exact only where its rows are. What
        a layout cannot store at all is left to the conversion, which names the weight.
        """
        smallest: dict[Format, TensorInfo] = {}
        counts: Counter[Format] = Counter()
        for info in map(self.checkpoint.info, self.keys):
            if info.format is not None:
                counts[info.format] += 1
                if info.format not in smallest or info.nbytes < smallest[info.format].nbytes:
                    smallest[info.format] = info
        lost: list[tuple[str, Outcome]] = []
        for info in smallest.values():
            with contextlib.suppress(LayoutError):
                outcome = convert_weight(_first_rows(self.checkpoint[info.key], self.goal), self.goal, info.key)
                lost += [(info.key, outcome)] if outcome.kind == "lossy" else []
        if lost:
            number = {info.key: counts[fmt] for fmt, info in smallest.items()}
            raise refusal(self.goal, lost, {key: number[key] for key, _ in lost})

    def planned(self, keys: Sequence[str]) -> Iterator[Unit]:
        """Units without arrays, not counted as done."""
        yield from self._ordered(keys, write=False)

    def step(self, record: Record) -> None:
        """Count a key as done."""
        self.done += record.nbytes
        if self.progress is not None:
            self.progress(self.done, self.total, record.key)

    def _ordered(self, keys: Sequence[str], write: bool) -> Iterator[Unit]:
        if self.workers <= 1:
            for key in keys:
                yield convert_key(self.checkpoint, key, self.goal, write, self.rounding)
            return
        with Background(self.workers) as background:
            waiting: deque[tuple[int, Task[Unit]]] = deque()
            for key in keys:
                size = self.checkpoint.info(key).nbytes
                while waiting and (len(waiting) > self.workers or sum(n for n, _ in waiting) + size > IN_FLIGHT):
                    yield waiting.popleft()[1].result()
                self.checkpoint.fetch(key)
                waiting.append((size, background.submit(convert_key, self.checkpoint, key, self.goal, write, self.rounding)))
            while waiting:
                yield waiting.popleft()[1].result()

    def tensors(self, unit: Unit) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...], Iterator[np.ndarray[Any, Any]]]]:
        """The arguments of a writer: name, dtype, shape, blocks."""
        for name, array in unit.arrays.items():
            yield name, array.dtype, array.shape, blocks(array)


def _first_rows(weight: Any, goal: Goal) -> QTensor:
    """At most FIRST_ROWS rows of a weight, of one expert of a stack; all of it where groups do not
    run along rows.
    """
    if weight.format.grouping != "row" or weight.format.composite or weight.format.scale == "nested" or not weight.shape[0]:
        return cast(QTensor, weight)
    if weight.ndim > 2:
        weight = weight[0] if LAYOUTS[goal.layout].splits_stacks else weight[:1]
    return cast(QTensor, weight.rows(0, min(FIRST_ROWS, weight.shape[-2])))


def resumed_units(run: ConversionRun, file: ResumableFile, result: Converted) -> list[Unit]:
    """The units that an earlier run had written into a file, counted as done."""
    units = [from_note(note) for note in file.notes]
    result.resumed = len(units)
    for unit in units:
        run.step(unit.record)
    return units


def input_files(checkpoint: Checkpoint) -> list[Path]:
    """Every weight file that is read, of the model that gives names too."""
    files = source_files(checkpoint)
    return files + source_files(checkpoint.like) if isinstance(checkpoint, RenamedLike) else files


def identity(run: ConversionRun, limit: int = 0) -> dict[str, Any]:
    """What makes two runs the same run."""
    like = source_identity(run.checkpoint.like) if isinstance(run.checkpoint, RenamedLike) else ""
    return {
        **source_identity(run.checkpoint), "to": str(run.goal), "params": dict(run.goal.params),
        "scale_dtype": run.goal.scale_dtype, "how": run.method, "like": like, "lossy": run.lossy, "limit": limit, "version": 3,
    }  # fmt: skip
