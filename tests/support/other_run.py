"""Another process that has the lock of an output."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_CODE = """
import sys, time
from pathlib import Path
from halfbyte.checkpoints.io.journal import Lock
lock = Lock(Path(sys.argv[1]), Path("out"))
print("locked", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def other_run(lock: Path) -> Iterator[int]:
    """The id of a process that has the lock; it is killed at the end, its lock file stays."""
    process = subprocess.Popen([sys.executable, "-c", _CODE, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
