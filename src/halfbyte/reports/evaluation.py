"""The page of an evaluation: what the bits cost in words, checkpoints beside each other, then for
each one limits, error by layer and divergences, and what was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import plural
from .page import Head, Row, cards, facts, page, section, table, verdict
from .plots import SIZES, Axes, bars, histogram, points

if TYPE_CHECKING:
    from ..evaluation.compare import Comparison
    from ..evaluation.thresholds import Verdict


class Evaluated(NamedTuple):
    """One checkpoint of a page.

    facts       what was run and measured, a row each
    comparison  with the baseline; None without one
    verdicts    of the limits that were given
    """

    facts: Mapping[str, Any]
    comparison: Comparison | None
    verdicts: Sequence[Verdict]

    @property
    def name(self) -> str:
        path = str(self.facts.get("path", "a model"))
        name = PurePath(path).name or path
        return f"{name} as {self.facts['requantized']}" if self.facts.get("requantized") else name


GRADES = ((0.005, 0.97, "very small loss"), (0.02, 0.92, "small loss"), (0.1, 0.85, "noticeable loss"))
"""(perplexity increase up to, equal tokens from, word): the first row whose bounds both hold."""
_GRADING = (
    "The words are a convention of this page: very small is at most 0.5 % more perplexity and at least 97 % equal tokens, "
    "small 2 % and 92 %, noticeable 10 % and 85 %, large what is beyond."
)


def grade(c: Comparison) -> str:
    """A word for the loss against the baseline."""
    if not math.isfinite(c.perplexity_increase) or math.isnan(c.least_cosine):
        return "broken: not all results are numbers"
    for most, least, word in GRADES:
        if c.perplexity_increase <= most and c.agreement >= least:
            return word
    return "large loss"


def report(evaluated: Sequence[Evaluated]) -> str:
    """One HTML page over one or several checkpoints."""
    several = len(evaluated) > 1
    title = f"Evaluation of {plural(len(evaluated), 'checkpoint')}" if several else f"Evaluation of {evaluated[0].name}"
    body, sections = [_verdict(evaluated)], []
    if several:
        sections.append("Checkpoints")
        body.append(_beside(evaluated))
    for one in evaluated:
        if several:
            sections.append(one.name)
            body.append(section(one.name, "", [], 2))
        body += _one(one, 3 if several else 2)
    if not several:
        sections = ["Error by layer", "Divergence of the next token", "Layers, worst first"] if evaluated[0].comparison else []
        sections.append("What was run")
    return page(title, body, sections)


def _verdict(evaluated: Sequence[Evaluated]) -> str:
    """What the evaluation comes to."""
    missed = [(one, v) for one in evaluated for v in one.verdicts if not v.kept]
    limits = sum(len(one.verdicts) for one in evaluated)
    sentences = [_sentence(one, len(evaluated) > 1) for one in evaluated]
    compared = [one.comparison for one in evaluated if one.comparison is not None]
    if compared:
        sentences.append(_GRADING)
    if missed:
        what = "; ".join(
            f"{one.name + ': ' if len(evaluated) > 1 else ''}{v.words} {v.measured}, {v.allowed} wanted" for one, v in missed
        )
        return verdict("bad", f"{len(missed)} of {limits} limits missed", [f"Missed: {what}.", *sentences])
    if limits:
        return verdict("good", "The limit is kept." if limits == 1 else f"All {limits} limits are kept.", sentences)
    if not compared:
        return verdict("warn", "No baseline was given, so this page shows no loss, only a perplexity.", sentences)
    if len(evaluated) == 1:
        word = grade(compared[0])
        return verdict(grade_colour(word), word[0].upper() + word[1:], sentences)
    best = min((one for one in evaluated if one.comparison), key=lambda one: _order(one.comparison))
    return verdict("good", f"{best.name} is closest to the baseline: {grade(best.comparison)}", sentences)  # type: ignore[arg-type]


def _order(c: Comparison | None) -> float:
    return c.kl_mean if c is not None and math.isfinite(c.kl_mean) else math.inf


def grade_colour(word: str) -> str:
    """Of a verdict with this word."""
    return {"very small loss": "good", "small loss": "good", "noticeable loss": "warn"}.get(word, "bad")


def _sentence(one: Evaluated, named: bool) -> str:
    """One checkpoint in a sentence."""
    who = one.name if named else "The model"
    c = one.comparison
    if c is None:
        value = one.facts.get("perplexity")
        return f"{who} has a perplexity of {value:.4g}." if isinstance(value, float) else f"{who} was evaluated."
    size = ""
    if "bytes" in one.facts and "baseline_bytes" in one.facts:
        share = one.facts["bytes"] / one.facts["baseline_bytes"]
        size = f" Its weights take {one.facts['bytes'] / 1e6:,.0f} MB, {share:.2f} times the baseline's."
    change = c.perplexity_increase
    more = f"{abs(change) * 100:#.3g} % {'higher' if change >= 0 else 'lower'}" if math.isfinite(change) else "no number"
    word = grade(c)
    start = f"{one.name}: {word}; it" if named else f"{word[0].upper()}{word[1:]}: the model"
    return (
        f"{start} finds the same next token likeliest as the baseline in {100 * c.agreement:.1f} % of "
        f"{plural(len(c.kl), 'position')}, and its perplexity is {more} ({c.model.value:.4g}, "
        f"baseline {c.baseline.value:.4g}).{size}"
    )


def _beside(evaluated: Sequence[Evaluated]) -> str:
    """All checkpoints in one table, and their loss over their size."""
    heads = [
        Head("checkpoint"), Head("MB", True), Head("bits/weight", True), Head("perplexity", True), Head("change", True),
        Head("equal tokens", True), Head("mean KL", True), Head("verdict"),
    ]  # fmt: skip
    rows: list[Row] = []
    for one in evaluated:
        c, f = one.comparison, one.facts
        size = [
            f"{f['bytes'] / 1e6:,.1f}" if "bytes" in f else "",
            f"{f['bits_per_weight']:#.3g}" if "bits_per_weight" in f else "",
        ]
        if c is None:
            rows.append([one.name, *size, f"{f.get('perplexity', math.nan):.4g}", "", "", "", ""])
            continue
        missed = [v for v in one.verdicts if not v.kept]
        word = ("limit missed", "bad") if missed else (grade(c), grade_colour(grade(c)))
        change = f"{100 * c.perplexity_increase:+#.3g} %"
        rows.append([one.name, *size, f"{c.model.value:.4g}", change, f"{100 * c.agreement:.2f} %", f"{c.kl_mean:.3g}", word])
    content = [table(heads, rows)]
    drawn = [one for one in evaluated if one.comparison is not None and "bytes" in one.facts]
    if len(drawn) > 1:
        sizes = [one.facts["bytes"] / 1e6 for one in drawn]
        losses = [one.comparison.kl_mean for one in drawn if one.comparison is not None]
        axes = Axes("size of the weights, MB", "mean KL divergence, nats")
        content.append(
            '<p class="why">Each point is a checkpoint: further left is smaller, further down is closer to the baseline.</p>'
        )
        content += [points([one.name for one in drawn], sizes, losses, axes, size) for size in SIZES]
    return section("Checkpoints", "Every checkpoint on the same text, beside the same baseline.", content)


_KL = (
    "KL divergence says how far the model's probabilities of the next token are from the baseline's, in nats: 0 is equal, 0.01 "
    "is hard to notice, 1 is another answer. Each bar counts positions of the text; the further left, the better."
)
_ERROR = (
    "How far the hidden states after each layer are from the baseline's, relative to their size. Errors add up, so a slow rise "
    "is normal; a jump names the layer that lost most."
)
_COSINES = "Cosine of the hidden states to the baseline's: 1 is the same direction."


def _one(one: Evaluated, level: int) -> list[str]:
    """The sections of one checkpoint."""
    c = one.comparison
    out, of = [], one.name if level > 2 else ""
    if one.verdicts:
        out.append(_limits(one, level, of))
    if c is not None:
        out += [_cards(one.facts, c), *comparison_sections(c, level, of)]
    out.append(section("What was run", "", [facts(one.facts)], level, of))
    return out


def comparison_sections(c: Comparison, level: int = 2, of: str = "") -> list[str]:
    """Error by layer, divergences, and the table of the layers."""
    every = (c.embedding, *c.layers)
    names, errors = [d.name for d in every], [d.relative_rms for d in every]
    error_axes = Axes("layer (emb: token embedding)", "relative RMS error")
    kl_axes = Axes("KL divergence of one position, nats", "positions")
    marks = {"median": c.kl_median, "99 %": c.kl_p99}
    by_layer = [bars(names, errors, error_axes, size) for size in SIZES]
    by_position = [histogram(c.kl, kl_axes, size, marks) for size in SIZES]
    return [
        section("Error by layer", _ERROR, by_layer if any(errors) else ["<p>0 after every layer.</p>"], level, of),
        section("Divergence of the next token", _KL, by_position if c.kl.any() else ["<p>0 at every position.</p>"], level, of),
        section("Layers, worst first", _COSINES, [_layers(c)], level, of),
    ]


def _cards(values: Mapping[str, Any], c: Comparison) -> str:
    """The figures that count, large."""
    figures = [
        ("perplexity", f"{c.model.value:.4g}", f"baseline {c.baseline.value:.4g}, {100 * c.perplexity_increase:+#.3g} %"),
        ("equal likeliest tokens", f"{100 * c.agreement:.2f} %", f"of {len(c.kl):,}"),
        ("KL divergence, mean", f"{c.kl_mean:.3g}", f"median {c.kl_median:.3g}, 99th percentile {c.kl_p99:.3g}"),
        ("least cosine", f"{c.least_cosine:.4f}", f"{c.worst()[0].name} {c.worst()[0].cosine:.4f}, pooled {c.pooled:.4f}"),
    ]
    if "bytes" in values and "baseline_bytes" in values:
        was = f"baseline {values['baseline_bytes'] / 1e6:,.1f} MB"
        figures.append(("weights", f"{values['bytes'] / 1e6:,.1f} MB", was))
    return cards(figures)


def _limits(one: Evaluated, level: int, of: str) -> str:
    heads = [Head("limit"), Head("measured", True), Head("allowed", True), Head("")]
    rows: list[Row] = [[v.words, v.measured, v.allowed, ("kept", "good") if v.kept else ("missed", "bad")] for v in one.verdicts]
    return section("Limits", "What was asked of the checkpoint.", [table(heads, rows)], level, of)


def _layers(comparison: Comparison) -> str:
    heads = [Head("after"), Head("mean cosine", True), Head("smallest", True), Head("relative RMS", True)]
    rows = [[d.name, f"{d.cosine:.5f}", f"{d.least:.4f}", f"{d.relative_rms:#.3g}"] for d in comparison.worst()]
    return table(heads, rows)
