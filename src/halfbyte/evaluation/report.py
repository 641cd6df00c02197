"""The HTML page of an evaluation: what was measured, the limits and whether they were kept, the layers, the divergences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .compare import Comparison
from .plots import bars, histogram
from .thresholds import Verdict

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
th,td{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #d8dee4}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.kept{color:#116329}.missed{color:#b42318;font-weight:600}svg{width:100%;height:auto}
.bar{fill:#2f6fb2}.bar.bad{fill:#b42318}.grid{stroke:#d8dee4}text{font-size:11px;fill:#57606a}
.level{text-anchor:end}.tick,.label{text-anchor:middle}.label{font-size:12px}
@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}th,td{border-color:#30363d}.grid{stroke:#30363d}
text{fill:#8b949e}.bar{fill:#58a6ff}.bar.bad,.missed{fill:#ff7b72;color:#ff7b72}.kept{color:#56d364}}
"""


def report(facts: Mapping[str, Any], comparison: Comparison | None, verdicts: Sequence[Verdict]) -> str:
    """One HTML page without scripts or outside files.

    facts  what was run and measured, in words, a row each
    """
    title = f"Evaluation of {facts.get('path', 'a model')}"
    body = [f"<h1>{escape(title)}</h1>", _facts(facts)]
    if verdicts:
        body += ["<h2>Limits</h2>", _verdicts(verdicts)]
    if comparison is not None:
        every = (comparison.embedding, *comparison.layers)
        body += [
            "<h2>Error by layer</h2>",
            bars(
                [d.name for d in every],
                [d.relative_rms for d in every],
                "relative RMS error of the hidden states after each layer",
            ),
            "<h2>Divergence of the next token</h2>",
            histogram(comparison.kl, "KL(baseline ‖ model) of each scored token, nats"),
            "<h2>Layers, worst first</h2>",
            _layers(comparison),
        ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(k.replace('_', ' '))}</th><td>{escape(_text(v))}</td></tr>" for k, v in facts.items())
    return f"<table>{rows}</table>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    rows = "".join(
        f'<tr><th>{escape(v.name.replace("_", " "))}</th><td class="n">{v.value:.6g}</td><td class="n">{v.limit:.6g}</td>'
        f'<td class="{"kept" if v.kept else "missed"}">{"kept" if v.kept else "missed"}</td></tr>'
        for v in verdicts
    )
    return f'<table><tr><th>limit</th><th class="n">measured</th><th class="n">allowed</th><th></th></tr>{rows}</table>'


def _layers(comparison: Comparison) -> str:
    rows = "".join(
        f'<tr><td>{escape(d.name)}</td><td class="n">{d.cosine:.6f}</td><td class="n">{d.least:.6f}</td>'
        f'<td class="n">{d.relative_rms:.4g}</td></tr>'
        for d in comparison.worst()
    )
    head = '<tr><th>after</th><th class="n">cosine</th><th class="n">smallest</th><th class="n">relative RMS</th></tr>'
    return f"<table>{head}{rows}</table>"
