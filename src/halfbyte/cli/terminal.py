"""Printing: tables that fit the terminal, JSON Lines, progress on standard error.

Names from files are never taken as markup or escape sequences.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

UNLIMITED = 1 << 14
"""Columns of an output that is no terminal: a file or pipe gets every value whole, on one line."""

ProgressCallback = Callable[[int, int, str], None]


def survive_any_output() -> None:
    """Print what the output's encoding does not have as escapes instead of failing (LC_ALL=C, old
    Windows code pages), and put the null device at standard streams that are closed (`halfbyte ...
    <&- >&- 2>&-`), whose descriptors a file being written would get otherwise.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free descriptor, which is this one: those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115  until the program ends
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def printable(text: str) -> str:
    """`text` on one line, control characters shown as escapes: a name from a file must not move the
    cursor or hide a line.
    """
    return "".join(c if c.isprintable() else " " if c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def print_json(record: Mapping[str, Any]) -> None:
    """One record as a line of JSON. Infinities and NaN, which JSON lacks, become the strings "inf",
    "-inf" and "nan".
    """
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
    """A column of a table.

    right     numbers: aligned to the right and never wrapped
    optional  0: always shown. Where a terminal is too narrow for all columns, those with the
              highest number go first
    """

    heading: str
    right: bool = False
    optional: int = 0


GAP = 2
TABLE_WIDTH = 72
"""On terminals of at least this many columns rows are printed as a table; on narrower ones as
paragraphs.
"""
NARROWEST = 14
"""Columns a wrapped text column keeps; below it optional columns are left out."""


def output_width(stream: TextIO | None = None) -> int:
    """Columns of a line of `stream` (standard output): the terminal's, `UNLIMITED` in a file or
    pipe.
    """
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    terminal = stream.isatty() or "COLUMNS" in os.environ
    # A terminal that does not know its size says 0 columns.
    return max(Console(file=stream).width or 80, NARROWEST) if terminal else UNLIMITED


def print_wrapped(text: str, indent: str = "", stream: TextIO | None = None) -> None:
    """A sentence or list on `stream` (standard output), broken at spaces where the terminal is
    narrower, but not within a `command`, which is copied; further lines are indented by two columns
    more.
    """
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", _INSIDE), printable(text))
    lines = textwrap.wrap(
        whole,
        output_width(stream),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    print("\n".join(lines).replace(_INSIDE, " "), file=stream, flush=stream is not None)


_INSIDE = "\0"
"""A space within a command while lines are broken: no printable text has it."""


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Rows as a table: text wraps and then optional columns are left out, and named, where the
    terminal is narrow.

    Below TABLE_WIDTH columns each row is a short paragraph, with nothing left out. A file or pipe
    gets every row on one line. A column of which no row has a value is not printed.
    """
    available = output_width()
    kept = [i for i in range(len(columns)) if not rows or any(row[i] for row in rows)]
    columns = [columns[i] for i in kept]
    cells = [[printable(row[i]) for i in kept] for row in rows]
    content = [max((len(row[i]) for row in cells), default=0) for i in range(len(columns))]
    shown, widths = fitted(columns, content, available)
    if available < TABLE_WIDTH and (len(shown) < len(columns) or available < sum(content) + GAP * (len(content) - 1)):
        _print_paragraphs(columns, cells, available)
        return
    _print_row([columns[i].heading for i in shown], widths, [columns[i].right for i in shown])
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    print((" " * GAP).join(("─" if encoding.startswith("utf") else "-") * w for w in widths))
    for row in cells:
        _print_row([row[i] for i in shown], widths, [columns[i].right for i in shown])
    left_out = [c.heading for i, c in enumerate(columns) if i not in shown and any(row[i] for row in cells)]
    if left_out:
        note = f"not shown here: {', '.join(left_out)}; a wider terminal shows all, --json has all"
        print("\n".join(textwrap.wrap(note, available)))


def fitted(columns: Sequence[Column], content: Sequence[int], available: int) -> tuple[list[int], list[int]]:
    """The columns that fit into `available`, by index, and their widths.

    content  the longest cell of each column
    Headings of numbers wrap first; then the widest text columns, each down to NARROWEST; then
    columns are left out, the most optional first and, where none is optional, the last, until two
    are left.
    """
    shown = list(range(len(columns)))
    whole = [max(n, len(c.heading)) for n, c in zip(content, columns, strict=True)]
    words = [max(n, *(map(len, c.heading.split()))) for n, c in zip(content, columns, strict=True)]
    while True:
        widths = {i: whole[i] for i in shown}
        excess = sum(widths.values()) + GAP * (len(shown) - 1) - available
        text = [i for i in shown if not columns[i].right]
        for which, least in ((shown, words), (text, [NARROWEST] * len(columns))):
            while excess > 0:
                candidates = [i for i in which if widths[i] > least[i]]
                if not candidates:
                    break
                widths[max(candidates, key=lambda i: widths[i])] -= 1
                excess -= 1
        if excess <= 0 or len(shown) <= 2:
            return shown, [widths[i] for i in shown]
        shown.remove(max(shown[1:], key=lambda i: (columns[i].optional, i)))


def _print_row(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> None:
    parts = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for line in range(max(map(len, parts))):
        texts = [part[line] if line < len(part) else "" for part in parts]
        texts = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)]
        print((" " * GAP).join(texts).rstrip())


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, broken at spaces; a word that is longer than a line is
    broken behind its dots, slashes, colons and underscores, else anywhere.
    """
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        for piece in [word] if len(word) <= width else re.findall(r"[^._/:]*[._/:]+|[^._/:]+", word):
            if len(lines[-1]) + len(gap) + len(piece) > width and lines[-1]:
                lines.append("")
                gap = ""
            for start in range(0, len(piece), width):
                if start:
                    lines.append("")
                lines[-1] += gap + piece[start : start + width]
                gap = ""
    return lines


def _print_paragraphs(columns: Sequence[Column], cells: Sequence[Sequence[str]], available: int) -> None:
    for row in cells:
        facts = ", ".join(f"{c.heading} {cell}" for c, cell in zip(columns[1:], row[1:], strict=True) if cell)
        print("\n".join(wrapped(row[0], available)))
        for line in textwrap.wrap(facts, max(available - 2, 20)):
            print(f"  {line}")


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


BAR_WIDTH = 16
PROGRESS_WIDTH = BAR_WIDTH + 27
"""Columns of a line of progress without its first word and its last: the bar, `123.4/567.8 MB`,
`0:00:00`, and the spaces between.
"""


@contextlib.contextmanager
def progress(what: str, in_bytes: bool = False) -> Iterator[ProgressCallback | None]:
    """A callback (done, total, key) that draws a bar on standard error; None when that is no
    terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    key_column = TextColumn("{task.fields[key]}", markup=False)
    columns = (TextColumn("{task.fields[what]}"), BarColumn(BAR_WIDTH), count, TimeRemainingColumn(), key_column)
    console = Console(stderr=True)
    room = max((console.width or 80) - len(what) - PROGRESS_WIDTH, 1)
    bar = Progress(*columns, console=console, transient=True)
    with bar:
        task = bar.add_task("", total=None, what=what, key="")

        def update(done: int, total: int, key: str) -> None:
            name = printable(key)
            bar.update(task, completed=done, total=total, key=name if len(name) <= room else f"…{name[len(name) - room + 1 :]}")

        yield update
