"""A limit of time and memory for a checkpoint's own chat template.

    with template_limits():
        tokenizer.apply_chat_template(...)

Jinja's sandbox keeps a template from the interpreter, not from endless loops: two nested ranges of
100,000 steps take an hour, `{% set x = x ~ x %}` in a loop doubles a text until memory ends. A
thread watches the block and raises `TemplateLimitError` in it between two bytecodes. A single
operation cannot be interrupted, so two limits prevent long ones: on Linux the address space may
grow by `ADDRESS_SPACE` meanwhile, so that a text times 10^12 is a MemoryError, which becomes the
same error; and `check_template` refuses powers, since 9 ** 9 ** 9 does not end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator

from ..errors import UnsupportedError

SECONDS = 10.0
"""Templates of published models take milliseconds for a long conversation."""
MEGABYTES = 512
ADDRESS_SPACE = 4 << 30
"""Bytes of address space that the whole process may take during a template: far above what other
threads take in milliseconds.
"""
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
        with _address_space():
            yield
    except MemoryError:
        raise TemplateLimitError from None
    finally:
        with lock:
            ended.set()
        watcher.join()


def check_template(text: str) -> None:
    """UnsupportedError for a template that raises a number to a power; one that does not parse is
    left to the renderer, which says why.
    """
    if "**" not in text:
        return
    from jinja2 import Environment, TemplateSyntaxError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError:
        powers = True  # tags of transformers' own: the sign alone decides
    else:
        powers = next(tree.find_all(nodes.Pow), None) is not None
    if powers:
        raise UnsupportedError(
            "[chat] the chat template raises a number to a power (**), which can take for ever; give another one with "
            "--chat-template, or do not use this checkpoint"
        )


_limited = threading.Lock()


@contextlib.contextmanager
def _address_space() -> Iterator[None]:
    """RLIMIT_AS at what the process has and `ADDRESS_SPACE` more; the outermost of nested or
    parallel blocks sets it.
    """
    if sys.platform != "linux" or not _limited.acquire(blocking=False):
        yield
        return
    import resource

    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = _statm(0) + ADDRESS_SPACE
        if soft != resource.RLIM_INFINITY and soft <= most:
            yield
            return
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    finally:
        _limited.release()


def _resident() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    return _statm(1)


def _statm(field: int) -> int:
    try:
        with open("/proc/self/statm", "rb") as f:
            return int(f.read().split()[field]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
