"""What a command does when something goes wrong: one line on standard error and an exit status,
never a traceback.

`HALFBYTE_DEBUG=1` in the environment shows the traceback instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import typer

from ..checkpoints.inspect import pattern_of
from ..errors import HalfbyteError, plural
from .terminal import printable

INTERRUPTED = 130
PIPE_CLOSED = 141
FAULT = 70
"""A fault of halfbyte itself (EX_SOFTWARE)."""


def complain(message: str) -> None:
    """One line on standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"halfbyte: {printable(message)}", file=sys.stderr, flush=True)


def complain_of_notes(notes: Iterable[str]) -> None:
    """A line a note; notes `module: cause` of one cause share a line, with the modules' names
    without their layers.
    """
    by_cause: dict[str, list[str]] = {}
    for note in notes:
        module, colon, cause = note.partition(": ")
        alike = bool(colon) and " " not in module
        by_cause.setdefault(cause if alike else note, []).extend([module] if alike else [])
    for cause, modules in by_cause.items():
        names = list(dict.fromkeys(map(pattern_of, modules)))
        if len(modules) > 1:
            complain(f"note: {plural(len(modules), 'weight')} ({', '.join(names)}): {cause}")
        else:
            complain(f"note: {modules[0]}: {cause}" if modules else f"note: {cause}")


def warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A Python warning as one line, without file and line number."""
    complain(f"warning: {message}")


def guarded(name: str, command: Callable[..., int | None]) -> Callable[..., None]:
    """`command` with every failure turned into a line and an exit status; its return value is the
    status when nothing fails.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        status = FAULT
        try:
            status = command(*map(_expanded, args), **{k: _expanded(v) for k, v in kwargs.items()}) or 0
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except BaseException as error:
            if os.environ.get("HALFBYTE_DEBUG", "0") not in ("", "0"):
                raise
            status = explain(name, error)
        raise typer.Exit(status)

    return run


def _expanded(value: Any) -> Any:
    """A path, or a list of them, with the home folder in place of ~."""
    if isinstance(value, list):
        return [_expanded(v) for v in value]
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def explain(name: str, error: BaseException) -> int:
    """Say what happened, and return the exit status."""
    if isinstance(error, HalfbyteError):
        complain(str(error))
        return 2
    if isinstance(error, BrokenPipeError):
        # Whoever read standard output has gone (`halfbyte inspect x | head`). Python would complain
        # once more at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    if isinstance(error, KeyboardInterrupt):
        complain("interrupted")
        return INTERRUPTED
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        complain(f"[{name}] {where}{error.strerror or error}")
        return 2
    if isinstance(error, MemoryError):
        complain(f"[{name}] out of memory{f': {error}' if str(error) else ''}")
        return 2
    if isinstance(error, ImportError):
        remedy = "" if "pip install" in str(error) else "; install it, or the extra that brings it (see README)"
        complain(f"[{name}] a package is missing: {error}{remedy}")
        return 2
    if isinstance(error, Warning):
        complain(f"[{name}] a warning, which PYTHONWARNINGS or -W makes an error: {error}")
        return 2
    if isinstance(error, Exception):
        what = f"{type(error).__name__}: {error}"
        complain(f"[{name}] a fault in halfbyte: {what}; HALFBYTE_DEBUG=1 shows the traceback, which is worth reporting")
        return FAULT
    raise error
