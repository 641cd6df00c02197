"""Layers that a walk has done, in a folder beside its result, so that an interrupted walk goes on behind the last of them.

    .OUT.calibration/journal.jsonl    first what is being done, then a line a finished layer
    .OUT.calibration/00003.layer      its packed weights and the dense tensors that have changed, as `save` writes them
    .OUT.calibration/00003.hidden     what it gives to the next layer, float32; of the last layer done only

A layer counts as done when its line is there and its files have the sizes that the line says. Hidden states come back as the same
numbers, so the result of a walk in pieces is that of a walk in one go, bit for bit. A journal of other work (another source,
recipe, text, method, option) is thrown away. The folder goes when the result is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor

from ..checkpoints import Checkpoint, load, save
from ..checkpoints.io.journal import append_line, make_folder, plain, read_lines, take_lock
from ..tensor.qtensor import QTensor

JOURNAL = "journal.jsonl"
LOCK = "lock"


@dataclass
class Done:
    """What one layer came to.

    weights   module of the checkpoint -> packed weight
    replaced  dense tensors that take another value, by key
    notes     sentences
    starved   modules that saw no token
    """

    weights: dict[str, QTensor] = field(default_factory=dict)
    replaced: dict[str, NDArray[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)


class Spool:
    """The folder for the result `out`. A context manager: left by an exception it keeps what can be gone on with, else it goes.

    Raises CheckpointError when another process is at it, WriteError when the disk refuses.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = self.out.with_name(f".{self.out.name}.calibration")
        self._lines: list[dict[str, Any]] = []
        make_folder(self.folder, self.out)
        take_lock(self.folder / LOCK, self.out)

    def resume(self, work: Mapping[str, Any]) -> list[Done]:
        """What an earlier run of the same work had done, layers in order, weights mapped from disk."""
        known = plain(work)
        lines = read_lines(self.folder / JOURNAL)
        self._lines = []
        for number, line in enumerate(lines[1:] if lines[:1] == [known] else []):
            if not self._whole(_layer(number), line["nbytes"]):
                break
            self._lines.append(line)
        # Hidden states before the last line may be gone already.
        while self._lines and not self._whole(_hidden(len(self._lines) - 1), self._lines[-1]["hidden_nbytes"]):
            self._lines.pop()
        kept = {LOCK, JOURNAL, *map(_layer, range(len(self._lines))), _hidden(len(self._lines) - 1)}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()
        new = self.folder / f"{JOURNAL}.new"  # a disk that is full leaves the old one
        new.write_text("".join(json.dumps(x) + "\n" for x in (known, *self._lines)), encoding="utf-8")
        new.replace(self.folder / JOURNAL)
        return [self._done(number, line) for number, line in enumerate(self._lines)]

    def hidden(self, device: str) -> list[Tensor]:
        """What the last layer done gives to the next."""
        stored = load(self.folder / _hidden(len(self._lines) - 1))
        return [torch.from_numpy(np.array(stored[str(i)])).to(device) for i in range(len(stored))]

    def add(self, done: Done, hidden: Sequence[Tensor]) -> Done:
        """Keep the next layer. Returns it with its weights mapped from disk."""
        number = len(self._lines)
        save(self.folder / _layer(number), {**done.weights, **done.replaced})
        save(self.folder / _hidden(number), {str(i): h.float().cpu().numpy() for i, h in enumerate(hidden)})
        line = {
            "nbytes": self._size(_layer(number)), "hidden_nbytes": self._size(_hidden(number)), "notes": done.notes,
            "starved": done.starved,
        }  # fmt: skip
        append_line(self.folder / JOURNAL, line)
        self._lines.append(line)
        (self.folder / _hidden(number - 1)).unlink(missing_ok=True)
        return self._done(number, line)

    def _done(self, number: int, line: Mapping[str, Any]) -> Done:
        done = Done(notes=list(line["notes"]), starved=list(line["starved"]))
        for name, value in load(self.folder / _layer(number)).items():
            if isinstance(value, QTensor):
                done.weights[name] = value
            else:
                done.replaced[name] = value
        return done

    def _size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def _whole(self, name: str, nbytes: int) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == nbytes

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # An earlier run's layers stay where this one ended before it asked for them.
        if kind is None or len(read_lines(self.folder / JOURNAL)) < 2:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            (self.folder / LOCK).unlink(missing_ok=True)


def _layer(number: int) -> str:
    return f"{number:05d}.layer"


def _hidden(number: int) -> str:
    return f"{number:05d}.hidden"


def work_of(checkpoint: Checkpoint, recipe: Any, name: str) -> dict[str, Any]:
    """What makes two walks the same: the source's files and configuration, the recipe, and the name of method, options, device
    kind and tokens."""
    path = checkpoint.path.resolve()
    base = path if path.is_dir() else path.parent
    files = sorted({f for info in checkpoint.infos() for f in info.files})
    stats = [(f, (base / f).stat()) for f in files if (base / f).is_file()]
    config = json.dumps(checkpoint.config, sort_keys=True, default=str)
    return {
        "source": str(path), "config": hashlib.sha256(config.encode()).hexdigest()[:16],
        "files": [[f, s.st_size, s.st_mtime_ns] for f, s in stats],
        "to": str(recipe.goal), "params": dict(recipe.goal.params), "scale_dtype": recipe.goal.scale_dtype,
        "rules": [r.text for r in recipe.rules], "how": name, "version": 1,
    }  # fmt: skip
