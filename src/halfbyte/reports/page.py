"""The frame of a page and its parts: verdict, figures, tables, sections with a plot.

Colours follow the reader's light or dark setting; on paper they are dark on white. Tables become
one block a row on a narrow screen, so nothing scrolls sideways.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--paper:#fff;--bar:#2f6fb2;--bad:#b42318;
--good:#116329;--warn:#7d4e00;--tint:#f3f6f9}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa4af;--line:#30363d;--paper:#0d1117;--bar:#58a6ff;
--bad:#ff7b72;--good:#56d364;--warn:#e3b341;--tint:#161b22}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:1.2rem 1rem 3rem;color:var(--ink);
background:var(--paper)}
h1{font-size:1.4rem;margin:.2rem 0 .8rem}h2{font-size:1.15rem;margin:2.2rem 0 .3rem}h3{font-size:1rem;margin:1.4rem 0 .2rem}
h1,h2,h3,td,p{overflow-wrap:anywhere}p{margin:.3rem 0 .6rem;max-width:46rem}.why{color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.8rem 0}a{color:var(--bar)}
a:focus-visible,summary:focus-visible{outline:3px solid var(--bar);outline-offset:2px;border-radius:2px}
.verdict{border-left:.4rem solid var(--bar);background:var(--tint);padding:.7rem 1rem;border-radius:.2rem}
.verdict p{margin:.2rem 0;max-width:none}.verdict .word{font-size:1.15rem;font-weight:600}
.verdict.good{border-color:var(--good)}.verdict.bad{border-color:var(--bad)}.verdict.warn{border-color:var(--warn)}
table{border-collapse:collapse;width:100%;margin:.4rem 0 .8rem}caption{text-align:left;color:var(--soft)}
th,td{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600}td.n,th.n{text-align:right}td.n{font-variant-numeric:tabular-nums;white-space:nowrap}
td:last-child,th:last-child{padding-right:0}td b{overflow-wrap:normal}code{font:inherit;white-space:nowrap}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:.8rem 0}
.cards div{border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
.cards strong{display:block;font-size:1.35rem;line-height:1.3;font-variant-numeric:tabular-nums}
.cards span{color:var(--soft);font-size:.85rem}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}.verdict{color:var(--ink)}b.good,b.bad,b.warn{font-weight:600}
svg{width:100%;height:auto;display:block}svg.narrow{display:none}
.bar{fill:var(--bar)}.bar.flaw{fill:var(--bad)}.grid{stroke:var(--line)}.mark{stroke:var(--bad);stroke-dasharray:4 3}
text{font-size:11px;fill:var(--soft)}.level{text-anchor:end}.tick,.label{text-anchor:middle}.label,.up{font-size:12px}
.name{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:3px}
@media screen and (max-width:34rem){svg.wide{display:none}svg.narrow{display:block}body{padding:.8rem .8rem 2rem}
table.blocks,table.blocks tbody,table.blocks tr,table.blocks td{display:block}table.blocks thead{display:none}
table.blocks tr{border-bottom:1px solid var(--line);padding:.4rem 0}
table.blocks td,table.blocks td.n{border:0;padding:.05rem 0;text-align:left;white-space:normal}
table.blocks td:empty{display:none}
table.blocks td[data-label]::before{content:attr(data-label) ": ";color:var(--soft)}th,td{padding-right:.5rem}}
@media print{:root{--ink:#000;--soft:#444;--line:#bbb;--paper:#fff;--bar:#2f6fb2;--bad:#b42318;--good:#116329;--warn:#7d4e00;
--tint:#fff}body{max-width:none;padding:0;font-size:11pt}nav{display:none!important}h2,h3,.why,thead{break-after:avoid}
svg,tr,.cards div,.verdict,.why{break-inside:avoid}.bar,.verdict{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


_TIED = re.compile(r"(?<=\d) (?=%)|(?<=[≤≥]) ")
"""Spaces at which a line must not break: before a per cent sign and behind a relation."""
_OPTION = re.compile(r"(?<!\S)--[a-z-]+")
"""An option of a command, which a narrow page must not break behind its hyphens."""

Row = Sequence["str | tuple[str, str]"]
"""Cells of a table: texts, or pairs (text, class)."""


class Head(NamedTuple):
    """The heading of a column; `right` for numbers."""

    text: str
    right: bool = False


def page(title: str, body: Iterable[str], sections: Sequence[str] = ()) -> str:
    """The whole file.

    sections  titles of the sections that links at the top lead to
    """
    links = "".join(f'<a href="#{anchor(s)}">{escape(s)}</a>' for s in sections)
    nav = f'<nav aria-label="Sections">{links}</nav>' if links else ""
    head, *rest = body
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"{head}{nav}{''.join(rest)}</main></body></html>\n"
    )


def anchor(title: str) -> str:
    """The id of a section."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _escaped(text: str) -> str:
    return _TIED.sub("\u00a0", escape(text))


def verdict(kind: str, word: str, sentences: Sequence[str]) -> str:
    """What the page comes to, in words.

    kind  "good", "warn" or "bad": the colour of its edge
    """
    lines = "".join(f"<p>{_OPTION.sub(_code, _escaped(s))}</p>" for s in sentences)
    return f'<section class="verdict {kind}" aria-label="Verdict"><p class="word">{_escaped(word)}</p>{lines}</section>'


def _code(option: re.Match[str]) -> str:
    return f"<code>{option[0]}</code>"


def section(title: str, explanation: str, content: Iterable[str], level: int = 2, of: str = "") -> str:
    """A section whose first line says what it shows.

    of  what it is about, where a page has several sections of this title
    """
    why = f'<p class="why">{_escaped(explanation)}</p>' if explanation else ""
    return f'<section id="{anchor(f"{of} {title}")}"><h{level}>{escape(title)}</h{level}>{why}{"".join(content)}</section>'


def cards(figures: Sequence[tuple[str, str, str]]) -> str:
    """Figures in large type: (name, value, a line below)."""
    each = (
        f"<div><span>{_escaped(a)}</span><strong>{_escaped(b)}</strong><span>{_escaped(c)}</span></div>" for a, b, c in figures
    )
    return f'<div class="cards">{"".join(each)}</div>'


def table(heads: Sequence[Head], rows: Iterable[Row]) -> str:
    """A table of rows."""
    top = "".join(f'<th scope="col"{_class(h.right)}>{escape(h.text)}</th>' for h in heads)
    lines = []
    for row in rows:
        cells = []
        for i, (head, cell) in enumerate(zip(heads, row, strict=True)):
            text, word = cell if isinstance(cell, tuple) else (cell, "")
            label = f' data-label="{escape(head.text)}"' if i and head.text else ""
            inner = f'<b class="{word}">{_escaped(text)}</b>' if word else _escaped(text)
            cells.append(f"<td{_class(head.right)}{label}>{inner}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="blocks"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _class(right: bool) -> str:
    return ' class="n"' if right else ""


def facts(values: Mapping[str, Any]) -> str:
    """Names and values, a row each."""
    rows = "".join(
        f'<tr><th scope="row">{escape(k.replace("_", " "))}</th><td>{escape(_text(v))}</td></tr>' for k, v in values.items()
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
