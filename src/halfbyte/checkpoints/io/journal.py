"""The journal of a run that can be resumed: JSON lines beside the result, and a lock file against a
second process.

The first line identifies the run; one more line is added for each part that is on disk.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...errors import CheckpointError


class WriteError(CheckpointError):
    """The file system refused a write: full, read-only, gone. The parts that are finished are kept."""


def make_folder(folder: Path, out: Path) -> None:
    """Create `folder`, in which `out` is written, and its parents. WriteError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"[save] {out}: cannot be written: {error.strerror or error}: {error.filename or folder}") from error


def read_lines(path: Path) -> list[Any]:
    """The values of a journal's lines; a last line that is incomplete is left out."""
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
    """`value` after a round trip through JSON, for comparison with a line that was read."""
    return json.loads(json.dumps(value))


def take_lock(lock: Path, out: Path) -> None:
    """Lock `out` for this process. CheckpointError when a running process has the lock; a dead
    one's is taken over.
    """
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
