"""Whole checkpoints: every packed weight converted, dense tensors and files carried along, or nothing written.

Tensors are read, converted and written one after another (`workers` at a time), so memory stays at a few of them. A weight
that has no exact or equal edge stops the writing, not the reading: the refusal at the end names all of them.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoints import Checkpoint
from ..checkpoints.io.journal import WriteError, make_folder
from ..checkpoints.io.output_path import CARRIED, check_place
from ..checkpoints.io.resumable_file import StreamedFile
from ..checkpoints.quant_config.write import CONFIGS, ConfigFiles
from ..checkpoints.safetensors.folder import SIDE_CONFIGS
from ..checkpoints.safetensors.sharded_writer import ResumableFolder
from ..checkpoints.safetensors.writer import SafetensorsWriter
from ..checkpoints.views.gptqmodel_gpt_oss import AlternatingRows, rows_by_name
from ..errors import CheckpointError, LayoutError
from .gguf_names import Relaid
from .outcome import KINDS, Outcome
from .targets import Goal, goal_named
from .tensor import refusal
from .to_dense import ACTIVATION_SCALES, DEFAULT_SHARD, QUANTIZATION_KEYS
from .unit import COPIED, QUANTIZED, Record, Unit, blocks, convert_key, from_note

if TYPE_CHECKING:
    from .quantize import Quantizing

IN_FLIGHT = 1 << 27
"""Bytes read ahead of the writer, at most, or one tensor."""
Progress = Callable[[int, int, str], None]


@dataclass
class Converted:
    """What `convert_checkpoint` did, or would do.

    records  one a key, in file order
    dropped  tensors left out: scales of activations, which belong to the source's own kernels
    notes    what whoever loads the result should know
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


def convert_checkpoint(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    to: str | Goal,
    *,
    lossy: bool = False,
    plan: bool = False,
    like: Checkpoint | None = None,
    scale_dtype: str | None = None,
    workers: int = 0,
    max_shard_size: int = DEFAULT_SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write `checkpoint` to `out` in another layout.

    out             a folder; one file where its name ends in .safetensors, or .gguf for the gguf layout
    to              `layout[:codec[:gN]]`
    lossy           requantize weights that no edge keeps
    plan            only say what would be done: nothing is written
    like            a checkpoint of the same model whose names, row orders, configuration and tokenizer the result takes: for a
                    GGUF from a folder, and for a folder from a GGUF
    workers         tensors converted at a time; 0 for one a processor, at most 4
    max_shard_size  bytes of a file of a folder
    overwrite       replace what is at `out`
    progress        called as progress(done_bytes, total_bytes, key), bytes as read
    Raises LossyError naming every weight that would lose, unless `lossy`; CheckpointError when `out` exists or a tensor cannot
    be read; LayoutError when a weight has no place in the layout.
    """
    goal = goal_named(to, scale_dtype) if isinstance(to, str) else to
    checkpoint = rows_by_name(checkpoint)
    if like is not None:
        checkpoint = Relaid(checkpoint, rows_by_name(like))
    return write_checkpoint(
        checkpoint, Path(out), goal, lossy=lossy, plan=plan, workers=workers, limit=max_shard_size, overwrite=overwrite,
        progress=progress,
    )  # fmt: skip


def write_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    goal: Goal,
    *,
    lossy: bool,
    plan: bool,
    workers: int,
    limit: int,
    overwrite: bool,
    progress: Progress | None,
    quantizing: Quantizing | None = None,
    named: Sequence[str] = (),
) -> Converted:
    """`convert_checkpoint`, and `quantize_checkpoint` with what rounds dense weights and words that name how."""
    if goal.layout != "gguf" and goal.layout not in CONFIGS:
        raise LayoutError(f"[convert] no writer for {goal.layout} checkpoints; there are {', '.join((*CONFIGS, 'gguf'))}")
    check_out(checkpoint.path, out, goal, overwrite, plan)
    goal = goal if quantizing is not None else _settled(checkpoint, goal)
    keys, dropped = _keys(checkpoint, goal)
    result = Converted(out, goal, dropped=dropped, notes=_notes(checkpoint, goal))
    result.dropped += checkpoint.left_out if isinstance(checkpoint, Relaid) else []
    count = workers or min(4, os.cpu_count() or 1)
    work = _Work(checkpoint, goal, keys, count, lossy, progress, quantizing, named)
    if goal.layout == "gguf":
        from .write_gguf import gguf_to_go_by, write_gguf

        gguf_to_go_by(checkpoint)  # a plan too
    if plan:
        result.records = [u.record for u in work.units(keys, write=False)]
    elif goal.layout == "gguf":
        write_gguf(work, out, result)
    elif out.suffix == ".safetensors":
        _write_file(work, out, result)
    else:
        _write_folder(work, out, result, limit)
    return result


class _Work:
    """The conversion of keys in order, several at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        goal: Goal,
        keys: Sequence[str],
        workers: int,
        lossy: bool,
        progress: Progress | None,
        quantizing: Quantizing | None = None,
        named: Sequence[str] = (),
    ) -> None:
        self.checkpoint = checkpoint
        self.goal = goal
        self.keys = keys
        self.workers = workers
        self.lossy = lossy
        self.progress = progress
        self.quantizing = quantizing
        self.named = list(named)
        self.total = sum(checkpoint.info(k).nbytes for k in keys)
        self.done = 0
        self.lost: list[tuple[str, Outcome]] = []

    def units(self, keys: Sequence[str], write: bool = True) -> Iterator[Unit]:
        """Converted units in order. With `write`, stops yielding at the first loss that is not allowed and raises at the end."""
        for unit in self._ordered(keys, write):
            if unit.record.kind == "lossy" and not self.lossy and write:
                self.lost += [(unit.record.key, o) for o in unit.outcomes if o.kind == "lossy"][:1]
            if not self.lost:
                yield unit
            self.checkpoint.release(unit.record.key)
            self.step(unit.record)
        if self.lost:
            raise refusal(self.goal, self.lost)

    def planned(self, keys: Sequence[str]) -> Iterator[Unit]:
        """Units as they would be, without counting them as done."""
        for unit in self._ordered(keys, write=False):
            yield unit
            self.checkpoint.release(unit.record.key)

    def step(self, record: Record) -> None:
        """Count a key as done."""
        self.done += record.nbytes
        if self.progress is not None:
            self.progress(self.done, self.total, record.key)

    def _ordered(self, keys: Sequence[str], write: bool) -> Iterator[Unit]:
        if self.workers <= 1:
            for key in keys:
                yield convert_key(self.checkpoint, key, self.goal, write, self.quantizing)
            return
        with ThreadPoolExecutor(self.workers) as pool:
            waiting: deque[tuple[int, Future[Unit]]] = deque()
            try:
                for key in keys:
                    size = self.checkpoint.info(key).nbytes
                    while waiting and (len(waiting) > self.workers or sum(n for n, _ in waiting) + size > IN_FLIGHT):
                        yield waiting.popleft()[1].result()
                    self.checkpoint.fetch(key)
                    future = pool.submit(convert_key, self.checkpoint, key, self.goal, write, self.quantizing)
                    waiting.append((size, future))
                while waiting:
                    yield waiting.popleft()[1].result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def tensors(self, unit: Unit) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...], Iterator[np.ndarray[Any, Any]]]]:
        """What a writer takes: name, dtype, shape, blocks."""
        key = unit.record.key
        for name, array in unit.arrays.items():
            yield name, array.dtype, array.shape, blocks(array, lambda: self.checkpoint.release(key))


