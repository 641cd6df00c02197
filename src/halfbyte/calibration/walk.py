"""Layer-wise calibration: embed the calibration text; then, for each layer, collect input
statistics, quantize the weights, and compute the layer's outputs with the quantized weights as the
next layer's inputs.

Memory holds one layer and the hidden states of the sequences. With a `Spool`, packed weights are
written to disk and an interrupted calibration resumes after the last finished layer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.io.home import expanded
from ..checkpoints.io.regular_file import TEXT_BYTES, read_given
from ..checkpoints.views.usual import usual
from ..conversion.expert_formats import check_experts
from ..conversion.importance import gguf_modules
from ..conversion.mixes import BoundMix
from ..conversion.quantize import check_dense, model_to_round, round_searched, with_names_of_file
from ..conversion.recipe import Recipe, format_for, module_of
from ..conversion.targets import goal_named
from ..conversion.transposed_experts import with_transposed_experts
from ..errors import FormatError, HalfbyteError, ShapeError, plural
from ..generation.templates import token_ids
from ..gguf_models.to_gguf import GGUFView
from ..gguf_models.view import ModelView
from ..quantizers import Factored, factored, gptq, has_search, mse, on_tensors
from ..quantizers.groups import checked_importance
from ..spec import Format
from ..tensor.concat import moved_units, stack, take_inputs, take_rows
from ..tensor.qtensor import QTensor
from ..tensor.quantize import quantize
from ..transformers.fill.module_paths import is_experts
from .distill import Distillation
from .learned import BATCH, LearningOptions, Weight, split, train_layer
from .matrices import Matrix, layer_matrices
from .running import first_inputs, run_layer
from .scaling import Scaling, as_stored
from .sources import Source, layer_source
from .spool import LayerResult, Spool, job_key
from .statistics import InputCollector, InputStatistics
from .trainable import check_trainable

Progress = Callable[[int, int, str], None]


WALKED = 1024
"""Most sequences that GPTQ reads where only the whole model is trained."""


class CalibrationError(HalfbyteError, ValueError):
    """An unusable calibration text or model; the message gives the reason."""


@dataclass
class Calibrated:
    """The result of a calibration.

    weights   module of the checkpoint, of a GGUF that becomes a folder those of the folder ->
              packed weight, rows in its order
    replaced  changed dense tensors, by key
    notes     sentences about requested steps that were not possible
    name      identifies method, text and options
    layers    of the model
    resumed   number of layers taken from an earlier run
    """

    weights: dict[str, QTensor] = field(default_factory=dict)
    replaced: dict[str, NDArray[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    uncalibrated: list[str] = field(default_factory=list)
    name: str = ""
    layers: int = 0
    resumed: int = 0

    def rounder(self, module: str, x: NDArray[Any], fmt: Format) -> QTensor:
        """The calibrated weight of a module; searched scales for a module that was not calibrated."""
        result = self.weights.get(module)
        if result is not None and result.format == fmt and result.shape == x.shape:
            return result
        self.uncalibrated.append(module)
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
    learning: LearningOptions | None = None,
    spool: Spool | None = None,
    progress: Progress | None = None,
) -> Calibrated:
    """Quantize the weights of `recipe` using their inputs on `text`.

    text       path of a UTF-8 file
    method     "gptq", "awq", "mse" weighted by the inputs' mean squares, or "learned": trained from
               gptq's result
    context    tokens of a sequence, `sequences` of which are taken evenly from the text
    act_order  of gptq
    device     where the model runs; "auto" takes a GPU if there is one
    learning   options of learned; without steps for a layer its GPTQ reads `WALKED` sequences at most
    spool      folder for finished layers, which are mapped from there; layers of an interrupted run
               of the same job are reused. None keeps them in memory
    progress   called as progress(done, total, layer)

    Modules that no token reached, mostly experts, are quantized with searched scales to the same
    format and named in the notes. Raises CalibrationError for a text that is too short or a model
    without tokenizer, FormatError when experts of a layer would be packed and dense.
    """
    if method not in ("mse", "gptq", "awq", "learned"):
        raise FormatError(f"[quantize] method {method!r} needs no calibration; allowed here: mse, gptq, awq, learned")
    if learning is not None and (learning.norms or learning.compiled) and not learning.distill:
        raise FormatError(
            "[quantize] norms and compile are options of the steps for the whole model; give their number: --distill"
        )
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    check_dense(checkpoint, from_packed)
    checkpoint = model_to_round(checkpoint, recipe)
    if isinstance(checkpoint, ModelView):
        recipe = with_names_of_file(recipe, checkpoint)
    check_experts(checkpoint, recipe)
    checkpoint = usual(with_transposed_experts(checkpoint, recipe))
    source = layer_source(checkpoint, where)
    ids = token_sequences(source.tokenizer, expanded(text), context, sequences)
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    learning = (learning or LearningOptions()) if method == "learned" else None
    options = "act-order " if act_order else "" if learning is None else f"{learning} "
    result = Calibrated(name=f"{method} {options}on {torch.device(where).type}, tokens {digest}")
    result.layers = source.count
    calibration = _Calibration(checkpoint, source, recipe, method, act_order, learning)
    with torch.no_grad():
        hidden, arguments = first_inputs(source, ids, where)
        before = hidden
        walked = list(range(len(ids)))
        if learning is not None:
            if not learning.steps:
                seen = split(len(ids))[0]
                walked = seen[:: math.ceil(len(seen) / WALKED)]
            hidden = [*(before[i] for i in walked), *before]
        layers = [] if spool is None else spool.resume(job_key(checkpoint, recipe, result.name))
        result.resumed = len(layers)
        if spool is not None and layers:
            hidden = spool.hidden(where)
        for number in range(result.resumed, source.count):
            if progress is not None:
                progress(number, source.count, f"layer {number}")
            done, hidden = calibration.layer(number, hidden, arguments[number], len(walked))
            layers.append(done if spool is None else spool.add(done, hidden))
        if learning is not None and learning.distill:
            layers = calibration.distill(layers, ids, before, hidden[len(walked) :], arguments, learning)
    if progress is not None:
        progress(source.count, source.count, "")
    for done in layers:
        result.weights |= done.weights
        result.replaced |= done.replaced
        result.notes += done.notes
    calibration.report_uncalibrated(result, [module for done in layers for module in done.uncalibrated])
    return result


def token_sequences(tokenizer: Any, path: Path, context: int, count: int) -> list[list[int]]:
    """`count` sequences of `context` tokens, spread evenly over a text, each with the tokenizer's
    first token in front.
    """
    if tokenizer is None:
        raise CalibrationError("[quantize] the checkpoint has no tokenizer, and calibration text must become tokens")
    try:
        text = read_given(path, TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"[quantize] {path} is not UTF-8: byte {error.start}") from error
    ids = token_ids(tokenizer, text, "quantize", add_special_tokens=False)
    start = list(tokenizer("")["input_ids"])[:1]
    size = context - len(start)
    if len(ids) < size:
        raise CalibrationError(f"[quantize] {path} has {plural(len(ids), 'token')}; one sequence takes {size:,}")
    count = min(count, len(ids) // size)
    step = (len(ids) - size) // max(count - 1, 1)
    return [start + ids[i * step : i * step + size] for i in range(count)]


class InputRounder:
    """Rounds weights under the Hessian of their input.

    method     "rtn", "gptq", or "mse" and "awq", whose errors are weighted by the Hessian's diagonal
    act_order  of gptq
    """

    def __init__(self, method: str, act_order: bool = False) -> None:
        self.method, self.act_order = method, act_order
        self._factored: dict[bool, Factored] = {}
        """Factored Hessian of the current input, on the model's device and on the host."""

    def next_input(self) -> None:
        """Weights that follow have another input."""
        self._factored.clear()

    def round(self, weight: Tensor, hessian: Tensor | None, fmt: Format) -> QTensor:
        """On the weight's GPU where the format supports it, else in NumPy. Without a Hessian, and
        where the format has no search, the weight alone decides.
        """
        if self.method == "rtn":
            return quantize(weight.cpu().numpy(), fmt)
        if hessian is None or not has_search(fmt):
            return round_searched("", weight.cpu().numpy(), fmt)
        there = weight.is_cuda and on_tensors(fmt)
        w, h = (weight, hessian) if there else (weight.cpu().numpy(), hessian.cpu().numpy())
        if self.method != "gptq":
            importance = h.diagonal()
            checked_importance(importance, "mse", "the diagonal of the Hessian")
            return mse(w, fmt, importance.clip(1e-12 * max(float(importance.sum()), 1e-30), None))
        if there not in self._factored:
            self._factored[there] = factored(h, act_order=self.act_order)
        return gptq(w, self._factored[there], fmt)


