"""halfbyte convert: a checkpoint in another layout, exactly, or with a stated error only when
asked.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..checkpoints.inspect import pattern_of
from ..errors import FormatError, plural
from .failures import complain, complain_of_notes
from .opening import AllowUnknown, ConfigOption, ForceOption, ShardSizeOption, open_with, warn_of_missing_tokenizer
from .terminal import Column, human_bytes, print_json, print_table, print_wrapped, printable, progress

if TYPE_CHECKING:
    from ..conversion import Converted
    from ..conversion.unit import Record

_COLUMNS = (
    Column("tensor"), Column("count", True), Column("edge"), Column("from"), Column("to"), Column("largest rel. RMS", True),
    Column("why"),
)  # fmt: skip
TensorsOption = Annotated[bool, typer.Option("--tensors", help="A row for every tensor instead of one for each kind.")]


def convert(
    path: Annotated[Path, typer.Argument(help="A checkpoint: folder, .safetensors or .gguf.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, or one file named *.safetensors; *.gguf for gguf.")],
    to: Annotated[
        str | None,
        typer.Option("--to", help="layout[:codec[:gN]]: mlx, gguf:q4_0, gptq:int4:g128, compressed-tensors:nvfp4"),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Requantize, with least error, the weights that cannot be kept exactly.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Report what would be done with each tensor; write nothing.")] = False,
    like: Annotated[
        Path | None,
        typer.Option(help="A checkpoint of the same model whose names, config and tokenizer OUT takes: folder to GGUF and back."),
    ] = None,
    scale_dtype: Annotated[
        str | None, typer.Option(help="float16, bfloat16 or float32 for group scales, instead of one that holds them exactly.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Tensors converted at a time; 0: one a processor, at most 4.")] = 0,
    max_shard_size: ShardSizeOption = "5GB",
    force: ForceOption = False,
    tensors: TensorsOption = False,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: every tensor, then the summary.")] = False,
) -> int:
    """Move packed weights to another layout, with the same values.

    Each weight is kept exactly, exactly by a condition that its values meet, or equal in the
    target's own arithmetic. Weights that cannot be are refused, all of them named with the error
    they would have, unless --lossy is given. Streams; an interrupted run is resumed where it
    stopped. Exit status: 0 done, 1 a plan with lossy edges, 2 refused or failed.
    """
    from ..conversion import LossyError, convert_checkpoint
    from ..conversion.targets import layouts_in_words
    from ..conversion.to_dense import parse_size

    if to is None:
        raise FormatError(f"[convert] no target; give --to layout[:codec[:gN]]: {layouts_in_words()}")
    limit = parse_size(max_shard_size, "convert")
    with (
        open_with(path, config, allow_unknown) as checkpoint,
        open_with(like, None, None) if like is not None else contextlib.nullcontext() as other,
        progress("planning" if plan else "converting", in_bytes=True) as report,
    ):
        if like is None and not plan:
            warn_of_missing_tokenizer(checkpoint, out)
        try:
            done = convert_checkpoint(
                checkpoint,
                out,
                to,
                lossy=lossy,
                plan=plan,
                like=other,
                scale_dtype=scale_dtype,
                workers=workers,
                max_shard_size=limit,
                overwrite=force,
                progress=report,
            )
        except LossyError as error:
            complain(str(error))
            target = f"--to {error.instead}" if error.instead else f"--to {to} --lossy"
            complain(f"next: halfbyte convert {shlex.quote(str(path))} {shlex.quote(str(out))} {target}")
            return 2
    complain_of_notes(done.notes)
    if json:
        for r in done.records:
            print_json(r.record())
        print_json(done.record())
    else:
        _print(done, plan, path, tensors)
    return int(plan and not lossy and done.counts["lossy"] > 0)


def _print(done: Converted, plan: bool, source: Path, each: bool) -> None:
    shown = done.records if plan else [r for r in done.records if r.kind in ("equal", "lossy")]
    if shown:
        print_table(_COLUMNS, rows_of(shown, each))
        print()
    counts = ", ".join(f"{n:,} {kind}" for kind, n in done.counts.items() if n) or "no tensors"
    if plan:
        print_wrapped(f"would write {human_bytes(done.nbytes)} to {done.goal}: {counts}")
        return
    files = sum(f.endswith((".safetensors", ".gguf")) for f in done.files)
    print_wrapped(f"{done.path}: {counts}; {human_bytes(done.nbytes)} in {plural(files, 'file')}")
    if done.resumed:
        print_wrapped(f"resumed an earlier run: {plural(done.resumed, 'tensor')} had been written")
    if done.dropped:
        print_wrapped(f"not written, used by the source's kernels only: {plural(len(done.dropped), 'activation scale')}")
    print_wrapped(_checked(done.counts, source, done.path))


_CHECKS = {
    "exact": "keep their values by rule",
    "exact-if": "by what was checked on these bits",
    "equal": "decode to the same numbers in the target's arithmetic",
    "lossy": "were rounded again, with the errors above",
}


def _checked(counts: dict[str, int], source: Path, out: Path) -> str:
    """What each kind of edge guarantees, and the command that compares both sides."""
    guaranteed = ", ".join(f"{counts[kind]:,} {words}" for kind, words in _CHECKS.items() if counts.get(kind))
    prefix = f"{guaranteed}; " if guaranteed else ""
    command = f"halfbyte verify {printable(shlex.quote(str(source)))} {printable(shlex.quote(str(out)))}"
    return f"checked: {prefix}`{command}` compares every value, with no tolerance"


def rows_of(records: Iterable[Record], each: bool) -> list[list[str]]:
    """A row for tensors that differ by the numbers in their names alone, or for `each`."""
    kinds: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        to = "" if r.kind == "copied" else r.other_format
        kinds.setdefault((r.key if each else pattern_of(r.key), r.kind, r.format, to, r.why), []).append(r)
    rows = []
    for (pattern, kind, source, target, why), same in kinds.items():
        errors = [r.relative_rms for r in same if r.relative_rms is not None]
        name, count = (same[0].key, "") if len(same) == 1 else (pattern, f"{len(same):,}")
        rows.append([name, count, kind, source, target, f"{max(errors):.3g}" if errors else "", why])
    return rows
