"""The end of learned rounding: the packed model's predictions approach the dense model's.

    minimize  Σ over tokens  Σ p ln(p / q)        p the dense model's distribution of the next token, q the packed model's

Where the model's dense weights fit in memory (`KEPT_IN_MEMORY`), codes, scales and biases are
trained together, straight through their rounding: quantization-aware training by distillation
(LLM-QAT, Liu et al. 2023, arXiv 2305.17888). Of larger models codes stay, and scales and biases (of
K-quants the second level) are trained (quantization parameters end to end: EfficientQAT, Chen et
al. 2024, arXiv 2407.11062; distilled from the dense model: DWQ of mlx-lm). Steps are Adam's (Kingma
and Ba 2014, arXiv 1412.6980) under a rate that rises and then falls linearly to 0. Sequences left
out (`learned.split`) are not trained on, and of the states seen at every quarter the one of least
divergence on them is kept, the start included.

With `norms`, the weights of norms are variables too (norm tweaking, Li et al. 2023, arXiv
2309.02784): dense tensors that the file has anyway.

A step passes through the model forward and backward, one layer's graph in memory at a time, beside
the hidden states of its sequences and three numbers a group; codes take four numbers a weight, a
position among them, which a scale that moves leaves where it is. Weights of small layers are
decoded together, `TOGETHER` at a time, and where the graph of the whole model fits (`GRAPH`), each
layer is run once instead of twice. A packed head, which every step multiplies by three times, is
decoded once where layers are kept. On a GPU products have bfloat16 factors in training; states are
judged in float32. There a compiled step whose graph fits is recorded (`_Recorded`), for starting
its kernels one by one takes two to three times as long as they do.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HalfbyteError
from ..tensor.qtensor import QTensor
from ..torch.modules import QLinear
from .learned import GPTQ_NEAR, backpropagate, deterministic, quick_compiled_products, quick_products, split
from .matrices import Matrix
from .running import run_layer, without_layers
from .sources import Source
from .trainable import TrainableStack, TrainableWeight

RATE = 5e-4
"""Of Adam, in units of a scale."""
CODE_RATE = 2e-3
"""Of Adam for the offsets of codes, in codes."""
BATCH = 16
"""Sequences of a step."""
WARM = 0.1
"""Share of the steps in which the rate rises, for Adam's first steps follow a gradient's sign."""
CHECKS = 4
JUDGED = 256
"""Most sequences that decide which state is kept."""
PRODUCTS = torch.bfloat16
"""Factors of the products on a GPU, in training."""
GRAPH = 0.6
"""Share of a GPU's free memory that the graph of all layers may take (`_graph_bytes`)."""
LOGITS = 1 << 28
"""Most logits that are computed at once where one sequence has fewer: 1 GiB of float32."""
LOGITS_SHARE, LOGIT_BYTES = 0.25, 32
"""Share of a GPU's free memory that more of them may take, and what one takes where states are
judged.
"""
EAGER = 3
"""Steps before one is recorded: what is compiled or allocated once is then there."""
KEPT_IN_MEMORY = 1 << 32
"""Bytes of float32 layers that are read once; of larger models they are read in every pass."""

TOGETHER = 1 << 26
"""Most weights whose decoding is one graph, of more than one layer: each array of it takes 256 MiB."""

Ranges = dict[str, Tensor]


def trained_parts(q: QTensor) -> list[str]:
    """Parts that may change in the whole model: floats and E4M3. Zero points, powers of two and
    the small integers of K-quants stay, for their steps are too large.
    """
    fixed = ("scales", "mins") if q.format.super_size or q.format.scale == "e8m0" else ()
    return [p for p in ("scales", "super_scales", "super_mins", "biases") if p in q.parts and p not in fixed]


@dataclass
class _Norm:
    """The weight of a norm of a layer.

    number, path  of the layer, and of the norm in it
    view          the parameter
    start, unit   its value is start + u · unit
    """

    number: int
    path: str
    view: Tensor
    start: Tensor
    unit: Tensor
    u: Tensor

    def value(self) -> Tensor:
        """What the layer computes with, differentiable."""
        return self.start + self.u * self.unit


@dataclass(frozen=True)
class _Block:
    """Layers that follow each other.

    numbers  of the layers
    layers   themselves
    views    their matrices, where decoded weights go
    decode   decode() gives the decoded weights in the order of `views`, differentiable
    """

    numbers: range
    layers: nn.ModuleList
    views: list[Tensor]
    decode: Callable[[], list[Tensor]]


