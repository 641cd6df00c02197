"""halfbyte inspect: the content of a checkpoint, and what looks wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..checkpoints import Checkpoint, Finding, TensorInfo
from ..errors import plural
from .opening import AllowUnknown, ConfigOption, check_report, open_with
from .terminal import Column, human_bytes, human_count, print_json, print_table, print_wrapped, progress, shape_text

if TYPE_CHECKING:
    from ..checkpoints.ledger import Ledger

SHOWN = 4
"""Findings of one code that are printed when not every tensor is."""

_COLUMNS = (
    Column("tensor"), Column("count", True), Column("layout"), Column("format"), Column("shape", True),
    Column("bits/weight", True), Column("bytes", True, optional=1),
)  # fmt: skip

_PREDICTIONS = (Column("engine"), Column("weight"), Column("verdict"), Column("why", optional=1))

_LEDGER = (Column("tensor or key"), Column("status"), Column("beside"), Column("why"))


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint: folder, .safetensors or .gguf.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="A row for every tensor instead of one for each kind.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Also read the packed weights: NaN scales, overflow, equal zero points.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option("--for", help="What an engine will do with it: vllm==0.32, transformers, llama.cpp, mlx, sglang, ..., all."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with plots there; --data adds the values.")] = None,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: checkpoint, tensors, ledger, findings.")] = False,
) -> int:
    """Show layout, format and size of every tensor, the ledger of tensors and config keys, and what
    looks wrong, worst first.

    With --for instead a prediction from headers and configuration: fine, refused, or wrong (it
    loads and computes something else), with the public report and the conversion that repairs it.

    Exit status: 0 when no error was found (warnings and notes allowed), 1 when one was, or when an
    engine of --for refuses the checkpoint or computes something else, 2 when it cannot be opened.
    """
    from ..checkpoints.inspect import records
    from ..checkpoints.io.safe_files import replace_text
    from ..reports.inspection import Layers, Survey, inspection

    if engine is not None:
        return _predict(path, engine, config, allow_unknown, tensors, json)
    check_report(report, "inspect")
    with open_with(path, config, allow_unknown, data) as checkpoint:
        survey = Survey(Layers(checkpoint.keys())) if report is not None and data else None
        with progress("reading") as update:
            findings = checkpoint.findings(data=data, progress=update, visit=None if survey is None else survey.visit)
        if report is not None:
            replace_text(report, inspection(checkpoint, findings, survey))
        if json:
            for record in records(checkpoint, findings):
                print_json(record)
        else:
            _print(checkpoint, findings, tensors, data)
    return int(any(f.severity == "error" for f in findings))


def _predict(path: Path, engine: str, config: str | None, allow_unknown: list[str] | None, each: bool, json: bool) -> int:
    from ..checkpoints.engines import FINE, parse_engine, predictions

    parse_engine(engine)
    with open_with(path, config, allow_unknown, data=False) as checkpoint:
        found = predictions(checkpoint, engine)
        where = checkpoint.remote.where if checkpoint.remote else str(checkpoint.path)
        kind = checkpoint.format
    if json:
        for p in found:
            print_json(p.record())
        return int(any(p.verdict != FINE for p in found))
    print_wrapped(f"{where}: {kind}")
    print()
    shown = [p for p in found if each or not p.key]
    print_table(_PREDICTIONS, [[f"{p.engine} {p.version}", p.key or "all", p.verdict, p.reason] for p in shown])
    for p in {(p.reason, p.report, p.repair): p for p in found if p.verdict != FINE and p.report}.values():
        print()
        print_wrapped(f"{p.engine}, {p.verdict}: {p.reason}")
        print_wrapped(f"report: {p.report}", "  ")
        if p.repair:
            print_wrapped(f"repair: {p.repair}", "  ")
    return int(any(p.verdict != FINE for p in found))


def _print(checkpoint: Checkpoint, findings: Sequence[Finding], each: bool, data: bool) -> None:
    from ..checkpoints.inspect import Group, grouped, totals

    infos = list(checkpoint.infos())
    sums = totals(infos)
    what = f"{plural(len(infos), 'tensor')} in {plural(len(sums.files), 'file')}, {human_bytes(sums.all.nbytes)}"
    remote = checkpoint.remote
    print_wrapped(f"{remote.where if remote else checkpoint.path}: {checkpoint.format}, {what}")
    if remote:
        print_wrapped(f"read by {plural(remote.requests, 'range request')} of {human_bytes(remote.received)} in all")
    print()
    groups = [Group(i.key, (i,)) for i in infos] if each else grouped(infos)
    named = {i.layout for i in infos if i.layout} <= {checkpoint.format}  # by the line above the table
    rows = [_row(g, each, not named) for g in groups]
    print_table([c for c in _COLUMNS if not each or c.heading != "count"], rows)
    print()
    for word, share in (("packed", sums.packed), ("dense", sums.dense), ("all", sums.all)):
        if share.tensors and not (word == "all" and not (sums.packed.tensors and sums.dense.tensors)):
            print_wrapped(
                f"{word + ':':<8}{plural(share.tensors, 'tensor')}, {human_count(share.weights)} weights, "
                f"{share.bits_per_weight:.4g} bits/weight, {human_bytes(share.nbytes)}"
            )
    _print_ledger(checkpoint.ledger(), each)
    if not data:
        print_wrapped("values: not read; --data looks for NaN scales, overflow and zero points that do not fit")
    _print_findings(findings, each)


def _row(group: object, each: bool, layout: bool) -> list[str]:
    from ..checkpoints.inspect import Group, bits_per_weight, format_word

    assert isinstance(group, Group)
    first: TensorInfo = group.infos[0]
    count = [] if each else [f"{len(group.infos):,}"]
    return [
        group.pattern, *count, first.layout if layout else "", format_word(first), shape_text(first.shape),
        f"{bits_per_weight(first):.4g}", human_bytes(group.nbytes),
    ]  # fmt: skip


def _print_ledger(ledger: Ledger, each: bool) -> None:
    """Counts of the ledger; with `each`, also every entry that is neither a part of a packed weight
    nor a dense tensor.
    """
    for subject, word in (("tensor", "tensors"), ("key", "quantization config")):
        counts = ", ".join(f"{n:,} {status}" for status, n in ledger.counts(subject).items())
        if counts:
            print_wrapped(f"{word}: {counts}")
    print_wrapped(
        f"modules: not checked, {ledger.modules}" if ledger.modules else "modules: compared with the model's configuration"
    )
    shown = [e for e in ledger.entries if e.status not in ("claimed", "dense", "consumed")]
    if each and shown:
        print()
        print_table(_LEDGER, [[e.name, e.status, e.owner, e.why] for e in shown])


def _print_findings(findings: Sequence[Finding], each: bool) -> None:
    """Findings worst first; of one code no more than `SHOWN` unless `each` is asked for."""
    from ..checkpoints.inspect import fix_for

    if not findings:
        print("\nNothing looks wrong.")
        return
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for f in findings:
        kinds.setdefault((f.severity, f.code), []).append(f)
    for (severity, code), same in kinds.items():
        fix = fix_for(code)
        print()
        print_wrapped(f"{severity} [{code}]" + (f" fix: {fix}" if fix else ""))
        for f in same if each else same[:SHOWN]:
            print_wrapped(f"{f.key}: {f.message}" if f.key else f.message, "  ")
        if not each and len(same) > SHOWN:
            print_wrapped(f"and {len(same) - SHOWN:,} more; --tensors and --json list all", "  ")
