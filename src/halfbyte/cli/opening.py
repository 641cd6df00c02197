"""The options that several commands have: how a checkpoint is opened (another quantization config,
what may be passed over), where a model runs, how output is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checkpoints.io.home import expanded
from .failures import complain

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="Read with this quantization config instead of the checkpoint's: a JSON file, or JSON itself."),
]
AllowUnknown = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-unknown",
        help="Pass over this tensor or config key (or pattern with *) that inspect calls unknown or missing.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]
ShardSizeOption = Annotated[str, typer.Option(help="Most bytes of one file of a folder: 5GB, 500MB, 2GiB.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
BackendOption = Annotated[str | None, typer.Option(help="One of `halfbyte backends`; without it the best that serves.")]


def config_of(text: str | None) -> dict[str, Any] | None:
    """The quantization config that `--config` gives. CheckpointError for what is neither a JSON
    file nor JSON.
    """
    from ..checkpoints.io.bounded_json import parse_object, read_json

    if text is None:
        return None
    return parse_object(text.encode(), "--config") if text.lstrip().startswith("{") else read_json(expanded(text))


def downloaded(path: Path) -> Path:
    """`path`, or the local copy of a name on the hub, whose size is printed before it is fetched."""
    from ..checkpoints.hub import local_copy

    return local_copy(path, complain)


def open_with(path: Path, config: str | None, allow_unknown: Sequence[str] | None, data: bool = True) -> Checkpoint:
    """The checkpoint at `path` under these options.

    data  its weights will be read: a checkpoint on the hub is downloaded
    """
    from ..checkpoints import open as open_checkpoint

    if data:
        path = downloaded(path)

    return open_checkpoint(path, config_of(config), tuple(allow_unknown or ()))


def check_report(path: Path | None, command: str) -> None:
    """CheckpointError, before the work, for a page whose folder is not there, and for a file at its
    path that is no page.
    """
    from ..errors import CheckpointError

    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise CheckpointError(f"[{command}] --report {path}: there is no folder {path.absolute().parent}; make it first")
    if path.exists() and not (path.is_file() and _first(path).lower() == b"<!doctype html>"):
        raise CheckpointError(f"[{command}] --report {path} exists and is no HTML page; give another path")


def _first(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(15)


def warn_of_missing_tokenizer(checkpoint: Checkpoint, out: Path) -> None:
    """A note, before the work, that a folder written from a GGUF will have no tokenizer."""
    from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
    from ..gguf_models.model_files import missing_package

    if isinstance(checkpoint, GGUFCheckpoint) and out.suffix not in (".gguf", ".safetensors") and (why := missing_package()):
        complain(f"note: no tokenizer will be written: {why}")