def _write_folder(work: _Work, out: Path, result: Converted, limit: int) -> None:
    checkpoint, goal = work.checkpoint, work.goal
    metadata = {"format": "halfbyte", "version": "1"} if goal.layout == "halfbyte" else {"format": "pt"}
    with ResumableFolder(out, identity(work, limit), limit, metadata) as folder:
        units = [from_note(note) for note in folder.notes if note]
        result.resumed = len(units)
        for unit in units:
            work.step(unit.record)
        finished = {u.record.key for u in units}
        try:
            for unit in work.units([k for k in work.keys if k not in finished]):
                folder.add(work.tensors(unit), unit.record.other_nbytes, unit.note())
                units.append(replace(unit, arrays={}, outcomes=()))
            files = _config_files(units, goal)
        except WriteError:
            raise  # there may be room later
        except (LayoutError, CheckpointError, ValueError):
            folder.discard()  # the same would happen again
            raise
        result.records = [u.record for u in units]
        result.files = folder.finish(_json_files(checkpoint, files), _carried(checkpoint))


def _write_file(work: _Work, out: Path, result: Converted) -> None:
    own = work.goal.layout == "halfbyte"
    make_folder(out.absolute().parent, out)
    metadata = {"format": "halfbyte", "version": "1"} if own else {"format": "pt"}
    with SafetensorsWriter(out, metadata, 6 * len(work.keys), identity(work)) as file:
        units = resumed_units(work, file, result)
        for unit in work.units(work.keys[len(units) :]):
            for name, dtype, shape, parts in work.tensors(unit):
                file.add_blocks(name, dtype, shape, parts)
            file.unit_done(unit.note())
            units.append(replace(unit, arrays={}, outcomes=()))
        files = _config_files(units, work.goal)
        if "quantization_config" in files.entries:
            file.metadata["quantization_config"] = json.dumps(files.entries["quantization_config"])
    result.records = [u.record for u in units]
    result.files = [out.name]


def resumed_units(work: _Work, file: StreamedFile, result: Converted) -> list[Unit]:
    """The units that an earlier run had written into a file, counted as done."""
    units = [from_note(note) for note in file.notes]
    result.resumed = len(units)
    for unit in units:
        work.step(unit.record)
    return units


def _config_files(units: Sequence[Unit], goal: Goal) -> ConfigFiles:
    packed = [p for u in units for p in u.packed]
    return CONFIGS[goal.layout](packed, [d for u in units for d in u.dense]) if packed else ConfigFiles({})


