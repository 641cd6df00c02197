"""Records as a table for the terminal, and as Markdown for a page of figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import plural
from .records import Record, name_of

HEADS = ("what", "activations", "bits", "weight", "m", "time, us", "GB/s", "GFLOP/s", "of limit", "of best peer", "which is")
"""Headings of `row_of`; the third and later ones are of numbers."""


def limits_line(limits: Record) -> str:
    """`AMD EPYC, avx512, 1 thread; reads 31.5 GB/s, FMA 117 GFLOP/s, 8-bit products 470 Gop/s`."""
    threads = limits.get("threads")
    words = [str(limits.get("name") or limits["device"])]
    if threads:
        words.append(plural(threads, "thread"))
    rates = [f"reads {limits['read_gbps']:,.1f} GB/s"]
    if limits.get("gflops"):
        rates.append(f"{limits.get('gflops_of', 'float32 FMA')} {limits['gflops']:,.0f} GFLOP/s")
    if limits.get("gops"):
        rates.append(f"8-bit products {limits['gops']:,.0f} Gop/s")
    return f"{', '.join(words)}; {', '.join(rates)}"


def row_of(r: Record) -> list[str]:
    """One record `time` as cells under `HEADS`."""
    return [
        name_of(r), str(r["kind"]), f"{r['bits']:.4g}" if "bits" in r else "", f"{r['n']}x{r['k']}", str(r["m"]),
        f"{r['time_us']:,.1f}", f"{r['gbps']:,.2f}" if "gbps" in r else "", f"{r['gflops']:,.1f}" if "gflops" in r else "",
        f"{r['fraction']:.0%}" if "fraction" in r else "", f"{r['ratio']:.2f}" if "ratio" in r else "",
        str(r.get("best_peer", "")),
    ]  # fmt: skip


def markdown(records: Sequence[Record]) -> Iterator[str]:
    """Lines of Markdown: the limits, then for each shape and kind a table with a column for each m.

    A cell is the time in ms; for halfbyte also the ratio to the best peer of the kind within 5 %
    in bits, with that peer's letter, and the fraction of the limit.
    """
    for r in records:
        if r["record"] == "limits":
            yield limits_line(r) + "."
    times = [r for r in records if r["record"] == "time"]
    for n, k in dict.fromkeys((r["n"], r["k"]) for r in times):
        for kind in dict.fromkeys(r["kind"] for r in times):
            yield from _one_table([r for r in times if (r["n"], r["k"], r["kind"]) == (n, k, kind)], f"{kind}, n = {n}, k = {k}")


def _one_table(times: Sequence[Record], title: str) -> Iterator[str]:
    columns = sorted({r["m"] for r in times})
    names = list(dict.fromkeys(name_of(r) for r in sorted(times, key=lambda r: r["peer"] == "halfbyte")))
    if not names:
        return
    letters: dict[str, str] = {}
    for r in times:
        if r["peer"] != "halfbyte":
            letters.setdefault(r["peer"], chr(ord("A") + len(letters)) if len(letters) < 26 else f"P{len(letters)}")
    yield ""
    yield f"| {title} | bits | " + " | ".join(f"m = {m}" if i == 0 else str(m) for i, m in enumerate(columns)) + " |"
    yield "|---" * (len(columns) + 2) + "|"
    for name in names:
        mine = {r["m"]: r for r in times if name_of(r) == name}
        one = next(iter(mine.values()))
        first = f"`{one['format']}`" if one["peer"] == "halfbyte" else f"{letters[one['peer']]}: {one['peer']}"
        cells = [_cell(mine[m], letters) if m in mine else "" for m in columns]
        yield f"| {first} | {one['bits']:.4g} | " + " | ".join(cells) + " |"


def _cell(r: Record, letters: dict[str, str]) -> str:
    words = [f"{r['time_us'] / 1e3:.2f}"]
    if r["peer"] == "halfbyte":
        if "ratio" in r:
            words.append(f"{r['ratio']:.2f} {letters.get(r.get('best_peer', ''), '')}".rstrip())
        if "fraction" in r:
            words.append(f"{r['fraction']:.0%}".replace("%", " %"))
    return ", ".join(words)
