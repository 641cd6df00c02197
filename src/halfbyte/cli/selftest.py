"""halfbyte selftest: are this machine's kernels right, and how fast are they?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BackendError, FormatError, plural
from .terminal import Column, print_json, print_table, print_wrapped

if TYPE_CHECKING:
    from ..bench.selftest import Bench, Outcome

_COLUMNS = (
    Column("format"), Column("framework", optional=4), Column("op"), Column("schedule"), Column("dtype", optional=3),
    Column("one-hot"),
    Column("error / bound", True), Column("m", True), Column("n x k", optional=5), Column("us", True),
    Column("GB/s", True, optional=2), Column("mx.quantized_matmul us", True, optional=7), Column("dense us", True, optional=6),
    Column("failure", optional=1),
)  # fmt: skip


def selftest(
    device: Annotated[str | None, typer.Option(help="mps, cuda or cpu; else the first that computes here.")] = None,
    format: Annotated[str | None, typer.Option(help="Codecs, comma separated: mxfp4,int4:g128. All when left out.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtypes of x, comma separated.")] = "float16",
    shape: Annotated[str, typer.Option(help="N,K to time; 0 for no timing.")] = "4096,4096",
    m: Annotated[str, typer.Option("--m", help="Tokens to time, comma separated.")] = "1,64",
    hash: Annotated[bool, typer.Option("--hash", help="SHA-256 of the CPU's products, the same on every CPU.")] = False,
    model: Annotated[str | None, typer.Option(help="With --hash: also of this model's logits after 64 prompts.")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: one kernel a line.")] = False,
) -> int:
    """Check every kernel of a device against the referee and time it: paste the table into a
    report.

    Exit status: 0 all right, 1 a kernel is wrong, 2 nothing computes on that device here.
    """
    from ..bench.selftest import FORMATS, run

    if hash:
        return _hashes(model, json)
    if model is not None:
        raise FormatError(f"[selftest] --model {model} without --hash; allowed: both, or neither")

    benches = _benches(device)
    wanted = tuple(format.split(",")) if format else FORMATS
    outcomes = []
    tokens = tuple(_whole("--m", t) for t in m.split(","))
    for bench in benches:
        for outcome in run(bench, wanted, tuple(dtype.split(",")), _shape(shape), tokens):
            outcomes.append(outcome)
            if json:
                print_json(outcome.record())
    wrong = [o for o in outcomes if not o.passed]
    if not json:
        for bench in benches:
            print_wrapped(f"{bench.backend.name} ({bench.framework}): {bench.backend.describe()}")
        print_table(_COLUMNS, [_row(o) for o in outcomes])
        print_wrapped(f"{plural(len(outcomes), 'result')}, {len(wrong)} wrong")
    return int(bool(wrong))


def _hashes(model: str | None, json: bool) -> int:
    """Prints the hashes of this machine; 1 when one is not the documented one."""
    from ..backends.cpu import native
    from ..bench.product_hash import EXPECTED, logits_hash, product_hash

    core = native()
    found: list[tuple[str, str, str, str | None]] = [
        ("products", kind, product_hash(kind), expected) for kind, expected in EXPECTED.items()
    ]
    if model is not None:
        from ..checkpoints import open as open_checkpoint
        from ..generation.native_model import native_model

        with open_checkpoint(model) as checkpoint:
            found.append(("logits", "int8", logits_hash(native_model(checkpoint, "int8"), model), None))
    for of, activations, sha256, expected in found:
        verdict = "" if expected is None else "as documented" if sha256 == expected else f"WRONG, documented: {expected}"
        if json:
            print_json(
                {
                    "record": "hash",
                    "of": of,
                    "activations": activations,
                    "instruction_set": core.current(),
                    "threads": core.threads(),
                    "sha256": sha256,
                    "expected": expected,
                }
            )
        else:
            print(f"{of}, {activations}, {core.current()}, {plural(core.threads(), 'thread')}: {sha256}  {verdict}".rstrip())
    return int(any(expected not in (None, sha256) for _, _, sha256, expected in found))


def _benches(device: str | None) -> list[Bench]:
    """Those of the device; of the first that computes here when none is named."""
    from ..bench.selftest import DEVICES, benches_for

    for word in DEVICES if device is None else ():
        try:
            return benches_for(word)
        except BackendError:
            continue
    return benches_for(device or DEVICES[-1])


def _whole(option: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise FormatError(f"[selftest] {option} {text}; a whole number above 0 is allowed")
    return int(text)


def _shape(text: str) -> tuple[int, int] | None:
    if text == "0":
        return None
    parts = text.split(",")
    if len(parts) != 2:
        raise FormatError(f"[selftest] --shape {text}; allowed: N,K or 0")
    return _whole("--shape", parts[0]), _whole("--shape", parts[1])


def _number(v: float | None) -> str:
    return "" if v is None else f"{v:.1f}"


def _row(o: Outcome) -> list[str]:
    size = f"{o.n}x{o.k}" if o.time_us is not None else ""
    return [
        o.format, o.framework, o.op, o.schedule, o.dtype, "exact" if o.one_hot else "WRONG", f"{o.worst:.3f}" if o.n else "",
        str(o.m) if o.m else "", size, _number(o.time_us), _number(o.gbps), _number(o.peer_us), _number(o.dense_us), o.failure,
    ]  # fmt: skip
