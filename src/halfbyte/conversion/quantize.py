"""Quantize a dense checkpoint: the weights of the recipe are rounded, all other tensors are copied.

Writers, shards and resumption are those of `convert`. The rounding is a parameter: to nearest, with
searched scales, or the result of calibration (`calibration/`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.io.home import expanded
from ..checkpoints.views.mlx_experts import MLXExperts
from ..checkpoints.views.usual import usual
from ..errors import CheckpointError, FormatError, ShapeError, plural
from ..gguf_models.to_gguf import GGUFView, Replaced
from ..gguf_models.view import ModelView, as_model
from ..numerics.error_stats import ErrorStats
from ..numerics.row_slices import row_slices
from ..quantizers import has_search, mse
from ..spec import Format
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from .expert_formats import check_experts
from .importance import ImportanceRounder
from .mixes import BoundMix
from .outcome import spelled
from .recipe import Recipe, format_for, module_of
from .run import Converted, Progress
from .targets import Goal, goal_named
from .to_dense import DEFAULT_SHARD
from .transposed_experts import reason_kept_dense, with_transposed_experts
from .unit import QUANTIZED, Record, Unit, packed_unit
from .write import write_checkpoint

Rounder = Callable[[str, NDArray[Any], Format], QTensor]
"""(module, dense weight, format) -> packed weight."""


@dataclass
class Quantizing:
    """The `Rounding` of a recipe.

    rounder       rounds a weight
    replaced      dense tensors that take another value (AWQ's folded scales), by key
    from_packed   packed weights are decoded and rounded again
    fallen_back   module -> why its format is another one, or why it is kept
    mix           llama.cpp's mix, for what no rule names
    """

    recipe: Recipe
    rounder: Rounder
    replaced: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    from_packed: bool = False
    fallen_back: dict[str, str] = field(default_factory=dict)
    mix: BoundMix | None = None

    @property
    def file_type(self) -> int | None:
        """llama.cpp's number of the mix."""
        return None if self.mix is None else self.mix.mix.file_type

    def wanted(self, info: TensorInfo) -> tuple[str, Goal] | None:
        """(module, goal) of a tensor that is to be quantized."""
        module = module_of(info)
        if module is None or (info.quantized and not self.from_packed):
            return None
        goal = self.recipe.of(module, len(info.shape))
        if self.mix is not None and self.recipe.rule(module) is None:
            codec = self.mix.codec(module, info.shape)
            goal = None if codec is None else goal_named(f"gguf:{codec}")
        return None if goal is None else (module, goal)

    def format(self, info: TensorInfo) -> Format | None:
        """The format a tensor will have, from its header; None when it is kept."""
        wanted = self.wanted(info)
        if wanted is None:
            return None
        try:
            return format_for(wanted[1], "float32" if info.quantized else info.dtype, info.shape)[0]
        except ShapeError:
            return None

    def unit(self, info: TensorInfo, weight: QTensor | NDArray[Any], write: bool) -> Unit | None:
        """The quantized unit of a key, None when it is kept."""
        wanted = self.wanted(info)
        if wanted is None:
            return None
        module, goal = wanted
        x = weight.dequantize("float32") if isinstance(weight, QTensor) else np.asarray(weight)
        try:
            fmt, other = format_for(goal, x.dtype.name, x.shape)
        except ShapeError as error:
            self.fallen_back[module] = f"kept dense: {error}"
            return None
        if other:
            self.fallen_back[module] = other
        try:
            q = self.rounder(module, x, fmt)
        except FormatError as error:
            raise FormatError(f"[quantize] {module}: {error}") from error
        was = str(info.format or info.dtype)
        record = Record(info.key, QUANTIZED, other, was, spelled(q.format), info.nbytes, 0, error_of(x, q))
        return packed_unit(module, q, goal, record, write)


BLOCK_ELEMENTS = 1 << 20
"""Elements decoded at a time."""


def error_of(x: NDArray[Any], q: QTensor) -> float:
    """Relative RMS error of a packed weight against its original."""
    d = ErrorStats()
    for a, b in [(x, q)] if q.ndim == 2 else [(x[e], q[e]) for e in range(len(x))]:
        for rows in row_slices(b.shape, BLOCK_ELEMENTS):
            d.add(np.asarray(a[rows]), b.rows(rows.start, rows.stop).dequantize("float32"))
    return d.relative_rms


def round_to_nearest(module: str, x: NDArray[Any], fmt: Format) -> QTensor:
    """`rtn`."""
    return quantize(x, fmt)


def round_searched(module: str, x: NDArray[Any], fmt: Format) -> QTensor:
    """`mse`: searched scales where the format has them; to nearest in others."""
    return mse(x, fmt) if has_search(fmt) else quantize(x, fmt)


ROUNDERS: dict[str, Rounder] = {"rtn": round_to_nearest, "mse": round_searched}
"""Methods that need the weight only."""


def check_dense(checkpoint: Checkpoint, from_packed: bool) -> None:
    """Raises CheckpointError for a packed checkpoint, unless `from_packed`."""
    packed = [i.key for i in checkpoint.infos() if i.quantized]
    if packed and not from_packed:
        raise CheckpointError(
            f"[quantize] {checkpoint.path} is packed already ({checkpoint.format}, {plural(len(packed), 'weight')}). convert "
            "keeps their values; --from-packed decodes them and rounds again"
        )


def model_to_round(checkpoint: Checkpoint, recipe: Recipe, weights_only: bool = False) -> Checkpoint:
    """A GGUF of a model under transformers' names where the recipe's target is a folder, as
    calibration walks it and as it is written; others as they are.

    weights_only  the method needs no calibration, which keeps stacks of experts whole
    """
    if recipe.goal.writer.container == "gguf":
        return checkpoint
    return as_model(checkpoint, recipe.goal.layout, stacks=not weights_only)


def with_names_of_file(recipe: Recipe, view: ModelView) -> Recipe:
    """The recipe, whose rules may refer to a module by its name in the GGUF too."""
    return replace(recipe, names={new.removesuffix(".weight"): old.removesuffix(".weight") for old, new in view.names().items()})


def quantize_checkpoint(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    recipe: Recipe,
    method: str | Rounder = "rtn",
    *,
    replaced: Mapping[str, NDArray[Any]] | None = None,
    from_packed: bool = False,
    plan: bool = False,
    workers: int = 0,
    max_shard_size: int = DEFAULT_SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
    named: str = "",
) -> Converted:
    """Write `checkpoint` to `out` with the weights of the recipe quantized.

    method       "rtn", "mse", or a function that rounds
    named        identifies the function `method`: an interrupted run is resumed only under the same
                 name
    replaced     dense tensors that take another value, by key
    from_packed  also decode packed weights and round them again; without it a checkpoint that has
                 some is refused
    Others as for `convert_checkpoint`. Raises CheckpointError when nothing is to be quantized,
    FormatError when experts of a layer would be packed and dense.
    """
    if isinstance(method, str) and method not in ROUNDERS:
        raise FormatError(f"[quantize] method {method!r}; allowed without calibration: {', '.join(ROUNDERS)}")
    check_dense(checkpoint, from_packed)
    checkpoint.check("quantize")
    rounder = ROUNDERS[method] if isinstance(method, str) else method
    other_form: list[str] = []

    def searched(module: str, x: NDArray[Any], fmt: Format) -> QTensor:
        other_form.append(module)
        return round_searched(module, x, fmt)

    if recipe.goal.writer.container != "gguf":
        checkpoint = model_to_round(checkpoint, recipe, isinstance(method, str))
    elif not isinstance(checkpoint, GGUFCheckpoint):
        checkpoint = GGUFView(Replaced(usual(checkpoint), replaced or {}))
        replaced = {}
        if isinstance(method, ImportanceRounder):
            rounder = checkpoint.rounder(method, replace(method, orders={}))
        elif not isinstance(method, str):
            rounder = checkpoint.rounder(method, searched)
    model = checkpoint
    if isinstance(model, ModelView):
        recipe = with_names_of_file(recipe, model)
        if isinstance(rounder, ImportanceRounder):
            rounder = replace(rounder, modules=model.modules_of_source(), orders=model.input_orders())
    elif isinstance(model, GGUFView):
        recipe = replace(recipe, names=model.source_names())
    elif recipe.goal.writer.engine_names and isinstance(method, str) and not recipe.rules:
        # Rules and calibration name the experts one by one. A GGUF that is no model keeps its
        # names.
        checkpoint = checkpoint if isinstance(checkpoint, GGUFCheckpoint) else MLXExperts(checkpoint)
    expert_notes = check_experts(checkpoint, recipe)
    kept = reason_kept_dense(checkpoint, recipe)
    checkpoint = usual(with_transposed_experts(checkpoint, recipe))
    how = Quantizing(recipe, rounder, replaced or {}, from_packed)
    if recipe.mix:
        assert isinstance(model, (GGUFView, GGUFCheckpoint))
        how.mix = BoundMix(recipe.mix, model)
    if not any(how.wanted(i) for i in checkpoint.infos()):
        raise CheckpointError(
            f"[quantize] {checkpoint.path}: no weight to quantize; {plural(len(checkpoint), 'tensor')}, see halfbyte inspect"
        )
    if not any(how.format(i) for i in checkpoint.infos()):
        reasons = []
        for info in checkpoint.infos():
            wanted = how.wanted(info)
            if wanted is not None:
                try:
                    format_for(wanted[1], "float32" if info.quantized else info.dtype, info.shape)
                except ShapeError as error:
                    reasons.append(f"{wanted[0]}: {error}")
        raise CheckpointError(f"[quantize] {checkpoint.path}: no weight can be {recipe.goal}: {'; '.join(reasons[:3])}")
    word = method if isinstance(method, str) else named or repr(method)
    result = write_checkpoint(
        checkpoint,
        expanded(out),
        recipe.goal,
        lossy=True,
        plan=plan,
        workers=workers,
        limit=max_shard_size,
        overwrite=overwrite,
        progress=progress,
        rounding=how,
        method=[word, *([recipe.mix] if recipe.mix else []), *(r.text for r in recipe.rules)],
    )
    result.notes += [f"{module}: {why}" for module, why in sorted(how.fallen_back.items())]
    if other_form:
        result.notes.append(
            f"rounded with searched scales: {plural(len(set(other_form)), 'weight')} that the GGUF has in another form: "
            f"{', '.join(sorted(set(other_form))[:6])}"
        )
    if isinstance(method, ImportanceRounder) and (without := sorted(set(method.without))):
        result.notes.append(
            f"the importance matrix has no entry for {plural(len(without), 'weight')}, whose inputs count the same: "
            f"{', '.join(without[:6])}{', ...' if len(without) > 6 else ''}"
        )
    result.notes += [*expert_notes, kept] if kept else expert_notes
    return result