@dataclass(frozen=True)
class _Batch:
    """Sequences of a step.

    ids      [sequences, tokens]
    inputs   hidden states before the first layer [sequences, tokens, d]
    targets  the same behind the dense model's last layer
    """

    ids: Tensor
    inputs: Tensor
    targets: Tensor

    def rows(self, some: slice) -> _Batch:
        return _Batch(self.ids[some], self.inputs[some], self.targets[some])


class _Recorded:
    """A step in two CUDA graphs: decoding and the layers forward; the layers backward and Adam's
    descent. The head between them is not recorded, for models look at values on their way to it.

    inputs    where a batch's hidden states are copied before a replay
    last      hidden states behind the last layer
    gradient  where the derivative by them is copied
    """

    def __init__(self, batch: _Batch) -> None:
        self.inputs, self.gradient = batch.inputs.clone(), torch.zeros_like(batch.inputs)
        self.last = batch.inputs
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def record(self, step: Callable[[Tensor, Callable[[Tensor], Tensor]], None]) -> None:
        """step(inputs, head) is recorded, without being executed, up to where it calls head(last)
        for the derivative, and from there on.
        """
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        self._forward.capture_begin(pool=pool)
        try:
            step(self.inputs, lambda last: self._turn(last, pool))
        except (RuntimeError, HalfbyteError):
            for graph in (self._forward, self._backward):
                with suppress(RuntimeError):
                    graph.capture_end()
            raise
        self._backward.capture_end()

    def _turn(self, last: Tensor, pool: Any) -> Tensor:
        self.last = last.detach()
        self._forward.capture_end()
        self._backward.capture_begin(pool=pool)
        return self.gradient

    def replay(self, batch: _Batch, head: Callable[[Tensor], Tensor]) -> None:
        self.inputs.copy_(batch.inputs)
        self._forward.replay()
        self.gradient.copy_(head(self.last))
        self._backward.replay()


