"""Convert a whole checkpoint: packed weights are converted, dense tensors and model files copied,
or nothing is written.

Tensors are read, converted and written in order (`workers` at a time), so memory holds a few of
them. Before anything is written, the first rows of one weight of each format are tried, which finds
most losses at once. After a loss found later nothing more is written, but all weights are read.
The refusal gives each cause once, with its weights and errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.io.home import expanded
from ..checkpoints.io.journal import WriteError, make_folder
from ..checkpoints.io.output_path import check_output_path
from ..checkpoints.ledger import ACTIVATION_SCALES
from ..checkpoints.quant_config import write_config
from ..checkpoints.safetensors.sharded_writer import ResumableFolder
from ..checkpoints.safetensors.writer import SafetensorsWriter
from ..checkpoints.views.gptqmodel_gpt_oss import AlternatingRows
from ..checkpoints.views.mlx_experts import MLXExperts
from ..checkpoints.views.usual import usual
from ..errors import CheckpointError, LayoutError
from ..formats import format_named
from ..gguf_models.to_gguf import GGUFView, as_gguf
from ..gguf_models.view import ModelView, as_model, with_older_names
from ..layouts import written_layouts
from ..layouts.quant_config.writer import EMBEDDINGS, ConfigFiles, DenseTensor
from .gguf_names import RenamedLike
from .run import ConversionRun, Converted, Progress, identity, input_files, resumed_units
from .targets import Goal, goal_named
from .to_dense import DEFAULT_SHARD, QUANTIZATION_KEYS, beside_weights, carried_model_files, untied
from .unit import Rounding, Unit, from_note
from .write_gguf import gguf_template, write_gguf


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

    out             a folder; one file where its name ends in .safetensors, or .gguf for the gguf
                    layout
    to              `layout[:codec[:gN]]`
    lossy           requantize weights that no exact edge keeps
    plan            only report what would be done: nothing is written
    like            a checkpoint of the same model whose names, row orders, configuration and
                    tokenizer the result takes: for a GGUF from a folder, and for a folder from a
                    GGUF
    workers         tensors converted at a time; 0 for one a processor, at most 4
    max_shard_size  bytes of a file of a folder
    overwrite       replace what is at `out`
    progress        called as progress(done_bytes, total_bytes, key), bytes as read
    Raises LossyError, by cause, when values would change, unless `lossy`; CheckpointError when
    `out` exists or a tensor cannot be read; LayoutError when the layout cannot store a weight.
    """
    goal = goal_named(to, scale_dtype) if isinstance(to, str) else to
    checkpoint.check("convert")
    checkpoint = usual(checkpoint)
    if like is not None:
        like.check("convert")
        checkpoint = RenamedLike(checkpoint, usual(like))
    else:
        check_suffix(expanded(out), goal)
        checkpoint = as_gguf(checkpoint) if goal.writer.container == "gguf" else as_model(checkpoint, goal.layout)
        # A ModelView stacks experts itself, and a GGUF that is no model keeps its names.
        if goal.writer.engine_names and not isinstance(checkpoint, ModelView | GGUFCheckpoint):
            checkpoint = MLXExperts(checkpoint)
    return write_checkpoint(
        checkpoint,
        expanded(out),
        goal,
        lossy=lossy,
        plan=plan,
        workers=workers,
        limit=max_shard_size,
        overwrite=overwrite,
        progress=progress,
    )


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
    rounding: Rounding | None = None,
    method: Sequence[str] = (),
) -> Converted:
    """The common part of `convert_checkpoint` and `quantize_checkpoint`; `rounding` and `method` as
    for `ConversionRun`.
    """
    if goal.layout not in written_layouts():
        raise LayoutError(f"[convert] no writer for {goal.layout} checkpoints; there are {', '.join(written_layouts())}")
    check_output(checkpoint.path, out, goal, overwrite, plan, input_files(checkpoint))
    goal = goal if rounding is not None else _with_shared_params(checkpoint, goal)
    keys, dropped = _keys(checkpoint, goal)
    count = workers or min(4, os.cpu_count() or 1)
    run = ConversionRun(checkpoint, goal, keys, count, lossy, progress, rounding, method)
    if goal.writer.container == "gguf":
        gguf_template(checkpoint)  # a plan too
    if not (plan or lossy or rounding is not None):
        run.try_first_rows()
    beside, notes = ({}, []) if goal.writer.container == "gguf" else beside_weights(checkpoint, out)
    result = Converted(out, goal, dropped=dropped, notes=notes)
    result.dropped += checkpoint.left_out if isinstance(checkpoint, RenamedLike) else []
    result.notes += checkpoint.notes if isinstance(checkpoint, GGUFView) else []
    if plan:
        result.records = [u.record for u in run.units(keys, write=False)]
    elif goal.writer.container == "gguf":
        write_gguf(run, out, result)
    elif out.suffix == ".safetensors":
        _write_file(run, out, result)
    else:
        _write_folder(run, out, result, limit, beside)
    return result


