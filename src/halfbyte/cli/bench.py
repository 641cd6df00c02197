"""halfbyte bench: time against peers and the measured limits."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import FormatError, UnsupportedError
from .terminal import Column, print_json, print_table


def _numbers(text: str, what: str) -> list[int]:
    try:
        values = [int(v) for v in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise FormatError(f"[bench] {what} {text!r}; whole numbers above 0, with commas between, are allowed")
    return values


def _shapes(text: str) -> list[tuple[int, int]]:
    out = []
    for part in text.split(";"):
        pair = _numbers(part, "--shape")
        if len(pair) != 2:
            raise FormatError(f"[bench] --shape {part!r}; N,K is allowed, several with ';' between")
        out.append((pair[0], pair[1]))
    return out


def bench(
    device: Annotated[str, typer.Option(help="cpu; for an NVIDIA GPU run `python -m halfbyte.bench.cuda_linear`.")] = "cpu",
    shape: Annotated[str, typer.Option(help="N,K of the weight; several with ';' between.")] = "4096,4096",
    m: Annotated[str, typer.Option("--m", help="Tokens, with commas between.")] = "1,4,16",
    format: Annotated[str, typer.Option("--format", help="Codecs, with commas between.")] = "int4:g128,mxfp4,q4_0,q4_K",
    peers: Annotated[
        str, typer.Option(help="Peers beside: onnxruntime, torch, or full names; '' for none.")
    ] = "onnxruntime,torch",
    activations: Annotated[str, typer.Option(help="exact, int8 or both with a comma between.")] = "exact,int8",
    threads: Annotated[int, typer.Option(min=1, help="Threads of every contender.")] = 1,
    backend: Annotated[str, typer.Option(help="cpu or reference.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all weights.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines instead of a table.")] = False,
) -> int:
    """Time linear beside its peers, in one run, against the limits measured in it."""
    if device != "cpu":
        raise UnsupportedError(
            f"[bench] --device {device}; cpu is allowed here, and `python -m halfbyte.bench.cuda_linear` times an NVIDIA GPU"
        )
    from ..bench.cpu_linear import bench as run
    from ..bench.peers import peers_named

    try:
        chosen = peers_named([p for p in peers.split(",") if p])
    except KeyError as error:
        raise FormatError(f"[bench] --peers: {error.args[0]}") from None
    absent = {p.name: p.reason() for p in chosen if p.reason()}
    for name, why in absent.items():
        typer.echo(f"{name} is left out: {why}", err=True)
    running = [p for p in chosen if p.name not in absent]
    rows: list[list[str]] = []
    for record in run(_shapes(shape), _numbers(m, "--m"), format.split(","), running, threads=threads,
                      activations=tuple(activations.split(",")), backend=backend, rounds=rounds):  # fmt: skip
        if json:
            print_json(record)
        elif record["record"] == "limits":
            typer.echo(f"{record['backend']}; {threads} thread(s); reads {record['read_gbps']:.1f} GB/s, "
                       f"float32 product {record['gflops']:.0f} GFLOP/s")  # fmt: skip
        else:
            rows.append([
                f"{record['peer']} {record['format']}" if record["peer"] == "halfbyte" else record["peer"], record["kind"],
                f"{record['n']}x{record['k']}", str(record["m"]), f"{record['time_us']:,.0f}", f"{record['gbps']:.2f}",
                f"{record['gflops']:.1f}", f"{record['fraction']:.0%}", f"{record['ratio']:.2f}" if "ratio" in record else "",
            ])  # fmt: skip
    if not json:
        heads = ("what", "activations", "weight", "m", "time, us", "GB/s", "GFLOP/s", "of the limit", "of the best peer")
        print_table([Column(h, i > 2) for i, h in enumerate(heads)], rows)
    return 0
