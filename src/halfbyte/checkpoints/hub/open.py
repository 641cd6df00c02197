"""Open a repository on the hub: headers by range requests, or all of its files through the cache."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, plural
from ...numerics.background import Background
from ..base import Checkpoint
from ..findings import Finding
from ..io.home import expanded
from ..io.output_path import CARRIED
from ..safetensors.checkpoint import SafetensorsCheckpoint
from ..safetensors.folder import SIDE_CONFIGS, Sources, index_among, sources_of
from .files import RemoteGGUF, RemoteSafetensors
from .names import HubName, parse_name
from .repository import HubWarning, Repository, download_command, explained, human, library

CONNECTIONS = 8
"""Shards whose headers are read at once."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def open_remote(name: HubName, config: Mapping[str, Any] | None) -> Checkpoint:
    """The checkpoint of a repository, of which headers and configuration are read.

    CheckpointError when the hub or the repository does not give a checkpoint.
    """
    repository = Repository.of(name)
    found = weight_files(repository)
    if found[0].endswith(".gguf"):
        from ..gguf.checkpoint import GGUFCheckpoint

        checkpoint: Checkpoint = GGUFCheckpoint(Path(found[0]), RemoteGGUF(repository, found))
    else:
        sources = _sources(repository)
        checkpoint = SafetensorsCheckpoint(sources.folder, sources, config)
    checkpoint.remote = repository
    return checkpoint


def is_offline(name: HubName | None = None) -> bool:
    """True when huggingface_hub is set not to use the network."""
    return bool(library(name).constants.is_offline_mode())


def weight_files(repository: Repository) -> list[str]:
    """The files with weights that make up the checkpoint, safetensors first, of a split GGUF all
    parts. CheckpointError naming the choices where there are several models.
    """
    name, names = repository.name, sorted(repository.sizes)
    if name.file:
        if name.file not in repository.sizes:
            beside = ", ".join([n for n in names if n.endswith((".gguf", ".safetensors"))][:8])
            raise CheckpointError(f"[hub] {repository.where} has no file {name.file!r}; there are {beside or 'no weights'}")
        return _parts(name.file, names) if name.file.endswith(".gguf") else [name.file]
    tensors = [n for n in names if n.endswith(".safetensors") and "/" not in n]
    if tensors:
        return tensors
    ggufs = [n for n in names if n.endswith(".gguf") and not n.rpartition("/")[2].startswith("mmproj")]
    heads = [n for n in ggufs if not (m := _SPLIT.fullmatch(n)) or int(m[2]) == 1]
    if len(heads) > 1:
        sizes = ", ".join(f"{n} ({human(sum(repository.sizes[p] for p in _parts(n, names)))})" for n in heads[:24])
        raise CheckpointError(
            f"[hub] {repository.where}: {plural(len(heads), 'model')}: {sizes}; open one of them: {name.repo}/{heads[0]}"
            + (f"@{name.revision}" if name.revision else "")
        )
    if heads:
        return _parts(heads[0], names)
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    kind = f"{pickles[0]} is a pickle, which runs code when it is read" if pickles else f"its files are {', '.join(names[:8])}"
    raise CheckpointError(f"[hub] {repository.where}: no .safetensors or .gguf file; {kind}")


def _parts(file: str, names: list[str]) -> list[str]:
    """All parts of a split GGUF, the file alone where it is not split."""
    match = _SPLIT.fullmatch(file)
    if match is None:
        return [file]
    parts = [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, min(int(match[3]), 10000) + 1)]
    if missing := [p for p in parts if p not in names]:
        raise CheckpointError(
            f"[hub] {file}: part {missing[0]!r} is missing in the repository; allowed: repositories with every part"
        )
    return parts


def _sources(repository: Repository) -> Sources:
    """Configuration from the cache, shards by ranges."""
    name = repository.name
    top = {n for n in repository.sizes if "/" not in n}
    wanted = [n for n in ("config.json", *SIDE_CONFIGS) if n in top]
    index = "" if name.file else index_among(sorted(top), repository.where)
    folder = Path(repository.where)
    for small in [*wanted, *([index] if index else [])]:
        folder = repository.small(small).parent
    if name.file:
        sources = Sources(folder, {name.file: folder / name.file}, lone=True)
    else:
        sources = sources_of(folder, index, repository.sizes)
    with Background(CONNECTIONS) as background:
        opening = {n: background.submit(lambda name: RemoteSafetensors(repository.file(name)), n) for n in sources.shards}
        sources.opened = {n: task.result() for n, task in opening.items()}
    sources.findings.append(
        Finding("note", "read-remotely", "", f"read from {repository.where} on the hub: headers and configuration, no weights")
    )
    return sources


def local_copy(path: str | os.PathLike[str] | HubName, say: Callable[[str], None] | None = None) -> Path:
    """`path` itself, or, where it is a name on the hub, the folder or file in the hub's cache with
    everything that the checkpoint needs, downloaded as far as it is not there.

    say  called with the size before anything is downloaded; a HubWarning without it
    """
    name = path if isinstance(path, HubName) else parse_name(path)
    if name is None:
        assert not isinstance(path, HubName)
        return expanded(path)
    hub = library(name)
    if is_offline():
        with explained(name):
            folder = Path(hub.snapshot_download(name.repo, revision=name.revision or None, local_files_only=True))
        return folder / name.file if name.file else folder
    repository = Repository.of(name)
    weights = weight_files(repository)
    files = [n for n in repository.sizes if n in weights or ("/" not in n and os.path.splitext(n)[1] in CARRIED)]
    missing = [n for n in files if not isinstance(hub.try_to_load_from_cache(name.repo, n, revision=repository.commit), str)]
    if missing:
        text = (
            f"downloading {human(sum(repository.sizes[n] for n in missing))} in {plural(len(missing), 'file')} of "
            f"{repository.where} from {hub.HfApi().endpoint} into {hub.constants.HF_HUB_CACHE}; "
            f"`{download_command(name)}` puts them into a folder instead"
        )
        if say is not None:
            say(text)
        else:
            warnings.warn(f"[hub] {text}", HubWarning, stacklevel=3)
    with explained(name):
        folder = Path(
            hub.snapshot_download(
                name.repo,
                revision=repository.commit,
                endpoint=hub.HfApi().endpoint,
                allow_patterns=[glob.escape(n) for n in files],
            )
        )
    return folder / weights[0] if name.file or weights[0].endswith(".gguf") else folder
