"""Tasks in the background that end everywhere: where the system starts no thread (limits on
processes or on memory), or a thread dies at its start, whoever asks for a result computes it.

`concurrent.futures` raises RuntimeError in the first case, and waits for ever in the second.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """One call, made once by whichever thread claims it first."""

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._claim = threading.Lock()
        self._ended = threading.Event()
        self._values: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, unless a thread has claimed it."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._values.append(self._function(*self._arguments))
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        """Whether the call has returned or raised."""
        return self._ended.is_set()

    def drop(self) -> None:
        """Wait for the call if it has begun, and never make it otherwise."""
        if self._claim.acquire(blocking=False):
            self._error = CancelledError()
            self._ended.set()
        self._ended.wait()

    def result(self) -> T:
        """What the call returned, to be asked for once: the task keeps no reference.

        Raises what the call raised, and CancelledError for a task that was dropped.
        """
        self.run()
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._values.pop()


class Background:
    """At most `threads` threads that run tasks in the order in which they are submitted.

    with Background(2) as background:
        task = background.submit(function, *arguments)
        ...
        task.result()

    At the end tasks that have begun are waited for, and others dropped.
    """

    def __init__(self, threads: int) -> None:
        self._left = threads
        self._started = 0
        self._queue: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._tasks: list[Task[Any]] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> Task[T]:
        """A task that calls `function(*arguments)`."""
        task = Task(function, arguments)
        self._tasks = [t for t in self._tasks if not t.done()]
        self._tasks.append(task)
        if self._left:
            try:
                _thread.start_new_thread(_work, (self._queue,))
                self._left -= 1
                self._started += 1
            except (RuntimeError, MemoryError):
                self._left = 0
        self._queue.put(task)
        return task

    def close(self) -> None:
        """End the threads. Tasks that have begun are waited for."""
        for task in reversed(self._tasks):  # those that have not begun before those that are waited for
            task.drop()
        self._tasks.clear()
        for _ in range(self._started):
            self._queue.put(None)
        self._left = self._started = 0

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _work(queue: SimpleQueue[Task[Any] | None]) -> None:
    while (task := queue.get()) is not None:
        task.run()
