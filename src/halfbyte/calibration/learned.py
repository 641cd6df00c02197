"""Learned rounding of one layer: its packed weights are trained so that it computes what the dense
layer does.

    minimize  Σ over tokens  |layer(x̂) − y|² / |y|²

x̂ are the outputs of the packed layers before it and y the dense layer's outputs on the dense
model's own hidden states, so that a layer also makes up for the layers before it (block-wise
reconstruction: BRECQ, Li et al. 2021, arXiv 2102.05426). A token's error counts relative to its
outputs, as the norm that reads them divides by their magnitude.

Variables (`trainable`) go down by the sign of their gradient under a rate that falls linearly to
0, as in SignRound (Cheng et al. 2023, arXiv 2309.05516), so each travels a bounded distance.
Training is done twice, from GPTQ's result and from searched scales (`mse` under the inputs' mean
squares); either can end lower. Of all states seen at every quarter, both starts included, the one
of least error on sequences left out is returned: on these the result is never worse than GPTQ's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch.nn.attention import SDPBackend, sdpa_kernel

import torch
from torch import Tensor, nn

from ..tensor.qtensor import QTensor
from .trainable import EDGE, TrainableWeight

STEPS = 100
LEFT_OUT = 8
"""One sequence of so many decides which state is kept."""
BATCH = 8
"""Sequences of a step."""
TRAVEL, GPTQ_TRAVEL = 0.3, 0.1
"""How far an offset moves at most, in codes, from searched scales and from GPTQ's codes, which are
closer to the optimum.
"""
GPTQ_NEAR = 0.3
"""`TrainableWeight`'s `near` for GPTQ's codes, of which a sixth are not the nearest ones."""
RANGE_TRAVEL = 0.02
"""The same for scales, as a share, and for zero points and biases, as a share of the range."""
CHECKS = 4
"""Times that the error over all sequences is determined, besides the start."""


@dataclass
class Weight:
    """A weight of a layer.

    view    what the layer computes with
    packed  as it was rounded
    dense   float32 values before rounding; None where nothing is trained
    start   as training starts; None where nothing is trained
    """

    view: Tensor
    packed: QTensor
    dense: Tensor | None = None
    start: QTensor | None = None


@dataclass(frozen=True)
class LearningOptions:
    """steps       of descent for a layer; 0 leaves it as GPTQ rounds it
    distill     steps of descent for the whole model, afterwards (`distill`)
    seed        of the choice of sequences
    norms       the steps for the whole model train the weights of its layers' norms, too
    compiled    these steps run through torch.compile, which on a GPU wants Triton and a C compiler
    """

    steps: int = STEPS
    distill: int = 0
    seed: int = 0
    norms: bool = False
    compiled: bool = False


def train_layer(
    layer: nn.Module,
    weights: Sequence[Weight],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    run: Callable[[Tensor], Tensor],
    options: LearningOptions,
) -> list[QTensor]:
    """The packed weights of least error, in the order of `weights`; the layer computes with them
    from then on.

    inputs   hidden states [1, tokens, d] of each sequence
    targets  what the layer should return for them
    run      run(hidden) gives the layer's outputs
    """
    training = _Training(layer, weights, inputs, targets, run)
    seen, judged = split(len(inputs))
    checks = {options.steps * (i + 1) // CHECKS for i in range(CHECKS)}
    best = [w.packed for w in weights]
    with torch.enable_grad(), deterministic():
        least = math.inf
        searched = [w.start or w.packed for w in weights]
        for start, near, travel in ((best, GPTQ_NEAR, GPTQ_TRAVEL), (searched, EDGE, TRAVEL)):
            generator = torch.Generator().manual_seed(options.seed)
            training.begin(start, near, travel)
            kept = None
            for step in range(options.steps + 1):
                if (step in checks or step == 0) and (error := training.error(judged)) < least:
                    least, kept = error, training.state()
                if step < options.steps:
                    order = torch.randperm(len(seen), generator=generator)[:BATCH].tolist()
                    training.step([seen[i] for i in order], 1 - step / options.steps, options.steps)
            if kept is not None:
                best = training.packed(kept)
    training.put(best)
    return best


def split(count: int) -> tuple[list[int], list[int]]:
    """(sequences to train on, sequences that decide which state is kept): every eighth decides; all
    do both where there are fewer than eight.
    """
    every = list(range(count))
    judged = every[LEFT_OUT - 1 :: LEFT_OUT]
    return [i for i in every if i not in judged], judged or every


def deterministic() -> AbstractContextManager[None]:
    """Attention whose gradients are summed in one order."""
    found: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return found


def backpropagate(layer: nn.Module, views: Sequence[Tensor], values: Sequence[Tensor], backward: Callable[[], None]) -> None:
    """Run `backward` with values in a layer's parameters, and pass the gradients of the parameters
    on to what the values are functions of; so a layer may use its parameters in any way.

    views  matrices within parameters, where values go
    """
    storages = {p.untyped_storage().data_ptr(): p for p in layer.parameters()}
    parameters = [storages[view.untyped_storage().data_ptr()] for view in views]
    with torch.no_grad():
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
    for p in parameters:
        p.requires_grad_()
        p.grad = None
    backward()
    given = [
        (value, p.grad.as_strided(view.shape, view.stride(), view.storage_offset()))
        for view, value, p in zip(views, values, parameters, strict=True)
        if p.grad is not None and value.requires_grad
    ]
    if given:
        torch.autograd.backward([value for value, _ in given], [gradient for _, gradient in given])
    for p in parameters:
        p.requires_grad_(False)
        p.grad = None


class _Training:
    def __init__(
        self,
        layer: nn.Module,
        weights: Sequence[Weight],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        run: Callable[[Tensor], Tensor],
    ) -> None:
        self.layer, self.weights, self.inputs, self.targets, self.run = layer, weights, inputs, targets, run
        self.trained: list[TrainableWeight] = []
        self.travel = TRAVEL

    def begin(self, start: Sequence[QTensor], near: float, travel: float) -> None:
        """Variables at packed weights; an offset will move by `travel` at most."""
        dense = (w.dense for w in self.weights)
        self.trained = [TrainableWeight(q, x, near=near) for q, x in zip(start, dense, strict=True)]
        self.travel = travel

    def step(self, chosen: Sequence[int], rate: float, steps: int) -> None:
        """One step of descent on some sequences."""
        x, y = (torch.cat([tensors[i] for i in chosen]) for tensors in (self.inputs, self.targets))
        values = [t.value() for t in self.trained]
        with quick_products():
            backpropagate(self.layer, [w.view for w in self.weights], values, lambda: relative_error(self.run(x), y).backward())
        with torch.no_grad():
            for t in self.trained:
                for variable, travel in ((t.rounding, self.travel), *((u, RANGE_TRAVEL) for u in t.ranges.values())):
                    if variable.grad is not None:
                        variable.add_(variable.grad.sign_(), alpha=-2 * travel * rate / steps)
                        variable.grad = None

    def state(self) -> list[Tensor]:
        """A copy of all variables."""
        return [variable.detach().clone() for t in self.trained for variable in t.variables()]

    def packed(self, state: Sequence[Tensor]) -> list[QTensor]:
        """The packed weights of a state."""
        with torch.no_grad():
            for variable, value in zip((v for t in self.trained for v in t.variables()), state, strict=True):
                variable.copy_(value)
        return [t.packed() for t in self.trained]

    def put(self, packed: Sequence[QTensor]) -> None:
        """The layer computes with these weights."""
        with torch.no_grad():
            for w, q in zip(self.weights, packed, strict=True):
                w.view.copy_(torch.from_numpy(q.dequantize("float32")))

    def error(self, sequences: Sequence[int]) -> float:
        """The mean over sequences, of the variables as they are."""
        with torch.no_grad():
            for w, t in zip(self.weights, self.trained, strict=True):
                w.view.copy_(t.value())
            total = torch.zeros((), device=self.inputs[0].device)
            for i in range(0, len(sequences), BATCH):
                x, y = (torch.cat([tensors[j] for j in sequences[i : i + BATCH]]) for tensors in (self.inputs, self.targets))
                total += relative_error(self.run(x), y) * len(x)
        return float(total) / len(sequences)


@contextmanager
def quick_products() -> Iterator[None]:
    """Products of float32 matrices on a GPU with factors of 10 bits of mantissa (TF32), for
    gradients: several times as fast. What decides between states is computed without.

    torch 2.9 and newer refuse the older of its two settings where a program has used the newer one.
    """
    matmul = torch.backends.cuda.matmul
    name, quick = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    setattr(matmul, name, quick)
    try:
        yield
    finally:
        setattr(matmul, name, before)


@contextmanager
def quick_compiled_products() -> Iterator[None]:
    """The same for compiled code, by the older of torch's two settings, which its compiler reads; a
    program that has set the newer one to something else gets torch's error.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def relative_error(x: Tensor, y: Tensor) -> Tensor:
    """The mean over tokens of |x − y|² / |y|²."""
    x, y = x.float(), y.float()
    out: Tensor = ((x - y).square().sum(-1) / y.square().sum(-1).clamp(min=1e-30)).mean()
    return out
