"""A roofline as a picture: operations a second over operations a byte of packed weight, under the
limits measured in the run.

    draw(limits, times, "roofline.png")

The slanted line is the read limit, the horizontal ones are the arithmetic limits. A product of m
tokens with b bits a weight does 16 · m / b operations a byte. Works for any device whose records
have the words of `records`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .records import Record
from .tables import limits_line

MARKS = "osD^vP*Xhd"
COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "k", "gold", "navy", "darkgreen")
GREY = "0.6"


def intensity(r: Record) -> float:
    """Operations a byte of packed weight: 2 · m · n · k over the bytes read."""
    return float(r["gflops"] / r["gbps"])


def check_drawable() -> None:
    """Raises UnsupportedError when matplotlib is not installed; called before the timing starts."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("[bench] --plot needs matplotlib, which is missing; `pip install 'halfbyte[bench]'` brings it")


def draw(limits: Record, times: Sequence[Record], path: str | Path) -> None:
    """Write the roofline of the records `time` with `gbps` and `gflops`; the suffix of `path`
    chooses the file type (PNG, SVG, PDF).

    One panel for each kind of activations of halfbyte's records, one colour for each format, one
    marker for each m; other libraries are grey.
    """
    check_drawable()
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [r for r in times if r.get("gbps") and r.get("gflops")]
    mine = [r["kind"] for r in shown if r["peer"] == "halfbyte"]
    kinds = list(dict.fromkeys(mine or [r["kind"] for r in shown])) or ["exact"]
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
    formats = list(dict.fromkeys(r["format"] for r in shown if r["peer"] == "halfbyte"))
    colours = {f: COLOURS[i % len(COLOURS)] for i, f in enumerate(formats)}
    for r in sorted(shown, key=lambda r: r["peer"] == "halfbyte"):
        ours = r["peer"] == "halfbyte"
        mark = MARKS[tokens.index(r["m"]) % len(MARKS)]
        axes.plot(intensity(r), r["gflops"], mark, color=colours[r["format"]] if ours else GREY, ms=6 if ours else 4)
    for name, colour in [*colours.items(), ("other libraries", GREY)]:
        axes.plot([], [], "-", color=colour, label=name)
    for i, m in enumerate(tokens):
        axes.plot([], [], MARKS[i % len(MARKS)], color="k", ms=4, label=f"m = {m}")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte of packed weight", title=f"{kind} activations")
    axes.set_ylabel("billion operations a second")
    axes.grid(True, which="both", lw=0.3)
    axes.legend(fontsize=6, ncols=2, loc="lower right")
