"""Two plots as SVG, so that a report is one file without scripts or network access.

bars(names, values, label)      a bar a layer
histogram(values, label)        counts over a logarithmic axis

Each is drawn in two sizes with equal font size; the page shows the one for the screen's width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Size(NamedTuple):
    """Width and height in the picture's own units, bins of a histogram, most names along the axis,
    CSS class.
    """

    width: int
    height: int
    bins: int
    names: int
    word: str


WIDE = Size(720, 260, 40, 24, "wide")
NARROW = Size(340, 230, 24, 10, "narrow")
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 20, 46


def bars(names: Sequence[str], values: Sequence[float], label: str, size: Size = WIDE) -> str:
    """Values ≥ 0 as bars, each with its number as a tooltip; NaN and infinity are drawn to the top
    in another colour.
    """
    finite = [v for v in values if math.isfinite(v)]
    top = _nice(max(finite, default=0.0))
    step = _plot_width(size) / max(len(values), 1)
    marks = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        known = math.isfinite(value)
        height = (value / top if known else 1.0) * _plot_height(size)
        kind = "bar" if known else "bar bad"
        marks.append(
            f'<rect class="{kind}" x="{LEFT + i * step + step * 0.1:.1f}" y="{TOP + _plot_height(size) - height:.1f}" '
            f'width="{step * 0.8:.1f}" height="{height:.1f}"><title>{escape(name)}: {value:.4g}</title></rect>'
        )
    every = max(1, math.ceil(len(names) / size.names))
    ticks = [(LEFT + (i + 0.5) * step, _short(n)) for i, n in enumerate(names) if i % every == 0]
    return _frame(marks, ticks, [(top * f, f"{top * f:.3g}") for f in (0, 0.25, 0.5, 0.75, 1)], top, label, size)


def histogram(values: NDArray[np.float64], label: str, size: Size = WIDE, marked: Mapping[str, float] | None = None) -> str:
    """Counts of values on a logarithmic axis; what is 0 or less is counted in the first bin.
    `marked` are upright lines.
    """
    kept = values[np.isfinite(values)]
    positive = kept[kept > 0]
    low, high = (math.log10(positive.min()), math.log10(positive.max())) if positive.size else (-1.0, 0.0)
    low, high = math.floor(max(low, high - 8)), math.ceil(high + 1e-9)
    high = max(high, low + 1)
    logs = np.log10(np.maximum(kept, 10.0**low))
    counts, edges = np.histogram(np.clip(logs, low, high), size.bins, (low, high))
    top = _nice(float(counts.max(initial=0)))
    step = _plot_width(size) / size.bins
    marks = []
    for i, count in enumerate(counts.tolist()):
        height = count / top * _plot_height(size)
        marks.append(
            f'<rect class="bar" x="{LEFT + i * step:.1f}" y="{TOP + _plot_height(size) - height:.1f}" width="{step - 1:.1f}" '
            f'height="{height:.1f}"><title>{10 ** edges[i]:.2g} to {10 ** edges[i + 1]:.2g}: {count}</title></rect>'
        )

    def position(power: float) -> float:
        return LEFT + (power - low) / (high - low) * _plot_width(size)

    for name, value in (marked or {}).items():
        if math.isfinite(value) and value > 0:
            x = position(min(max(math.log10(value), low), high))
            marks.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + _plot_height(size):.1f}"/>')
            marks.append(f'<text class="tick" x="{x:.1f}" y="{TOP - 6}">{escape(name)}</text>')
    ticks = [(position(e), f"1e{e}") for e in range(low, high + 1)]
    return _frame(marks, ticks, [(top * f, f"{top * f:.0f}") for f in (0, 0.5, 1)], top, label, size)


def _short(name: str) -> str:
    """A layer's number; the embedding as three letters, which its neighbour leaves room for."""
    return {"embedding": "emb"}.get(name, name.removeprefix("layer "))


def _plot_width(size: Size) -> float:
    return float(size.width - LEFT - RIGHT)


def _plot_height(size: Size) -> float:
    return float(size.height - TOP - BOTTOM)


def _nice(value: float) -> float:
    """The next of 1, 2, 5 · 10^i."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-12))


def _frame(
    marks: Sequence[str],
    ticks: Sequence[tuple[float, str]],
    levels: Sequence[tuple[float, str]],
    top: float,
    label: str,
    size: Size,
) -> str:
    """Axes around the marks."""
    bottom = TOP + _plot_height(size)
    parts = [f'<svg class="{size.word}" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(label)}">']
    for value, text in levels:
        y = bottom - value / top * _plot_height(size)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{size.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="level" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>')
    parts += marks
    parts += [f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}">{escape(text)}</text>' for x, text in ticks]
    middle = size.width / 2 if size is NARROW else (LEFT + size.width - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle:.0f}" y="{size.height - 8}">{escape(label)}</text></svg>')
    return "".join(parts)
