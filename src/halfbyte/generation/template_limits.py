"""A limit of time and memory for a checkpoint's own chat template.

    with template_limits():
        tokenizer.apply_chat_template(...)

Jinja's sandbox keeps a template from the interpreter, not from endless loops: two nested ranges of
100,000 steps take an hour, `{% set x = x ~ x %}` in a loop doubles a text until memory ends. A
thread watches the block and raises `TemplateLimitError` in it between two bytecodes. One operation
that takes all memory at once, as a text times 10^12, is not stopped by it; the system's own limit
makes that a MemoryError, which becomes the same error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator

from ..errors import UnsupportedError

SECONDS = 10.0
"""Templates of published models take milliseconds for a long conversation."""
MEGABYTES = 512
_STEP = 0.02


class TemplateLimitError(UnsupportedError):
    """A chat template that takes more time or memory than it may."""

    def __init__(self) -> None:
        super().__init__(
            f"[chat] the chat template takes over {SECONDS:g} s or {MEGABYTES} MB: it loops, or the conversation is too long for "
            "it. Give another one with --chat-template, or do not use this checkpoint"
        )


@contextlib.contextmanager
def template_limits(seconds: float | None = None, megabytes: int | None = None) -> Iterator[None]:
    """Raises TemplateLimitError in the block when it takes more than `seconds` (`SECONDS`), or the
    process grows by more than `megabytes` (`MEGABYTES`) meanwhile.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock, ended = threading.Lock(), threading.Event()
    limit = time.monotonic() + (SECONDS if seconds is None else seconds)
    most = _resident() + ((MEGABYTES if megabytes is None else megabytes) << 20)

    def watch() -> None:
        while not ended.wait(_STEP):
            if time.monotonic() > limit or _resident() > most:
                with lock:
                    if not ended.is_set():
                        raise_in(thread, ctypes.py_object(TemplateLimitError))
                return

    watcher = threading.Thread(target=watch, name="halfbyte-template", daemon=True)
    watcher.start()
    try:
        yield
    except MemoryError:
        raise TemplateLimitError from None
    finally:
        with lock:
            ended.set()
        watcher.join()


def _resident() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