def _free_bytes(device: torch.device) -> int:
    """Of a GPU; what the CPU has is not asked for."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _toward(dense: Tensor, logits: Tensor, scale: float) -> Tensor:
    """The derivative of Σ p ln(p / q) · scale with respect to logits, q − p, in their dtype."""
    q, p = (torch.softmax(x, -1, dtype=torch.float32) for x in (logits, dense))
    return q.sub_(p).mul_(scale).to(logits.dtype)


def _decoded(weights: Sequence[TrainableWeight]) -> list[Tensor]:
    return [w.value() for w in weights]


class Distillation:
    """The training of a model's packed weights.

    source      the model; what is outside its layers is there
    matrices    the matrices of a layer that are packed
    packed      for each layer the weights of these matrices, in their order and with the model's rows
    ids         tokens of each sequence
    inputs      hidden states [1, tokens, d] before the first layer
    targets     the same behind the dense model's last layer
    arguments   of each layer, besides hidden states
    norms       norms(layer, number) are the paths of the norms that are trained; only where layers
                are kept in memory
    compiled    layers run through torch.compile in training; decoding does not, for a compiler may
                leave out the rounding of scales to the format's dtype
    """

    def __init__(
        self,
        source: Source,
        matrices: Callable[[nn.Module, int], list[Matrix]],
        packed: Sequence[Sequence[QTensor]],
        ids: Sequence[list[int]],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        arguments: Sequence[tuple[Any, dict[str, Any]]],
        norms: Callable[[nn.Module, int], list[str]] = lambda layer, number: [],
        compiled: bool = False,
    ) -> None:
        self.source, self.packed, self.ids, self.inputs, self.targets = source, packed, ids, inputs, targets
        self._matrices, self._arguments = matrices, arguments
        self._few = 4 * sum(q.size for layer in packed for q in layer) <= KEPT_IN_MEMORY
        self.ranges = [[self._new(q) for q in layer] for layer in packed]
        self._weights: list[list[TrainableWeight]] = []
        self._stacks: list[TrainableStack] = []
        self._kept: list[_Block] = []
        self._run = torch.compile(run_layer, dynamic=False) if compiled else run_layer
        self._toward = torch.compile(_toward, dynamic=False) if compiled else _toward
        self._compiled = compiled
        self._norms: list[_Norm] = []
        self.changed_norms: list[tuple[int, str, Tensor]] = []
        """(layer, path in it, weight) of the norms that `train` changed."""
        if self._few:
            self._keep(norms)
            self._decode_head()
        room = _free_bytes(inputs[0].device) * LOGITS_SHARE / LOGIT_BYTES
        self._at_once = max(LOGITS, 1 << int(room).bit_length() - 1) if room else LOGITS
        self._whole = self._few and self._graph_bytes() <= GRAPH * _free_bytes(inputs[0].device)

    def _new(self, q: QTensor) -> Ranges:
        device = self.inputs[0].device
        parts = trained_parts(q)
        return {p: torch.zeros(q.parts[p].shape, device=device, requires_grad=True) for p in parts}

    def train(self, steps: int, seed: int) -> list[list[QTensor]]:
        """The packed weights of least divergence, as `packed` has them."""
        own = [stack.ranges for stack in self._stacks] if self._few else [ranges for layer in self.ranges for ranges in layer]
        ranges = [u for parts in own for u in parts.values()]
        codes = [stack.rounding for stack in self._stacks]
        ranges += [norm.u for norm in self._norms]
        groups = [(group, rate) for group, rate in ((ranges, RATE), (codes, CODE_RATE)) if group]
        if not groups:
            return [list(layer) for layer in self.packed]
        variables = [*ranges, *codes]
        learned, judged = split(len(self.ids))
        judged = judged[:: math.ceil(len(judged) / JUDGED)]
        generator = torch.Generator().manual_seed(seed)
        device = variables[0].device
        recording = device.type == "cuda" and self._compiled and self._whole
        adam = torch.optim.Adam(
            [{"params": group, "lr": torch.tensor(rate, device=device) if recording else rate} for group, rate in groups],
            fused=device.type == "cuda",
            capturable=recording,
        )
        checks = {steps * (i + 1) // CHECKS for i in range(CHECKS)}
        recorded: _Recorded | None = None
        if recording:
            torch.cuda.synchronize(device)
        # Nothing can be recorded on the default stream.
        with torch.cuda.stream(torch.cuda.Stream(device) if recording else None):
            best, least = None, self.divergence(judged)
            for step in range(steps):
                order = torch.randperm(len(learned), generator=generator)[:BATCH].tolist()
                batch = self._batch([learned[i] for i in order])
                for group, (_, rate) in zip(adam.param_groups, groups, strict=True):
                    now = rate * min(1.0, (step + 1) / (WARM * steps)) * (1 - step / steps)
                    group["lr"] = group["lr"].fill_(now) if recording else now
                with torch.enable_grad(), deterministic(), self._quick():
                    if recording and step == EAGER:
                        recorded = self._record(batch, adam)
                    if recorded is None:
                        self._pass(batch)
                        adam.step()
                        adam.zero_grad()
                    else:
                        recorded.replay(batch, partial(self._head_gradient, batch))
                if step + 1 in checks and (found := self.divergence(judged)) < least:
                    best, least = [v.detach().clone() for v in variables], found
        if best is None:
            return [list(layer) for layer in self.packed]
        with torch.no_grad():
            for variable, value in zip(variables, best, strict=True):
                variable.copy_(value)
            self.changed_norms = [(norm.number, norm.path, norm.value()) for norm in self._norms]
        weights = self._weights or [self._scales_of(number) for number in range(len(self.packed))]
        return [[t.packed() for t in layer] for layer in weights]

    def divergence(self, sequences: Sequence[int]) -> float:
        """Nats a token, the mean over sequences."""
        total = torch.zeros((), device=self.inputs[0].device)
        with torch.no_grad():
            for at in range(0, len(sequences), BATCH):
                batch = self._batch(sequences[at : at + BATCH])
                hidden = self._forward(batch.inputs)[-1]
                with without_layers(self.source) as run:
                    for rows in self._rows(len(hidden)):
                        total += self._kl(run, batch.rows(rows), hidden[rows])
        return float(total) / len(sequences)

    def _batch(self, sequences: Sequence[int]) -> _Batch:
        ids = torch.tensor([self.ids[i] for i in sequences], device=self.inputs[0].device)
        return _Batch(ids, *(torch.cat([states[i] for i in sequences]) for states in (self.inputs, self.targets)))

    def _scales_of(self, number: int) -> list[TrainableWeight]:
        device = self.inputs[0].device
        return [
            TrainableWeight(q, None, ranges, device) for q, ranges in zip(self.packed[number], self.ranges[number], strict=True)
        ]

    def _read(self, number: int) -> tuple[nn.Module, list[Tensor]]:
        """A layer and its matrices."""
        layer = self.source.layer(number)
        return layer, [m.view for m in self._matrices(layer, number)]

    def _graph_bytes(self) -> int:
        """About what the graph of a step takes: of each token and layer a dozen vectors of each
        width, and three scores of attention.
        """
        text = self.source.model.config.get_text_config()
        tokens, hidden = len(self.ids[0]), text.hidden_size
        inner = max((q.shape[0] for layer in self.packed for q in layer), default=hidden)
        floats = 12 * (2 * hidden + inner) + 3 * getattr(text, "num_attention_heads", 1) * tokens
        return int(4 * BATCH * tokens * len(self.packed) * floats)

    def _keep(self, norms: Callable[[nn.Module, int], list[str]]) -> None:
        """All layers, read once, their weights in stacks."""
        layers, views = [], []
        for number, packed in enumerate(self.packed):
            layer, found = self._read(number)
            for path in norms(layer, number):
                weight = layer.get_submodule(path).weight.data
                start = weight.detach().clone()
                self._norms.append(
                    _Norm(number, path, weight, start, start.abs().mean(), torch.zeros_like(start, requires_grad=True))
                )
            self._weights.append([
                TrainableWeight(q, view.float(), ranges, near=GPTQ_NEAR, free=True)
                for q, view, ranges in zip(packed, found, self.ranges[number], strict=True)
            ])  # fmt: skip
            layers.append(layer)
            views.append(found)
        sizes = [sum(q.size for q in packed) for packed in self.packed]
        first = 0
        while first < len(sizes):
            end = first + 1
            while end < len(sizes) and sum(sizes[first : end + 1]) <= TOGETHER:
                end += 1
            numbers = range(first, end)
            weights = [w for number in numbers for w in self._weights[number]]
            scaled = [norm for norm in self._norms if norm.number in numbers]
            self._kept.append(
                _Block(
                    numbers,
                    nn.ModuleList(layers[first:end]),
                    [view for number in numbers for view in views[number]] + [norm.view for norm in scaled],
                    self._in_stacks(weights, scaled),
                )
            )
            first = end

    def _decode_head(self) -> None:
        """A packed head as a dense matrix."""
        head = self.source.model.get_output_embeddings()
        if isinstance(head, QLinear):
            dense = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
            values = torch.from_numpy(head.canonical().dequantize("float32"))
            dense.weight = nn.Parameter(values.to(self.inputs[0].device), requires_grad=False)
            dense.bias = head.bias
            self.source.model.set_output_embeddings(dense)

    def _in_stacks(self, weights: Sequence[TrainableWeight], norms: Sequence[_Norm]) -> Callable[[], list[Tensor]]:
        """Stacks of weights, and the function that decodes them in their order, then norms."""
        alike: dict[tuple[Any, int], list[int]] = defaultdict(list)
        for at, w in enumerate(weights):
            alike[w.format, w.shape[1]].append(at)
        stacks = [(TrainableStack([weights[at] for at in places]), places) for places in alike.values()]
        self._stacks += [stack for stack, _ in stacks]

        def decode() -> list[Tensor]:
            found: dict[int, Tensor] = {}
            for stack, places in stacks:
                found.update(zip(places, stack.value().split(stack.rows), strict=True))
            return [*(found[at] for at in range(len(weights))), *(norm.value() for norm in norms)]

        return decode

    def _blocks(self, backward: bool = False) -> Iterator[_Block]:
        """In order or backward; a layer that is not kept is read, and dropped afterwards."""
        if self._few:
            yield from reversed(self._kept) if backward else self._kept
            return
        numbers = range(len(self.packed))
        for number in reversed(numbers) if backward else numbers:
            layer, views = self._read(number)
            yield _Block(range(number, number + 1), nn.ModuleList([layer]), views, partial(_decoded, self._scales_of(number)))
            self.source.drop(number)

    def _trained(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        """A layer's outputs in training."""
        with torch.autocast(x.device.type, PRODUCTS, enabled=x.is_cuda):
            out: Tensor = self._run(layer, x, self._arguments[number]).float()
        return out

    def _forward(self, inputs: Tensor, every: bool = False) -> list[Tensor]:
        """Hidden states behind the last layer; `every`, in training: before each layer too."""
        states = [inputs]
        with torch.no_grad():
            for block in self._blocks():
                for view, value in zip(block.views, block.decode(), strict=True):
                    view.copy_(value)
                for number, layer in zip(block.numbers, block.layers, strict=True):
                    if every:
                        states.append(self._trained(number, layer, states[-1]))
                    else:
                        states = [run_layer(layer, states[-1], self._arguments[number])]
        return states

    def _quick(self) -> AbstractContextManager[None]:
        return quick_compiled_products() if self._compiled and self.inputs[0].is_cuda else quick_products()

    def _pass(self, batch: _Batch) -> None:
        """Add the gradients of some sequences to all variables."""
        if self._whole:
            self._pass_whole(batch.inputs, partial(self._head_gradient, batch))
            return
        states = self._forward(batch.inputs, every=True)
        gradient = self._head_gradient(batch, states.pop())
        for block in self._blocks(backward=True):
            inputs = [states.pop().requires_grad_() for _ in block.numbers]
            backpropagate(block.layers, block.views, block.decode(), partial(self._backward, block, inputs, gradient))
            gradient = inputs[-1].grad

    def _pass_whole(self, inputs: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        """The same, all layers in one graph; head(last) is the derivative by the hidden states
        behind the last layer.
        """
        layers = nn.ModuleList(layer for block in self._kept for layer in block.layers)
        views = [view for block in self._kept for view in block.views]
        values = [value for block in self._kept for value in block.decode()]

        def backward() -> None:
            hidden = inputs
            for block in self._kept:
                for number, layer in zip(block.numbers, block.layers, strict=True):
                    hidden = self._trained(number, layer, hidden)
            hidden.backward(head(hidden))

        backpropagate(layers, views, values, backward)

    def _record(self, batch: _Batch, adam: torch.optim.Adam) -> _Recorded | None:
        """A recorded step; None for a model whose layers look at values, or that does not fit
        twice: the same step ran before, so what fails here is the recording.
        """

        def step(inputs: Tensor, head: Callable[[Tensor], Tensor]) -> None:
            self._pass_whole(inputs, head)
            adam.step()
            adam.zero_grad()

        recorded = _Recorded(batch)
        try:
            recorded.record(step)
        except (RuntimeError, HalfbyteError):
            adam.zero_grad()
            return None
        return recorded

    def _head_gradient(self, batch: _Batch, last: Tensor) -> Tensor:
        """The derivative by the hidden states behind the last layer."""
        last = last.detach().requires_grad_()
        with without_layers(self.source) as run:
            for rows in self._rows(len(last)):
                self._backward_head(run, batch.rows(rows), last[rows], len(last))
        assert last.grad is not None
        return last.grad

    def _backward(self, block: _Block, inputs: Sequence[Tensor], gradient: Any) -> None:
        """Gradients through a block's layers, the last first, as `inputs` are."""
        for number, layer, x in zip(reversed(block.numbers), reversed(block.layers), inputs, strict=True):
            self._trained(number, layer, x).backward(gradient)
            gradient = x.grad

    def _rows(self, count: int) -> Iterator[slice]:
        """Rows of a batch of `count` sequences whose logits are computed together."""
        size = max(1, self._at_once // (len(self.ids[0]) * self.source.model.config.get_text_config().vocab_size))
        return (slice(at, at + size) for at in range(0, count, size))

    def _logits(self, run: Callable[[Tensor, Tensor], Tensor], batch: _Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the dense model's, the packed model's with a graph) of some sequences."""
        with torch.no_grad():
            dense = run(batch.ids, batch.targets)
        return dense, run(batch.ids, hidden)

    def _kl(self, run: Callable[[Tensor, Tensor], Tensor], batch: _Batch, hidden: Tensor) -> Tensor:
        """The sum over some sequences of the mean divergence of each, a tensor."""
        p, q = (torch.log_softmax(x.float(), -1) for x in self._logits(run, batch, hidden))
        total: Tensor = (p.exp() * (p - q)).sum(-1).mean(-1).sum()
        return total

    def _backward_head(self, run: Callable[[Tensor, Tensor], Tensor], batch: _Batch, hidden: Tensor, count: int) -> None:
        """Gradients of `_kl` / count by what `hidden` is made of."""
        with torch.autocast(hidden.device.type, PRODUCTS, enabled=hidden.is_cuda):
            dense, logits = self._logits(run, batch, hidden)
        with torch.no_grad():
            gradient = self._toward(dense, logits, 1 / (count * logits.shape[1]))
        logits.backward(gradient)
