"""Open regular files only: a pipe or a device in the place of a checkpoint file would block the
reader, or never end.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""O_NONBLOCK: opening a pipe returns at once instead of waiting for a writer."""


LFS_POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer."""
LFS_ADVICE = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository, or download the file from the hub"
_PIECE = re.compile(r"(?P<whole>.+\.(?:gguf|safetensors))[.-](?:part[-.]?(?P<number>\w+?)(?:of\d+)?|split-\w+|\d{2,3})")


def pieces_advice(name: str, beside: list[str]) -> str:
    """What to do with a byte piece `X.gguf.part1of2` of a larger file, as a clause; "" for other
    names.

    beside  names of the files in the same folder
    """
    match = _PIECE.fullmatch(name)
    if match is None:
        return ""
    pieces = sorted(n for n in beside if (m := _PIECE.fullmatch(n)) and m["whole"] == match["whole"]) or [name]
    joined = " ".join(pieces[:6]) + (" ..." if len(pieces) > 6 else "")
    return f"is a byte piece of {match['whole']}, not a whole file; join all pieces in order: cat {joined} > {match['whole']}"


def open_regular(path: Path) -> BinaryIO:
    """`path` opened for reading bytes. OSError, with a sentence, when it is a folder, a pipe, a
    device or a socket.
    """
    descriptor = os.open(path, _FLAGS)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe, a device or a socket", str(path))


def stays_inside(folder: Path, path: Path) -> bool:
    """Whether `path`, links followed, is inside `folder`, or in the hub's store of the snapshot
    that `folder` is.
    """
    home, real = folder.resolve(), path.resolve()
    if real.is_relative_to(home):
        return True
    blobs = home.parent.parent / "blobs"
    return home.parent.name == "snapshots" and real.parent == blobs and re.fullmatch(r"[0-9a-f]{40,64}", real.name) is not None
