"""The page of a quantization: what it came to in words, error by layer, where the bits went, bytes
against divergence, what stayed dense and why, time and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checkpoints import TensorInfo
from ..checkpoints.inspect import Subtotal, format_word
from ..errors import plural
from .evaluation import comparison_sections, grade, grade_colour
from .inspection import Layers
from .page import Head, Row, cards, facts, page, section, table, verdict
from .plots import SIZES, Axes, bars, points

if TYPE_CHECKING:
    from ..conversion.allocation import Allocation
    from ..conversion.unit import Record
    from ..evaluation.compare import Comparison

_AROUND = (0.8, 0.9, 1.0, 1.1, 1.25, 1.4)
"""Budgets of the plot, in terms of the chosen bytes."""


class Dense(NamedTuple):
    """A matrix that stayed dense, and why."""

    key: str
    why: str


@dataclass
class Quantized:
    """What a page is made of.

    name        of the result
    source_bytes  of the source's tensors
    written     tensors of the result
    records     of its writing, with the error of each weight
    dense       matrices that stayed dense
    comparison  with the source; None where no text was given, or `unmeasured` says why
    same_text   the text is the one that calibrated
    allocation  None without a budget
    facts       what was run, a row each: times and memory too
    """

    name: str
    source_bytes: int
    written: Sequence[TensorInfo]
    records: Sequence[Record]
    dense: Sequence[Dense]
    comparison: Comparison | None = None
    unmeasured: str = ""
    same_text: bool = False
    allocation: Allocation | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def quantization(q: Quantized) -> str:
    """One HTML page."""
    sections = ["Error of the weights by layer", "Where the bits went"]
    body = [_verdict(q), _cards(q)]
    if q.comparison is not None:
        sections[:0] = ["Error by layer", "Divergence of the next token", "Layers, worst first"]
        body += comparison_sections(q.comparison)
    body += [_weights(q), _bits(q)]
    if q.allocation is not None:
        sections.append("Bytes and divergence")
        body.append(_pareto(q.allocation))
    if q.dense:
        sections.append("What stayed dense")
        body.append(_dense(q.dense))
    sections.append("What was run")
    body.append(section("What was run", "", [facts(q.facts)]))
    return page(f"Quantization of {q.name}", body, sections)


def _verdict(q: Quantized) -> str:
    nbytes = sum(i.nbytes for i in q.written)
    share = f"The tensors take {nbytes / 1e6:,.1f} MB, {nbytes / max(q.source_bytes, 1):.2f} times the source's."
    c = q.comparison
    if c is None:
        why = q.unmeasured or "no text was given; --report-text FILE measures"
        return verdict("warn", f"The loss was not measured: {why}", [share])
    word = grade(c)
    sentences = [
        share,
        (
            f"The most likely next token is the source's in {100 * c.agreement:.1f} % of {plural(len(c.kl), 'position')}; "
            f"the perplexity is {c.model.value:.4g}, the source's {c.baseline.value:.4g}."
        ),
    ]
    if q.same_text:
        sentences.append(
            "The text is the one that calibrated, on which a quantization looks better than on others; give --report-text."
        )
    return verdict(grade_colour(word), word[0].upper() + word[1:], sentences)


def _cards(q: Quantized) -> str:
    packed = [i for i in q.written if i.quantized]
    nbytes = sum(i.nbytes for i in q.written)
    whole = Subtotal()
    for info in packed:
        whole.add(info)
    figures = [
        ("tensors", f"{nbytes / 1e6:,.1f} MB", f"source {q.source_bytes / 1e6:,.1f} MB"),
        ("packed weights", f"{len(packed):,}", f"{whole.bits_per_weight:.3g} bits a weight" if packed else ""),
    ]
    if q.comparison is not None:
        c = q.comparison
        figures.append(("KL divergence, mean", f"{c.kl_mean:.3g}", f"median {c.kl_median:.3g}, 99th percentile {c.kl_p99:.3g}"))
    return cards(figures)


def _weights(q: Quantized) -> str:
    """Relative RMS error of the weights of each layer: the root mean square over them, by bytes."""
    layers = Layers(r.key for r in q.records)
    sums: dict[str, list[float]] = {}
    for r in q.records:
        if r.relative_rms is not None:
            own = sums.setdefault(layers.of(r.key), [0.0, 0.0])
            own[0] += r.relative_rms**2 * r.nbytes
            own[1] += r.nbytes
    names = [n for n in layers.names if n in sums]
    values = [(sums[n][0] / max(sums[n][1], 1)) ** 0.5 for n in names]
    axes = Axes("layer (emb: token embedding)", "relative RMS error of the weights")
    why = "Difference of the written values to the source's, relative to their size; of a layer the root mean square by bytes."
    return section("Error of the weights by layer", why, [bars(names, values, axes, size) for size in SIZES])


def _bits(q: Quantized) -> str:
    layers = Layers(i.key for i in q.written)
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    by_layer: dict[str, list[TensorInfo]] = {}
    for info in q.written:
        counts[format_word(info)] += prod(info.shape)
        nbytes[format_word(info)] += info.nbytes
        if len(info.shape) > 1:
            by_layer.setdefault(layers.of(info.key), []).append(info)
    total = max(sum(nbytes.values()), 1)
    heads = [Head("format"), Head("weights", True), Head("MB", True), Head("share of the bytes", True)]
    rows: list[Row] = [
        [word, f"{counts[word]:,}", f"{size / 1e6:,.2f}", f"{100 * size / total:.1f} %"] for word, size in nbytes.most_common()
    ]
    names = [n for n in layers.names if n in by_layer]
    bits = [8 * sum(i.nbytes for i in by_layer[n]) / max(sum(prod(i.shape) for i in by_layer[n]), 1) for n in names]
    axes = Axes("layer (emb: token embedding)", "bits a weight of the matrices")
    plots = [bars(names, bits, axes, size) for size in SIZES]
    return section(
        "Where the bits went", "Formats of the tensors, and bits a weight of each layer.", [table(heads, rows), *plots]
    )


def _pareto(allocation: Allocation) -> str:
    found = [*allocation.frontier(_AROUND), *allocation.uniform()]
    least, most = _AROUND[0] * allocation.nbytes, _AROUND[-1] * allocation.nbytes
    shown = [p for p in found if least <= p.nbytes <= most]
    axes = Axes("size of the weights, MB", "estimated KL divergence, nats")
    why = (
        "Estimated divergence over bytes: best choices at other budgets, by their bits a weight, and every codec that fits all "
        "weights. Further left is smaller, further down is closer to the source."
    )
    heads = [Head("choice"), Head("MB", True), Head("estimated KL", True)]
    rows: list[Row] = [[p.name, f"{p.nbytes / 1e6:,.2f}", f"{p.kl:.3g}"] for p in sorted(found, key=lambda p: p.nbytes)]
    names, sizes, losses = [p.name for p in shown], [p.nbytes / 1e6 for p in shown], [p.kl for p in shown]
    return section("Bytes and divergence", why, [*(points(names, sizes, losses, axes, s) for s in SIZES), table(heads, rows)])


def _dense(dense: Sequence[Dense]) -> str:
    heads = [Head("matrix"), Head("why")]
    return section("What stayed dense", "Matrices that were not packed.", [table(heads, [[d.key, d.why] for d in dense])])
