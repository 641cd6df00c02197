"""How much memory this process may still take: its own limits and those of its control groups.

    limit = memory_limit()              None where nothing limits it
    check_memory(nbytes, "[open] …")    MemoryLimitError before an allocation that would not fit

A control group ends a process that takes more without a word, and RLIMIT_AS makes allocations fail
wherever they happen to be; asking first gives a message. Linux only: elsewhere nothing is known.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import MemoryLimitError

CHECKED = 16 << 20
"""Bytes below which an allocation is not checked: asking takes 0.1 ms."""
_UNLIMITED = 1 << 62
"""Control groups of version 1 write a number above this for no limit."""


class MemoryLimit(NamedTuple):
    """left  bytes that the process may still take
    limit  bytes of the limit itself
    name   what sets it, as a user knows it
    """

    left: int
    limit: int
    name: str


def memory_limit(process: str = "/proc/self", groups: str = "/sys/fs/cgroup") -> MemoryLimit | None:
    """The limit that is reached first; None where there is none, or the system does not say.

    Limits of the process (RLIMIT_AS, RLIMIT_DATA) count its address space and its data; limits of a
    control group, and of each group that it is in, count the memory of all their processes, less
    the file cache that the kernel drops first.
    """
    if sys.platform != "linux":
        return None
    return min([*_of_process(Path(process)), *_of_groups(Path(process), Path(groups))], default=None)


def check_memory(nbytes: int, what: str) -> None:
    """MemoryLimitError when `nbytes` more would pass a limit; `what` begins the message."""
    if nbytes < CHECKED:
        return
    limit = memory_limit()
    if limit is not None and nbytes > limit.left:
        raise MemoryLimitError(
            f"{what} takes {nbytes:,} bytes; this process may take {max(limit.left, 0):,} more of the {limit.limit:,} that "
            f"{limit.name} allows. Raise the limit, or read a smaller part"
        )


def _of_process(process: Path) -> Iterator[MemoryLimit]:
    import resource

    try:
        pages = (process / "statm").read_text().split()
    except OSError:
        return
    size = os.sysconf("SC_PAGESIZE")
    for name, kind, used in (
        ("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS, pages[0]),
        ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA, pages[5]),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(soft - int(used) * size, soft, name)


def _of_groups(process: Path, groups: Path) -> Iterator[MemoryLimit]:
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file ")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the path may be the host's; the group is then at the root.
        for level in (folder, *folder.parents) if folder.is_dir() else (root,):
            found = _of_group(level, *names)
            if found is not None:
                yield found
            if level == root:
                break


def _of_group(folder: Path, most: str, used: str, cache: str) -> MemoryLimit | None:
    try:
        limit = int((folder / most).read_text())  # ValueError: "max"
        now = int((folder / used).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if limit >= _UNLIMITED:
        return None
    dropped = next((int(line.removeprefix(cache)) for line in stat if line.startswith(cache)), 0)
    return MemoryLimit(limit - max(now - dropped, 0), limit, f"the control group {folder}")
