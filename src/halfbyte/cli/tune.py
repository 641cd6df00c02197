"""halfbyte tune: the best tiles for this GPU and these shapes, written where the kernels look for
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import BackendError, plural
from .bench import numbers_of, shapes_of
from .terminal import print_json

FORMATS = "int4:g128,uint4:g128,affine4:g64,mxfp4,nvfp4,int8:g128"


def tune(
    shape: Annotated[str, typer.Option(help="N,K of weights; several with ';' between.")] = "14336,4096;4096,4096;4096,14336",
    m: Annotated[str, typer.Option("--m", help="Tokens, with commas between; an entry serves calls up to its m.")] = "2,4,16,64",
    format: Annotated[
        str, typer.Option("--format", help="Codecs, with commas between.", show_default=FORMATS.replace(",", ", "))
    ] = FORMATS,
    out: Annotated[Path | None, typer.Option(help="File to write; the user's own for this card by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="A JSON line a measurement.")] = False,
) -> int:
    """Find the fastest tiles on this NVIDIA GPU and write them where later calls read them; no call
    searches by itself.
    """
    from ..backends import backend_named

    shapes, tokens = shapes_of(shape, "tune"), numbers_of(m, "--m", "tune")
    why = backend_named("cuda").reason()
    if why:
        raise BackendError(f"[tune] {why}")
    import datetime

    import torch

    from ..backends.cuda import write_tiles
    from ..bench.cuda.tune_mma import tune as run

    card = torch.cuda.get_device_name()
    entries = run(shapes, format.split(","), tokens, jobs, print_json if json else lambda record: None)
    path = write_tiles(card, entries, datetime.date.today().isoformat(), out)
    typer.echo(f"{plural(len(entries), 'tile')} for {card}: {path}", err=json)
    return 0
