"""What computes a model: `--engine`, the native decoder, which needs no torch, or transformers; and
`--activations`. `text_model` loads a model and its tokenizer for one of them.
"""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..backends.base import ACTIVATIONS
from ..errors import UnsupportedError
from .opening import config_of, open_with

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint
    from ..generation.native_model import NativeReader


class Engine(str, Enum):
    """What computes the model."""

    auto = "auto"
    native = "native"
    transformers = "transformers"


def _known_activations(value: str) -> str:
    """BadParameter, before any work, for a mode that no backend has."""
    if value not in ACTIVATIONS:
        raise typer.BadParameter(f"{value}; allowed: {', '.join(ACTIVATIONS)}")
    return value


ActivationsOption = Annotated[
    str,
    typer.Option(
        "--activations",
        callback=_known_activations,
        help="exact; int8: faster, activations rounded a group at a time; on an NVIDIA GPU fp8.",
    ),
]
EngineOption = Annotated[
    Engine,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="native: no torch; common architectures. transformers: every model. auto: native where it can.",
    ),
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
    from ..backends.cpu import ACTIVATIONS as ON_CPU

    if engine is Engine.transformers:
        return None
    options = {
        f"--activations {activations}": activations in ON_CPU,
        f"--backend {backend}": backend in (None, "cpu"),
        f"--device {device}": device == "cpu",
        f"--dtype {dtype}": dtype in (None, "float32"),
    }
    why = next((option for option, fits in options.items() if not fits), "several texts at once" if prompts > 1 else "")
    if not why:
        from ..generation.native_model import native_reader
        from ..generation.native_tokenizer import no_tokenizer

        found = no_tokenizer(checkpoint) or native_reader(checkpoint, activations)
        if not isinstance(found, str):
            return found
        why = found
    if engine is Engine.native:
        raise UnsupportedError(f"[{command}] --engine native does not take this: {why}; use --engine transformers")
    return None


class TextModel(NamedTuple):
    """A loaded model that continues text.

    size     its weights and bytes
    engine   "native" or "transformers"
    ready_s  seconds of loading, without imports
    ends     tokens that end a reply, None where the tokenizer knows them
    """

    path: Path
    model: Any
    tokenizer: Any
    size: Any
    engine: str
    ready_s: float
    ends: set[int] | None = None


def text_model(
    path: Path,
    command: str,
    engine: Engine,
    *,
    activations: str,
    backend: str | None,
    device: str,
    dtype: str | None = None,
    prompts: int = 1,
    templates: bool = False,
    config: str | None = None,
    allow_unknown: list[str] | None = None,
) -> TextModel:
    """Load the model of a checkpoint and its tokenizer; `templates` if the tokenizer has to write
    conversations.

    Raises UnsupportedError for a checkpoint without the config.json or the tokenizer of a model,
    and as `native_engine`; CheckpointError for a damaged or incomplete file.
    """
    # A damaged or incomplete file is reported at once, before torch and transformers are imported.
    with open_with(path, config, allow_unknown) as checkpoint:
        checkpoint.check_model(command)
        if checkpoint.format != "gguf" and "model_type" not in checkpoint.config:
            raise UnsupportedError(
                f"[{command}] {path} is a {checkpoint.format} checkpoint without the config.json of a model; text needs one. "
                "Its weights can be looked into with halfbyte inspect and made dense with halfbyte dequantize"
            )
        path = checkpoint.path
        start = time.perf_counter()
        native = native_engine(
            checkpoint,
            command,
            engine,
            activations=activations,
            backend=backend,
            device=device,
            dtype=dtype,
            prompts=prompts,
        )
        if native is not None:
            from ..generation.native_tokenizer import NativeTokenizer, templated_tokenizer

            # The tokenizer first: making it takes, for a moment, as much memory as a small model.
            ends: set[int] | None = None
            if templates:
                tokenizer: Any
                tokenizer, ends = templated_tokenizer(checkpoint)
            else:
                tokenizer = NativeTokenizer(checkpoint)
            model: Any = native.model()
            return TextModel(path, model, tokenizer, model.size, "native", time.perf_counter() - start, ends)
    from ..transformers import import_model_code, load_model, model_size

    import_model_code(path, config_of(config))
    start = time.perf_counter()
    model, tokenizer = load_model(
        path,
        activations=activations,
        backend=backend,
        device=device,
        dtype=dtype,
        config=config_of(config),
        allow_unknown=allow_unknown or (),
    )
    if tokenizer is None:
        raise UnsupportedError(f"[{command}] {path} has no tokenizer; put its tokenizer.json beside the weights")
    return TextModel(path, model, tokenizer, model_size(model), "transformers", time.perf_counter() - start)
