"""A traced child process: its n-th system call that changes files fails, is cut, is done although
an error is reported, ends the process, or waits while something else happens.

The tracer is `ptrace` through ctypes, so the child runs the library unmodified. Linux on x86-64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import platform
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import sandbox

AVAILABLE = sys.platform == "linux" and platform.machine() == "x86_64"

_NAMES = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs"


class Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in _NAMES.split()]


TRACEME, PEEK, CONT, GETREGS, SETREGS, SYSCALL, SETOPTIONS = 0, 2, 7, 12, 13, 24, 0x4200
OPTIONS = 1 | 2 | 4 | 8 | 0x80 | 0x100000
"""Stops at system calls are marked, threads and processes that the child starts are traced too, and
all end with the tracer.
"""

BY_DESCRIPTOR = {
    1: "write", 18: "pwrite64", 20: "writev", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 91: "fchmod",
    277: "sync_file_range", 285: "fallocate", 296: "pwritev", 326: "copy_file_range", 40: "sendfile",
}  # fmt: skip
BY_PATH = {
    76: "truncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink", 88: "symlink", 90: "chmod",
}  # fmt: skip
BY_FOLDER = {
    257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat", 268: "fchmodat", 280: "utimensat",
    316: "renameat2",
}  # fmt: skip
OPEN = 2
READS = {0: "read", 17: "pread64", 19: "readv", 9: "mmap", 5: "fstat", 8: "lseek"}
WRITES = {1: 2, 18: 2, 40: 3}
"""Calls with a number of bytes, and the argument that is it."""
OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _stop_only_at(numbers: list[int]) -> None:
    """A seccomp filter of this process: calls of these numbers stop for the tracer, others pass."""
    program = struct.pack("HBBI", 0x20, 0, 0, 0)
    for i, number in enumerate(numbers):
        program += struct.pack("HBBI", 0x15, len(numbers) - i, 0, number)
    program += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000) + struct.pack("HBBI", 0x06, 0, 0, 0x7FF00000)
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    for option, *rest in ((38, 1, 0, 0, 0), (22, 2, header, 0, 0)):
        if _LIBC.prctl(option, *rest) == -1:
            raise OSError(ctypes.get_errno(), "prctl")


@dataclass
class Fault:
    """What happens at call number `at` (from 1; 0 lets all calls pass).

    action  "errno"    the call is not made and fails with `code`; `sticky`: so do those after it
            "late"     the call is made, and fails with `code` all the same
            "half"     a write takes half of its bytes, as the kernel may do
            "kill"     SIGKILL before the call; "kill-after" behind it; "half-kill" after half a write
            "meanwhile"  `meanwhile()` runs while the child waits in front of the call
    """

    action: str
    at: int
    code: int = errno.ENOSPC
    sticky: bool = False
    meanwhile: Callable[[], None] | None = None
    reads: bool = False
    """Count calls that read files of the folder, and opens, instead of those that change it."""
    calls: list[str] = field(default_factory=list)
    """Names of the calls counted, filled by `run`."""


_LIBC = ctypes.CDLL(None, use_errno=True)
if AVAILABLE:
    _LIBC.ptrace.argtypes = [ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p]
    _LIBC.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: Any = 0) -> None:
    if _LIBC.ptrace(request, pid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _string(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        found = b""
        while b"\0" not in found and len(found) < 4096:
            found += memory.read(256 - (address + len(found)) % 256)
    return os.fsdecode(found.split(b"\0")[0])


def _path(pid: int, descriptor: int, address: int) -> str:
    """The absolute path of a name relative to an open folder."""
    name = _string(pid, address) if address else ""
    at = ctypes.c_int(descriptor).value
    if name.startswith("/"):
        return name
    return os.path.join(os.readlink(f"/proc/{pid}/cwd" if at == -100 else f"/proc/{pid}/fd/{at}"), name)


def _counted(pid: int, registers: Registers, folder: str, reads: bool) -> str | None:
    """The name of the call when it concerns a file below `folder` and is of the counted kind."""
    number = registers.orig_rax
    arguments = (registers.rdi, registers.rsi, registers.rdx)
    try:
        if number in (257, OPEN):
            at, path, flags = arguments if number == 257 else (-100, arguments[0], arguments[1])
            to_write = bool(flags & OPENED_TO_WRITE)
            if to_write == reads:
                return None
            return ("open to write" if to_write else "open") if folder in _path(pid, at, path) else None
        if reads:
            if number not in READS:
                return None
            descriptor = registers.r8 if number == 9 else arguments[0]
            return READS[number] if folder in os.readlink(f"/proc/{pid}/fd/{ctypes.c_int(descriptor).value}") else None
        if number in BY_DESCRIPTOR:
            return BY_DESCRIPTOR[number] if folder in os.readlink(f"/proc/{pid}/fd/{arguments[0]}") else None
        if number in BY_PATH:
            return BY_PATH[number] if folder in _path(pid, -100, arguments[0]) else None
        if number in BY_FOLDER:
            return BY_FOLDER[number] if folder in _path(pid, arguments[0], arguments[1]) else None
    except OSError:
        return None
    return None


def run(fault: Fault, folder: str, function: Callable[..., Any], *arguments: Any) -> sandbox.Outcome:
    """`function(*arguments)` in a traced child; calls that concern files below `folder` count.
    What it returns must fit a pipe (64 KiB), which is read at the end.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _ptrace(TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        _stop_only_at([2, 257, *(READS if fault.reads else (*BY_DESCRIPTOR, *BY_PATH, *BY_FOLDER))])
        sandbox.child(function, arguments, write)
    os.close(write)
    os.waitpid(pid, 0)
    _ptrace(SETOPTIONS, pid, 0, OPTIONS)
    _ptrace(CONT, pid)
    inside: dict[int, tuple[str, int]] = {}
    ended: int | None = None
    while ended is None:
        thread, status = os.waitpid(-1, 0x40000000)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == pid:
                ended = status
            continue
        delivered, resume = 0, CONT
        try:
            if status >> 8 == signal.SIGTRAP | 7 << 8:
                if _at_entry(thread, pid, fault, folder, inside):
                    resume = SYSCALL
            elif os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
                _at_exit(thread, pid, *inside.pop(thread))
            elif os.WSTOPSIG(status) not in (signal.SIGTRAP, signal.SIGSTOP):
                delivered = os.WSTOPSIG(status)
            _ptrace(resume, thread, 0, delivered)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
    with open(read, "rb") as stream:
        received = stream.read()
    if os.WIFSIGNALED(ended):
        return sandbox.Outcome("signal", os.WTERMSIG(ended))
    kind, value = pickle.loads(received)
    return sandbox.Outcome(kind, value)


def _at_exit(thread: int, pid: int, action: str, code: int) -> None:
    if action in ("kill-after", "half-kill"):
        os.kill(pid, signal.SIGKILL)
        return
    registers = Registers()
    _ptrace(GETREGS, thread, 0, ctypes.addressof(registers))
    registers.rax = ctypes.c_ulonglong(-code).value
    _ptrace(SETREGS, thread, 0, ctypes.addressof(registers))


def _at_entry(thread: int, pid: int, fault: Fault, folder: str, inside: dict[int, tuple[str, int]]) -> bool:
    """In front of a call; whether `_at_exit` follows behind it."""
    registers = Registers()
    _ptrace(GETREGS, thread, 0, ctypes.addressof(registers))
    name = _counted(thread, registers, folder, fault.reads)
    if name is None:
        return False
    fault.calls.append(name)
    number = len(fault.calls)
    if fault.at == 0 or number < fault.at or (number > fault.at and not fault.sticky):
        return False
    if number > fault.at and (name.startswith(("unlink", "rmdir")) or name == "flock"):
        return False
    if fault.action == "meanwhile":
        assert fault.meanwhile is not None
        fault.meanwhile()
        return False
    if fault.action == "kill":
        os.kill(pid, signal.SIGKILL)
        return False
    if fault.action in ("half", "half-kill") and registers.orig_rax in WRITES:
        count = "rdx" if WRITES[registers.orig_rax] == 2 else "r10"
        setattr(registers, count, max(1, getattr(registers, count) // 2))
    elif fault.action == "errno":
        registers.orig_rax = ctypes.c_ulonglong(-1).value
    elif fault.action == "half":
        return False
    _ptrace(SETREGS, thread, 0, ctypes.addressof(registers))
    inside[thread] = (fault.action, fault.code)
    return fault.action != "half"
