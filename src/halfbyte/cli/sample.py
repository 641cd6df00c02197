"""halfbyte sample: text that a model writes by itself, to calibrate a model with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckpointError, plural
from .engine import ActivationsOption, Engine, EngineOption, text_model
from .opening import AllowUnknown, BackendOption, ConfigOption, DeviceOption, ForceOption
from .terminal import print_json, print_wrapped, progress


def sample(
    path: Annotated[Path, typer.Argument(help="A checkpoint of a language model, dense or packed: folder or .gguf.")],
    out: Annotated[Path, typer.Argument(help="Text file to write, *.txt.")],
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to draw.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences that the transformers engine draws at once, on a GPU hundreds.")
    ] = 1,
    activations: ActivationsOption = "exact",
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    engine: EngineOption = Engine.auto,
    force: ForceOption = False,
    config: ConfigOption = None,
    allow_unknown: AllowUnknown = None,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: one record.")] = False,
) -> int:
    """Write a text that the model draws from its own probabilities, for `quantize --calibration`.

    Text like that which a model reads calibrates it best; where none is at hand, its own is closer
    than text of another kind.
    """
    from ..checkpoints.io.output_path import check_output_path
    from ..checkpoints.io.safe_files import replace_text
    from ..generation.own_text import own_text

    check_output_path("sample", path, out, force, (".txt",))
    if out.suffix != ".txt":
        raise CheckpointError(f"[sample] {out}: a text is one file named *.txt")
    loaded = text_model(
        path,
        "sample",
        engine,
        activations=activations,
        backend=backend,
        device=device,
        prompts=batch,
        config=config,
        allow_unknown=allow_unknown,
    )
    texts = []
    with progress("drawing") as report:
        for text in own_text(loaded.model, loaded.tokenizer, sequences=sequences, tokens=tokens, seed=seed, at_once=batch):
            texts.append(text)
            if report is not None:
                report(len(texts), sequences, "sequences")
    whole = "\n\n".join(texts) + "\n"
    replace_text(out, whole)
    if json:
        print_json({
            "record": "sample", "path": str(out), "source": str(loaded.path), "engine": loaded.engine, "sequences": sequences,
            "tokens": tokens, "seed": seed, "batch": batch, "characters": len(whole),
        })  # fmt: skip
        return 0
    print_wrapped(f"{out}: {plural(sequences, 'sequence')} of {plural(tokens, 'token')}, {plural(len(whole), 'character')}")
    return 0
