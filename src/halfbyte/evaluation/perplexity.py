"""Perplexity: exp of the mean of −ln p(token | tokens before it) over the scored tokens.

The model runs in its own dtype; probabilities and sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import plural
from .protocols import EvaluationError, Window

Progress = Callable[[int, int, str], None]
ROWS = 32
"""Positions per block: 32 rows of a vocabulary of 262,144 are 67 MB in float64."""


@dataclass(frozen=True)
class Perplexity:
    """Sums over the scored tokens.

    total, squares  of −ln p
    """

    tokens: int
    total: float
    squares: float

    @property
    def nll(self) -> float:
        """Mean of −ln p."""
        return self.total / self.tokens

    @property
    def value(self) -> float:
        """exp(nll); infinity where that overflows."""
        try:
            return math.exp(self.nll)
        except OverflowError:
            return math.inf

    @property
    def error(self) -> float:
        """Standard error of `value`, tokens taken as independent: value · sqrt(variance / (tokens −
        1)).
        """
        variance = max(self.squares / self.tokens - self.nll**2, 0.0)
        return self.value * math.sqrt(variance / (self.tokens - 1)) if self.tokens > 1 else math.inf

    @staticmethod
    def of(losses: Iterable[Tensor]) -> Perplexity:
        """From −ln p of the scored tokens, some at a time. EvaluationError when one of them is NaN."""
        tokens, total, squares = 0, 0.0, 0.0
        for loss in losses:
            if bool(loss.isnan().any()):
                raise EvaluationError("[eval] the model returned NaN; a weight or scale is NaN, see `halfbyte inspect --data`")
            tokens += loss.numel()
            total += float(loss.sum())
            squares += float((loss * loss).sum())
        if tokens == 0:
            raise EvaluationError("[eval] no token is scored; give a longer text")
        return Perplexity(tokens, total, squares)


def perplexity(model: Any, windows: Sequence[Window], progress: Progress | None = None) -> Perplexity:
    """Perplexity of a transformers causal language model over the windows."""

    def losses() -> Iterable[Tensor]:
        for i, window in enumerate(windows):
            if progress is not None:
                progress(i, len(windows), "")
            logits = scored_logits(model, window)[0]
            yield losses_of(logits, targets_of(window, logits.device))
        if progress is not None:
            progress(len(windows), len(windows), "")

    return Perplexity.of(losses())


def scored_logits(model: Any, window: Window, hidden: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [scored, vocabulary] for the scored tokens of a window, and, with `hidden`, the hidden
    states (embeddings first).

    EvaluationError when the window is longer than the model's context.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(window.tokens) > limit:
        raise EvaluationError(f"[eval] a window of {plural(len(window.tokens), 'token')}; the model takes up to {limit:,}")
    device = model.get_input_embeddings().weight.device
    # The logits at a position predict the next token.
    positions = torch.arange(window.first - 1, len(window.tokens) - 1, device=device)
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([window.tokens], device=device),
            logits_to_keep=positions,
            use_cache=False,
            output_hidden_states=hidden,
        )
    return out.logits[0], tuple(out.hidden_states or ()) if hidden else ()


def targets_of(window: Window, device: Any) -> Tensor:
    """The scored tokens."""
    return torch.tensor(window.tokens[window.first :], device=device)


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """−ln p of each target, float64 [scored]."""
    rows = []
    for start in range(0, len(targets), ROWS):
        block = logits[start : start + ROWS].double()
        chosen = block.gather(1, targets[start : start + ROWS, None])[:, 0]
        rows.append(torch.logsumexp(block, dim=-1) - chosen)
    return torch.cat(rows) if rows else logits.new_zeros(0, dtype=torch.float64)
