"""Two plots as SVG, drawn here so that a report is one file that needs no script and no network.

bars(names, values, label)      a bar a layer
histogram(values, label)        counts over a logarithmic axis
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 46
BINS = 40


def bars(names: Sequence[str], values: Sequence[float], label: str) -> str:
    """Values ≥ 0 (NaN and infinity are drawn to the top, hatched) as bars, each with its number as a tooltip."""
    finite = [v for v in values if math.isfinite(v)]
    top = _nice(max(finite, default=0.0))
    step = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
    marks = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        known = math.isfinite(value)
        height = (value / top if known else 1.0) * _plot_height()
        kind = "bar" if known else "bar bad"
        marks.append(
            f'<rect class="{kind}" x="{LEFT + i * step + step * 0.1:.1f}" y="{TOP + _plot_height() - height:.1f}" '
            f'width="{step * 0.8:.1f}" height="{height:.1f}"><title>{escape(name)}: {value:.4g}</title></rect>'
        )
    every = max(1, math.ceil(len(names) / 24))
    ticks = [(LEFT + (i + 0.5) * step, n.removeprefix("layer ")) for i, n in enumerate(names) if i % every == 0]
    return _frame(marks, ticks, [(top * f, f"{top * f:.3g}") for f in (0, 0.25, 0.5, 0.75, 1)], top, label)


def histogram(values: NDArray[np.float64], label: str) -> str:
    """Counts of values on a logarithmic axis; what is 0 or less is counted in the first bin."""
    kept = values[np.isfinite(values)]
    positive = kept[kept > 0]
    low, high = (math.log10(positive.min()), math.log10(positive.max())) if positive.size else (-1.0, 0.0)
    low, high = math.floor(max(low, high - 8)), math.ceil(high + 1e-9)
    high = max(high, low + 1)
    logs = np.log10(np.maximum(kept, 10.0**low))
    counts, edges = np.histogram(np.clip(logs, low, high), BINS, (low, high))
    top = _nice(float(counts.max(initial=0)))
    step = (WIDTH - LEFT - RIGHT) / BINS
    marks = []
    for i, count in enumerate(counts.tolist()):
        height = count / top * _plot_height()
        marks.append(
            f'<rect class="bar" x="{LEFT + i * step:.1f}" y="{TOP + _plot_height() - height:.1f}" width="{step - 1:.1f}" '
            f'height="{height:.1f}"><title>{10 ** edges[i]:.2g} to {10 ** edges[i + 1]:.2g}: {count}</title></rect>'
        )
    ticks = [(LEFT + (e - low) / (high - low) * (WIDTH - LEFT - RIGHT), f"1e{e}") for e in range(low, high + 1)]
    return _frame(marks, ticks, [(top * f, f"{top * f:.0f}") for f in (0, 0.5, 1)], top, label)


def _plot_height() -> float:
    return float(HEIGHT - TOP - BOTTOM)


def _nice(value: float) -> float:
    """The next of 1, 2, 5 · 10^i."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-12))


def _frame(
    marks: Sequence[str], ticks: Sequence[tuple[float, str]], levels: Sequence[tuple[float, str]], top: float, label: str
) -> str:
    """Axes around the marks."""
    bottom = TOP + _plot_height()
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    for value, text in levels:
        y = bottom - value / top * _plot_height()
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="level" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>')
    parts += marks
    parts += [f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}">{escape(text)}</text>' for x, text in ticks]
    parts.append(f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}">{escape(label)}</text></svg>')
    return "".join(parts)
