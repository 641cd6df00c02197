"""Convert one key of a checkpoint: the tensors to write, and the record of what was done.

Stacks of experts are split for layouts that store matrices only (`experts.gate_up_proj` of 8
experts becomes `experts.0.gate_up_proj` …), and gpt-oss's interleaved gate and up rows for MLX,
whose models keep them in two modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.safetensors.native_layout import OwnLayout
from ..checkpoints.views.mlx_form import to_mlx
from ..errors import LayoutError
from ..layouts import LAYOUTS
from ..layouts.native import format_from_json, format_to_json
from ..layouts.quant_config.writer import DenseTensor, PackedModule
from ..numerics.error_stats import ErrorStats
from ..spec import Format
from ..tensor.qtensor import QTensor
from .edges import convert_weight, packed_as_is
from .outcome import KINDS, MisfitError, Outcome, spelled
from .targets import Goal

BLOCK_BYTES = 1 << 25
COPIED, QUANTIZED = "copied", "quantized"
"""Kinds of dense tensors: copied bytes; rounded by `quantize`."""


@dataclass(frozen=True)
class Record:
    """The record of one key.

    kind          one of `outcome.KINDS`, or "copied" or "quantized" for a dense tensor
    why           the condition that was checked, or what was lost
    format        of the source, `other_format` of the result
    nbytes        read and `other_nbytes` written
    relative_rms  error of a lossy conversion, else None
    """

    key: str
    kind: str
    why: str
    format: str
    other_format: str
    nbytes: int
    other_nbytes: int
    relative_rms: float | None = None

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {"record": "tensor", **asdict(self)}


@dataclass(frozen=True)
class Unit:
    """A converted key: arrays by name, its record, descriptions of the modules it became, and the
    outcomes behind it.
    """

    arrays: Mapping[str, NDArray[Any]]
    record: Record
    packed: tuple[PackedModule, ...] = ()
    dense: tuple[DenseTensor, ...] = ()
    outcomes: tuple[Outcome, ...] = ()

    def note(self) -> dict[str, Any]:
        """The unit without its arrays, as JSON: what a resumed run needs."""
        return {
            "record": asdict(self.record),
            "packed": [[p.name, format_to_json(p.format), list(p.shape), dict(p.params)] for p in self.packed],
            "dense": [[d.name, list(d.shape)] for d in self.dense],
        }


class Rounding(Protocol):
    """What rounds the dense weights of a checkpoint, and which: `quantize.Quantizing`.

    replaced  dense tensors that take another value, by key
    """

    replaced: Mapping[str, NDArray[Any]]

    def format(self, info: TensorInfo) -> Format | None:
        """The format a tensor will have, from its header; None when it is kept."""

    def unit(self, info: TensorInfo, weight: QTensor | NDArray[Any], write: bool) -> Unit | None:
        """The quantized unit of a key, None when it is kept."""


def from_note(note: Mapping[str, Any]) -> Unit:
    """A unit of an earlier run, without its arrays."""
    packed = tuple(PackedModule(n, format_from_json(f), tuple(s), p) for n, f, s, p in note["packed"])
    return Unit({}, Record(**note["record"]), packed, tuple(DenseTensor(n, tuple(s)) for n, s in note["dense"]))


def convert_key(checkpoint: Checkpoint, key: str, goal: Goal, write: bool = True, rounding: Rounding | None = None) -> Unit:
    """`key` converted.

    write     False omits the arrays, for a plan
    rounding  rounds dense weights; None leaves them
    """
    info = checkpoint.info(key)
    weight = checkpoint[key]
    if rounding is not None:
        unit = rounding.unit(info, weight, write)
        if unit is not None:
            return unit
        weight = rounding.replaced.get(key, weight)
        # A packed weight that the recipe keeps may take any format of the layout.
        goal = replace(goal, target=replace(goal.target, codec=None, group_size=None))
    if not isinstance(weight, QTensor):
        return _copied(weight, info, goal, checkpoint)
    pieces = list(_pieces(key, weight, goal, checkpoint))
    arrays: dict[str, NDArray[Any]] = {}
    packed, outcomes = [], []
    for name, piece in pieces:
        outcome = convert_weight(piece, goal, name)
        outcomes.append(outcome)
        packed.append(PackedModule(name, outcome.weight.format, outcome.weight.shape, outcome.config))
        if write:
            arrays |= _named(name, outcome, goal)
    return Unit(arrays, _record(info, outcomes), tuple(packed), (), tuple(outcomes))


def packed_unit(name: str, weight: QTensor, goal: Goal, record: Record, write: bool) -> Unit:
    """The unit of a weight that was rounded to a format of the target, `record` still without the
    bytes written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    modules, outcomes = [], []
    for own, piece in _matrices(name, weight, goal):
        try:
            outcome = packed_as_is(piece, goal)
        except MisfitError as misfit:
            raise LayoutError(f"[quantize] {own}: {weight.format} cannot be stored in {goal.layout}: {misfit}") from None
        outcomes.append(outcome)
        arrays |= _named(own, outcome, goal) if write else {}
        modules.append(PackedModule(own, outcome.weight.format, outcome.weight.shape, outcome.config))
    nbytes = sum(a.nbytes for o in outcomes for a in o.tensors.values())
    return Unit(arrays, replace(record, other_nbytes=nbytes), tuple(modules), (), tuple(outcomes))


