"""A roofline as a picture: operations a second over operations a byte of packed weight, under the limits measured in the run.

    draw(limits, times, "roofline.png")

The slanted line is the read limit, the flat ones are the arithmetic's. A product of m tokens with b bits a weight does 16 · m / b
operations a byte. Works for any device whose records have the words of `records`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .records import Record, name_of
from .tables import limits_line

MARKS = "osD^vP*Xhd"


def intensity(r: Record) -> float:
    """Operations a byte of packed weight: 2 · m · n · k over the bytes read."""
    return float(r["gflops"] / r["gbps"])


def check_drawable() -> None:
    """UnsupportedError when matplotlib is not installed: better said before minutes of timing than after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("[bench] --plot needs matplotlib, which is missing; `pip install 'halfbyte[bench]'` brings it")


def draw(limits: Record, times: Sequence[Record], path: str | Path) -> None:
    """Writes the picture of records `time` with `gbps` and `gflops` as a file matplotlib knows by its suffix (PNG, SVG, PDF).

    One colour a contender, one panel a kind of activations, one mark an m.
    """
    check_drawable()
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [r for r in times if r.get("gbps") and r.get("gflops")]
    kinds = list(dict.fromkeys(r["kind"] for r in shown)) or ["exact"]
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(7 * len(kinds), 6), squeeze=False, sharey=True)
    for axes, kind in zip(panels[0], kinds, strict=True):
        _panel(axes, kind, [r for r in shown if r["kind"] == kind], limits)
    figure.suptitle(limits_line(limits))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Any, kind: str, shown: Sequence[Record], limits: Record) -> None:
    peak = float((limits.get("gops") if kind == "int8" else 0) or limits.get("gflops") or 0)
    places = [intensity(r) for r in shown] or [1.0]
    left, right = min(places) / 2, max(*places, peak / limits["read_gbps"]) * 2
    knee = peak / limits["read_gbps"] if peak else right
    axes.plot([left, knee], [left * limits["read_gbps"], knee * limits["read_gbps"]], "k-", lw=1)
    if peak:
        axes.plot([knee, right], [peak, peak], "k-", lw=1)
    tokens = sorted({r["m"] for r in shown})
    contenders = list(dict.fromkeys(name_of(r) for r in shown))
    for i, name in enumerate(contenders):
        mine = sorted((r for r in shown if name_of(r) == name), key=intensity)
        ours = name.startswith("halfbyte")
        colour = f"C{i % 10}" if ours else "0.6"
        for r in mine:
            axes.plot(intensity(r), r["gflops"], MARKS[tokens.index(r["m"]) % len(MARKS)], color=colour, ms=6 if ours else 4)
        axes.plot([], [], "-" if ours else ":", color=colour, label=name)
    for i, m in enumerate(tokens):
        axes.plot([], [], MARKS[i % len(MARKS)], color="k", ms=4, label=f"m = {m}")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte of packed weight", title=f"{kind} activations")
    axes.set_ylabel("billion operations a second")
    axes.grid(True, which="both", lw=0.3)
    axes.legend(fontsize=6, ncols=2, loc="lower right")
