"""Plots as SVG, so that a page is one file without scripts or network access.

bars(names, values, axes)        a bar a name
ranges(names, spans, axes)       a bar from one value to another, over a logarithmic axis
histogram(values, axes)          counts over a logarithmic axis
points(names, x, y, axes)        a named point a pair, over two axes

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


class Axes(NamedTuple):
    """What the axes are, with their units."""

    x: str
    y: str


WIDE = Size(720, 270, 40, 24, "wide")
NARROW = Size(340, 240, 24, 10, "narrow")
SIZES = (WIDE, NARROW)
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 38, 46
LETTER = 7.2
"""Width of a bold letter of 11 pixels, at most."""


def bars(names: Sequence[str], values: Sequence[float], axes: Axes, size: Size = WIDE) -> str:
    """Values ≥ 0 as bars, each with its number as a tooltip; NaN and infinity are drawn to the top
    in another colour.
    """
    top = _nice(max((v for v in values if math.isfinite(v)), default=0.0))
    step = _plot_width(size) / max(len(values), 1)
    marks = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        known = math.isfinite(value)
        height = (value / top if known else 1.0) * _plot_height(size)
        kind = "bar" if known else "bar flaw"
        marks.append(
            f'<rect class="{kind}" x="{LEFT + i * step + step * 0.1:.1f}" y="{_bottom(size) - height:.1f}" '
            f'width="{step * 0.8:.1f}" height="{height:.1f}"><title>{escape(name)}: {value:.4g}</title></rect>'
        )
    return _frame(marks, _name_ticks(names, size), _levels(top), axes, size)


def ranges(names: Sequence[str], spans: Sequence[tuple[float, float]], axes: Axes, size: Size = WIDE) -> str:
    """Pairs of numbers above 0 as bars over a logarithmic axis; a pair that is not finite, or has
    nothing above 0, is left out.
    """
    known = [low > 0 and math.isfinite(high) and high >= low for low, high in spans]
    logs = [math.log10(v) for span, ok in zip(spans, known, strict=True) if ok for v in span] or [-1.0, 0.0]
    low, high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
    step, per = _plot_width(size) / max(len(spans), 1), _plot_height(size) / (high - low)
    marks = []
    for i, (name, (least, most), ok) in enumerate(zip(names, spans, known, strict=True)):
        if not ok:
            continue
        y = _bottom(size) - (math.log10(most) - low) * per
        height = max((math.log10(most) - math.log10(least)) * per, 2.0)
        marks.append(
            f'<rect class="bar" x="{LEFT + i * step + step * 0.2:.1f}" y="{y:.1f}" width="{step * 0.6:.1f}" '
            f'height="{height:.1f}"><title>{escape(name)}: {least:.3g} to {most:.3g}</title></rect>'
        )
    every = max(1, math.ceil((high - low) / 6))
    levels = [((e - low) / (high - low), f"1e{e}") for e in range(low, high + 1, every)]
    return _frame(marks, _name_ticks(names, size), levels, axes, size)


def histogram(values: NDArray[np.float64], axes: Axes, size: Size = WIDE, marked: Mapping[str, float] | None = None) -> str:
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
            f'<rect class="bar" x="{LEFT + i * step:.1f}" y="{_bottom(size) - height:.1f}" width="{step - 1:.1f}" '
            f'height="{height:.1f}"><title>{10 ** edges[i]:.2g} to {10 ** edges[i + 1]:.2g}: {count}</title></rect>'
        )

    def position(power: float) -> float:
        return LEFT + (power - low) / (high - low) * _plot_width(size)

    for name, value in (marked or {}).items():
        if math.isfinite(value) and value > 0:
            x = position(min(max(math.log10(value), low), high))
            marks.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{_bottom(size):.1f}"/>')
            marks.append(f'<text class="tick" x="{x:.1f}" y="{TOP - 5}">{escape(name)}</text>')
    ticks = [(position(e), f"1e{e}") for e in range(low, high + 1)]
    return _frame(marks, ticks, [(f, f"{top * f:g}") for f in (0, 0.5, 1)], axes, size)


def points(names: Sequence[str], x: Sequence[float], y: Sequence[float], axes: Axes, size: Size = WIDE) -> str:
    """A point with its name for each pair of finite numbers; both axes begin at 0."""
    right = _nice(max((v for v in x if math.isfinite(v)), default=0.0))
    top = _nice(max((v for v in y if math.isfinite(v)), default=0.0))
    marks = []
    for name, across, up in zip(names, x, y, strict=True):
        if not (math.isfinite(across) and math.isfinite(up)):
            continue
        px, py = LEFT + across / right * _plot_width(size), _bottom(size) - up / top * _plot_height(size)
        most = int(_plot_width(size) / LETTER)
        word = name if len(name) <= most else name[: most - 1] + "…"
        half = len(word) * LETTER / 2
        middle = min(max(px, LEFT + half), size.width - RIGHT - half)
        tip = f"<title>{escape(name)}: {across:.4g}, {up:.4g}</title>"
        marks.append(
            f'<circle class="bar" cx="{px:.1f}" cy="{py:.1f}" r="5">{tip}</circle>'
            f'<text class="name tick" x="{middle:.1f}" y="{py - 9:.1f}">{escape(word)}</text>'
        )
    ticks = [(LEFT + f * _plot_width(size), text) for f, text in _levels(right)]
    return _frame(marks, ticks, _levels(top), axes, size)


def _name_ticks(names: Sequence[str], size: Size) -> list[tuple[float, str]]:
    """Names below their bars, as many as fit."""
    step, every = _plot_width(size) / max(len(names), 1), max(1, math.ceil(len(names) / size.names))
    return [(LEFT + (i + 0.5) * step, short(n)) for i, n in enumerate(names) if i % every == 0]


def short(name: str) -> str:
    """A layer's number; the embedding as three letters, which its neighbour leaves room for."""
    return {"embedding": "emb"}.get(name, name.removeprefix("layer "))


