"""The output path of a command: what may exist there already.

A result is written under a temporary name beside the output path and renamed when it is complete
(`resumable_file`, `safetensors/sharded_writer`). `--force` replaces a checkpoint and nothing else:
a folder with other files in it, a link, a device or a pipe is left alone, and so is every file of
the input, under whatever name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import CheckpointError

CARRIED = frozenset({".json", ".model", ".txt", ".jinja", ".tiktoken", ".py"})
"""Suffixes of files that are copied with a model: configuration, tokenizer, chat template, its own
code.
"""
WEIGHTS = (".safetensors", ".gguf")
BESIDE = frozenset({".md", ".gitattributes", "LICENSE", "LICENSE.txt", "NOTICE"})
"""Suffixes and names of other files that model hubs add to a folder."""


def check_output_path(
    op: str,
    source: Path,
    out: Path,
    overwrite: bool,
    file_suffixes: Sequence[str] = (".safetensors",),
    inputs: Iterable[Path] = (),
) -> None:
    """CheckpointError when `out` is or holds the source, is of the wrong kind, or exists and may
    not be replaced.

    op             the command, for messages
    overwrite      a file of the kind written, or a folder that holds a checkpoint and nothing else,
                   may be replaced
    file_suffixes  suffixes of `out` that mean one file; everything else is a folder
    inputs         further files that are read: `out` is none of them and holds none of them, by
                   another name (a link, a hard link) neither
    """
    here, there = source.resolve(), out.resolve()
    if here == there or here.is_relative_to(there):
        raise CheckpointError(f"[{op}] {out} holds the checkpoint being read; give another path")
    if not os.path.lexists(out):
        return
    if out.is_symlink():
        raise CheckpointError(f"[{op}] {out} is a link to {os.readlink(out)}; links are not replaced, give the path itself")
    one_file = out.suffix in file_suffixes
    if out.is_dir() and one_file:
        raise CheckpointError(f"[{op}] {out} is a folder; a name that ends in {out.suffix} is written as one file")
    if out.exists() and not out.is_dir() and not out.is_file():
        raise CheckpointError(f"[{op}] {out} is a device, a pipe or a socket; give the name of a folder or of a file")
    if out.is_file() and not one_file:
        names = " or ".join(f"*{s}" for s in file_suffixes)
        raise CheckpointError(f"[{op}] {out} is a file; the result is a folder, or one file named {names}")
    if out.is_dir() and os.path.ismount(out):
        raise CheckpointError(f"[{op}] {out} is a mount point, which cannot be renamed; give a name inside it")
    if out.is_dir() and not any(out.iterdir()):
        return
    read = _identities([source, *(source.iterdir() if source.is_dir() else ()), *inputs])
    if shared := sorted(p.name for p in (out.iterdir() if out.is_dir() else [out]) if _identities([p]) & read):
        raise CheckpointError(f"[{op}] {out} is or holds a file that is read, by another name ({shared[0]}); give another path")
    if not overwrite:
        raise CheckpointError(f"[{op}] {out} exists; give another path, or --force to replace it")
    if out.is_dir() and (stray := foreign_entry(out)):
        raise CheckpointError(
            f"[{op}] {out} holds {stray}; --force replaces checkpoints only. Empty the folder yourself, or give another path"
        )


def _identities(paths: Iterable[Path]) -> set[tuple[int, int]]:
    """(device, inode) of each file, links followed; those that are not there are left out."""
    found = set()
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def foreign_entry(folder: Path) -> str:
    """The first entry of a folder that belongs to no checkpoint; "" when the folder is a
    checkpoint.
    """
    entries = sorted(folder.iterdir())
    for entry in entries:
        kinds = {entry.suffix, entry.name}
        if not stat.S_ISREG(entry.lstat().st_mode) or not kinds & (CARRIED | BESIDE | set(WEIGHTS)):
            return repr(entry.name)
    return "" if any(entry.suffix in WEIGHTS for entry in entries) else "no weights"
