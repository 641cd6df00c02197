"""Put a finished output in the place of an older one.

file over file            one rename, which is atomic
folder to a free name     one rename
folder over folder        the two names are exchanged in one step (renameat2 of Linux,
                          renamex_np of macOS), then the old folder is deleted under the
                          temporary name
... where the file system cannot exchange names (NFS, some FUSE)
                          OUT -> .OUT.replaced, .OUT.partial -> OUT, then the old is deleted;
                          a run that is killed between the two renames is completed by the next
                          run for OUT (`sharded_writer`), from the journal's last line
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS."""
_AT_FDCWD = -100
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False, with nothing changed, where the system or the file
    system cannot. A call that is made and reported as failed, as a file server's answer that was
    lost is, counts as made.
    """
    before = identity(a)
    libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    first, second = os.fsencode(a), os.fsencode(b)
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _EXCHANGE)  # type: ignore[union-attr]
    elif sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(first, second, _EXCHANGE)
    else:
        return False
    if not failed or (before and identity(b) == before):
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(b))


def identity(path: Path) -> list[int]:
    """[device, inode] of a folder, which a rename keeps; [] when it is not there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return []
    return [status.st_dev, status.st_ino]
