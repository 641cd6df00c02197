"""halfbyte bench: time against peers and the measured limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ..checkpoints.io.home import expanded
from ..errors import FormatError, UnsupportedError
from .terminal import Column, print_json, print_table, print_wrapped


def numbers_of(text: str, what: str, op: str = "bench") -> list[int]:
    """The numbers of option `what` of command `op`, with commas between."""
    try:
        values = [int(v) for v in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise FormatError(f"[{op}] {what} {text!r}; whole numbers above 0, with commas between, are allowed")
    return values


def shapes_of(text: str, op: str = "bench") -> list[tuple[int, int]]:
    """The pairs (n, k) of --shape of command `op`, with semicolons between."""
    out = []
    for part in text.split(";"):
        pair = numbers_of(part, "--shape", op)
        if len(pair) != 2:
            raise FormatError(f"[{op}] --shape {part!r}; N,K is allowed, several with ';' between")
        out.append((pair[0], pair[1]))
    return out


ACTING = {
    "cpu": {"shape", "m", "format", "peers", "activations", "threads", "backend", "rounds", "seconds", "clock", "plot"},
    "cuda": {"shape", "m", "format", "peers", "activations", "jobs", "plot"},
    "cpu --sweep": {"threads", "rounds", "clock", "plot"},
    "cuda --sweep": {"shape", "m", "format", "jobs", "plot"},
    "cpu --model": {"peers", "activations", "threads", "rounds", "clock"},
}
"""Options that act in each mode, beside --markdown, --json and those that choose the mode."""


def _given(context: typer.Context, device: str, sweep: bool, model: str) -> set[str]:
    """The options on the command line; FormatError for one that would do nothing."""
    mode = device + (" --sweep" if sweep else "") + (" --model" if model else "")
    if mode not in ACTING:
        raise FormatError(f"[bench] --device {mode}; allowed together: {', '.join(f'--device {m}' for m in ACTING)}")
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    for name in sorted(given - ACTING[mode] - {"device", "sweep", "model", "markdown", "json"}):
        words = ", ".join(f"--{word}" for word in sorted(ACTING[mode]))
        raise FormatError(f"[bench] --{name} does nothing with --device {mode}; {words} act there; leave it out")
    return given


def bench(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="cpu, or cuda for an NVIDIA GPU.")] = "cpu",
    shape: Annotated[str, typer.Option(help="N,K of the weight; several with ';' between.")] = "4096,4096",
    m: Annotated[str, typer.Option("--m", help="Tokens, with commas between.")] = "1,4,16",
    format: Annotated[str, typer.Option("--format", help="Codecs, with commas between.")] = "int4:g128,mxfp4,q4_0,q4_K",
    model: Annotated[str, typer.Option(help="A .gguf file: measure a whole model, beside llama.cpp.")] = "",
    peers: Annotated[
        str,
        typer.Option(
            help="Compared with: onnxruntime, openvino, torch, mlx, llama.cpp, ik_llama.cpp, or full names; '' for none. "
            "cuda: all installed."
        ),
    ] = "onnxruntime,torch,llama.cpp",
    activations: Annotated[
        str,
        typer.Option(help="exact, int8, int8_token on cpu, fp8 on cuda; with commas between. On cuda exact alone by default."),
    ] = "exact,int8",
    threads: Annotated[int, typer.Option(min=1, help="Threads of every contender.")] = 1,
    backend: Annotated[str, typer.Option(help="cpu or reference.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all weights.")] = 3,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds that rounds last at least, for each shape and m.")] = 0,
    clock: Annotated[str, typer.Option(help="wall time, or processor time where other programs run too.")] = "wall",
    sweep: Annotated[bool, typer.Option("--sweep", help="Where each schedule wins: small k, wide n, many groups, m.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile kernels on cuda before anything is timed.")] = 8,
    plot: Annotated[str, typer.Option(help="Write the roofline there (PNG, SVG or PDF by the suffix).")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables for a page of figures.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines instead of a table.")] = False,
) -> int:
    """Time linear beside its peers, in one run, against the limits measured in it."""
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"[bench] --device {device}; cpu and cuda are allowed here; `halfbyte selftest --device mps` times an Apple GPU"
        )
    given = _given(context, device, sweep, model)
    if plot:
        from ..bench.roofline import check_drawable

        check_drawable()
    show = print_json if json else _ignore
    if model:
        _of_model(model, peers, _modes(activations), {"threads": threads, "rounds": rounds, "clock": clock}, show, markdown, json)
        return 0
    if sweep:
        timing: dict[str, Any] = {"threads": threads, "rounds": rounds, "clock": clock}
        if device == "cuda":
            timing = {"jobs": jobs, **_cuda_cases(given, shape, m, format)}
        _sweep(device, timing, show, plot, markdown, json)
        return 0
    if device == "cuda":
        shapes_of(shape), numbers_of(m, "--m")
        arguments = ["--shape", shape, "--m", m, "--format", format, "--jobs", str(jobs)]
        if "activations" in given:
            arguments += ["--activations", ",".join(_modes(activations))]
        records = _on_cuda([*arguments, *(["--peers", peers] if "peers" in given else [])], show)
    else:
        timing = {"threads": threads, "backend": backend, "rounds": rounds, "seconds": seconds, "clock": clock}
        records = _shown(_on_cpu(shapes_of(shape), numbers_of(m, "--m"), format.split(","), peers, activations, timing), show)
    _finish(records, plot, markdown, json)
    return 0


def _cuda_cases(given: set[str], shape: str, m: str, format: str) -> dict[str, Any]:
    """What --shape, --format and --m leave of a sweep on cuda."""
    from ..bench.cpu.sweep import Case

    out: dict[str, Any] = {"tokens": numbers_of(m, "--m")} if "m" in given else {}
    if given & {"shape", "format"}:
        codecs = format.split(",") if "format" in given else ["int4:g128"]
        out["cases"] = [Case(f"{n} outputs, {k} inputs", c, n, k) for n, k in shapes_of(shape) for c in codecs]
    return out


def _ignore(record: dict[str, Any]) -> None:
    """A table is printed when all is known."""


def _shown(records: Iterable[dict[str, Any]], show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    kept = []
    for r in records:
        show(r)
        kept.append(r)
    return kept


def _modes(activations: str) -> tuple[str, ...]:
    from ..backends import ACTIVATIONS

    modes = tuple(activations.split(","))
    if not set(modes) <= set(ACTIVATIONS):
        raise FormatError(f"[bench] --activations {activations!r}; allowed: {', '.join(ACTIVATIONS)}, with a comma between")
    return modes


def _check_clock(clock: str, threads: int) -> None:
    from ..bench.cpu.linear import CLOCKS

    if clock not in CLOCKS:
        raise FormatError(f"[bench] --clock {clock!r}; allowed: {', '.join(CLOCKS)}")
    if clock == "processor" and threads > 1:
        raise FormatError("[bench] --clock processor adds up all threads' time; --threads 1 is allowed with it")


def _of_model(
    path: str,
    peers: str,
    modes: tuple[str, ...],
    timing: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    markdown: bool,
    json: bool,
) -> None:
    from ..bench.model import race as model

    _check_clock(timing["clock"], timing["threads"])
    why = model.llama_reason()
    wanted = model.LLAMA in peers.split(",")
    if wanted and why:
        typer.echo(f"{model.LLAMA} is left out: {why}", err=True)
    records = _shown(model.bench_model(expanded(path), activations=modes, with_llama=wanted and not why, **timing), show)
    if markdown:
        for line in model.markdown(records):
            typer.echo(line)
    elif not json:
        print_table([Column(h, i > 0) for i, h in enumerate(model.HEADS)], [model.row_of(r) for r in records])


def _sweep(
    device: str, timing: dict[str, Any], show: Callable[[dict[str, Any]], None], plot: str, markdown: bool, json: bool
) -> None:
    from ..bench.cpu import sweep
    from ..bench.cuda import sweep as cuda_sweep

    which = cuda_sweep if device == "cuda" else sweep
    if device == "cuda":
        _check_cuda()
    else:
        _check_clock(timing["clock"], timing["threads"])
    records = _shown(which.sweep(**timing), show)
    if markdown:
        for line in which.markdown(records):
            typer.echo(line)
    elif not json:
        shown = [r for r in records if r["record"] == "sweep"]
        if which is cuda_sweep:
            shown.sort(key=cuda_sweep.of_cublas, reverse=True)
        print_table([Column(h, i > 2) for i, h in enumerate(which.HEADS)], [which.row_of(r) for r in shown])
    _draw(records, plot)


def _on_cpu(
    shapes: list[tuple[int, int]], tokens: list[int], formats: list[str], peers: str, activations: str, timing: dict[str, Any]
) -> Iterable[dict[str, Any]]:
    from ..bench.cpu.linear import bench as run
    from ..bench.cpu.peers.registry import peers_named

    _check_clock(timing["clock"], timing["threads"])
    try:
        chosen = peers_named([p for p in peers.split(",") if p])
    except KeyError as error:
        raise FormatError(f"[bench] --peers: {error.args[0]}") from None
    running = []
    absent: dict[str, list[str]] = {}
    for p in chosen:
        why = p.reason()
        if why:
            absent.setdefault(why, []).append(p.name)
        else:
            running.append(p)
    for why, names in absent.items():
        typer.echo(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out: {why}", err=True)
    return run(shapes, tokens, formats, running, activations=_modes(activations), **timing)


def _check_cuda() -> None:
    """UnsupportedError with the reason why nothing runs on an NVIDIA GPU here."""
    from ..backends import backend_named

    why = backend_named("cuda").reason()
    if why:
        raise UnsupportedError(f"[bench] --device cuda: {why}")


def _on_cuda(arguments: list[str], show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Runs `halfbyte.bench.cuda.linear` in this process and keeps its records."""
    _check_cuda()
    from ..bench.cuda import linear as cuda_linear
    from ..bench.cuda.peers import PEERS

    wanted = arguments[arguments.index("--peers") + 1] if "--peers" in arguments else ""
    unknown = [name for name in wanted.split(",") if name and name not in PEERS]
    if unknown:
        raise FormatError(f"[bench] --peers {','.join(unknown)}; with --device cuda allowed: {', '.join(PEERS)}")

    kept: list[dict[str, Any]] = []

    def sink(record: dict[str, Any]) -> None:
        show(record)
        kept.append(record)

    cuda_linear.main(arguments, sink)
    return kept


def _finish(records: list[dict[str, Any]], plot: str, markdown: bool, json: bool) -> None:
    from ..bench import tables

    limits = [r for r in records if r.get("record") == "limits"]
    times = [r for r in records if r.get("record") == "time"]
    if markdown:
        for line in tables.markdown([*limits, *times]):
            typer.echo(line)
    elif not json:
        for r in limits:
            print_wrapped(tables.limits_line(r))
        print_table([Column(h, i > 1) for i, h in enumerate(tables.HEADS)], [tables.row_of(r) for r in times])
    _draw(records, plot)


def _draw(records: list[dict[str, Any]], plot: str) -> None:
    limits = [r for r in records if r.get("record") == "limits"]
    if plot and limits:
        from ..bench.roofline import draw

        draw(limits[0], [r for r in records if r.get("record") == "time"], plot)
        typer.echo(f"{plot} written", err=True)
