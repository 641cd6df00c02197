"""What an interrupted run had done: a file of JSON lines beside the result, and a lock that keeps a second process away.

The first line says what work it is; the others are added as parts of it are on disk.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...errors import CheckpointError


class WriteError(CheckpointError):
    """The disk refused: full, read-only, gone. Nothing is wrong with the work, and what is finished of it is kept."""


def make_folder(folder: Path, out: Path) -> None:
    """A folder for `out`, with those above it. WriteError when there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"[save] {out}: cannot be written: {error.strerror or error}: {error.filename or folder}") from error


def read_lines(path: Path) -> list[Any]:
    """The journal's lines; a last one that was cut off in writing is left out."""
    out: list[Any] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                break
    return out


def append_line(path: Path, value: Any, sync: bool = True) -> None:
    """Add a line; WriteError when it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(value) + "\n")
            f.flush()
            if sync:
                os.fsync(f.fileno())
    except OSError as error:
        raise WriteError(f"[save] {path}: {error.strerror or error}") from error


def plain(value: Any) -> Any:
    """A value as it comes back from JSON, for comparing."""
    return json.loads(json.dumps(value))


def take_lock(lock: Path, out: Path) -> None:
    """Keep other processes from `out`. CheckpointError when a living one has it; one that died is passed over."""
    try:
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        owner = lock.read_text(encoding="ascii", errors="replace").strip()
        if owner.isdigit() and int(owner) != os.getpid() and _alive(int(owner)):
            raise CheckpointError(f"[convert] {out}: process {owner} is writing it; wait for it, or end it") from None
        lock.unlink(missing_ok=True)
        handle = os.open(lock, os.O_CREAT | os.O_WRONLY)
    except OSError as error:
        raise WriteError(f"[save] {out}: cannot be written: {error.strerror or error}") from error
    with os.fdopen(handle, "w") as f:
        f.write(str(os.getpid()))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