def _write_folder(run: ConversionRun, out: Path, result: Converted, limit: int, beside: Mapping[str, Any]) -> None:
    checkpoint, goal = run.checkpoint, run.goal
    metadata = {"format": "halfbyte", "version": "1"} if goal.writer.container == "halfbyte" else {"format": "pt"}
    carried = _carried(checkpoint)
    with ResumableFolder(out, identity(run, limit), limit, metadata) as folder:
        units = [from_note(note) for note in folder.notes if note]
        result.resumed = len(units)
        for unit in units:
            run.step(unit.record)
        finished = {u.record.key for u in units}
        try:
            for unit in run.units([k for k in run.keys if k not in finished]):
                folder.add(run.tensors(unit), unit.record.other_nbytes, unit.note())
                units.append(replace(unit, arrays={}, outcomes=()))
            files = _config_files(units, goal)
        except WriteError:
            raise  # the disk may have space later
        except (LayoutError, CheckpointError, ValueError):
            folder.discard()  # it would happen again
            raise
        result.records = [u.record for u in units]
        result.files = folder.finish({**_json_files(checkpoint, files, goal), **beside}, carried)


def _write_file(run: ConversionRun, out: Path, result: Converted) -> None:
    own = run.goal.writer.container == "halfbyte"
    make_folder(out.absolute().parent, out)
    metadata = {"format": "halfbyte", "version": "1"} if own else {"format": "pt"}
    with SafetensorsWriter(out, metadata, 6 * len(run.keys), identity(run)) as file:
        units = resumed_units(run, file, result)
        for unit in run.units(run.keys[len(units) :]):
            for name, dtype, shape, parts in run.tensors(unit):
                file.add_blocks(name, dtype, shape, parts)
            file.unit_done(unit.note())
            units.append(replace(unit, arrays={}, outcomes=()))
        files = _config_files(units, run.goal)
        if "quantization_config" in files.entries:
            file.metadata["quantization_config"] = json.dumps(files.entries["quantization_config"])
    result.records = [u.record for u in units]
    result.files = [out.name]


def _config_files(units: Sequence[Unit], goal: Goal) -> ConfigFiles:
    packed = [p for u in units for p in u.packed]
    dense = [d for u in units for d in u.dense]
    modules = [*(p.name for p in packed), *(d.name.removesuffix(".weight") for d in dense)]
    names = [module.rpartition(".")[2] for module in modules]
    if not {"lm_head", "output"} & set(names) and set(EMBEDDINGS) & set(names):
        # A tied head has no tensor, yet a reader that packs every Linear of the model needs to know
        # to leave it dense.
        dense.append(DenseTensor("lm_head.weight", (0, 0)))
    return write_config(goal.layout, packed, dense) if packed else ConfigFiles({})


