"""Sending a growing file to the disk while more of it is made.

A system keeps what is written in memory, some gigabytes of it, and the wait comes at the end, when the file is flushed and
nothing is left to compute. A thread flushes what is there every 256 MiB instead, so that the disk works from the first second.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

STEP = 1 << 28
"""Bytes between two flushes. Files under it have no thread."""


class Flusher:
    """Flushes one file descriptor in the background.

    flusher = Flusher(descriptor)
    flusher.wrote(nbytes)                  after each write
    flusher.wait()                         before the descriptor is closed; OSError when the disk refused
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._since = 0
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def wrote(self, nbytes: int) -> None:
        """Count bytes that the system has taken. OSError when it could not keep earlier ones."""
        self._since += nbytes
        if self._since < STEP or (self._running is not None and not self._running.done()):
            return
        self._ended()
        self._since = 0
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="halfbyte-flush")
        # What a file's own length and place need is written by the last flush.
        self._running = self._pool.submit(getattr(os, "fdatasync", os.fsync), self._descriptor)

    def wait(self) -> None:
        """Let a flush end, and the thread. A system tells of a failure once: it is raised here."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._ended()

    def _ended(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()
