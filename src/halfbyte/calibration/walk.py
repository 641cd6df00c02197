"""The walk: embeddings of the calibration text, then each layer in turn; its inputs are watched, its weights rounded, its outputs
computed with the rounded weights and handed on.

What is kept in memory is one layer, the hidden states of the sequences and the packed weights so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..converting.quantizing import round_searched
from ..converting.recipe import Recipe, format_for, module_of
from ..errors import FormatError, HalfbyteError, ShapeError
from ..exact import bfloat16
from ..formats.encode import quantize
from ..qtensor import QTensor
from ..quantizers import gptq, mse
from ..spec import Format
from ..torch.modules import QLinear
from .folding import fold
from .sources import Source, source_of
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
    """

    weights: dict[str, QTensor] = field(default_factory=dict)
    replaced: dict[str, NDArray[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)

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
    progress: Progress | None = None,
) -> Calibrated:
    """Round the weights of `recipe` with the inputs they have on `text`.

    text       path of a UTF-8 file
    method     "gptq", "awq", or "mse" weighted by the inputs' mean squares
    context    tokens of a sequence, `sequences` of which are taken evenly from the text
    act_order  of gptq
    device     where the model runs; "auto" takes a GPU if there is one
    progress   called as progress(done, total, layer)

    Modules that no token reached, experts above all, are rounded with searched scales to the same format, and named in the notes.
    Raises CalibrationError for a text that is too short or a model without tokenizer.
    """
    if method not in ("mse", "gptq", "awq"):
        raise FormatError(f"[quantize] method {method!r} needs no calibration; allowed here: mse, gptq, awq")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    source = source_of(checkpoint, where)
    ids = token_sequences(source.tokenizer, Path(text), context, sequences)
    found = Calibrated()
    walk = _Walk(checkpoint, source, recipe, method, act_order, from_packed, found)
    with torch.no_grad():
        hidden, arguments = walk.begin(ids, where)
        for number in range(source.count):
            if progress is not None:
                progress(number, source.count, f"layer {number}")
            hidden = walk.layer(number, hidden, arguments[number])
    if progress is not None:
        progress(source.count, source.count, "")
    walk.name_unmet()
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
        from_packed: bool,
        found: Calibrated,
    ) -> None:
        self.checkpoint, self.source, self.recipe, self.found = checkpoint, source, recipe, found
        self.method, self.act_order, self.from_packed = method, act_order, from_packed

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

    def layer(self, number: int, hidden: list[Tensor], arguments: tuple[Any, dict[str, Any]]) -> list[Tensor]:
        """Round a layer and return what it gives."""
        layer = self.source.layer(number)
        prefix = f"{self.source.prefix}.{number}"
        wanted = self._wanted(layer, prefix)
        linear = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
        with Inputs(layer, linear) as inputs:
            for h in hidden:
                _run(layer, h, arguments)
                inputs.sequence_done()
        for group in inputs.groups:
            self._group(layer, prefix, group, wanted, set(linear))
        for name, rounded in self._rounded(layer, prefix, inputs.groups, wanted).items():
            linear[name].weight.data = rounded.to(linear[name].weight.device)
        out = [_run(layer, h, arguments) for h in hidden]
        self.source.drop(number)
        return out

    def _wanted(self, layer: nn.Module, prefix: str) -> dict[str, tuple[str, Format]]:
        """Path in the layer -> (key, format) of the weights to round; packed ones become dense first."""
        wanted: dict[str, tuple[str, Format]] = {}
        for name, module in list(layer.named_modules()):
            if not isinstance(module, nn.Linear | QLinear):
                continue
            key = self.source.keys.get(f"{prefix}.{name}.weight")
            if key is None:
                continue
            info = self.checkpoint.info(key)
            path = module_of(info)
            goal = None if path is None else self.recipe.of(path, len(info.shape))
            if isinstance(module, QLinear):
                if goal is None or not self.from_packed:
                    continue
                dense = torch.from_numpy(module.weight.canonical().dequantize("float32")).to(module.device)
                plain = nn.Linear(dense.shape[1], dense.shape[0], bias=False, device="meta")
                plain.weight = nn.Parameter(dense, requires_grad=False)
                plain.bias = module.bias
                layer.set_submodule(name, plain)
            if goal is None:
                continue
            try:
                wanted[name] = key, format_for(goal, "float32" if info.quantized else info.dtype, info.shape)[0]
            except ShapeError:
                continue  # kept dense, which the writer says
        return wanted

    def _group(
        self, layer: nn.Module, prefix: str, group: Shared, wanted: Mapping[str, tuple[str, Format]], watched: set[str]
    ) -> None:
        """AWQ's folding for one group of modules."""
        if self.method != "awq" or not any(n in wanted for n in group.names):
            return
        roundings = {n: _rounding(wanted[n][1]) for n in group.names if n in wanted}
        done = fold(layer, group, roundings, watched)
        if isinstance(done, str):
            if not done.startswith("nothing"):
                self.found.notes.append(f"{prefix}.{group.names[0]}: not scaled, {done}")
            return
        path, alpha = done
        if alpha > 0 and path not in wanted:
            self._replace(f"{prefix}.{path}", layer.get_submodule(path))

    def _replace(self, path: str, module: nn.Module) -> None:
        """Keep the new weight and bias of a dense module for the writer, in the file's dtype and convention."""
        for leaf in ("weight", "bias"):
            value = getattr(module, leaf, None)
            key = self.source.keys.get(f"{path}.{leaf}")
            if value is None or key is None:
                continue
            stored = np.asarray(self.checkpoint[key])
            new = value.detach().float().cpu().numpy()
            if getattr(getattr(self.source, "_filling", None), "architecture", None) is not None and leaf == "weight":
                # GGUF holds Gemma's norms as 1 + w.
                new = new + np.float32(1) if self.source._filling.architecture.norm_offset else new  # type: ignore[attr-defined]
            self.found.replaced[key] = new.astype(bfloat16 if stored.dtype == bfloat16 else stored.dtype)

    def _rounded(
        self, layer: nn.Module, prefix: str, groups: list[Shared], wanted: Mapping[str, tuple[str, Format]]
    ) -> dict[str, Tensor]:
        """The packed weights of a layer, into `found`; their values by path."""
        out: dict[str, Tensor] = {}
        for group in groups:
            for name in group.names:
                if name not in wanted:
                    continue
                key, fmt = wanted[name]
                w = layer.get_submodule(name).weight.detach().float().cpu().numpy()
                q = self._round(w, group, fmt)
                out[name] = torch.from_numpy(q.dequantize("float32"))
                module = module_of(self.checkpoint.info(key))
                assert module is not None
                self.found.weights[module] = self._in_file_order(key, q)
            group.hessian = None
        return out

    def _round(self, w: NDArray[np.float32], group: Shared, fmt: Format) -> QTensor:
        if group.hessian is None or group.tokens == 0:
            return round_searched("", w, fmt)
        hessian = group.hessian.double().cpu().numpy()
        try:
            if self.method == "gptq":
                return gptq(w, hessian, fmt, act_order=self.act_order)
            return mse(w, fmt, np.maximum(np.diag(hessian), 1e-12 * max(float(np.trace(hessian)), 1e-30)))
        except FormatError as error:
            if "no grid" not in str(error):
                raise
            return round_searched("", w, fmt)

    def _in_file_order(self, key: str, q: QTensor) -> QTensor:
        order = self.source.rows(key, q.shape[0])
        if order is None:
            return q
        back = np.argsort(order)
        parts = {p: a if p == "global_scale" else np.ascontiguousarray(a[back]) for p, a in q.parts.items()}
        return QTensor(q.format, q.shape, parts, origin=q.origin)

    def name_unmet(self) -> None:
        """Say which weights of the recipe no token reached."""
        unmet = []
        for info in self.checkpoint.infos():
            module = module_of(info)
            if module is None or (info.quantized and not self.from_packed) or self.recipe.of(module, len(info.shape)) is None:
                continue
            if module not in self.found.weights:
                unmet.append(module)
        if unmet:
            self.found.notes.append(
                f"{len(unmet)} weights saw no calibration token and are rounded with searched scales: {', '.join(unmet[:6])}"
                + (", ..." if len(unmet) > 6 else "")
            )


def _rounding(fmt: Format) -> Callable[[NDArray[Any]], QTensor]:
    """Plain rounding, for the search of scales: twenty times as fast as searching each time, and the same order."""
    return lambda w: quantize(w, fmt)


def _run(layer: nn.Module, hidden: Tensor, arguments: tuple[Any, dict[str, Any]]) -> Tensor:
    out = layer(hidden, *arguments[0], **arguments[1])
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result
