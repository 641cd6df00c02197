"""Which files of a folder make up a checkpoint: configuration, shard index, shards.

    weight_map in *.safetensors.index.json     names the shards; other .safetensors files are
                                               ignored and reported
    model.safetensors                          else, alone
    name-00001-of-000NN.safetensors            else, all NN of them
    the .safetensors files there are           else

A shard's name comes from a file that may lie, so it must stay below the folder: no absolute path,
no "..", no backslash, no symlink that leads out. The one exception is the store of the Hugging Face
hub, whose snapshots are links to ../../blobs/<hash>.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ...errors import CheckpointError
from ..findings import Finding
from ..io.bounded_json import INDEX_BYTES, read_json
from ..io.regular_file import stays_inside
from .file import SafetensorsFile

SIDE_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Quantization configs beside config.json: AutoGPTQ's, AutoAWQ's, ModelOpt's."""
INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass
class Sources:
    """The files of one checkpoint.

    folder      their folder
    shards      name relative to the folder -> its real path, in reading order
    weight_map  tensor -> shard name, {} without an index
    index       name of the index file, "" without one
    config      config.json ({} without one), and `side`: the other configuration files by name
    findings    files that are ignored
    lone        one file was opened, not a folder: configuration beside it is read when it carries
                none itself
    opened      shards that are open already, because they are not on disk
    """

    folder: Path
    shards: dict[str, Path] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    index: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    side: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lone: bool = False
    opened: Mapping[str, SafetensorsFile] = field(default_factory=dict)


def sources_of(folder: Path, index: str | None = None, remote: Collection[str] | None = None) -> Sources:
    """The files of the checkpoint in `folder`. CheckpointError when there is none, or one is
    missing or outside the folder.

    index   name of the shard index, "" for none; None finds it
    remote  names of all files of a repository of which only the configuration is in `folder`
    """
    s = Sources(folder)
    read_configs(folder, s)
    top = sorted(p.name for p in folder.iterdir()) if remote is None else sorted(n for n in remote if "/" not in n)
    present = [name for name in top if name.endswith(".safetensors")]
    s.index = index_among(top, folder) if index is None else index
    if s.index:
        path_of_index = folder / s.index
        s.weight_map = _weight_map(path_of_index)
        names = list(dict.fromkeys(s.weight_map.values()))
        s.shards = {name: _shard(folder, name, f"{path_of_index}: weight_map", remote) for name in names}
        for name, path in s.shards.items():
            if not (path.is_file() if remote is None else name in remote):
                first = next(t for t, shard in s.weight_map.items() if shard == name)
                raise CheckpointError(
                    f"[open] {folder}: shard {name!r} is missing; {s.index} puts tensor {first!r} and "
                    f"{sum(v == name for v in s.weight_map.values()) - 1:,} more in it. Fetch it, or repair the index"
                )
    else:
        names = _without_index(folder, present, top)
        s.shards = {name: _shard(folder, name, str(folder), remote) for name in names}
    for name in present:
        if name not in s.shards:
            why = f"{s.index} does not name it" if s.index else f"{next(iter(s.shards))} is the checkpoint"
            if not s.index and len(s.shards) > 1:
                why = "the numbered shards are the checkpoint"
            s.findings.append(Finding("warning", "unreferenced-file", name, f"ignored: {why}"))
    return s


def read_configs(folder: Path, s: Sources) -> None:
    """config.json and the quantization configs beside it, into `s`."""
    if (folder / "config.json").is_file():
        s.config = read_json(folder / "config.json")
    for name in SIDE_CONFIGS:
        if (folder / name).is_file():
            s.side[name] = read_json(folder / name)


def _shard(folder: Path, name: str, source: str, remote: Collection[str] | None) -> Path:
    """The path of a shard; of a remote one, which is no file here, as its name says it."""
    if remote is None:
        return inside(folder, name, source)
    check_name(name, source)
    return folder / name


def check_name(name: str, source: str) -> None:
    """CheckpointError for the name of a file that is not one below its folder."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    if not name or "\0" in name or "\\" in name or posix.is_absolute() or windows.drive or windows.root or ".." in posix.parts:
        raise CheckpointError(
            f"[open] {source}: shard name {name!r}; a name relative to the folder is allowed, with neither '..', backslash nor "
            f"drive. It would read a file outside the checkpoint: do not trust this folder"
        )
    longest = max((len(part.encode("utf-8", "surrogatepass")) for part in posix.parts), default=0)
    if longest > 255 or len(name) > 4000 or re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", name):
        raise CheckpointError(
            f"[open] {source}: shard name {name!r:.80}; a name of at most 255 bytes, without control characters and lone "
            "surrogates, is allowed"
        )


def inside(folder: Path, name: str, source: str) -> Path:
    """The path of file `name` of `folder`; CheckpointError unless it is inside the folder.
    `source`: the file that names it.
    """
    check_name(name, source)
    path = folder / name
    try:
        if stays_inside(folder, path):
            return path
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # before Python 3.13 a loop of links is a RuntimeError
        raise CheckpointError(f"[open] {source}: shard {name!r} is a broken link: {error}") from error
    raise CheckpointError(
        f"[open] {source}: shard {name!r} is a link to {real}, outside {folder.resolve()}; open that file by its own path if you "
        "trust it"
    )


def index_among(names: Collection[str], folder: object) -> str:
    """The shard index among the files of a folder, "" where there is none. CheckpointError for
    several.
    """
    if INDEX_NAME in names:
        return INDEX_NAME
    found = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(found) > 1:
        raise CheckpointError(f"[open] {folder}: {len(found)} shard indices ({', '.join(found)}); open one of them by its path")
    return found[0] if found else ""


def _weight_map(index: Path) -> dict[str, str]:
    """tensor -> shard name."""
    weight_map = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"[open] {index}: weight_map is {_kind(weight_map)}; wanted an object of tensor name to file name")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"[open] {index}: weight_map puts tensor {tensor!r} in {_kind(name)}; wanted a file name")
    return weight_map


def _without_index(folder: Path, present: list[str], names: Collection[str]) -> list[str]:
    """The shards of a folder that has no index."""
    if "model.safetensors" in present:
        return ["model.safetensors"]
    sets: dict[tuple[str, int], list[int]] = {}
    for name in present:
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), []).append(int(match[2]))
    if sets:
        if len(sets) > 1:
            words = ", ".join(f"{stem} (of {total})" for stem, total in sets)
            raise CheckpointError(f"[open] {folder}: several sharded sets and no index: {words}; keep one set in a folder")
        ((stem, total), numbers) = next(iter(sets.items()))
        if sorted(numbers) != list(range(1, total + 1)):
            missing = sorted(set(range(1, min(total, len(numbers) + 1) + 1)) - set(numbers))
            first = f"{stem}-{(missing or [total])[0]:05d}-of-{total:05d}.safetensors"
            raise CheckpointError(f"[open] {folder}: {len(numbers)} of {total} shards are there; the first missing is {first!r}")
        return [n for n in present if _SHARD.fullmatch(n)]
    if present:
        return present
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(
            f"[open] {folder}: {pickles[0]} is a pickle, which runs code when it is read; "
            f"convert the checkpoint to safetensors first"
        )
    raise CheckpointError(f"[open] {folder}: no .safetensors or .gguf file here; name the folder or file that holds the weights")


def _kind(value: object) -> str:
    if isinstance(value, dict) and not value:
        return "empty"
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}.get(
        type(value), "null"
    )
