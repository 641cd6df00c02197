"""The walk: embeddings of the calibration text, then each layer in turn; its inputs are watched, its weights rounded, its outputs
computed with the rounded weights and handed on.

What is kept in memory is one layer and the hidden states of the sequences; where a folder is given, packed weights go there, and
a walk that was interrupted goes on behind the last layer in it (`spool`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..checkpoints.views.gptqmodel_gpt_oss import rows_by_name
from ..conversion.expert_formats import check_experts
from ..conversion.quantize import check_dense, round_searched
from ..conversion.recipe import Recipe, format_for, module_of
from ..conversion.transposed_experts import turned
from ..errors import FormatError, HalfbyteError, ShapeError
from ..quantizers import Factored, factored, gptq, has_grid, mse, on_tensors
from ..spec import Format
from ..tensor.concat import stack
from ..tensor.qtensor import QTensor
from ..transformers.fill.module_paths import is_experts
from .matrices import Matrix, matrices_of
from .scaling import Scaling
from .sources import Source, source_of
from .spool import Done, Spool, work_of
from .statistics import Inputs, Shared

Progress = Callable[[int, int, str], None]


class CalibrationError(HalfbyteError, ValueError):
    """A calibration text or model that cannot be used; the message says why."""


@dataclass
class Calibrated:
    """What a walk found.

    weights   module of the checkpoint -> packed weight, rows in the file's order
    replaced  dense tensors that take another value, by key
    notes     sentences about what could not be done as asked
    name      of the method, the text and all else that these results come from
    layers    of the model
    resumed   how many of them an earlier run had done
    """

    weights: dict[str, QTensor] = field(default_factory=dict)
    replaced: dict[str, NDArray[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)
    name: str = ""
    layers: int = 0
    resumed: int = 0

    def rounder(self, module: str, x: NDArray[Any], fmt: Format) -> QTensor:
        """The weight found for a module; searched scales for one the walk did not meet."""
        found = self.weights.get(module)
        if found is not None and found.format == fmt and found.shape == x.shape:
            return found
        self.starved.append(module)
        return round_searched(module, x, fmt)


def calibrate(
    checkpoint: Checkpoint,
    recipe: Recipe,
    text: str | Path,
    method: str = "gptq",
    *,
    context: int = 512,
    sequences: int = 32,
    act_order: bool = False,
    device: str = "auto",
    from_packed: bool = False,
    spool: Spool | None = None,
    progress: Progress | None = None,
) -> Calibrated:
    """Round the weights of `recipe` with the inputs they have on `text`.

    text       path of a UTF-8 file
    method     "gptq", "awq", or "mse" weighted by the inputs' mean squares
    context    tokens of a sequence, `sequences` of which are taken evenly from the text
    act_order  of gptq
    device     where the model runs; "auto" takes a GPU if there is one
    spool      a folder for layers that are done, which are mapped from there; a walk that finds some of the same work there goes
               on behind them. None keeps them in memory
    progress   called as progress(done, total, layer)

    Modules that no token reached, experts above all, are rounded with searched scales to the same format, and named in the notes.
    Raises CalibrationError for a text that is too short or a model without tokenizer, FormatError when experts of a layer would
    be packed and dense.
    """
    if method not in ("mse", "gptq", "awq"):
        raise FormatError(f"[quantize] method {method!r} needs no calibration; allowed here: mse, gptq, awq")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    check_dense(checkpoint, from_packed)
    check_experts(checkpoint, recipe)
    checkpoint = rows_by_name(turned(checkpoint, recipe))
    source = source_of(checkpoint, where)
    ids = token_sequences(source.tokenizer, Path(text), context, sequences)
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    found = Calibrated(name=f"{method} {'act-order ' if act_order else ''}on {torch.device(where).type}, tokens {digest}")
    found.layers = source.count
    walk = _Walk(checkpoint, source, recipe, method, act_order)
    with torch.no_grad():
        hidden, arguments = walk.begin(ids, where)
        layers = [] if spool is None else spool.resume(work_of(checkpoint, recipe, found.name))
        found.resumed = len(layers)
        if spool is not None and layers:
            hidden = spool.hidden(where)
        for number in range(found.resumed, source.count):
            if progress is not None:
                progress(number, source.count, f"layer {number}")
            done, hidden = walk.layer(number, hidden, arguments[number])
            layers.append(done if spool is None else spool.add(done, hidden))
    if progress is not None:
        progress(source.count, source.count, "")
    for done in layers:
        found.weights |= done.weights
        found.replaced |= done.replaced
        found.notes += done.notes
    walk.name_unmet(found, [module for done in layers for module in done.starved])
    return found


def token_sequences(tokenizer: Any, path: Path, context: int, count: int) -> list[list[int]]:
    """`count` sequences of `context` tokens, spread evenly over a text, each with the tokenizer's first token in front."""
    if tokenizer is None:
        raise CalibrationError("[quantize] the checkpoint has no tokenizer, and calibration text must become tokens")
    ids = list(tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    start = list(tokenizer("")["input_ids"])[:1]
    size = context - len(start)
    if len(ids) < size:
        raise CalibrationError(f"[quantize] {path} has {len(ids)} tokens; one sequence takes {size}")
    count = min(count, len(ids) // size)
    step = (len(ids) - size) // max(count - 1, 1)
    return [start + ids[i * step : i * step + size] for i in range(count)]


class _Stop(nn.Module):  # type: ignore[misc] # torch is not type-checked
    """Stands for a layer: keeps what it is called with and gives its input on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.seen: tuple[Any, dict[str, Any]] = ((), {})
        # Some models ask a layer which kind of attention it has before they call it.
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = (args, kwargs)
        return hidden


class _Walk:
    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Source,
        recipe: Recipe,
        method: str,
        act_order: bool,
    ) -> None:
        self.checkpoint, self.source, self.recipe = checkpoint, source, recipe
        self.method, self.act_order = method, act_order
        self._done = Done()
        self._stacks: dict[str, list[tuple[int, QTensor]]] = {}
        self._factored: dict[bool, Factored] = {}
        """The input's Hessian made ready, on the model's device and on the host."""

    def begin(self, ids: list[list[int]], device: str) -> tuple[list[Tensor], list[tuple[Any, dict[str, Any]]]]:
        """Hidden states before the first layer, and what each layer is called with besides."""
        source = self.source
        source.start()
        layers = source.model.get_submodule(source.prefix)
        real = list(layers)
        stops = [_Stop(layer) for layer in real]
        for i, stop in enumerate(stops):
            layers[i] = stop
        inner = source.model.get_submodule(source.prefix.rpartition(".")[0]) if "." in source.prefix else source.model
        firsts: list[Tensor] = []
        handle = stops[0].register_forward_pre_hook(lambda module, args: firsts.append(args[0]))
        for sequence in ids:
            inner(input_ids=torch.tensor([sequence], device=device), use_cache=False)
        handle.remove()
        for i, layer in enumerate(real):
            layers[i] = layer
        return firsts, [stop.seen for stop in stops]

    def layer(self, number: int, hidden: list[Tensor], arguments: tuple[Any, dict[str, Any]]) -> tuple[Done, list[Tensor]]:
        """Round a layer: what it came to, and what it gives to the next."""
        self._done = Done()
        layer = self.source.layer(number)
        prefix = f"{self.source.prefix}.{number}"
        matrices = matrices_of(layer, prefix, self.source.slots, lambda key: self.checkpoint.info(key).shape[-2])
        wanted = {key: fmt for key in {m.key for m in matrices} if (fmt := self._wanted(key)) is not None}
        linear = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
        experts = {n: m for n, m in layer.named_modules() if is_experts(m) and hasattr(m, "_apply_gate")}
        with Inputs(layer, linear, experts) as inputs:
            for h in hidden:
                _run(layer, h, arguments)
                inputs.sequence_done()
        if self.method == "awq":
            Scaling(
                self.checkpoint, self.source, layer, prefix, inputs, matrices, wanted, self._done,
                lambda: _run(layer, hidden[0], arguments),
            ).scale()  # fmt: skip
        self._round_all([m for m in matrices if m.key in wanted], inputs, wanted)
        out = [_run(layer, h, arguments) for h in hidden]
        self.source.drop(number)
        return self._done, out

    def _wanted(self, key: str) -> Format | None:
        """The format of a weight that is to be rounded."""
        info = self.checkpoint.info(key)
        module = module_of(info)
        goal = None if module is None else self.recipe.of(module, len(info.shape))
        if goal is None:
            return None
        try:
            return format_for(goal, "float32" if info.quantized else info.dtype, info.shape)[0]
        except ShapeError:
            return None  # kept dense, which the writer says

    def _round_all(self, matrices: list[Matrix], inputs: Inputs, wanted: Mapping[str, Format]) -> None:
        """The packed weights of a layer, into `Done`; the layer computes with them from now on."""
        position = {name: i for i, group in enumerate(inputs.groups) for name in group.names}
        ordered = sorted(matrices, key=lambda m: position.get(m.input, len(position)))
        hessian: Tensor | None = None
        last: Shared | None = None
        for matrix in ordered:
            group = inputs.of(matrix.input)
            if group is not None and group is not last:
                hessian = None if group.hessian is None else group.hessian.double()
                self._factored.clear()
                if last is not None:
                    last.hessian = None
            last = group
            q = self._round(matrix.view.float(), None if group is None else hessian, wanted[matrix.key])
            matrix.view.copy_(torch.from_numpy(q.dequantize("float32")))
            module = module_of(self.checkpoint.info(matrix.key))
            assert module is not None
            if group is None:
                self._done.starved.append(module if matrix.expert is None else f"{module}[{matrix.expert}]")
            if matrix.expert is None:
                self._done.weights[module] = self._in_file_order(matrix.key, q)
            else:
                self._stacks.setdefault(module, []).append((matrix.expert, q))
        for module, pieces in self._stacks.items():
            self._done.weights[module] = stack([q for _, q in sorted(pieces, key=lambda piece: piece[0])])
        self._stacks.clear()

    def _round(self, weight: Tensor, hessian: Tensor | None, fmt: Format) -> QTensor:
        """On the weight's GPU where the format can, else by NumPy."""
        if hessian is None or not has_grid(fmt):
            return round_searched("", weight.cpu().numpy(), fmt)
        there = weight.is_cuda and on_tensors(fmt)
        w, h = (weight, hessian) if there else (weight.cpu().numpy(), hessian.cpu().numpy())
        if self.method != "gptq":
            importance = h.diagonal()
            return mse(w, fmt, importance.clip(1e-12 * max(float(importance.sum()), 1e-30), None))
        if there not in self._factored:
            self._factored[there] = factored(h, act_order=self.act_order)
        return gptq(w, self._factored[there], fmt)

    def _in_file_order(self, key: str, q: QTensor) -> QTensor:
        order = self.source.rows(key, q.shape[0])
        if order is None:
            return q
        back = np.argsort(order)
        parts = {p: a if p == "global_scale" else np.ascontiguousarray(a[back]) for p, a in q.parts.items()}
        return QTensor(q.format, q.shape, parts, origin=q.origin)

    def name_unmet(self, found: Calibrated, starved: list[str]) -> None:
        """Say which weights of the recipe no token reached, and which the walk did not meet."""
        unmet = []
        for info in self.checkpoint.infos():
            module = module_of(info)
            if module is not None and self._wanted(info.key) is not None and module not in found.weights:
                unmet.append(module)
        for names, why in ((starved, "saw no calibration token"), (unmet, "are in no layer that calibration walks over")):
            if names:
                found.notes.append(
                    f"{len(names)} weights {why} and are rounded with searched scales: {', '.join(names[:6])}"
                    + (", ..." if len(names) > 6 else "")
                )


def _run(layer: nn.Module, hidden: Tensor, arguments: tuple[Any, dict[str, Any]]) -> Tensor:
    out = layer(hidden, *arguments[0], **arguments[1])
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result
