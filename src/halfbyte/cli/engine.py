"""What computes a model: `--engine`, the native decoder, which needs no torch, or transformers; and
`--activations`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint
    from ..generation.native_model import NativeReader


class Engine(str, Enum):
    """What computes the model."""

    auto = "auto"
    native = "native"
    transformers = "transformers"


ActivationsOption = Annotated[
    str,
    typer.Option("--activations", help="exact; int8: faster, activations rounded a group at a time; on an NVIDIA GPU fp8."),
]
EngineOption = Annotated[
    Engine, typer.Option("--engine", help="native: no torch; GGUF models of common architectures. auto: native where it can.")
]


def native_engine(
    checkpoint: Checkpoint,
    command: str,
    engine: Engine,
    *,
    activations: str,
    backend: str | None,
    device: str,
    dtype: str | None = None,
    prompts: int = 1,
) -> NativeReader | None:
    """The reader of the native decoder, None where transformers computes the model.

    Raises UnsupportedError, with the reason, where `--engine native` asks for what it cannot do;
    CheckpointError for a damaged or incomplete file.
    """
    from ..backends.cpu import ACTIVATIONS

    if engine is Engine.transformers:
        return None
    options = {
        "--activations": activations in ACTIVATIONS,
        "--backend": backend in (None, "cpu"),
        "--device": device == "cpu",
        "--dtype": dtype in (None, "float32"),
    }
    why = next((f"{name} as given" for name, fits in options.items() if not fits), "several prompts" if prompts > 1 else "")
    if not why:
        from ..generation.native_model import native_reader

        found = native_reader(checkpoint, activations)
        if not isinstance(found, str):
            return found
        why = found
    if engine is Engine.native:
        raise UnsupportedError(f"[{command}] --engine native: {why}; use --engine transformers")
    return None
