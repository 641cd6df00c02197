"""The command line: one command a file, registered here by name.

Exit statuses: 0 done, nothing wrong. 1 the answer is no (weights differ, errors found). 2 there is no answer: bad usage, a file
that cannot be read, a refusal. 70 a fault in halfbyte. 130 interrupted. 141 the reader of standard output went away.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from .failures import explain, guarded, warn
from .terminal import survive_any_output
from .waiting import let_threads_sleep

COMMANDS = (
    "inspect", "dequantize", "convert", "quantize", "verify", "generate", "chat", "serve", "eval", "plan", "bench",
    "tune", "backends", "selftest",
)  # fmt: skip
"""Modules of this package; each holds a function of the module's name."""

app = typer.Typer(
    name="halfbyte",
    help="Low-bit quantized weights: look into checkpoints, decode them exactly, compare them, run them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from halfbyte import __version__

        typer.echo(f"halfbyte {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""


for _name in COMMANDS:
    app.command(_name)(guarded(_name, getattr(importlib.import_module(f"{__package__}.{_name}"), _name)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (`sys.argv` when None) and return its exit status."""
    survive_any_output()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] != ["bench"]:  # peers run as they do by themselves
        let_threads_sleep()
    with warnings.catch_warnings():
        warnings.showwarning = warn
        try:
            app(args=words, prog_name="halfbyte")
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
        except OSError as error:  # outside of any command: --help or --version that could not be printed
            return explain("halfbyte", error)
    return 0