def _json_files(checkpoint: Checkpoint, files: ConfigFiles) -> dict[str, Any]:
    """config.json, the source's own with another quantization, and what stands beside it."""
    own = checkpoint.config if (folder_of(checkpoint) or Path()).joinpath("config.json").is_file() else {}
    config = {**without_quantization(own), **files.entries}
    return {**({"config.json": config} if config else {}), **files.beside}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration without what describes packed weights, in its parts too."""
    kept = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    return {k: without_quantization(v) if k.endswith("_config") and isinstance(v, dict) else v for k, v in kept.items()}


def folder_of(checkpoint: Checkpoint) -> Path | None:
    """The folder whose files go along: the checkpoint's own, not that of a lone file."""
    path = checkpoint.like.path if isinstance(checkpoint, Relaid) else checkpoint.path
    return path if path.is_dir() else path.parent if path.name.endswith(".index.json") else None


def _carried(checkpoint: Checkpoint) -> dict[str, Path]:
    """Tokenizer, template and the like, by name."""
    folder = folder_of(checkpoint)
    if folder is None:
        return {}
    skipped = (*SIDE_CONFIGS, "config.json")
    return {
        p.name: p
        for p in sorted(folder.iterdir())
        if p.suffix in CARRIED and p.is_file() and p.name not in skipped and not p.name.endswith(".index.json")
    }


def _keys(checkpoint: Checkpoint, goal: Goal) -> tuple[list[str], list[str]]:
    """Keys to convert, and those left out."""
    if isinstance(checkpoint, AlternatingRows) and goal.layout == "gptq":
        raise CheckpointError(
            f"[convert] {checkpoint.path}: GPTQModel keeps gpt-oss's gate and up as halves of alternating rows, and it alone "
            "reads a GPTQ of gpt-oss: written by name, it would take most rows for others. Write another layout"
        )
    keys: list[str] = []
    dropped: list[str] = []
    for info in checkpoint.infos():
        module, _, last = info.key.rpartition(".")
        if last == "pre_quant_scale" and goal.layout not in ("modelopt", "halfbyte"):
            raise CheckpointError(
                f"[convert] {info.key} scales the inputs of {module}, and {goal.layout} has no place for it: the weights alone "
                "are another model. Write modelopt or halfbyte"
            )
        aside = last in ACTIVATION_SCALES and module in checkpoint and goal.layout not in (checkpoint.format, "halfbyte")
        (dropped if aside else keys).append(info.key)
    return keys, dropped


def _settled(checkpoint: Checkpoint, goal: Goal) -> Goal:
    """GPTQ's zero points are of one version in all of a checkpoint: v1, which everything reads, where all are the middle code.

    Others are written as v2: v1 has no code for 0, and GPTQModel refuses asymmetric v1 files of any writer but itself.
    """
    if goal.layout != "gptq" or "checkpoint_format" in goal.params:
        return goal
    version = "gptq"
    for info in checkpoint.infos():
        fmt = info.format
        if fmt is None or (fmt.element == "int" and fmt.zero == "none"):
            continue
        zeros = checkpoint.zero_points(info.key) if fmt.zero == "int" else None
        if zeros is None or bool((zeros != 1 << (fmt.bits - 1)).any()):
            version = "gptq_v2"
            break
        checkpoint.release(info.key)
    return replace(goal, params={**goal.params, "checkpoint_format": version})


def _notes(checkpoint: Checkpoint, goal: Goal) -> list[str]:
    if checkpoint.format == "gguf" and not isinstance(checkpoint, Relaid) and goal.layout not in ("gguf", "halfbyte"):
        text = "names stay GGUF's and no tokenizer is written: halfbyte reads the result; engines that load"
        return [f"{text} {goal.layout} want the model's own names and configuration"]
    return []


def identity(work: _Work, limit: int = 0) -> dict[str, Any]:
    """What makes two runs the same work."""
    path = work.checkpoint.path.resolve()
    files = sorted({f for k in work.keys for f in work.checkpoint.info(k).files})
    base = path if path.is_dir() else path.parent
    like = str(work.checkpoint.like.path.resolve()) if isinstance(work.checkpoint, Relaid) else ""
    stats = [[f, (base / f).stat().st_size, (base / f).stat().st_mtime_ns] for f in files if (base / f).is_file()]
    return {
        "source": str(path), "files": stats, "to": str(work.goal), "params": dict(work.goal.params),
        "scale_dtype": work.goal.scale_dtype, "how": work.named, "like": like, "lossy": work.lossy, "limit": limit, "version": 1,
    }  # fmt: skip


def check_out(source: Path, out: Path, goal: Goal, overwrite: bool, plan: bool) -> None:
    """CheckpointError when `out` is the source, is of the wrong kind, or may not be replaced. A plan writes nothing."""
    if goal.layout == "gguf" and out.suffix != ".gguf":
        raise CheckpointError(f"[convert] {out}: a gguf target is one file, named *.gguf")
    if goal.layout != "gguf" and out.suffix == ".gguf":
        raise CheckpointError(f"[convert] {out}: {goal.layout} is written as a folder, or as one file named *.safetensors")
    if not plan:
        check_place("convert", source, out, overwrite, (".gguf",) if goal.layout == "gguf" else (".safetensors",))
