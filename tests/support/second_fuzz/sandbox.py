"""One call in a forked process: what it returned or raised, within five seconds of processor time.

The parent imports the library once; a child inherits it by `fork`, so a case costs milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import pkgutil
import resource
import select
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfbyte.errors import HalfbyteError

CPU_LIMIT_S = 5.0
"""Most processor time of a call."""
WALL_LIMIT_S = 900.0
"""Most time of a call; long, for a run at the lowest priority."""


def import_library() -> None:
    """Import what commands import when they are first used, so that no child does. Once a process."""
    for package in (
        "checkpoints",
        "cli",
        "conversion",
        "formats",
        "layouts",
        "producers",
        "quantizers",
        "tensor",
        "verification",
    ):
        root = importlib.import_module(f"halfbyte.{package}")
        for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


@dataclass(frozen=True)
class Outcome:
    """`kind` is "value", "refused" (an error of the library), "exit" (a command's status, in
    `value`), "fault" (another exception), "signal", "hang" or "slow".
    """

    kind: str
    value: Any = None

    @property
    def broken(self) -> bool:
        return self.kind in ("fault", "signal", "hang", "slow")


def call(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """The verdict on one call in this process."""
    try:
        return "value", function(*arguments)
    except HalfbyteError as error:
        return "refused", str(error)
    except BaseException:
        return "fault", traceback.format_exc()


def command(arguments: list[str], first: Callable[[], None] = int) -> tuple[int, str]:
    """Exit status and standard error of `halfbyte ARGUMENTS`, run in this process, which ends
    afterwards: descriptors 1 and 2 are replaced. `first` is called before the command.
    """
    from halfbyte.cli.app import main

    read, write = os.pipe()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(write, 2)  # a pipe, to which no limit on the size of files applies
    first()
    try:
        status = int(main(arguments) or 0)
    except SystemExit as end:
        status = int(end.code or 0)
    os.set_blocking(read, False)
    with contextlib.suppress(BlockingIOError):
        return status, os.read(read, 1 << 14).decode("utf-8", "replace")
    return status, ""


def here(arguments: list[str]) -> None:
    """`halfbyte ARGUMENTS` in this process, which goes on afterwards."""
    standard = [os.dup(1), os.dup(2)]
    with contextlib.suppress(BaseException):
        command(arguments)
    for i, kept in enumerate(standard):
        os.dup2(kept, i + 1)
        os.close(kept)


def child(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: int) -> None:
    """Run the call, write its pickled verdict to `pipe` and end the process."""
    resource.setrlimit(resource.RLIMIT_CPU, (20, 25))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    verdict = call(function, *arguments)
    with open(pipe, "wb") as out:
        pickle.dump(verdict, out)
    os._exit(0)


def run(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """`function(*arguments)` in a child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        child(function, arguments, write)
    os.close(write)
    received, hung = bytearray(), False
    with open(read, "rb", buffering=0) as stream:
        while not hung:
            if not select.select([stream], [], [], WALL_LIMIT_S)[0]:
                hung = True
                os.kill(pid, signal.SIGKILL)
            elif piece := stream.read(1 << 20):
                received += piece
            else:
                break
    _, status, usage = os.wait4(pid, 0)
    if hung or os.WIFSIGNALED(status) or not received:
        return Outcome("hang" if hung else "signal", status)
    kind, value = pickle.loads(bytes(received))
    return Outcome("slow" if kind != "fault" and usage.ru_utime + usage.ru_stime > CPU_LIMIT_S else kind, value)
