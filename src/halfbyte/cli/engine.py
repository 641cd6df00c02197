"""`--engine`: the native decoder, which needs no torch, or transformers."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint


class Engine(str, Enum):
    """What computes the model."""

    auto = "auto"
    native = "native"
    transformers = "transformers"


EngineOption = Annotated[
    Engine, typer.Option("--engine", help="native: no torch; GGUF models of common architectures. auto: native where it can.")
]


def takes_native(
    checkpoint: Checkpoint,
    command: str,
    engine: Engine,
    *,
    activations: str,
    backend: str | None,
    device: str,
    dtype: str | None = None,
    prompts: int = 1,
) -> bool:
    """Whether the native decoder computes the model.

    Raises UnsupportedError, with the reason, where `--engine native` asks for what it cannot do;
    CheckpointError for a damaged or incomplete file.
    """
    if engine is Engine.transformers:
        return False
    options = {
        "--activations": activations in ("exact", "int8"),
        "--backend": backend in (None, "cpu"),
        "--device": device == "cpu",
        "--dtype": dtype in (None, "float32"),
    }
    why = next((f"{name} as given" for name, fits in options.items() if not fits), "several prompts" if prompts > 1 else "")
    if not why:
        from ..generation.native_model import why_not_native

        why = why_not_native(checkpoint, activations)
    if why and engine is Engine.native:
        raise UnsupportedError(f"[{command}] --engine native: {why}; use --engine transformers")
    return not why
