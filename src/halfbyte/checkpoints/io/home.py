"""`~` in paths that a user gives."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home folder in place of a leading `~`; as it is where there is no such user
    or no home, as shells leave it (`Path.expanduser` raises RuntimeError there).
    """
    return Path(os.path.expanduser(path))
