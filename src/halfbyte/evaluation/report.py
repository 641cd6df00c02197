"""The HTML page of an evaluation: limits and whether they hold, the main figures, error by layer,
divergences, and the settings.

A self-contained file without scripts, for narrow and wide screens, light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import PurePath
from typing import Any

from .compare import Comparison
from .plots import NARROW, WIDE, bars, histogram
from .thresholds import Verdict

_STYLE = """
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:1.2rem 1rem 3rem;color:#1b1f24;background:#fff}
h1{font-size:1.4rem;margin:.2rem 0 1rem}h2{font-size:1.1rem;margin:2rem 0 .6rem}h1,td{overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}th,td{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid #d8dee4}
th{font-weight:600;vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap}
td.n{font-variant-numeric:tabular-nums}td:last-child,th:last-child{padding-right:0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem}
.cards div{border:1px solid #d8dee4;border-radius:.5rem;padding:.6rem .8rem}
.cards strong{display:block;font-size:1.35rem;line-height:1.3;font-variant-numeric:tabular-nums}
.cards span{color:#57606a;font-size:.85rem}
.kept{color:#116329;font-weight:600}.missed{color:#b42318;font-weight:600}
svg{width:100%;height:auto;display:block}svg.narrow{display:none}
.bar{fill:#2f6fb2}.bar.bad{fill:#b42318}.grid{stroke:#d8dee4}.mark{stroke:#b42318;stroke-dasharray:4 3}
text{font-size:11px;fill:#57606a}.level{text-anchor:end}.tick,.label{text-anchor:middle}.label{font-size:12px}
@media (max-width:34rem){svg.wide{display:none}svg.narrow{display:block}body{padding:.8rem .8rem 2rem}
th,td{padding-right:.5rem}}
@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}th,td,.cards div{border-color:#30363d}
.grid{stroke:#30363d}text,.cards span{fill:#8b949e;color:#8b949e}.bar{fill:#58a6ff}.bar.bad{fill:#ff7b72}.mark{stroke:#ff7b72}
.missed{color:#ff7b72}.kept{color:#56d364}}
"""


def report(facts: Mapping[str, Any], comparison: Comparison | None, verdicts: Sequence[Verdict]) -> str:
    """One HTML page.

    facts  what was run and measured, in words, a row each
    """
    path = str(facts.get("path", "a model"))
    title = f"Evaluation of {PurePath(path).name or path}"
    if facts.get("requantized"):
        title += f" as {facts['requantized']}"
    body = [f"<h1>{escape(title)}</h1>"]
    if verdicts:
        body.append(_verdicts(verdicts))
    if comparison is not None:
        every = (comparison.embedding, *comparison.layers)
        names, errors = [d.name for d in every], [d.relative_rms for d in every]
        marks = {"median": comparison.kl_median, "99 %": comparison.kl_p99}
        body += [
            _cards(facts, comparison),
            "<h2>Error by layer</h2>",
            *(bars(names, errors, "relative RMS error of the hidden states after each layer", size) for size in (WIDE, NARROW)),
            "<h2>Divergence of the next token</h2>",
            *(histogram(comparison.kl, "KL(baseline ‖ model) of each token, nats", size, marks) for size in (WIDE, NARROW)),
            "<h2>Layers, worst first</h2>",
            _layers(comparison),
        ]
    body += ["<h2>What was run</h2>", _facts(facts)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _cards(facts: Mapping[str, Any], c: Comparison) -> str:
    """The figures that count, large."""
    cards = [
        ("perplexity", f"{c.model.value:.4g}", f"baseline {c.baseline.value:.4g}, {100 * c.perplexity_increase:+.3g} %"),
        ("equal greedy tokens", f"{100 * c.agreement:.2f} %", f"of {len(c.kl):,}"),
        ("KL divergence, mean", f"{c.kl_mean:.3g}", f"median {c.kl_median:.3g}, 99 % {c.kl_p99:.3g}"),
        ("least cosine", f"{c.least_cosine:.4f}", f"{c.worst()[0].name} {c.worst()[0].cosine:.4f}, pooled {c.pooled:.4f}"),
    ]
    if "bytes" in facts and "baseline_bytes" in facts:
        was = f"baseline {facts['baseline_bytes'] / 1e6:,.1f} MB"
        cards.append(("weights", f"{facts['bytes'] / 1e6:,.1f} MB", was))
    each = (f"<div><span>{escape(a)}</span><strong>{escape(b)}</strong><span>{escape(d)}</span></div>" for a, b, d in cards)
    return f'<div class="cards">{"".join(each)}</div>'


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(k.replace('_', ' '))}</th><td>{escape(_text(v))}</td></tr>" for k, v in facts.items())
    return f"<table>{rows}</table>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    rows = "".join(
        f'<tr><td>{escape(v.words)}</td><td class="n">{escape(v.measured)}</td><td class="n">{escape(v.allowed)}</td>'
        f'<td class="n {"kept" if v.kept else "missed"}">{"kept" if v.kept else "missed"}</td></tr>'
        for v in verdicts
    )
    head = '<tr><th>limit</th><th class="n">measured</th><th class="n">allowed</th><th></th></tr>'
    return f"<h2>Limits</h2><table>{head}{rows}</table><p></p>"


def _layers(comparison: Comparison) -> str:
    rows = "".join(
        f'<tr><td>{escape(d.name)}</td><td class="n">{d.cosine:.5f}</td><td class="n">{d.least:.4f}</td>'
        f'<td class="n">{d.relative_rms:.3g}</td></tr>'
        for d in comparison.worst()
    )
    head = '<tr><th>after</th><th class="n">cosine</th><th class="n">smallest</th><th class="n">rel. RMS</th></tr>'
    return f"<table>{head}{rows}</table>"
