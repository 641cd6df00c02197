"""Save and load packed weights in halfbyte's own layout: `save(path, {name: weight})`,
`load(path)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...tensor.qtensor import QTensor
from ..base import Checkpoint, Progress
from ..io.home import expanded
from ..open import open as open_checkpoint
from .checkpoint import SafetensorsCheckpoint
from .native_layout import OwnLayout
from .writer import SafetensorsWriter

VERSION = "1"


def save(
    path: str | os.PathLike[str],
    weights: Mapping[str, QTensor | NDArray[Any]] | Checkpoint,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write packed weights and dense arrays to one safetensors file, completely or not at all.

    weights   name -> QTensor or array; a Checkpoint is read and written one tensor at a time
    metadata  strings kept in the header
    progress  called as progress(done, total, name) before each weight
    Raises CheckpointError when a name or dtype cannot be stored, the file system refuses, or the
    ledger of a Checkpoint does not account for everything in it.

    >>> save("w.safetensors", {"layer": quantize(w, "mxfp4"), "layer.bias": b})      # doctest: +SKIP
    """
    if isinstance(weights, Checkpoint):
        weights.check("save")
    names = tuple(weights.keys())
    if isinstance(weights, Checkpoint):
        _check_path(expanded(path), weights)
    layout = OwnLayout()
    with SafetensorsWriter(path, {**(metadata or {}), "format": "halfbyte", "version": VERSION}, expected=4 * len(names)) as out:
        for done, name in enumerate(names):
            if progress is not None:
                progress(done, len(names), name)
            weight = weights[name]
            for key, array in _tensors(name, weight, layout):
                out.add(key, array)
        if progress is not None:
            progress(len(names), len(names), "")


def _check_path(path: Path, checkpoint: Checkpoint) -> None:
    """CheckpointError when `path` is a file of the checkpoint, by whatever name."""
    base = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for name in {f for info in checkpoint.infos() for f in info.files}:
        if path.exists() and (base / name).exists() and path.samefile(base / name):
            raise CheckpointError(f"[save] {path} is {base / name}, which is read; give another path")


def _tensors(name: str, weight: QTensor | NDArray[Any], layout: OwnLayout) -> Iterable[tuple[str, NDArray[Any]]]:
    if not isinstance(weight, QTensor):
        if not isinstance(weight, np.ndarray | np.generic):
            raise CheckpointError(f"[save] {name!r} is a {type(weight).__name__}; a QTensor or a NumPy array is written")
        return [(name, np.asarray(weight))]
    return [(f"{name}.{part}", array) for part, array in layout.pack(weight, {}).items()]


def load(path: str | os.PathLike[str], *, mapped: bool = False) -> dict[str, QTensor | NDArray[Any]]:
    """Everything in a file that `save` wrote, in memory.

    mapped  True: arrays are views of the mapped file, whose data are read when they are used. A
            program that truncates the file meanwhile ends this one with SIGBUS
    Raises CheckpointError for a damaged file, and for one that `save` did not write (`open` reads
    those).
    """
    checkpoint = open_checkpoint(Path(path))
    if checkpoint.metadata.get("format") != "halfbyte":
        raise CheckpointError(f"[load] {path} was not written by halfbyte.save ({checkpoint.format}); use halfbyte.open")
    if checkpoint.metadata.get("version") != VERSION:
        raise CheckpointError(f"[load] {path}: version {checkpoint.metadata.get('version')!r}; this halfbyte reads {VERSION!r}")
    if isinstance(checkpoint, SafetensorsCheckpoint):
        for file in checkpoint.shards.files.values():
            file.mapped = mapped
    return {key: checkpoint[key] for key in checkpoint}
