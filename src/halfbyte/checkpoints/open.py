"""`open(path)`: a checkpoint of any kind, recognised by its content."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, plural
from .base import Checkpoint
from .findings import Finding
from .io.home import expanded
from .io.regular_file import LFS_ADVICE, LFS_POINTER, open_regular, pieces_advice
from .safetensors.checkpoint import SafetensorsCheckpoint
from .safetensors.folder import Sources, sources_of

if TYPE_CHECKING:
    from .hub import HubName

_SHARD = re.compile(r".+-\d{5,6}-of-(\d{5,6})\.safetensors")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_KNOWN = {
    b"PK\x03\x04": "a zip archive: a PyTorch pickle, which runs code when it is read; convert it to safetensors",
    b"\x80\x02": "a pickle, which runs code when it is read; convert it to safetensors",
    b"\x89HDF": "an HDF5 file; convert it to safetensors",
    b"\x08": "perhaps an ONNX model, which is read under a name that ends in .onnx",
    b"ggjt": "a GGML file from before GGUF; convert it with llama.cpp",
    b"lmgg": "a GGML file from before GGUF; convert it with llama.cpp",
    b"{": "JSON; open the folder that it describes, a shard index by its own name (*.index.json)",
}
"""First bytes of a file that is not read -> what the file is."""

UNFINISHED = (".shard", ".partial")
"""Suffixes of the files of an interrupted run (`sharded_writer`, `resumable_file`)."""


def open(path: str | os.PathLike[str], config: Mapping[str, Any] | None = None, allow_unknown: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint at `path`, lazily: headers are read and checked, data when asked for.

    path    a folder (config.json, one or several .safetensors, or a .gguf), a .safetensors file, a
            shard index, a .gguf file (any part of a split one), or an .onnx model (extra
            `halfbyte[onnx]`). Where nothing of that name is here, "org/name", "org/name@revision"
            or "org/name/file.gguf" is a repository on the Hugging Face hub: headers are read by
            range requests, and a weight when it is asked for (extra `halfbyte[hub]`)
    config  the dictionary of a config.json's `quantization_config`; it overrides what the files
            say. A .safetensors file opened without it uses the one in its metadata, else the
            configuration files beside it

    allow_unknown
            names, or patterns with *, of unknown or missing tensors and config keys that commands
            may pass over (`ledger.py`)

    Raises CheckpointError, naming file and tensor, for what is damaged, incomplete or unknown;
    UnsupportedError for kinds that are recognised and not read.
    """
    checkpoint = _open(path, config)
    checkpoint.allowed = tuple(allow_unknown)
    return checkpoint


def _open(path: str | os.PathLike[str], config: Mapping[str, Any] | None) -> Checkpoint:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"[open] {path!r:.80} is a {type(path).__name__}; give the path of a folder or a file")
    if not os.fspath(path):
        raise CheckpointError("[open] the path is empty; give a folder or a file, '.' for this folder")
    given, path = path, expanded(path)
    if config is not None and not isinstance(config, Mapping):
        raise CheckpointError(
            f"[open] {path}: config is a {type(config).__name__}; wanted the dictionary of a quantization_config"
        )
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: a NUL in the name
        from .hub import parse_name

        if path.with_name(f".{path.name}.replaced").is_dir():
            raise CheckpointError(
                f"[open] {path} is not there: an interrupted run was about to replace it; run the same command again, which "
                f"completes it. The old output is in .{path.name}.replaced"
            ) from error

        name = parse_name(given)
        if name is None:
            raise CheckpointError(
                f"[open] {path}: there is no such file or folder here{_nearest(path)}, and it is no name on the hub, which is "
                "org/name, org/name@revision or org/name/file.gguf"
            ) from error
        return _open_remote(name, config)
    except OSError as error:
        raise CheckpointError(f"[open] {path}: cannot be read: {error.strerror or error}") from error
    if stat.S_ISDIR(mode):
        return _open_folder(path, config)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"[open] {path}: a pipe, a device or a socket; allowed: a folder or a regular file")
    if path.name.endswith(".index.json"):
        return SafetensorsCheckpoint(path, sources_of(path.parent, path.name), config)
    if path.suffix in UNFINISHED:
        raise CheckpointError(f"[open] {path} is part of an unfinished result; run the same command again, which resumes it")
    try:
        with open_regular(path) as f:
            first = f.read(len(LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"[open] {path}: cannot be read: {error.strerror or error}") from error
    if first.startswith(LFS_POINTER):
        raise CheckpointError(f"[open] {path} {LFS_ADVICE}")
    if advice := pieces_advice(path.name, [p.name for p in path.parent.iterdir()]):
        raise CheckpointError(f"[open] {path} {advice}")
    if first[:4] in (b"GGUF", b"FUGG") or path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix == ".onnx":
        return _open_onnx(path, config)
    known = next((text for magic, text in _KNOWN.items() if first.startswith(magic) and first[8:9] != b"{"), None)
    if known is not None:
        raise CheckpointError(f"[open] {path} is {known}")
    sources = Sources(path.parent, {path.name: path}, lone=True)
    if match := _SHARD.fullmatch(path.name):
        text = f"one of {int(match[1])} shards; open the folder for all of them"
        sources.findings.append(Finding("note", "one-shard", path.name, text))
    return SafetensorsCheckpoint(path, sources, config)


def _nearest(path: Path) -> str:
    """Names beside `path` that are spelled like it, for the message that it is not there."""
    try:
        beside = [p.name for p in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, beside, n=2)
    return f" (nearest: {', '.join(str(path.with_name(n)) for n in near)})" if near else ""


def _open_remote(name: HubName, config: Mapping[str, Any] | None) -> Checkpoint:
    """A repository on the hub; offline what the cache has of it."""
    from .hub import is_offline, local_copy, open_remote

    return _open(local_copy(name), config) if is_offline(name) else open_remote(name, config)


def _open_folder(folder: Path, config: Mapping[str, Any] | None) -> Checkpoint:
    ggufs = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    tensors = any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))
    models = sorted(folder.glob("*.onnx")) if not ggufs and not tensors else []
    if len(models) > 1:
        raise CheckpointError(
            f"[open] {folder}: {len(models)} ONNX models ({', '.join(p.name for p in models[:8])}); open one of them by its path"
        )
    if models:
        return _open_onnx(models[0], config)
    if not ggufs and not tensors:
        inside = sorted(p.name for p in folder.iterdir())
        if advice := next((a for n in inside if (a := pieces_advice(n, inside))), ""):
            raise CheckpointError(f"[open] {folder}: what is in it {advice}")
    if not ggufs or tensors:
        return SafetensorsCheckpoint(folder, sources_of(folder), config)
    heads = [p for p in ggufs if not (m := _SPLIT.fullmatch(p.name)) or int(m[2]) == 1]
    if len(heads) > 1:
        raise CheckpointError(
            f"[open] {folder}: {plural(len(heads), 'model')} ({', '.join(p.name for p in heads[:8])}); "
            "open one of them by its path"
        )
    return _open_gguf((heads or ggufs)[0])


def _open_onnx(path: Path, config: Mapping[str, Any] | None) -> Checkpoint:
    from .onnx.checkpoint import ONNXCheckpoint

    if config is not None:
        raise CheckpointError(
            f"[open] {path}: config with an ONNX model, whose nodes say how their weights are read; leave it out"
        )
    return ONNXCheckpoint(path)


def _open_gguf(path: Path) -> Checkpoint:
    from .gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