def _matrices(name: str, weight: QTensor, goal: Goal) -> Iterator[tuple[str, QTensor]]:
    """The weight, or the matrices of a stack under their own names where the layout stores matrices
    only.
    """
    path, _, last = name.rpartition(".")
    if weight.ndim > 2 and LAYOUTS[goal.layout].splits_stacks:
        if not weight.shape[0]:
            raise LayoutError(
                f"[convert] {name} is a stack of 0 experts; {goal.layout} writes a matrix for each, which would leave nothing"
            )
        for e in range(weight.shape[0]):
            yield f"{path}.{e}.{last}", weight[e]
    else:
        yield name, weight


def _named(name: str, outcome: Outcome, goal: Goal) -> dict[str, NDArray[Any]]:
    """Arrays by full name, wide elements first so that all are aligned."""
    layout, tensors = LAYOUTS[goal.layout], stored_tensors(outcome, goal)
    order = sorted(tensors, key=lambda s: -tensors[s].dtype.itemsize)
    return {f"{name}{layout.separator}{s}": tensors[s] for s in order}


def stored_tensors(outcome: Outcome, goal: Goal) -> Mapping[str, NDArray[Any]]:
    """The tensors of a packed weight in a file of the target, by suffix."""
    return OwnLayout().pack(outcome.weight, {}) if goal.writer.container == "halfbyte" else outcome.tensors


def _record(info: TensorInfo, outcomes: list[Outcome]) -> Record:
    worst = max(outcomes, key=lambda o: KINDS.index(o.kind))
    rms = None
    if worst.error is not None:
        total = ErrorStats()
        # The largest error of the pieces is reported.
        for o in outcomes:
            total = total if o.error is None else o.error if total.count == 0 else _worse(total, o.error)
        rms = total.relative_rms
    written = sum(a.nbytes for o in outcomes for a in o.tensors.values())
    why = "; ".join(dict.fromkeys(o.why for o in outcomes if o.kind == worst.kind and o.why))
    return Record(info.key, worst.kind, why, str(info.format), spelled(worst.weight.format), info.nbytes, written, rms)


def _worse(a: ErrorStats, b: ErrorStats) -> ErrorStats:
    return a if a.relative_rms >= b.relative_rms else b


def _copied(array: NDArray[Any], info: TensorInfo, goal: Goal, checkpoint: Checkpoint) -> Unit:
    arrays = {info.key: to_mlx(checkpoint.config, info.key, array) if goal.writer.engine_names else array}
    if goal.writer.engine_names and is_gpt_oss(checkpoint):
        arrays = dict(_as_mlx_has_it(info.key, array))
    record = Record(info.key, COPIED, "", info.dtype, info.dtype, info.nbytes, array.nbytes)
    return Unit(arrays, record, (), tuple(DenseTensor(n, a.shape) for n, a in arrays.items()))


def is_gpt_oss(checkpoint: Checkpoint) -> bool:
    """True for OpenAI's open models, whose gate and up rows are interleaved."""
    return str(checkpoint.config.get("model_type", "")).replace("-", "_") == "gpt_oss"


def _pieces(key: str, weight: QTensor, goal: Goal, checkpoint: Checkpoint) -> Iterator[tuple[str, QTensor]]:
    """The modules of the target that `key` becomes."""
    path, _, last = key.rpartition(".")
    if weight.ndim > 2 and goal.writer.engine_names and last == "gate_up_proj" and is_gpt_oss(checkpoint):
        yield f"{path}.gate_proj", every_other_row(weight, 0)
        yield f"{path}.up_proj", every_other_row(weight, 1)
    else:
        yield from _matrices(key, weight, goal)


def every_other_row(q: QTensor, first: int) -> QTensor:
    """Rows first, first + 2, … of each matrix of a stack in row groups, as views."""
    parts = {p: a if a.ndim < q.ndim else a[..., first::2, :] for p, a in q.parts.items()}
    return QTensor(q.format, (*q.shape[:-2], len(range(first, q.shape[-2], 2)), q.shape[-1]), parts, origin=q.origin)


def _as_mlx_has_it(key: str, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """A dense tensor of gpt-oss under MLX's names: gate and up of the experts apart, and their
    matrices (experts, k, rows) with rows first.
    """
    path, _, last = key.rpartition(".")
    name, kind = (last.removesuffix("_bias"), "bias") if last.endswith("_bias") else (last, "weight")
    if not path.endswith(".experts") or array.ndim != {"bias": 2, "weight": 3}[kind]:
        yield key, array
        return
    rows = array if kind == "bias" else array.swapaxes(1, 2)
    if name == "gate_up_proj":
        for first, half in enumerate(("gate_proj", "up_proj")):
            yield f"{path}.{half}.{kind}", np.ascontiguousarray(rows[:, first::2])
    elif name == "down_proj":
        yield f"{path}.{name}.{kind}", np.ascontiguousarray(rows)
    else:
        yield key, array


def blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """`array` in blocks of whole rows, of about BLOCK_BYTES."""
    if array.ndim < 2 or array.nbytes <= BLOCK_BYTES:
        yield array
        return
    rows = array.reshape(-1, array.shape[-1]) if array.flags.c_contiguous else array
    step = max(1, BLOCK_BYTES * len(rows) // array.nbytes)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
