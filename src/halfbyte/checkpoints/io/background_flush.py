"""Flush a growing file to disk in the background while more of it is computed.

The operating system caches gigabytes of written data, and the final fsync then waits for the disk
while nothing is computed. A thread that flushes every 256 MiB keeps the disk busy from the start.
"""

from __future__ import annotations

import os

from ...numerics.background import Background, Task

STEP = 1 << 28
"""Bytes between two flushes. Files under it have no thread."""


class Flusher:
    """Flushes one file descriptor in the background.

    flusher = Flusher(descriptor)
    flusher.wrote(nbytes)                  after each write
    flusher.wait()                         before the descriptor is closed; OSError when the disk
                                           refused
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._since = 0
        self._background: Background | None = None
        self._running: Task[None] | None = None

    def wrote(self, nbytes: int) -> None:
        """Count bytes that were written. OSError when an earlier flush failed."""
        self._since += nbytes
        if self._since < STEP or (self._running is not None and not self._running.done()):
            return
        self._ended()
        self._since = 0
        if self._background is None:
            self._background = Background(1)
        # The final fsync writes the metadata; these flushes need the data only.
        self._running = self._background.submit(getattr(os, "fdatasync", os.fsync), self._descriptor)

    def wait(self) -> None:
        """Wait for a running flush and stop the thread. The system reports a failed flush once: it
        is raised here.
        """
        background, self._background = self._background, None
        try:
            self._ended()
        finally:
            if background is not None:
                background.close()

    def _ended(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()
