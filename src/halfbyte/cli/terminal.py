"""Printing: tables that fit the terminal, JSON Lines, progress on standard error.

Names from files are never taken as markup or escape sequences.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

UNLIMITED = 1 << 14
"""Columns of an output that is no terminal: a file or pipe gets every value whole, on one line."""

ProgressCallback = Callable[[int, int, str], None]


def survive_any_output() -> None:
    """Print what the output's encoding does not have as escapes instead of failing (LC_ALL=C, old Windows code pages), and
    nothing at all where there is no output (`halfbyte ... >&-`)."""
    if sys.stdout is None:
        # It takes the free descriptor too, which a file being written would get otherwise.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the program ends
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def printable(text: str) -> str:
    """`text` on one line, control characters shown as escapes: a name from a file must not move the cursor or hide a line."""
    return "".join(c if c.isprintable() else " " if c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def print_json(record: Mapping[str, Any]) -> None:
    """One record as a line of JSON. Infinities and NaN, which JSON lacks, become the strings "inf", "-inf" and "nan"."""
    utf = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    print(json.dumps(_plain(record), ensure_ascii=not utf))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class Column(NamedTuple):
    """A heading; numbers are set to the right. The first column is the one that folds when the terminal is narrow."""

    heading: str
    right: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Rows as a table as wide as it needs to be; on a terminal too narrow for it, each row as a short paragraph."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(file=sys.stdout, highlight=False, width=None if terminal else UNLIMITED)
    cells = [[printable(c) for c in row] for row in rows]
    widths = [max((len(r[i]) for r in cells), default=0) for i in range(len(columns))]
    widths = [max(w, len(c.heading)) for w, c in zip(widths, columns, strict=True)]
    rest = sum(widths[1:]) + 3 * len(columns)
    if console.width < rest + min(widths[0], 24):
        for row in cells:
            facts = ", ".join(f"{c.heading} {cell}" for c, cell in zip(columns[1:], row[1:], strict=True) if cell)
            print(row[0])
            for line in textwrap.wrap(facts, max(console.width - 2, 20)):
                print(f"  {line}")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column.heading, justify="right" if column.right else "left", overflow="fold", no_wrap=i > 0)
    for row in cells:
        table.add_row(*(Text(c) for c in row))
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        print(line.rstrip())


def plural(n: int, word: str) -> str:
    """1 tensor, 1,234 tensors."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def human_bytes(n: int) -> str:
    """1,234 B, 12.3 MB, 4.56 GB: decimal units, three digits."""
    return _three_digits(n, (" B", " kB", " MB", " GB", " TB", " PB"))


def human_count(n: int) -> str:
    """1,234, 270M, 6.74B: numbers of weights, three digits."""
    return _three_digits(n, ("", "k", "M", "B", "T"))


def _three_digits(n: int, units: Sequence[str]) -> str:
    if n < 10_000:
        return f"{n:,}{units[0]}"
    power = 1
    while n / 1000**power >= 999.5 and power < len(units) - 1:
        power += 1
    size = n / 1000**power
    return f"{size:.3g}{units[power]}" if size < 99.95 else f"{size:.0f}{units[power]}"


def shape_text(shape: Sequence[int] | None) -> str:
    """4096x14336."""
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


@contextlib.contextmanager
def progress(what: str, in_bytes: bool = False) -> Iterator[ProgressCallback | None]:
    """A callback (done, total, key) that draws a bar on standard error; None when that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    key_column = TextColumn("{task.fields[key]}", markup=False)
    columns = (TextColumn("{task.fields[what]}"), BarColumn(), count, TimeRemainingColumn(), key_column)
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task("", total=None, what=what, key="")

        def update(done: int, total: int, key: str) -> None:
            bar.update(task, completed=done, total=total, key=printable(key))

        yield update
