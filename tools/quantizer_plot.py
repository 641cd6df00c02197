"""The plot and the table of benchmarks/quantize.md for learned rounding, from lines of
quantizer_table.

    python tools/quantizer_plot.py cells.jsonl --out benchmarks/quantize-learned.png

Of each model, format and method: the mean over seeds of the divergence from the dense model, with
its standard error. That of one seed comes from the chunks; that of the difference between two
methods from the chunks' differences, averaged over the seeds that both have.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

Cells = dict[tuple[str, str, str], dict[str, dict[int, dict[str, Any]]]]
"""(model, text, codec) -> method -> seed -> line"""


def main() -> None:
    """Print the table, and draw what it holds."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("cells", type=Path)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--baseline", default="gptq")
    a = arguments.parse_args()
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for line in map(json.loads, a.cells.read_text(encoding="utf-8").splitlines()):
        cells[line["model"], line["text"], line["codec"]][line["method"]][line["seed"]] = line
    for (model, text, codec), methods in sorted(cells.items()):
        for method, seeds in sorted(methods.items()):
            print(f"| {model} | {text} | {codec} | {method} | {row(seeds, methods.get(a.baseline, {}))} |")
    if a.out is not None:
        draw(cells, a.out)


def row(seeds: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    """Divergence, perplexity, seconds, GiB, and the share of the baseline's divergence taken off."""
    kl, error = mean_and_error(seeds)
    perplexity = float(np.mean([line["perplexity"] for line in seeds.values()]))
    common = sorted(seeds.keys() & base.keys())
    gain = ""
    if common and seeds is not base:
        ours, theirs = (np.mean([cells[s]["chunk_kl"] for s in common], axis=0) for cells in (seeds, base))
        less, spread = float((theirs - ours).mean()), float((theirs - ours).std(ddof=1) / math.sqrt(len(ours)))
        gain = f"{100 * less / theirs.mean():.1f} ± {100 * spread / theirs.mean():.1f} %"
    seconds, gib = (max(line[key] for line in seeds.values()) for key in ("wall_s", "gib"))
    return f"{len(seeds)} | {kl:.4f} ± {error:.4f} | {perplexity:.2f} | {gain} | {seconds:.0f} | {gib:.1f}"


def mean_and_error(seeds: dict[int, dict[str, Any]]) -> tuple[float, float]:
    """The mean divergence, and its standard error from the chunks' means over seeds."""
    chunks = np.mean([line["chunk_kl"] for line in seeds.values()], axis=0)
    return float(chunks.mean()), float(chunks.std(ddof=1) / math.sqrt(len(chunks)))


def draw(cells: Cells, path: Path) -> None:
    """Divergence over bits a weight, a panel a model: of each format and method the last line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = sorted({model for model, _, _ in cells})
    figure, panels = plt.subplots(1, len(models), figsize=(5.2 * len(models), 3.8), squeeze=False)
    for model, panel in zip(models, panels[0], strict=True):
        drawn: dict[str, dict[str, tuple[float, float, float]]] = defaultdict(dict)
        for (owner, _, codec), methods in cells.items():
            for method, seeds in methods.items():
                if owner == model and method != "none":
                    bits = next(iter(seeds.values()))["bits_per_weight"]
                    drawn[method.split()[0]][codec] = (bits, *mean_and_error(seeds))
        for shift, (method, points) in enumerate(sorted(drawn.items())):
            x, y, error = zip(*points.values(), strict=True)
            at = np.asarray(x) + 0.012 * (shift - (len(drawn) - 1) / 2)
            panel.errorbar(at, y, yerr=error, fmt="os^dv"[shift % 5], capsize=2, label=method)
        for codec, (bits, kl, _) in min(drawn.items())[1].items():
            panel.annotate(codec, (bits, kl), (-9, 0), textcoords="offset points", fontsize=7, va="center", ha="right")
        panel.margins(x=0.2)
        panel.set(title=model, xlabel="bits a weight", ylabel="KL to the dense model, nats a token", ylim=(0, None))
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
