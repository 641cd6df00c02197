"""halfbyte imatrix: how much each input of a model's weights counts, for `quantize --imatrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import plural
from .opening import AllowUnknown, ConfigOption, ForceOption, open_with
from .terminal import print_json, print_wrapped, progress


def imatrix(
    path: Annotated[Path, typer.Argument(help="A checkpoint, dense or packed: folder or .gguf.")],
    out: Annotated[Path, typer.Argument(help="File to write, *.gguf.")],
    text: Annotated[
        Path,
        typer.Option(help="Text whose tokens pass through the model; not the text you will measure with.", show_default=False),
    ],
    context: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences, spread evenly over the text.")] = 32,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda; auto takes a GPU if there is one.")] = "auto",
    force: ForceOption = False,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: one record.")] = False,
) -> int:
    """Collect the squares of every weight's inputs over a text: an importance matrix.

    The file is llama.cpp's, for `quantize --method mse --imatrix` and for llama-quantize --imatrix.
    Memory holds one layer of the model.
    """
    from ..calibration import collect_importance
    from ..conversion.importance import check_importance_path, write_importance

    with open_with(path, config, allow_unknown) as checkpoint, progress("collecting") as report:
        checkpoint.check("imatrix")
        check_importance_path(checkpoint.path, out, force)
        matrix = collect_importance(
            checkpoint,
            text,
            context=context,
            sequences=sequences,
            device=device,
            progress=report,
        )
    write_importance(out, matrix)
    unseen = sorted(name for name, entry in matrix.entries.items() if not (entry.counts > 0).all())
    if json:
        print_json(
            {
                "record": "imatrix",
                "path": str(out),
                "entries": len(matrix.entries),
                "chunks": matrix.chunks,
                "chunk_size": matrix.chunk_size,
                "without_tokens": unseen,
            }
        )
        return 0
    print_wrapped(f"{out}: {plural(len(matrix.entries), 'weight')}, {matrix.chunks} x {matrix.chunk_size} tokens")
    if unseen:
        print_wrapped(f"no token reached some experts of {', '.join(unseen[:6])}{', ...' if len(unseen) > 6 else ''}")
    return 0
