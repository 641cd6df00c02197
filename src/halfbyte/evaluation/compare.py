"""Divergence of a model from a baseline, by token and by layer.

    agreement   fraction of scored positions where both models' most likely tokens are equal
    kl          Σ p ln(p / q) at each scored position, p the baseline's distribution and q the
                model's
    cosine      of the hidden states after each layer, mean over all tokens read; `relative_rms` of
                their difference beside it
    embedding   the same for the token embeddings; `pooled`: of the last layer's mean over a window,
                a text's embedding

All measures are relative, and a NaN is never within a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor

from .perplexity import ROWS, Perplexity, Progress, scored_logits, targets_of
from .protocols import EvaluationError, Window


@dataclass(frozen=True)
class LayerDrift:
    """Hidden states after one layer against the baseline's.

    layer         0-based; −1 is the token embedding
    cosine        mean over tokens; `least` the smallest
    relative_rms  sqrt(Σ (b − a)² / Σ a²)
    """

    layer: int
    cosine: float
    least: float
    relative_rms: float

    @property
    def name(self) -> str:
        return "embedding" if self.layer < 0 else f"layer {self.layer}"


@dataclass(frozen=True)
class Comparison:
    """A model against a baseline over the same windows."""

    model: Perplexity
    baseline: Perplexity
    agreement: float
    kl: NDArray[np.float64] = field(repr=False)
    embedding: LayerDrift
    layers: tuple[LayerDrift, ...]
    pooled: float

    @property
    def perplexity_increase(self) -> float:
        """model / baseline − 1."""
        return self.model.value / self.baseline.value - 1

    @property
    def kl_mean(self) -> float:
        return float(self.kl.mean())

    @property
    def kl_median(self) -> float:
        return float(np.median(self.kl))

    @property
    def kl_p99(self) -> float:
        """99th percentile."""
        return float(np.percentile(self.kl, 99))

    @property
    def least_cosine(self) -> float:
        """The smallest of the layers' mean cosines, the embedding's and the pooled one included;
        NaN when one of them is.
        """
        every = [self.embedding.cosine, *(drift.cosine for drift in self.layers), self.pooled]
        return math.nan if any(map(math.isnan, every)) else min(every)

    def worst(self) -> list[LayerDrift]:
        """Embedding and layers, the smallest cosine first, NaN before all."""
        return sorted((self.embedding, *self.layers), key=lambda d: (not math.isnan(d.cosine), d.cosine))


class _Drift:
    """Sums for one layer."""

    def __init__(self) -> None:
        self.tokens, self.cosines, self.least = 0, 0.0, math.inf
        self.difference, self.size = 0.0, 0.0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        a, b = theirs.double(), ours.to(theirs.device).double()
        cosine = cosine_of(b, a)
        self.tokens += cosine.numel()
        self.cosines += float(cosine.sum())
        smallest = float(cosine.min())
        self.least = smallest if math.isnan(smallest) else min(self.least, smallest)
        self.difference += float((b - a).square().sum())
        self.size += float(a.square().sum())

    def result(self, layer: int) -> LayerDrift:
        rms = math.sqrt(self.difference / self.size) if self.size else (0.0 if self.difference == 0 else math.inf)
        return LayerDrift(layer, self.cosines / self.tokens, self.least, rms)


def cosine_of(a: Tensor, b: Tensor) -> Tensor:
    """Cosine along the last axis, computed from unit vectors, so that tiny vectors count as large
    ones do.

    1 for two zero vectors; 0 for a zero and a nonzero vector.
    """
    a, b = (v / v.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny) for v in (a, b))
    na, nb = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
    both = (na == 0) & (nb == 0)
    dot = ((a / na.where(na > 0, 1)) * (b / nb.where(nb > 0, 1))).sum(-1)
    return torch.where(both[..., 0], torch.ones_like(dot), dot)


class Paired(NamedTuple):
    """Of each row of two arrays of logits, float64: KL divergence, −ln of the target's probability
    by either, and the number of rows where both have the same most likely token.
    """

    kl: Tensor
    baseline: Tensor
    model: Tensor
    same: int


def paired(baseline: Tensor, model: Tensor, targets: Tensor) -> Paired:
    """Both models' logits [rows, vocabulary] and the target tokens, some rows at a time."""
    kl, theirs, ours, same = [], [], [], 0
    for start in range(0, len(baseline), ROWS):
        p = torch.log_softmax(baseline[start : start + ROWS].double(), dim=-1)
        q = torch.log_softmax(model[start : start + ROWS].to(p.device).double(), dim=-1)
        came = targets[start : start + ROWS, None]
        theirs.append(-p.gather(1, came)[:, 0])
        ours.append(-q.gather(1, came)[:, 0])
        # A token of probability 0 under p contributes nothing, whatever q is.
        terms = p.exp() * (p - q)
        kl.append(torch.where(p == -math.inf, torch.zeros_like(terms), terms).sum(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return Paired(torch.cat(kl), torch.cat(theirs), torch.cat(ours), same)


def compare(model: Any, baseline: Any, windows: Sequence[Window], progress: Progress | None = None) -> Comparison:
    """Run both models over the windows. EvaluationError when their vocabularies or layers differ."""
    drifts: list[_Drift] = []
    ours_losses, theirs_losses, kls = [], [], []
    pooled: list[float] = []
    same = 0
    for i, window in enumerate(windows):
        if progress is not None:
            progress(i, len(windows), "")
        theirs, their_states = scored_logits(baseline, window, hidden=True)
        ours, our_states = scored_logits(model, window, hidden=True)
        if ours.shape != theirs.shape or len(our_states) != len(their_states):
            raise EvaluationError(
                f"[eval] the model has {ours.shape[-1]} tokens and {len(our_states) - 1} layers, the baseline "
                f"{theirs.shape[-1]} and {len(their_states) - 1}; only models of one architecture and vocabulary are compared"
            )
        pair = paired(theirs, ours, targets_of(window, theirs.device))
        kls.append(pair.kl.cpu().numpy())
        same += pair.same
        theirs_losses.append(pair.baseline)
        ours_losses.append(pair.model)
        drifts = drifts or [_Drift() for _ in our_states]
        for drift, a, b in zip(drifts, our_states, their_states, strict=True):
            drift.add(a, b)
        last = our_states[-1].double().mean(1), their_states[-1].double().mean(1)
        pooled.append(float(cosine_of(last[0].to(last[1].device), last[1])))
    if progress is not None:
        progress(len(windows), len(windows), "")
    divergences = np.concatenate(kls)
    results = [drift.result(layer - 1) for layer, drift in enumerate(drifts)]
    return Comparison(
        Perplexity.of(ours_losses),
        Perplexity.of(theirs_losses),
        same / len(divergences),
        divergences,
        results[0],
        tuple(results[1:]),
        float(np.mean(pooled)),
    )
