"""Learned scales of a whole model: the packed model's predictions approach the dense model's.

    minimize  Σ over tokens  Σ p ln(p / q)        p the dense model's distribution of the next token, q the packed model's

Codes stay; scales and biases (of K-quants the second level) are trained, straight through their
rounding to what the format stores (quantization parameters end to end: EfficientQAT, Chen et al.
2024, arXiv 2407.11062; distilled from the dense model: DWQ of mlx-lm). Steps are Adam's (Kingma and
Ba 2014, arXiv 1412.6980) under a rate that falls linearly to 0. Sequences left out
(`learned.split`) are not trained on, and of the states seen at every quarter the one of least
divergence on them is kept, the start included.

A step passes through the model forward and backward, one layer in memory at a time beside the
hidden states of its sequences and three numbers a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..tensor.qtensor import QTensor
from .learned import backpropagate, deterministic, split
from .matrices import Matrix
from .running import run_layer, without_layers
from .sources import Source
from .trainable import TrainableWeight

RATE = 2e-3
"""Of Adam, in units of a scale."""
BATCH = 4
"""Sequences of a step."""
CHECKS = 4
KEPT_IN_MEMORY = 1 << 32
"""Bytes of float32 layers that are read once; of larger models they are read in every pass."""

Ranges = dict[str, Tensor]


def trained_parts(q: QTensor) -> list[str]:
    """Parts that may change under fixed codes: floats and E4M3. Zero points, powers of two and the
    small integers of K-quants stay, for their steps are too large.
    """
    fixed = ("scales", "mins") if q.format.super_size or q.format.scale == "e8m0" else ()
    return [p for p in ("scales", "super_scales", "super_mins", "biases") if p in q.parts and p not in fixed]


class Distillation:
    """The training of a model's scales.

    source      the model; what is outside its layers is there
    matrices    the matrices of a layer that are packed
    packed      for each layer the weights of these matrices, in their order and with the model's rows
    ids         tokens of each sequence
    inputs      hidden states [1, tokens, d] before the first layer
    targets     the same behind the dense model's last layer
    arguments   of each layer, besides hidden states
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
    ) -> None:
        self.source, self.packed, self.ids, self.inputs, self.targets = source, packed, ids, inputs, targets
        self._matrices, self._arguments = matrices, arguments
        self._layers: dict[int, nn.Module] = {}
        self._few = 4 * sum(q.size for layer in packed for q in layer) <= KEPT_IN_MEMORY
        self.ranges = [[self._new(q) for q in layer] for layer in packed]

    def _new(self, q: QTensor) -> Ranges:
        device = self.inputs[0].device
        parts = trained_parts(q)
        return {p: torch.zeros(q.parts[p].shape, device=device, requires_grad=True) for p in parts}

    def train(self, steps: int, seed: int) -> list[list[QTensor]]:
        """The packed weights of least divergence, as `packed` has them."""
        variables = [u for layer in self.ranges for ranges in layer for u in ranges.values()]
        if not variables:
            return [list(layer) for layer in self.packed]
        learned, judged = split(len(self.ids))
        generator = torch.Generator().manual_seed(seed)
        adam = torch.optim.Adam(variables, lr=RATE)
        checks = {steps * (i + 1) // CHECKS for i in range(CHECKS)}
        best, least = [u.detach().clone() for u in variables], self.divergence(judged)
        for step in range(steps):
            order = torch.randperm(len(learned), generator=generator)[:BATCH].tolist()
            with torch.enable_grad(), deterministic():
                self._pass([learned[i] for i in order])
            adam.param_groups[0]["lr"] = RATE * (1 - step / steps)
            adam.step()
            adam.zero_grad()
            if step + 1 in checks and (found := self.divergence(judged)) < least:
                best, least = [u.detach().clone() for u in variables], found
        with torch.no_grad():
            for u, value in zip(variables, best, strict=True):
                u.copy_(value)
        return [[trained.packed() for trained in self._trained(number)] for number in range(len(self.packed))]

    def divergence(self, sequences: Sequence[int]) -> float:
        """Nats a token, the mean over sequences."""
        with torch.no_grad():
            hidden = self._forward(sequences)[-1]
            return sum(float(self._kl(i, h[None])) for i, h in zip(sequences, hidden, strict=True)) / len(sequences)

    def _trained(self, number: int) -> list[TrainableWeight]:
        device = self.inputs[0].device
        return [
            TrainableWeight(q, None, ranges, device) for q, ranges in zip(self.packed[number], self.ranges[number], strict=True)
        ]

    def _layer(self, number: int) -> nn.Module:
        layer = self._layers.get(number) or self.source.layer(number)
        if self._few:
            self._layers[number] = layer
        return layer

    def _drop(self, number: int) -> None:
        if not self._few:
            self.source.drop(number)

    def _forward(self, sequences: Sequence[int]) -> list[Tensor]:
        """Hidden states before each layer, and behind the last."""
        states = [torch.cat([self.inputs[i] for i in sequences])]
        for number in range(len(self.packed)):
            layer = self._layer(number)
            with torch.no_grad():
                for matrix, trained in zip(self._matrices(layer, number), self._trained(number), strict=True):
                    matrix.view.copy_(trained.value())
                states.append(run_layer(layer, states[-1], self._arguments[number]))
            self._drop(number)
        return states

    def _pass(self, sequences: Sequence[int]) -> None:
        """Add the gradients of some sequences to all variables."""
        states = self._forward(sequences)
        last = states.pop().requires_grad_()
        for row, i in enumerate(sequences):
            (self._kl(i, last[row : row + 1]) / len(sequences)).backward()
        gradient = last.grad
        for number in reversed(range(len(self.packed))):
            x = states.pop().requires_grad_()
            layer = self._layer(number)
            views = [m.view for m in self._matrices(layer, number)]
            values = [trained.value() for trained in self._trained(number)]
            self._backward(layer, number, views, values, x, gradient)
            gradient = x.grad
            self._drop(number)

    def _backward(
        self, layer: nn.Module, number: int, views: Sequence[Tensor], values: Sequence[Tensor], x: Tensor, gradient: Any
    ) -> None:
        backpropagate(layer, views, values, lambda: run_layer(layer, x, self._arguments[number]).backward(gradient))

    def _kl(self, sequence: int, hidden: Tensor) -> Tensor:
        """Divergence on one sequence, a tensor."""
        with without_layers(self.source) as run:
            ids = self.ids[sequence]
            with torch.no_grad():
                p = torch.log_softmax(run(ids, self.targets[sequence])[0].float(), -1)
            q = torch.log_softmax(run(ids, hidden)[0].float(), -1)
        total: Tensor = (p.exp() * (p - q)).sum(-1).mean()
        return total
