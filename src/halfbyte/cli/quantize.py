"""halfbyte quantize: a dense checkpoint to a packed one."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checkpoints.io.home import expanded
from ..errors import FormatError, HalfbyteError, plural
from .convert import TensorsOption, rows_of
from .failures import complain_of_notes
from .generate import peak_memory
from .opening import AllowUnknown, ConfigOption, ForceOption, ShardSizeOption, check_report, open_with, warn_of_missing_tokenizer
from .terminal import Column, human_bytes, print_json, print_table, print_wrapped, progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..conversion import Converted
    from ..conversion.allocation import Allocation
    from ..conversion.quantize import Rounder
    from ..conversion.recipe import Recipe
    from ..evaluation.compare import Comparison

_COLUMNS = (Column("tensor"), Column("count", True), Column("from"), Column("to"), Column("largest rel. RMS", True))


def quantize(
    path: Annotated[Path, typer.Argument(help="A dense checkpoint: folder, .safetensors or .gguf.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, or one file named *.safetensors; *.gguf for gguf.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to", help="layout:codec[:gN]: mlx:affine4:g64, gguf:q4_K_M, gptq:int4:g128, ...; a layout with a budget."
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="rtn: to nearest. mse: searched scales. gptq, awq, learned: with calibration text, which helps mse too."
        ),
    ] = "rtn",
    rule: Annotated[
        list[str] | None, typer.Option("--rule", help="regex=codec[:gN] or regex=keep, for modules whose name matches; in order.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text file whose tokens calibrate gptq, awq, learned and mse; not the text you will measure with."),
    ] = None,
    bits: Annotated[
        float | None, typer.Option(help="Budget: bits a weight at most; a codec for each weight is chosen. Needs --calibration.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Budget: bytes of the written weights at most: 150MB, 2GiB.")] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Budget: KL divergence from the dense model at most, nats a token of the calibration text."),
    ] = None,
    codecs: Annotated[
        str | None, typer.Option(help="Codecs that a budget chooses among: q4_K,q5_K,q6_K; all without it.")
    ] = None,
    recipe_file: Annotated[
        Path | None, typer.Option("--recipe", help="Target and rules of an earlier --save-recipe, in place of --to and --rule.")
    ] = None,
    save_recipe: Annotated[Path | None, typer.Option(help="Write the recipe that a budget led to.")] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(help="Importance matrix that weights mse's errors, in llama.cpp's GGUF form; see halfbyte imatrix."),
    ] = None,
    context: Annotated[int, typer.Option(min=8, help="Tokens of a calibration sequence.")] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 32,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: inputs that matter most first.")] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=0, help="learned: steps of descent for a layer, from two starts; 100 without it, 0 for none."),
    ] = None,
    distill: Annotated[
        int | None,
        typer.Option(min=0, help="learned: steps for the whole model, afterwards; 0 without it."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="learned: order in which it sees sequences; of --rotate too. 0 without it.")
    ] = None,
    norms: Annotated[
        bool, typer.Option("--norms", help="learned: the steps for the whole model train the weights of its norms, too.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="learned: these steps run through torch.compile; on a GPU it wants Triton.")
    ] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate hidden states first, which spreads outliers; the model computes the same.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where calibration runs, and rounding with it: cpu, cuda; auto takes a GPU if there is one.")
    ] = "auto",
    from_packed: Annotated[
        bool, typer.Option("--from-packed", help="Also decode weights that are packed, and round them again.")
    ] = False,
    scale_dtype: Annotated[str | None, typer.Option(help="float16, bfloat16 or float32 for float group scales.")] = None,
    report_page: Annotated[
        Path | None, typer.Option("--report", help="Write an HTML page: error, divergence, where the bits went, time and memory.")
    ] = None,
    report_text: Annotated[
        Path | None, typer.Option(help="Text that the page measures the loss on; the calibration text without it.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done with each tensor; write nothing.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Tensors at a time; 0: one a processor, at most 4.")] = 0,
    max_shard_size: ShardSizeOption = "5GB",
    force: ForceOption = False,
    tensors: TensorsOption = False,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: every tensor, then the summary.")] = False,
) -> int:
    """Round the weights of a dense checkpoint.

    Embeddings, output head, routers and norms are kept, unless a --rule names them.
    """
    from ..checkpoints.io.safe_files import replace_text
    from ..conversion.allocation import check_recipe_path, read_recipe
    from ..conversion.expert_formats import check_experts
    from ..conversion.importance import digest_of, importance_rounder, read_importance
    from ..conversion.quantize import quantize_checkpoint
    from ..conversion.recipe import module_of, recipe_of
    from ..conversion.targets import goal_named, layouts_in_words
    from ..conversion.to_dense import parse_size
    from ..conversion.transposed_experts import stacks_of
    from ..conversion.write import check_output
    from ..gguf_models.view import as_model
    from ..quantizers import METHODS

    if method not in METHODS:
        raise FormatError(f"[quantize] --method {method}; allowed: {', '.join(METHODS)}")
    if report_page is not None and plan:
        raise FormatError("[quantize] --report with --plan, which writes nothing; give one of them")
    if report_text is not None and report_page is None:
        raise FormatError("[quantize] --report-text without --report; give --report PAGE too")
    check_report(report_page, "quantize")
    if save_recipe is not None:
        check_recipe_path(save_recipe)
    clock = _Clock()
    most = None if size is None else parse_size(size, "quantize")
    budget = [name for name, value in (("--bits", bits), ("--size", size), ("--max-kl", max_kl)) if value is not None]
    unfit = {"--rule": rule, "--recipe": recipe_file, "--imatrix": imatrix, "--scale-dtype": scale_dtype}
    _check_budget(budget, calibration, codecs, save_recipe, unfit)
    if recipe_file is not None:
        if to is not None or rule:
            raise FormatError("[quantize] --recipe with --to or --rule; a recipe has its own target and rules")
        to, rule = read_recipe(recipe_file)
    if to is None:
        raise FormatError(
            "[quantize] no target; give --to layout:codec[:gN], --to layout with a budget, or --recipe FILE; "
            f"{layouts_in_words()}"
        )
    limit = parse_size(max_shard_size, "quantize")
    recipe = recipe_of(to, rule or [], scale_dtype) if not budget else None
    needed = method in ("gptq", "awq", "learned")
    if calibration is not None and method == "rtn" and not budget:
        raise FormatError(
            "[quantize] --calibration with --method rtn, which looks at weights only; allowed: mse, gptq, awq, learned"
        )
    if imatrix is not None and (method != "mse" or calibration is not None):
        given = f"--method {method}" if method != "mse" else "--calibration"
        raise FormatError(f"[quantize] --imatrix with {given}; allowed: --method mse without --calibration")
    calibrated = (needed or (calibration is not None and method != "rtn")) and not plan
    if needed and not plan and calibration is None:
        raise FormatError(f"[quantize] --method {method} wants --calibration FILE, a text like those the model will read")
    rounder: str | Rounder = "mse" if method == "mse" else "rtn"
    replaced: Mapping[str, NDArray[Any]] = {}
    notes: list[str] = []
    named = ""
    walked: dict[str, int] = {}
    if act_order and method != "gptq":
        raise FormatError(f"[quantize] --act-order with --method {method}; it belongs to gptq")
    learning: dict[str, Any] = {
        name: value for name, value in (("steps", steps), ("distill", distill), ("seed", seed)) if value is not None
    }
    learning |= {name: True for name, wanted in (("norms", norms), ("compiled", compiled)) if wanted}
    if rotate and imatrix is not None:
        raise FormatError("[quantize] --rotate with --imatrix, whose inputs are not rotated; give --calibration")
    if learning and method != "learned" and not (rotate and learning.keys() == {"seed"}):
        option = next(iter(learning)).replace("compiled", "compile")
        raise FormatError(f"[quantize] --{option} with --method {method}; it belongs to learned")
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_with(path, config, allow_unknown))
        if rotate:
            from ..calibration.rotation import checked_rotation

            checkpoint = checked_rotation(checkpoint, seed or 0)
        allocation, source = None, checkpoint.path
        if recipe is None:
            from ..calibration import allocate

            assert calibration is not None
            goal = goal_named(to)
            check_output(checkpoint.path, out, goal, force, plan)
            with progress("measuring") as report:
                allocation = allocate(
                    checkpoint,
                    to,
                    calibration,
                    bits=bits,
                    size=most,
                    max_kl=max_kl,
                    method=method,
                    codecs=tuple(codecs.split(",")) if codecs else (),
                    context=context,
                    sequences=sequences,
                    device=device,
                    from_packed=from_packed,
                    folder=expanded(out).absolute().parent,
                    max_shard_size=limit,
                    progress=report,
                )
            clock.lap("seconds_allocating")
            recipe = allocation.recipe
            if save_recipe is not None:
                allocation.save(save_recipe)
        modules = [module for info in checkpoint.infos() if (module := module_of(info)) is not None]
        goal = recipe.goal
        named_too = [] if calibrated or goal.writer.container == "gguf" else as_model(checkpoint, goal.layout).keys()
        recipe.check([*modules, *stacks_of(checkpoint), *(key.removesuffix(".weight") for key in named_too)])
        complain_of_notes(reported := check_experts(checkpoint, recipe))
        if not plan:
            warn_of_missing_tokenizer(checkpoint, out)
        if calibrated and calibration is not None:
            from ..calibration import LearningOptions, Spool, calibrate

            check_output(checkpoint.path, out, recipe.goal, force, plan)
            layers = stack.enter_context(Spool(out))
            with progress("calibrating") as report:
                found = calibrate(
                    checkpoint,
                    recipe,
                    calibration,
                    method,
                    context=context,
                    sequences=sequences,
                    act_order=act_order,
                    device=device,
                    from_packed=from_packed,
                    learning=LearningOptions(**learning),
                    spool=layers,
                    progress=report,
                )
            rounder, replaced, notes, named = found.rounder, found.replaced, found.notes, found.name
            walked = {"layers": found.layers, "layers_resumed": found.resumed}
        clock.lap("seconds_calibrating")
        if imatrix is not None:
            rounder, named = importance_rounder(read_importance(imatrix), checkpoint), f"mse under {digest_of(imatrix)}"
        with progress("planning" if plan else "quantizing", in_bytes=True) as report:
            done = quantize_checkpoint(
                checkpoint,
                out,
                recipe,
                rounder,
                replaced=replaced,
                from_packed=from_packed,
                plan=plan,
                workers=workers,
                max_shard_size=limit,
                overwrite=force,
                progress=report,
                named=named,
            )
    clock.lap("seconds_writing")
    if most is not None and not plan and (written := _weight_bytes(done)) > most:
        raise FormatError(f"[quantize] {out} has {written:,} bytes, more than --size allows; give a smaller size")
    done.notes = [*notes, *done.notes]
    if report_page is not None:
        text = report_text or calibration
        run: dict[str, Any] = {
            "source": str(path),
            "target": str(done.goal),
            "method": method,
            "calibration": calibration and calibration.name,
            "importance_matrix": imatrix and imatrix.name,
            "measured_on": text and text.name,
        }
        page = _report(source, done, recipe, allocation, text, report_text is None, context, sequences, clock, run)
        replace_text(report_page, page)
    complain_of_notes(note for note in done.notes if note not in reported)
    if json:
        for r in done.records:
            print_json(r.record())
        if allocation is not None:
            print_json({"record": "allocation", **allocation.summary()})
        print_json({**done.record(), "record": "quantized", "method": method, **walked})
    else:
        if allocation is not None:
            _print_allocation(allocation)
        _print(done, plan, tensors)
        if walked.get("layers_resumed"):
            print_wrapped(
                f"calibration taken up where an earlier run stopped: {walked['layers_resumed']} of {walked['layers']} layers"
            )
    return 0


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 3), now


def _report(
    path: Path,
    done: Converted,
    recipe: Recipe,
    allocation: Allocation | None,
    text: Path | None,
    same_text: bool,
    context: int,
    sequences: int,
    clock: _Clock,
    run: dict[str, Any],
) -> str:
    """The page of what was written."""
    from ..checkpoints import open as open_checkpoint
    from ..reports.quantization import Dense, Quantized, quantization

    with open_checkpoint(path) as source, open_checkpoint(done.path) as result:
        found = Quantized(
            done.path.name,
            sum(i.nbytes for i in source.infos()),
            list(result.infos()),
            done.records,
            [Dense(i.key, _why_dense(i.key, recipe, done)) for i in result.infos() if not i.quantized and len(i.shape) > 1],
            allocation=allocation,
            same_text=same_text,
        )
    if text is not None:
        found.comparison, found.unmeasured = _compared(path, done.path, text, context, sequences)
        clock.lap("seconds_measuring")
    found.facts = {k: v for k, v in run.items() if v is not None} | clock.seconds | {"peak_memory_bytes": peak_memory()}
    return quantization(found)


def _why_dense(key: str, recipe: Recipe, done: Converted) -> str:
    module = key.removesuffix(".weight")
    if note := next((n for n in done.notes if n.startswith(f"{module}: ")), ""):
        return note.removeprefix(f"{module}: ")
    if rule := recipe.rule(module):
        return f"rule {rule.text}"
    return "embeddings, heads, routers, norms and tensors that are no matrix of weights are kept unless a rule names them"


def _compared(path: Path, out: Path, text: Path, context: int, sequences: int) -> tuple[Comparison | None, str]:
    """The result beside its source over a text, or why there is no comparison."""
    from ..calibration.allocate import windows_of
    from ..evaluation import compare
    from ..transformers import load_model

    try:
        dense, tokenizer = load_model(path)
        windows = windows_of(tokenizer, text, context, sequences)
        with progress("measuring") as report:
            return compare(load_model(out)[0], dense, windows, report), ""
    except HalfbyteError as error:
        return None, str(error)


def _check_budget(
    budget: Sequence[str], calibration: Path | None, codecs: str | None, save_recipe: Path | None, given: Mapping[str, Any]
) -> None:
    """What a budget goes with."""
    named = " and ".join(budget)
    if len(budget) > 1:
        raise FormatError(f"[quantize] {named}; one budget is allowed")
    if not budget and (codecs is not None or save_recipe is not None):
        option = "--codecs" if codecs is not None else "--save-recipe"
        raise FormatError(f"[quantize] {option} without a budget; give --bits, --size or --max-kl")
    if budget and calibration is None:
        raise FormatError(f"[quantize] {named} wants --calibration FILE, a text like those the model will read")
    if budget and (other := next((option for option, value in given.items() if value), None)):
        raise FormatError(f"[quantize] {other} with {named}, which chooses target and rules; allowed: --codecs, --method")


def _weight_bytes(done: Converted) -> int:
    """Bytes of the files of weights."""
    folder = done.path if done.path.is_dir() else done.path.parent
    return sum((folder / name).stat().st_size for name in done.files if name.endswith((".safetensors", ".gguf")))


def _print_allocation(allocation: Allocation) -> None:
    counts: dict[str, list[float]] = {}
    for unit, choice in zip(allocation.units, allocation.choices, strict=True):
        row = counts.setdefault(choice.codec, [0, 0, 0.0])
        for i, value in enumerate((unit.weights, choice.nbytes, choice.kl)):
            row[i] += value
    columns = (Column("codec"), Column("weights", True), Column("size", True), Column("estimated KL", True))
    print_table(columns, [[c, f"{w:,.0f}", human_bytes(int(b)), f"{kl:.3g}"] for c, (w, b, kl) in sorted(counts.items())])
    measured = allocation.facts.get("measured_kl")
    print_wrapped(
        f"{allocation.bits:.4g} bits a weight; estimated KL {allocation.kl:.4g} nats a token (no choice has less than "
        f"{allocation.bound:.4g})" + ("" if measured is None else f", measured {measured:.4g}")
    )
    print()


def _print(done: Converted, plan: bool, each: bool) -> None:
    rows = rows_of((r for r in done.records if r.kind != "copied"), each)
    print_table(_COLUMNS, [[name, count, source, to, error] for name, count, _, source, to, error, _ in rows])
    print()
    counts = ", ".join(f"{n:,} {kind}" for kind, n in done.counts.items() if n)
    if plan:
        print_wrapped(f"would write {human_bytes(done.nbytes)} to {done.goal}: {counts}")
        return
    files = sum(f.endswith((".safetensors", ".gguf")) for f in done.files)
    print_wrapped(f"{done.path}: {counts}; {human_bytes(done.nbytes)} in {plural(files, 'file')}")
    if done.resumed:
        print_wrapped(f"taken up where an earlier run stopped: {plural(done.resumed, 'tensor')} had been written")
