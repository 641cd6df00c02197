"""Create, reopen, copy and delete the files that this program writes, and no others.

A name may have been planted before the program runs: a link at the name of a temporary file would
send what is written to the link's target. So

    a new file      is created with O_EXCL and O_NOFOLLOW: a name that is there is an error
    an old file     is continued only when it is a regular file with one name, of this user
    a deletion      takes names that the caller lists, never all entries of a folder
    a copied file   is read from inside the folder of the checkpoint, through no link out of it

Every `OSError` of these functions names its path. `NotOursError` says what was found.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CheckpointError
from .regular_file import open_regular, stays_inside

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_PIECE = 1 << 20
_MAX_COPIED = 1 << 30
"""Most bytes of a model file that is copied: the largest tokenizers have 40 MB."""


class WriteError(CheckpointError):
    """The file system refused a write: full, read-only, gone. The parts that are finished are kept."""


class NotOursError(CheckpointError):
    """A file or folder at a name that this program uses, which it did not write."""


def foreign(path: Path, folder: bool = False) -> str:
    """Why the entry at `path` cannot be this program's own file (or folder), as a clause; "" when
    it can, or when there is none.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if folder != stat.S_ISDIR(status.st_mode):
        return "is not a folder" if folder else "is not a file"
    if not folder and not stat.S_ISREG(status.st_mode):
        return "is a pipe, a device or a socket"
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if not folder and status.st_nlink != 1:
        return "is a hard link to a file with another name"
    return ""


def check_ours(path: Path, out: Path, folder: bool = False) -> None:
    """NotOursError when what is at `path` was not written by a run for `out`."""
    if why := foreign(path, folder):
        raise not_ours(path, out, why)


def not_ours(path: Path, out: Path, why: str) -> NotOursError:
    """The error for an entry at `path`, which would have to be this program's own."""
    return NotOursError(
        f"[save] {out}: {path} {why}; an interrupted run leaves no such thing there, so it is neither continued nor "
        "deleted. Delete it yourself, or give another output path"
    )


def create(path: Path) -> BinaryIO:
    """A new file, for reading and writing. FileExistsError for a name that is there, a link too."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
    return os.fdopen(descriptor, "wb+")


def reopen(path: Path, out: Path, create_missing: bool = False, checked: bool = False) -> int:
    """A descriptor of the program's own file at `path`, for reading and writing. NotOursError for
    anything else.

    checked  this run created the file or has checked it: its owner is not compared, since some
             network file systems give files another owner
    """
    flags = os.O_RDWR | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | (os.O_CREAT if create_missing else 0)
    if not checked:
        check_ours(path, out)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that came after the check
            raise not_ours(path, out, "is a link") from None
        raise
    there = os.fstat(descriptor)
    if there.st_nlink == 0:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not stat.S_ISREG(there.st_mode) or there.st_nlink != 1:
        os.close(descriptor)
        raise not_ours(path, out, "was replaced while it was opened")
    return descriptor


def alive(pid: int) -> bool:
    """Whether a process of this machine has the id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def delete(paths: Iterable[Path]) -> None:
    """Unlink files; names that are not there, and folders, are left."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            path.unlink()


def delete_folder(folder: Path, names: Iterable[str]) -> list[str]:
    """Unlink the files `names` of a folder, then the folder when it is empty. Returns the names
    that are left in it. A link in place of the folder is left.
    """
    if folder.is_symlink() or not folder.is_dir():
        return []
    delete(folder / name for name in names)
    left = sorted(p.name for p in folder.iterdir())
    if not left:
        folder.rmdir()
    return left


def check_name(name: str) -> str:
    """`name`, a file's name in an output folder. CheckpointError for one that could lead out of
    it, or that other systems cannot have.
    """
    if (
        not name
        or name in (".", "..")
        or name != name.strip()
        or len(os.fsencode(name)) > 255
        or re.search(r'[/\\\x00-\x1f\x7f:*?"<>|]', name)
    ):
        raise CheckpointError(
            f"[save] file name {name!r:.80}; a plain name of at most 255 bytes is allowed, without slashes, control characters "
            "and leading or trailing spaces"
        )
    return name


def write_file(path: Path, data: bytes) -> None:
    """A new file with `data`, on disk when this returns."""
    check_name(path.name)
    try:
        with create(path) as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
    except OSError as error:
        raise _named(error, path) from error


def write_json(path: Path, value: Any) -> None:
    """A new JSON file, indented, in UTF-8; text that UTF-8 cannot hold (a lone surrogate) is
    escaped.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        data = json.dumps(value, indent=2).encode("ascii")
    write_file(path, data + b"\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 to `path` in one step: an interrupted call leaves the old file whole. A
    link at `path` is replaced, not followed. Lone surrogates are escaped as in JSON.

    What a killed call left is deleted by the next one. WriteError when the file system refuses.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        for old in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            pid = old.name.split(".")[-2]
            if pid.isdecimal() and (old == part or not alive(int(pid))) and not foreign(old):
                delete([old])
        try:
            write_file(part, text.encode("utf-8", "backslashreplace"))
            part.replace(path)
        except BaseException as error:
            if not isinstance(error, FileExistsError):
                with contextlib.suppress(OSError):
                    delete([part])
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise WriteError(f"[save] {path}: cannot be written: {error.strerror or error}") from error


def copy_file(source: Path, path: Path) -> None:
    """Copy a model file to the new file `path`; `source` was checked by `carried_files`."""
    check_name(path.name)
    try:
        with open_regular(source) as f, create(path) as out:
            while piece := f.read(_PIECE):
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise _named(error, path) from error


def carried_files(folder: Path, suffixes: Iterable[str], op: str) -> dict[str, Path]:
    """The files of a checkpoint's folder with one of `suffixes`, by name, for copying.

    A link is followed inside the folder and into the hub's store of the same snapshot.
    CheckpointError for a link that leads elsewhere: what it names would be published with the
    output.
    """
    wanted = set(suffixes)
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in wanted or not path.is_file():
            continue
        if not stays_inside(folder, path):
            raise CheckpointError(
                f"[{op}] {path} is a link to {path.resolve()}, outside the checkpoint; model files are copied into the output "
                "from inside its folder only. Put the file itself there, or remove the link"
            )
        size = path.stat().st_size
        if size > _MAX_COPIED:
            raise CheckpointError(f"[{op}] {path}: {size:,} bytes; model files of up to {_MAX_COPIED:,} are copied")
        found[check_name(path.name)] = path
    return found


def sync_folder(folder: Path) -> None:
    """Write a folder's names to disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems without it
                raise
        finally:
            os.close(descriptor)


def _named(error: OSError, path: Path) -> OSError:
    if error.filename is None:
        error.filename = str(path)
    return error