def _plot_width(size: Size) -> float:
    return float(size.width - LEFT - RIGHT)


def _plot_height(size: Size) -> float:
    return float(size.height - TOP - BOTTOM)


def _bottom(size: Size) -> float:
    return float(size.height - BOTTOM)


_STEPS = {1.0: 5, 1.5: 3, 2.0: 4, 2.5: 5, 3.0: 3, 4.0: 4, 5.0: 5, 6.0: 3, 8.0: 4, 10.0: 5}
"""First digits of the end of an axis -> steps between its levels, whose labels have two digits."""


def _nice(value: float) -> float:
    """The next of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 · 10^i."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in _STEPS if m * power >= value * (1 - 1e-12))


def _levels(top: float) -> list[tuple[float, str]]:
    """(fraction of an axis from 0 to `top`, label) of its levels; `top` is one of `_nice`."""
    steps = _STEPS[float(f"{top:e}".partition("e")[0])]
    return [(i / steps, f"{top * i / steps:.3g}") for i in range(steps + 1)]


def _frame(
    marks: Sequence[str], ticks: Sequence[tuple[float, str]], levels: Sequence[tuple[float, str]], axes: Axes, size: Size
) -> str:
    """Axes with their names around the marks.

    ticks   (x, text) below the plot
    levels  (fraction of the height, text) at its left
    """
    bottom = _bottom(size)
    label = f"{axes.y} over {axes.x}"
    parts = [f'<svg class="{size.word}" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(label)}">']
    parts.append(f'<text class="up" x="2" y="13">↑ {escape(axes.y)}</text>')
    for fraction, text in levels:
        y = bottom - fraction * _plot_height(size)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{size.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="level" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>')
    parts += marks
    parts += [f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}">{escape(text)}</text>' for x, text in ticks]
    middle = size.width / 2 if size is NARROW else (LEFT + size.width - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle:.0f}" y="{size.height - 8}">{escape(axes.x)} →</text></svg>')
    return "".join(parts)
