"""halfbyte quantize: a dense checkpoint to a packed one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FormatError
from .failures import complain
from .opening import AllowUnknown, ConfigOption, open_with, warn_of_missing_tokenizer
from .terminal import Column, human_bytes, plural, print_json, print_table, printable, progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..conversion import Converted
    from ..conversion.quantize import Rounder

_COLUMNS = (Column("tensor"), Column("from"), Column("to"), Column("rel. RMS", True))


def quantize(
    path: Annotated[Path, typer.Argument(help="A dense checkpoint: folder, .safetensors or .gguf.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, or one file named *.safetensors; *.gguf for gguf.")],
    to: Annotated[str, typer.Option("--to", help="layout:codec[:gN]: mlx:affine4:g64, gguf:q4_K_M, gptq:int4:g128, ...")],
    method: Annotated[
        str, typer.Option(help="rtn: to nearest. mse: searched scales. gptq, awq: with calibration text, which helps mse too.")
    ] = "rtn",
    rule: Annotated[
        list[str] | None, typer.Option("--rule", help="regex=codec[:gN] or regex=keep, for modules whose name matches; in order.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Text file whose tokens calibrate gptq, awq and mse; not the text you will measure with.")
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(help="Importance matrix that weights mse's errors, in llama.cpp's GGUF form; see halfbyte imatrix."),
    ] = None,
    context: Annotated[int, typer.Option(min=8, help="Tokens of a calibration sequence.")] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 32,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: inputs that matter most first.")] = False,
    device: Annotated[
        str, typer.Option(help="Where calibration runs, and rounding with it: cpu, cuda; auto takes a GPU if there is one.")
    ] = "auto",
    from_packed: Annotated[
        bool, typer.Option("--from-packed", help="Also decode weights that are packed, and round them again.")
    ] = False,
    scale_dtype: Annotated[str | None, typer.Option(help="float16, bfloat16 or float32 for float group scales.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done with each tensor; write nothing.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Tensors at a time; 0: one a processor, at most 4.")] = 0,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of one file of a folder: 5GB, 500MB, 2GiB.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: every tensor, then the summary.")] = False,
) -> int:
    """Round the weights of a dense checkpoint.

    Embeddings, output head, routers and norms are kept, unless a --rule names them.
    """
    from ..conversion.expert_formats import check_experts
    from ..conversion.importance import ImportanceRounder, digest_of, gguf_modules, read_importance
    from ..conversion.quantize import quantize_checkpoint
    from ..conversion.recipe import module_of, recipe_of
    from ..conversion.to_dense import parse_size
    from ..conversion.transposed_experts import stacks_of
    from ..conversion.write import check_output
    from ..gguf_models.view import as_model
    from ..quantizers import METHODS

    if method not in METHODS:
        raise FormatError(f"[quantize] --method {method}; allowed: {', '.join(METHODS)}")
    recipe, limit = recipe_of(to, rule or [], scale_dtype), parse_size(max_shard_size, "quantize")
    needed = method in ("gptq", "awq")
    if calibration is not None and method == "rtn":
        raise FormatError("[quantize] --calibration with --method rtn, which looks at weights only; allowed: mse, gptq, awq")
    if imatrix is not None and (method != "mse" or calibration is not None):
        given = f"--method {method}" if method != "mse" else "--calibration"
        raise FormatError(f"[quantize] --imatrix with {given}; allowed: --method mse without --calibration")
    calibrated = (needed or calibration is not None) and not plan
    if needed and not plan and calibration is None:
        raise FormatError(f"[quantize] --method {method} wants --calibration FILE, a text like those the model will read")
    rounder: str | Rounder = "mse" if method == "mse" else "rtn"
    replaced: Mapping[str, NDArray[Any]] = {}
    notes: list[str] = []
    named = ""
    walked: dict[str, int] = {}
    if act_order and method != "gptq":
        raise FormatError(f"[quantize] --act-order with --method {method}; it belongs to gptq")
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_with(path, config, allow_unknown))
        modules = [module for info in checkpoint.infos() if (module := module_of(info)) is not None]
        named_too = [] if calibrated or recipe.goal.layout == "gguf" else as_model(checkpoint, recipe.goal.layout).keys()
        recipe.check([*modules, *stacks_of(checkpoint), *(key.removesuffix(".weight") for key in named_too)])
        for note in (reported := check_experts(checkpoint, recipe)):
            complain(f"note: {note}")
        if not plan:
            warn_of_missing_tokenizer(checkpoint, out)
        if calibrated and calibration is not None:
            from ..calibration import Spool, calibrate

            check_output(checkpoint.path, out, recipe.goal, force, plan)
            layers = stack.enter_context(Spool(out))
            with progress("calibrating") as report:
                found = calibrate(
                    checkpoint, recipe, calibration, method, context=context, sequences=sequences, act_order=act_order,
                    device=device, from_packed=from_packed, spool=layers, progress=report,
                )  # fmt: skip
            rounder, replaced, notes, named = found.rounder, found.replaced, found.notes, found.name
            walked = {"layers": found.layers, "layers_resumed": found.resumed}
        if imatrix is not None:
            weighted = ImportanceRounder(read_importance(imatrix), gguf_modules(checkpoint))
            weighted.check()
            rounder, named = weighted, f"mse under {digest_of(imatrix)}"
        with progress("planning" if plan else "quantizing", in_bytes=True) as report:
            done = quantize_checkpoint(
                checkpoint, out, recipe, rounder, replaced=replaced, from_packed=from_packed, plan=plan, workers=workers,
                max_shard_size=limit, overwrite=force, progress=report, named=named,
            )  # fmt: skip
    done.notes = [*notes, *done.notes]
    for note in done.notes:
        if note not in reported:
            complain(f"note: {note}")
    if json:
        for r in done.records:
            print_json(r.record())
        print_json({**done.record(), "record": "quantized", "method": method, **walked})
    else:
        _print(done, plan)
        if walked.get("layers_resumed"):
            print(f"calibration taken up where an earlier run stopped: {walked['layers_resumed']} of {walked['layers']} layers")
    return 0


def _print(done: Converted, plan: bool) -> None:
    rows = [
        [r.key, r.format, r.other_format, f"{r.relative_rms:.3g}" if r.relative_rms is not None else ""]
        for r in done.records
        if r.kind != "copied"
    ]
    print_table(_COLUMNS, rows)
    print()
    counts = ", ".join(f"{n:,} {kind}" for kind, n in done.counts.items() if n)
    if plan:
        print(f"would write {human_bytes(done.nbytes)} to {done.goal}: {counts}")
        return
    files = sum(f.endswith((".safetensors", ".gguf")) for f in done.files)
    print(f"{printable(str(done.path))}: {counts}; {human_bytes(done.nbytes)} in {plural(files, 'file')}")
    if done.resumed:
        print(f"taken up where an earlier run stopped: {plural(done.resumed, 'tensor')} had been written")
