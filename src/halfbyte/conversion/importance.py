"""Importance matrices: the mean square of each input of a weight over calibration text, in
llama.cpp's GGUF form.

    general.type        "imatrix"
    imatrix.datasets    names of the texts        imatrix.chunk_count, imatrix.chunk_size   of tokens
    NAME.in_sum2        float32 [e, k]: Σ x² of input j over the tokens that reached matrix e
    NAME.counts         float32 [e, 1]: how many these were

NAME is a weight of a GGUF ("blk.0.ffn_down.weight"); e is 1 but for stacks of experts. The
importance of input j is in_sum2 / counts; inputs of a matrix that no token reached count the same.
Source of the form: llama.cpp's `tools/imatrix`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.file import GGUFFile
from ..checkpoints.gguf.writer import GGUFWriter
from ..checkpoints.io.journal import make_folder
from ..checkpoints.io.output_path import check_output_path
from ..checkpoints.io.regular_file import open_regular
from ..errors import CheckpointError, FormatError, ShapeError, UnsupportedError
from ..gguf_models.pairs import pair
from ..gguf_models.to_gguf import GGUFView
from ..quantizers import has_search, mse
from ..quantizers.groups import checked_importance
from ..spec import Format
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize

SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class InputSquares:
    """The squares of one weight's inputs.

    sums    float32 [e, k], finite and at least 0
    counts  float32 [e], likewise
    """

    sums: NDArray[np.float32]
    counts: NDArray[np.float32]

    def importance(self) -> NDArray[np.float64]:
        """Σ x² / tokens, [e, k]; 1 where there was no token."""
        counts = self.counts.astype(np.float64)[:, None]
        return np.where(counts > 0, self.sums / np.where(counts > 0, counts, 1), 1.0)


@dataclass(frozen=True)
class ImportanceMatrix:
    """An importance matrix.

    entries   name of a weight in a GGUF, without ".weight" -> squares of its inputs
    datasets  names of the texts
    chunks, chunk_size  of how many tokens
    """

    entries: Mapping[str, InputSquares]
    datasets: Sequence[str] = ()
    chunks: int = 0
    chunk_size: int = 0


def read_importance(path: str | Path) -> ImportanceMatrix:
    """The importance matrix of a file that `llama-imatrix` or `halfbyte imatrix` wrote.

    Raises CheckpointError for another file, or one whose tensors do not belong together;
    FormatError, naming the entry, for sums or counts that are NaN, infinite or negative;
    UnsupportedError for the form of before 2025 (.dat).
    """
    path = Path(path)
    with open_regular(path) as file:
        if file.read(4) != b"GGUF" and path.suffix in (".dat", ".imatrix"):
            raise UnsupportedError(
                f"[imatrix] {path} is in llama.cpp's older form; its GGUF form is read: llama-imatrix --in-file {path.name} "
                "-o imatrix.gguf"
            )
    with GGUFFile(path) as gguf:
        kind = gguf.metadata.typed("general.type", "string")
        if kind != "imatrix":
            raise CheckpointError(
                f"[imatrix] {path}: general.type is {kind!r}; an importance matrix says 'imatrix'. llama-imatrix and "
                "halfbyte imatrix write one"
            )
        entries = {}
        for name in gguf.headers:
            if name.endswith(SUMS):
                weight = name.removesuffix(SUMS)
                entries[weight.removesuffix(".weight")] = _entry(gguf, path, weight)
            elif not name.endswith(COUNTS) or f"{name.removesuffix(COUNTS)}{SUMS}" not in gguf.headers:
                raise CheckpointError(f"[imatrix] {path}: tensor {name!r} is no {SUMS} or {COUNTS} of a weight that has both")
        if not entries:
            raise CheckpointError(f"[imatrix] {path}: no entry; an importance matrix has one for each weight")
        metadata = gguf.metadata
        return ImportanceMatrix(
            entries,
            tuple(metadata.typed("imatrix.datasets", "array[string]", ())),
            int(metadata.typed("imatrix.chunk_count", "integer", 0)),
            int(metadata.typed("imatrix.chunk_size", "integer", 0)),
        )


def _entry(gguf: GGUFFile, path: Path, weight: str) -> InputSquares:
    if f"{weight}{COUNTS}" not in gguf.headers:
        raise CheckpointError(f"[imatrix] {path}: {weight}{SUMS} has no {weight}{COUNTS} beside it")
    sums, counts = (gguf.dense(f"{weight}{end}").astype(np.float32) for end in (SUMS, COUNTS))
    if sums.ndim > 2 or counts.size != sums.size // max(1, sums.shape[-1]):
        raise CheckpointError(
            f"[imatrix] {path}: {weight}{SUMS} {list(sums.shape)} with {COUNTS} {list(counts.shape)}; [e, k] and [e, 1] are "
            "allowed"
        )
    for what, values in ((SUMS, sums), (COUNTS, counts)):
        checked_importance(values.reshape(-1), "imatrix", f"{path}: {weight}{what}")
    return InputSquares(sums.reshape(-1, sums.shape[-1]), counts.reshape(-1))


def check_importance_path(source: Path, path: Path, overwrite: bool) -> None:
    """CheckpointError when an importance matrix of `source` cannot be written to `path`."""
    check_output_path("imatrix", source, path, overwrite, (".gguf",))
    if path.suffix != ".gguf":
        raise CheckpointError(f"[imatrix] {path}: an importance matrix is one file named *.gguf")


def write_importance(path: str | Path, matrix: ImportanceMatrix) -> Path:
    """Write an importance matrix in llama.cpp's GGUF form; a file of this name is replaced.
    CheckpointError when it cannot be written.
    """
    path = Path(path)
    pairs = [
        pair("general.type", "string", "imatrix"),
        pair("imatrix.datasets", "array[string]", list(matrix.datasets)),
        pair("imatrix.chunk_count", "uint32", matrix.chunks),
        pair("imatrix.chunk_size", "uint32", matrix.chunk_size),
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in matrix.entries.items():
        shapes[f"{name}.weight{SUMS}"] = entry.sums.shape
        shapes[f"{name}.weight{COUNTS}"] = (len(entry.counts), 1)
    make_folder(path.absolute().parent, path)
    with GGUFWriter(path, pairs, shapes) as file:
        for name, entry in matrix.entries.items():
            file.add(f"{name}.weight{SUMS}", "F32", [np.ascontiguousarray(entry.sums, np.float32)])
            file.add(f"{name}.weight{COUNTS}", "F32", [np.ascontiguousarray(entry.counts, np.float32)])
    return path


def digest_of(path: str | Path) -> str:
    """Identifies the contents of an importance matrix: SHA-256 of its file."""
    found = hashlib.sha256()
    with open_regular(Path(path)) as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def gguf_modules(checkpoint: Checkpoint) -> dict[str, tuple[str, int | None]]:
    """Module of a checkpoint -> (module of its GGUF, which expert of a stack). A module that a GGUF
    splits has the first of its parts, whose inputs are the same.

    Raises UnsupportedError for a folder whose model has no table of names.
    """
    if isinstance(checkpoint, GGUFCheckpoint):
        return {key.removesuffix(".weight"): (key.removesuffix(".weight"), None) for key in checkpoint.keys()}  # noqa: SIM118
    view = checkpoint if isinstance(checkpoint, GGUFView) else GGUFView(checkpoint, names_only=True)
    return view.modules_of_source()


def importance_rounder(matrix: ImportanceMatrix, checkpoint: Checkpoint) -> ImportanceRounder:
    """The rounder of a checkpoint's weights. Raises as `gguf_modules`, FormatError when no module
    has an entry: the matrix belongs to another model.
    """
    home = checkpoint if isinstance(checkpoint, GGUFCheckpoint | GGUFView) else GGUFView(checkpoint, names_only=True)
    orders = home.input_orders() if isinstance(home, GGUFView) else {}
    rounder = ImportanceRounder(matrix, gguf_modules(home), orders)
    rounder.check()
    return rounder


@dataclass
class ImportanceRounder:
    """A `Rounder`: searched scales, each input's error weighted by its importance.

    matrix   importances
    modules  module of the checkpoint -> where it is in a GGUF (`gguf_modules`)
    orders   module of a GGUF -> its index of each input of x, where their order is another
    without  modules that have no entry; their inputs count the same
    """

    matrix: ImportanceMatrix
    modules: Mapping[str, tuple[str, int | None]]
    orders: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)

    def __call__(self, module: str, x: NDArray[Any], fmt: Format) -> QTensor:
        name, expert = self.modules.get(module, (module, None))
        entry = self.matrix.entries.get(name)
        if entry is None:
            self.without.append(module)
        if not has_search(fmt):
            return quantize(x, fmt)
        if entry is None:
            return mse(x, fmt)
        h = entry.importance()
        wanted = (len(x) if x.ndim == 3 else 1, x.shape[-1])
        chosen = h if expert is None else h[expert : expert + 1]
        if chosen.shape != wanted:
            raise ShapeError(
                f"[imatrix] {name}: importances {list(h.shape)} for a weight {list(x.shape)}; wanted {list(wanted)}. The matrix "
                "belongs to another model"
            )
        chosen = chosen[:, self.orders[name]] if name in self.orders else chosen
        return mse(x, fmt, chosen if x.ndim == 3 else chosen[0])

    def check(self) -> None:
        """FormatError when no module has an entry: the matrix belongs to another model."""
        if not any(name in self.matrix.entries for name, _ in self.modules.values()):
            named = ", ".join(list(self.matrix.entries)[:3])
            raise FormatError(f"[imatrix] no entry fits a weight of this checkpoint; the entries are named like {named}")