class _Calibration:
    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Source,
        recipe: Recipe,
        method: str,
        act_order: bool,
        learning: LearningOptions | None = None,
    ) -> None:
        self.checkpoint, self.source, self.recipe = checkpoint, source, recipe
        self.method, self._learning = method, learning
        self._rounder = InputRounder("gptq" if learning else method, act_order)
        self._mix: BoundMix | None = None
        self._gguf_modules: dict[str, tuple[str, int | None]] = {}
        if recipe.mix:
            home = checkpoint if isinstance(checkpoint, GGUFCheckpoint) else GGUFView(checkpoint)
            self._mix, self._gguf_modules = BoundMix(recipe.mix, home), gguf_modules(home)
        self._done = LayerResult()
        self._divided: set[str] = set()
        """Modules whose inputs the file has in an order that divides groups of the format."""

    def layer(
        self, number: int, hidden: list[Tensor], arguments: tuple[Any, dict[str, Any]], walked: int
    ) -> tuple[LayerResult, list[Tensor]]:
        """Quantize a layer: its result, and its outputs.

        hidden  of `walked` sequences; for learned those of the packed model, then the dense model's
                of all
        """
        self._done = LayerResult()
        layer = self.source.layer(number)
        prefix = f"{self.source.prefix}.{number}"
        matrices = self._matrices(layer, number)
        wanted = {key: fmt for key in {m.key for m in matrices} if (fmt := self._wanted(key)) is not None}
        targets: list[Tensor] = []
        if self._learning is not None:
            for fmt in set(wanted.values()):
                check_trainable(fmt)
            hidden, dense = hidden[:walked], hidden[walked:]
            targets = self._run_all(layer, dense, arguments)
        with InputCollector(layer, *multiplying(layer)) as inputs:
            judging = self._learning is not None and self._learning.steps
            given = [hidden[i] for i in split(len(hidden))[0]] if judging else hidden
            self._run_all(layer, given, arguments, inputs.sequence_done)
        if self.method == "awq":
            Scaling(
                self.checkpoint,
                self.source,
                layer,
                prefix,
                inputs,
                matrices,
                wanted,
                self._done,
                lambda: run_layer(layer, hidden[0], arguments),
            ).scale()
        rounded = self._round_all([m for m in matrices if m.key in wanted], inputs, wanted)
        if self._learning is not None and self._learning.steps and rounded:
            weights = [weight for _, weight in rounded]
            trained = train_layer(layer, weights, hidden, targets, lambda x: run_layer(layer, x, arguments), self._learning)
            for weight, q in zip(weights, trained, strict=True):
                weight.packed = q
        self._keep(rounded)
        out = self._run_all(layer, hidden, arguments)
        self.source.drop(number)
        return self._done, [*out, *targets]

    def _run_all(
        self,
        layer: nn.Module,
        hidden: list[Tensor],
        arguments: tuple[Any, dict[str, Any]],
        done: Callable[[], None] | None = None,
    ) -> list[Tensor]:
        """The layer's outputs for each sequence: `BATCH` of them at once where launches cost most,
        on a GPU, and for learned, which trains on as many.
        """
        at_once = BATCH if self._learning is not None or (hidden and hidden[0].is_cuda) else 1
        out: list[Tensor] = []
        for i in range(0, len(hidden), at_once):
            out += run_layer(layer, torch.cat(hidden[i : i + at_once]), arguments).split(1)
            if done is not None:
                done()
        return out

    def _matrices(self, layer: nn.Module, number: int) -> list[Matrix]:
        prefix = f"{self.source.prefix}.{number}"
        return layer_matrices(layer, prefix, self.source.slots, lambda key: self.checkpoint.info(key).shape[-2])

    def distill(
        self,
        layers: list[LayerResult],
        ids: list[list[int]],
        inputs: list[Tensor],
        targets: list[Tensor],
        arguments: list[tuple[Any, dict[str, Any]]],
        learning: LearningOptions,
    ) -> list[LayerResult]:
        """The layers' results as they are when the whole model was trained (`distill`)."""
        found = [self._packed_of(number, done) for number, done in enumerate(layers)]
        training = Distillation(
            self.source,
            lambda layer, number: [m for m in self._matrices(layer, number) if self._wanted(m.key) is not None],
            [[q for _, q in layer] for layer in found],
            ids,
            inputs,
            targets,
            arguments,
            self._norms if learning.norms else lambda layer, number: [],
            learning.compiled,
        )
        out = []
        for done, layer, trained in zip(layers, found, training.train(learning.distill, learning.seed), strict=True):
            self._done = LayerResult({}, done.replaced, done.notes, done.uncalibrated)
            self._keep([(m, Weight(m.view, q)) for (m, _), q in zip(layer, trained, strict=True)])
            out.append(self._done)
        for number, path, value in training.changed_norms:
            key = self._norm_key(number, path)
            assert key is not None
            out[number].replaced[key] = as_stored(self.checkpoint, self.source, key, value)
        if learning.norms and not training.changed_norms:
            out[-1].notes.append(
                "norms were not trained: the file has none as dense vectors, or its layers do not stay in memory"
            )
        return out

    def _norms(self, layer: nn.Module, number: int) -> list[str]:
        """The norms of a layer whose weights the file has as dense vectors, by path."""
        return [
            path
            for path, module in layer.named_modules()
            if type(module).__name__.endswith("Norm")
            and getattr(module, "weight", None) is not None
            and (key := self._norm_key(number, path)) is not None
            and not self.checkpoint.info(key).quantized
        ]

    def _norm_key(self, number: int, path: str) -> str | None:
        return self.source.key_of(f"{self.source.prefix}.{number}.{path}", "weight")

    def _packed_of(self, number: int, done: LayerResult) -> list[tuple[Matrix, QTensor]]:
        """The matrices of a layer that are packed, with their weights in the model's order of rows."""
        out = []
        layer = self.source.layer(number)
        for m in self._matrices(layer, number):
            module = module_of(self.checkpoint.info(m.key))
            if self._wanted(m.key) is None or module is None:
                continue
            q = done.weights[module]
            q = q if m.expert is None else q[m.expert]
            order, inputs = self.source.rows(m.key, q.shape[0]), self.source.inputs(m.key, q.shape[-1])
            q = q if order is None else take_rows(q, order)
            out.append((m, q if inputs is None else take_inputs(q, inputs)))
        self.source.drop(number)
        return out

    def _wanted(self, key: str) -> Format | None:
        """The target format of a weight, None to keep it."""
        info = self.checkpoint.info(key)
        module = module_of(info)
        goal = None if module is None else self.recipe.of(module, len(info.shape))
        if self._mix is not None and module is not None and self.recipe.rule(module) is None:
            codec = self._mix.codec(self._gguf_modules.get(module, (module, None))[0], info.shape)
            goal = None if codec is None else goal_named(f"gguf:{codec}")
        if goal is None:
            return None
        try:
            fmt = format_for(goal, "float32" if info.quantized else info.dtype, info.shape)[0]
        except ShapeError:
            return None  # kept dense; the writer reports it
        inputs = self.source.inputs(key, info.shape[-1])
        if module is not None and inputs is not None and None in (moved_units(inputs, fmt), moved_units(np.argsort(inputs), fmt)):
            self._divided.add(module)
            return None
        return fmt

    def _round_all(
        self, matrices: list[Matrix], inputs: InputCollector, wanted: Mapping[str, Format]
    ) -> list[tuple[Matrix, Weight]]:
        """The packed weights of a layer, which computes with them from now on."""
        rounded = []
        position = {name: i for i, group in enumerate(inputs.groups) for name in group.names}
        ordered = sorted(matrices, key=lambda m: position.get(m.input, len(position)))
        hessian: Tensor | None = None
        last: InputStatistics | None = None
        for matrix in ordered:
            group = inputs.of(matrix.input)
            if group is not None and group is not last:
                hessian = None if group.hessian is None else group.hessian.double()
                self._rounder.next_input()
                if last is not None:
                    last.hessian = None
            last = group
            try:
                q = self._rounder.round(matrix.view.float(), None if group is None else hessian, wanted[matrix.key])
            except FormatError as error:
                raise FormatError(f"[quantize] {matrix.key}: {error}") from error
            weight = Weight(matrix.view, q)
            if self._learning is not None and self._learning.steps:
                weight.dense = matrix.view.float().clone()
                weight.start = InputRounder("mse").round(weight.dense, None if group is None else hessian, wanted[matrix.key])
            matrix.view.copy_(torch.from_numpy(q.dequantize("float32")))
            rounded.append((matrix, weight))
            if group is None:
                module = module_of(self.checkpoint.info(matrix.key)) or matrix.key
                self._done.uncalibrated.append(module if matrix.expert is None else f"{module}[{matrix.expert}]")
        return rounded

    def _keep(self, rounded: list[tuple[Matrix, Weight]]) -> None:
        """The packed weights of a layer, into `LayerResult`."""
        stacks: dict[str, list[tuple[int, QTensor]]] = defaultdict(list)
        for matrix, weight in rounded:
            module = module_of(self.checkpoint.info(matrix.key))
            assert module is not None
            if matrix.expert is None:
                self._done.weights[module] = self._in_file_order(matrix.key, weight.packed)
            else:
                stacks[module].append((matrix.expert, weight.packed))
        for module, pieces in stacks.items():
            self._done.weights[module] = stack([q for _, q in sorted(pieces, key=lambda piece: piece[0])])

    def _in_file_order(self, key: str, q: QTensor) -> QTensor:
        order, inputs = self.source.rows(key, q.shape[0]), self.source.inputs(key, q.shape[-1])
        q = q if order is None else take_rows(q, np.argsort(order))
        return q if inputs is None else take_inputs(q, np.argsort(inputs))

    def report_uncalibrated(self, result: Calibrated, uncalibrated: list[str]) -> None:
        """Note which weights of the recipe no token reached, and which are in no layer."""
        unmet = []
        for info in self.checkpoint.infos():
            module = module_of(info)
            if module is not None and self._wanted(info.key) is not None and module not in result.weights:
                unmet.append(module)
        for names, why in (
            (uncalibrated, "without a calibration token"),
            (unmet, "in no layer that calibration walks over"),
            (sorted(self._divided), "with inputs in an order that divides groups of the format"),
        ):
            if names:
                result.notes.append(
                    f"rounded with searched scales: {plural(len(names), 'weight')} {why}: {', '.join(names[:6])}"
                    + (", ..." if len(names) > 6 else "")
                )


def multiplying(layer: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """(linear modules, modules of gated experts) of a layer, by path."""
    linear = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
    gated = {n: m for n, m in layer.named_modules() if is_experts(m) and hasattr(m, "_apply_gate") and hasattr(m, "gate_up_proj")}
    return linear, gated
