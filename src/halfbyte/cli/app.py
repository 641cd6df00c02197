"""The command line: one command a file, registered here by name.

Exit statuses: 0 done, nothing wrong. 1 the answer is no (weights differ, errors found). 2 there is
no answer: bad usage, a file that cannot be read, a refusal. 70 a fault in halfbyte. 130
interrupted. 141 the reader of standard output went away.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Annotated

import typer
import typer.main

from ..numerics.waiting import let_threads_sleep
from .failures import explain, guarded, warn
from .terminal import survive_any_output

COMMANDS = (
    "inspect", "dequantize", "convert", "quantize", "sample", "imatrix", "verify", "generate", "chat", "serve", "eval", "plan",
    "bench", "tune", "backends", "selftest", "doctor",
)  # fmt: skip
"""Modules of this package; each holds a function of the module's name."""

app = typer.Typer(
    name="halfbyte",
    help="Low-bit quantized weights: inspect checkpoints, decode them exactly, convert and compare them, run them.",
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from halfbyte import __version__

        typer.echo(f"halfbyte {__version__}")
        raise typer.Exit


OVERVIEW = """\
halfbyte {version}: quantized language models, 2 to 8 bits a weight

What it does  Decodes GPTQ, AWQ, GGUF, MLX, compressed-tensors, ModelOpt, HQQ,
              bitsandbytes, torchao and ONNX weights exactly; converts between
              them without loss; multiplies packed weights on CPU and GPU.
For whom      Those who publish, convert, check or run quantized checkpoints,
              and those who write kernels for them.

Three commands to begin with (PATH: a folder, a .safetensors or .gguf file):

  halfbyte inspect PATH                what is in it, and what looks wrong
  halfbyte chat PATH                   talk to the model
  halfbyte convert PATH OUT --to mlx   another layout: exact, or refused

halfbyte --help lists all commands, halfbyte COMMAND --help explains one,
halfbyte doctor reports on this machine."""


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before the command."""
    if context.invoked_subcommand is None:
        from halfbyte import __version__

        typer.echo(OVERVIEW.format(version=__version__))


def _paragraphs(docstring: str) -> str:
    """A docstring as lines of whole paragraphs, which a terminal of any width wraps."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(docstring).split("\n\n"))


for _name in COMMANDS:
    _command = getattr(importlib.import_module(f"{__package__}.{_name}"), _name)
    _help = _paragraphs(_command.__doc__ or "")  # -OO leaves no docstrings
    _first = _help.partition("\n")[0].partition(". ")[0].rstrip(".") + "."
    app.command(_name, help=_help, short_help=_first)(guarded(_name, _command))


@functools.cache
def _command_line() -> Callable[..., object]:
    """The command line of `app`; typer builds another one, with every option of every command, at
    each call of `app`.
    """
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (`sys.argv` when None) and return its exit status."""
    survive_any_output()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] != ["bench"]:  # peers run as they do by themselves
        let_threads_sleep()
    if find_spec("torch") is None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install torch
    with warnings.catch_warnings():
        warnings.showwarning = warn
        try:
            _command_line()(args=words, prog_name="halfbyte")
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
        except (OSError, KeyboardInterrupt) as error:  # outside of any command, as --help that could not be printed
            return explain("halfbyte", error)
    return 0
