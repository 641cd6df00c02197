"""halfbyte verify: compare the weights of two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import FormatError
from .opening import AllowUnknown, ConfigOption, open_with
from .terminal import Column, human_count, print_json, print_table, print_wrapped, progress, shape_text

if TYPE_CHECKING:
    from ..verification.compare import Comparison, Report

_COLUMNS = (
    Column("tensor"), Column("status"), Column("A"), Column("B"), Column("compared as", optional=3),
    Column("differing", True), Column("rel. RMS", True), Column("max rel.", True, optional=2),
    Column("max abs.", True, optional=1), Column("1 - cosine", True, optional=4),
)  # fmt: skip


def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference: folder, .safetensors or .gguf.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The checkpoint compared with it, of any layout.")],
    map: Annotated[
        list[str] | None,
        typer.Option("--map", help="Rename keys of A: old=new, old a regular expression; or a file of such lines, or of JSON."),
    ] = None,
    rtol: Annotated[
        float, typer.Option(help="Call a tensor close when its relative RMS and largest relative error are at most this.")
    ] = 0.0,
    dtype: Annotated[str | None, typer.Option(help="Round both sides once to this dtype first.")] = None,
    arithmetic: Annotated[str, typer.Option(help="exact, or producer: what each producer's own decoder gives.")] = "exact",
    all: Annotated[bool, typer.Option("--all", help="Also list the tensors that are identical.")] = False,
    config: ConfigOption = None,
    other_config: Annotated[str | None, typer.Option(help="As --config, for B.")] = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: every tensor worst first, then the summary.")] = False,
) -> int:
    """Compare every weight by exact value; report differences, worst first.

    Packed is compared with packed exactly, and with dense after rounding once to the dense dtype.
    max rel. is against the largest value of the same row. A tensor or config key that is not
    accounted for counts as different. Exit status: 0 identical (or within --rtol), 1 different, 2
    the comparison could not be made.
    """
    from ..verification.compare import verify as compare
    from ..verification.names import read_rules

    if not 0 <= rtol < float("inf"):
        raise FormatError(f"[verify] --rtol {rtol}; allowed: 0 or a positive number")
    if arithmetic not in ("exact", "producer"):
        raise FormatError(f"[verify] --arithmetic {arithmetic}; allowed: exact, producer")
    rules = read_rules(map or [])
    with (
        open_with(a, config, allow_unknown) as left,
        open_with(b, other_config, allow_unknown) as right,
        progress("comparing") as report,
    ):
        result = compare(left, right, rules=rules, rtol=rtol, dtype=dtype, arithmetic=arithmetic, progress=report)
    if json:
        for comparison in result.comparisons:
            print_json(comparison.record())
        print_json(result.record())
    else:
        _print(result, all)
    return int(result.verdict == "different")


def _print(result: Report, every: bool) -> None:
    shown = [c for c in result.comparisons if every or c.status not in ("identical", "auxiliary")]
    if shown:
        print_table(_COLUMNS, [_row(c) for c in shown])
        print()
    for c in shown:
        if c.note:
            print_wrapped(f"{c.key}: {c.note}")
        elif c.difference is not None and c.difference.worst is not None and c is shown[0]:
            row, column = c.difference.worst
            print_wrapped(f"worst value: {c.key}, row {row}, input {column}")
    counts = ", ".join(f"{n:,} {status}" for status, n in result.counts.items() if n)
    print_wrapped(f"{result.verdict}: {counts or 'no tensors on either side'}")


def _row(c: Comparison) -> list[str]:
    sides = [f"{word} {shape_text(shape)}".strip() for word, shape in ((c.format, c.shape), (c.other_format, c.other_shape))]
    if not c.keys or not c.other_keys:
        sides[0 if not c.keys else 1] = "-"
    if c.difference is None:
        return [c.key, c.status, *sides, "", "", "", "", "", ""]
    d = c.difference
    share = f"{human_count(d.differing)} of {human_count(d.count)}"
    return [
        c.key, c.status, *sides, c.compared_as, share, f"{d.relative_rms:.3g}", f"{d.max_relative_error:.3g}",
        f"{d.max_abs_error:.3g}", f"{max(0.0, 1 - d.cosine):.2g}",
    ]  # fmt: skip
