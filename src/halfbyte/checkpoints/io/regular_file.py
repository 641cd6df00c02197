"""Open regular files only: a pipe or a device in the place of a checkpoint file would block the reader, or never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""O_NONBLOCK: opening a pipe returns at once instead of waiting for a writer."""


def open_regular(path: Path) -> BinaryIO:
    """`path` opened for reading bytes. OSError, with a sentence, when it is a folder, a pipe, a device or a socket."""
    descriptor = os.open(path, _FLAGS)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe, a device or a socket", str(path))
