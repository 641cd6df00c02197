"""Limits on a `Comparison`, and whether they hold."""

from __future__ import annotations

from dataclasses import dataclass

from .compare import Comparison
from .protocols import EvaluationError


@dataclass(frozen=True)
class Verdict:
    """One limit and what was measured."""

    name: str
    value: float
    limit: float
    kept: bool

    @property
    def words(self) -> str:
        """The limited quantity in words."""
        return _WORDS.get(self.name, self.name.replace("_", " "))

    @property
    def measured(self) -> str:
        """The value as a percentage, or as a cosine."""
        return _said(self.name, self.value)

    @property
    def allowed(self) -> str:
        """The limit, with the side it is on."""
        return f"{'≤' if self.name.startswith('max') else '≥'} {_said(self.name, self.limit)}"


_WORDS = {"max_ppl_increase": "perplexity increase", "min_agreement": "equal greedy tokens", "min_cosine": "least cosine"}


def _said(name: str, value: float) -> str:
    return f"{value:.6g}" if name == "min_cosine" else f"{100 * value:.4g} %"


@dataclass(frozen=True)
class Thresholds:
    """Limits; None is none.

    max_ppl_increase  of model perplexity / baseline perplexity − 1
    min_agreement     of the share of equal greedy tokens
    min_cosine        of every layer's mean cosine, the embedding's and the pooled one included
    """

    max_ppl_increase: float | None = None
    min_agreement: float | None = None
    min_cosine: float | None = None

    def verdicts(self, measured: Comparison) -> list[Verdict]:
        """Each limit that is set. A NaN keeps none."""
        out = []
        if self.max_ppl_increase is not None:
            value = measured.perplexity_increase
            out.append(Verdict("max_ppl_increase", value, self.max_ppl_increase, value <= self.max_ppl_increase))
        if self.min_agreement is not None:
            value = measured.agreement
            out.append(Verdict("min_agreement", value, self.min_agreement, value >= self.min_agreement))
        if self.min_cosine is not None:
            value = measured.least_cosine
            out.append(Verdict("min_cosine", value, self.min_cosine, value >= self.min_cosine))
        return out

    def __bool__(self) -> bool:
        return any(v is not None for v in (self.max_ppl_increase, self.min_agreement, self.min_cosine))


def fraction(text: str, name: str) -> float:
    """`1%` or `0.01` as 0.01. EvaluationError for anything else, NaN and infinities included."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = float("nan")
    if not -1e6 < value < 1e6:
        raise EvaluationError(f"[eval] {name} {text!r}; a fraction (0.01) or a percentage (1%) is allowed")
    return value
