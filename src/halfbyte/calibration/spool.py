"""Finished layers of a calibration on disk, beside its result, so that an interrupted calibration
resumes after the last of them.

    .OUT.calibration.journal          the job's key, then one line for each finished layer
    .OUT.calibration.lock             locked by the run
    .OUT.calibration/00003.layer      its packed weights and the changed dense tensors, as `save`
                                      writes them
    .OUT.calibration/00003.hidden     its outputs, float32; of the last finished layer only

A layer counts as finished when its line exists and its files have the sizes in the line. Hidden
states are restored exactly, so a resumed calibration gives the same result bit for bit. A journal
of another job (another source, recipe, text, method or option) is discarded. The folder is deleted
when the result is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
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
from ..checkpoints.io.journal import Journal, Lock, make_folder, plain
from ..checkpoints.io.safe_files import check_ours, delete, delete_folder, not_ours
from ..tensor.qtensor import QTensor

_OURS = re.compile(r"\.?\d{5,6}\.(layer|hidden)(\.partial(\.journal(\.new)?|\.lock)?)?")
"""Names of files of the folder, those of an interrupted `save` too."""


@dataclass
class LayerResult:
    """The result of one layer.

    weights   module of the checkpoint -> packed weight
    replaced  changed dense tensors, by key
    notes     sentences
    uncalibrated   modules that saw no token
    """

    weights: dict[str, QTensor] = field(default_factory=dict)
    replaced: dict[str, NDArray[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    uncalibrated: list[str] = field(default_factory=list)


class Spool:
    """The folder for the result `out`. A context manager: an exception keeps the folder for
    resuming, else it is deleted.

    Raises CheckpointError when another process uses it, WriteError when writing fails, NotOursError
    for a folder or a file under these names that no run wrote.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = self.out.with_name(f".{self.out.name}.calibration")
        self._lines: list[dict[str, Any]] = []
        make_folder(self.out.parent, self.out)
        self._lock = Lock(self.out.with_name(f".{self.out.name}.calibration.lock"), self.out)
        self._journal = Journal(self.out.with_name(f".{self.out.name}.calibration.journal"), self.out)
        try:
            self._check_folder()
        except BaseException:
            self._lock.release()
            raise

    def _check_folder(self) -> None:
        """NotOursError unless the folder is missing, empty, or that of an earlier run."""
        known = self._journal.exists()
        check_ours(self.folder, self.out, folder=True)
        names = [p.name for p in self.folder.iterdir()] if self.folder.is_dir() else []
        if names and not known:
            raise not_ours(self.folder, self.out, "has no journal beside it")
        if stray := [n for n in names if not _OURS.fullmatch(n)]:
            raise not_ours(self.folder / stray[0], self.out, "is in the temporary folder, and no run writes such a file")

    def resume(self, work: Mapping[str, Any]) -> list[LayerResult]:
        """The finished layers of an earlier run of the same job, in order, weights mapped from
        disk.
        """
        known = plain(work)
        lines = self._journal.read()
        self._lines = []
        for number, line in enumerate(lines[1:] if lines[:1] == [known] else []):
            if not self._whole(_layer(number), line["nbytes"]):
                break
            self._lines.append(line)
        # Hidden states of earlier layers may have been deleted.
        while self._lines and not self._whole(_hidden(len(self._lines) - 1), self._lines[-1]["hidden_nbytes"]):
            self._lines.pop()
        kept = {*map(_layer, range(len(self._lines))), _hidden(len(self._lines) - 1)}
        self._journal.start([known, *self._lines])
        make_folder(self.folder, self.out)
        delete(p for p in self.folder.iterdir() if p.name not in kept)
        return [self._done(number, line) for number, line in enumerate(self._lines)]

    def hidden(self, device: str) -> list[Tensor]:
        """The outputs of the last finished layer."""
        stored = load(self.folder / _hidden(len(self._lines) - 1), mapped=True)
        return [torch.from_numpy(np.array(stored[str(i)])).to(device) for i in range(len(stored))]

    def add(self, done: LayerResult, hidden: Sequence[Tensor]) -> LayerResult:
        """Store the next layer. Returns it with its weights mapped from disk."""
        number = len(self._lines)
        save(self.folder / _layer(number), {**done.weights, **done.replaced})
        save(self.folder / _hidden(number), {str(i): h.float().cpu().numpy() for i, h in enumerate(hidden)})
        line = {
            "nbytes": self._size(_layer(number)),
            "hidden_nbytes": self._size(_hidden(number)),
            "notes": done.notes,
            "uncalibrated": done.uncalibrated,
        }
        self._journal.append(line)
        self._lines.append(line)
        (self.folder / _hidden(number - 1)).unlink(missing_ok=True)
        return self._done(number, line)

    def _done(self, number: int, line: Mapping[str, Any]) -> LayerResult:
        done = LayerResult(notes=list(line["notes"]), uncalibrated=list(line["uncalibrated"]))
        for name, value in load(self.folder / _layer(number), mapped=True).items():
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
        # Layers of an earlier run are kept when this run ended before it read them.
        if kind is None or len(self._journal.read()) < 2:
            names = [p.name for p in self.folder.iterdir() if _OURS.fullmatch(p.name)] if self.folder.is_dir() else []
            delete_folder(self.folder, names)
            self._journal.remove()
        self._lock.release()


def _layer(number: int) -> str:
    return f"{number:05d}.layer"


def _hidden(number: int) -> str:
    return f"{number:05d}.hidden"


def job_key(checkpoint: Checkpoint, recipe: Any, name: str) -> dict[str, Any]:
    """The key that identifies a job: the source's files and configuration, the recipe, and the name
    of method, options, device type and tokens.
    """
    path = checkpoint.path.resolve()
    base = path if path.is_dir() else path.parent
    files = sorted({f for info in checkpoint.infos() for f in info.files})
    stats = [(f, (base / f).stat()) for f in files if (base / f).is_file()]
    config = json.dumps(checkpoint.config, sort_keys=True, default=str)
    return {
        "source": str(path), "config": hashlib.sha256(config.encode()).hexdigest()[:16],
        "files": [[f, s.st_size, s.st_mtime_ns] for f, s in stats],
        "to": str(recipe.goal), "params": dict(recipe.goal.params), "scale_dtype": recipe.goal.scale_dtype,
        "mix": recipe.mix, "rules": [r.text for r in recipe.rules], "how": name, "version": 1,
    }  # fmt: skip