def _json_files(checkpoint: Checkpoint, files: ConfigFiles, goal: Goal) -> dict[str, Any]:
    """config.json, the source's with another quantization config, and further JSON files of the
    target.
    """
    described = isinstance(checkpoint, ModelView) or (folder_of(checkpoint) or Path()).joinpath("config.json").is_file()
    own = checkpoint.config if described else {}
    config = {**untied(without_quantization(own), checkpoint), **files.entries}
    if goal.writer.engine_names and own:
        config = with_older_names(config)
    return {**({"config.json": config} if config else {}), **files.beside}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration without quantization configs, nested ones included."""
    kept = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    return {k: without_quantization(v) if str(k).endswith("_config") and isinstance(v, dict) else v for k, v in kept.items()}


def folder_of(checkpoint: Checkpoint) -> Path | None:
    """The folder whose model files are copied; None for a checkpoint of a single file."""
    if isinstance(checkpoint, ModelView):
        return None
    path = checkpoint.like.path if isinstance(checkpoint, RenamedLike) else checkpoint.path
    return path if path.is_dir() else path.parent if path.name.endswith(".index.json") else None


def _carried(checkpoint: Checkpoint) -> dict[str, Path]:
    """Tokenizer, template and similar files to copy, by name."""
    folder = folder_of(checkpoint)
    return {} if folder is None else carried_model_files(folder, "convert")


def _keys(checkpoint: Checkpoint, goal: Goal) -> tuple[list[str], list[str]]:
    """Keys to convert, and those that are dropped."""
    if isinstance(checkpoint, AlternatingRows) and "gptqmodel" in goal.writer.producers:
        raise CheckpointError(
            f"[convert] {checkpoint.path}: GPTQModel keeps gpt-oss's gate and up as halves of alternating rows, and it alone "
            "reads a GPTQ of gpt-oss: with rows sorted by name it would read most rows wrongly. Write another layout"
        )
    keys: list[str] = []
    dropped: list[str] = []
    for info in checkpoint.infos():
        module, _, last = info.key.rpartition(".")
        if last == "pre_quant_scale" and not goal.writer.input_scales:
            raise CheckpointError(
                f"[convert] {info.key} scales the inputs of {module}, and {goal.layout} cannot store it: without it the "
                "weights are another model. Write modelopt or halfbyte"
            )
        kept_here = goal.layout == checkpoint.format or goal.writer.container == "halfbyte"
        dropped_here = last in ACTIVATION_SCALES and module in checkpoint and not kept_here
        (dropped if dropped_here else keys).append(info.key)
    return keys, dropped


def _with_shared_params(checkpoint: Checkpoint, goal: Goal) -> Goal:
    """The goal with the parameters that all weights of the checkpoint share."""
    codec = goal.target.codec
    formats = (format_named(codec),) if codec else (i.format for i in checkpoint.infos() if i.format is not None)
    return replace(goal, params=goal.writer.checkpoint_params(goal.params, formats, lambda: _zeros_are_middle(checkpoint)))


def _zeros_are_middle(checkpoint: Checkpoint) -> bool:
    """Whether every zero point is 2^(bits-1), as those of integers without any are."""
    for info in checkpoint.infos():
        fmt = info.format
        if fmt is None or (fmt.element == "int" and fmt.zero == "none"):
            continue
        zeros = checkpoint.zero_points(info.key) if fmt.zero == "int" else None
        if zeros is None or bool((zeros != 1 << (fmt.bits - 1)).any()):
            return False
    return True


def check_suffix(out: Path, goal: Goal) -> None:
    """CheckpointError when the name of `out` is not that of the target's kind of file."""
    if goal.writer.container == "gguf" and out.suffix != ".gguf":
        raise CheckpointError(f"[convert] {out}: a gguf target is one file, named *.gguf")
    if goal.writer.container != "gguf" and out.suffix == ".gguf":
        raise CheckpointError(f"[convert] {out}: {goal.layout} is written as a folder, or as one file named *.safetensors")


def check_output(source: Path, out: Path, goal: Goal, overwrite: bool, plan: bool, inputs: Iterable[Path] = ()) -> None:
    """CheckpointError when `out` is the source, is of the wrong kind, or may not be replaced. A
    plan writes nothing.
    """
    check_suffix(out, goal)
    if not plan:
        suffixes = (".gguf",) if goal.writer.container == "gguf" else (".safetensors",)
        check_output_path("convert", source, out, overwrite, suffixes, inputs)
