"""Compile an MSL source and run its kernels on NumPy arrays.

    library = compile_source(text)
    library.run("name", [array, 7, out], grid=(64, 1, 1), group=(32, 1, 1))

clang's front end makes LLVM IR; threadgroup variables there get a guard zone and are listed; the
optimiser then adds a call before every load and store. Objects are kept in `.cache/metal_cpu/`,
named by the hash of everything that made them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .lint import check_source
from .signature import Signature, signatures

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / ".cache" / "metal_cpu"
CLANG = os.environ.get("HALFBYTE_CLANG", "clang-19")
FRONT = [
    "-x", "cl", "-cl-std=CLC++2021", "-cl-no-stdinc", "-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64", "-nostdinc",
    "-fno-builtin", "-fPIC",
    "-O1", "-Xclang",
    "-disable-llvm-passes", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-attributes", "-Wno-unused-function",
    "-Wno-unused-const-variable", "-Wno-unknown-pragmas", "-ffp-contract=off",
    "-fsanitize=array-bounds,integer-divide-by-zero", "-fsanitize-minimal-runtime", "-g0", "-S", "-emit-llvm",
]  # fmt: skip
# No vectorisation: an access stays the one the source makes. Loops are kept: code small,
# compilation short.
BACK = [
    "-x", "ir", "-O1", "-fPIC", "-fno-vectorize", "-fno-slp-vectorize", "-Wno-override-module",
    "-Xclang", "-fsanitize-coverage-type=1",
    "-Xclang", "-fsanitize-coverage-trace-loads", "-Xclang", "-fsanitize-coverage-trace-stores", "-S", "-emit-llvm",
]  # fmt: skip
CODE = ["-shared", "-O0", "-fPIC", "-Wno-override-module", "-Wl,-z,separate-code", "-x", "ir"]
GUARD_BYTES = 4096
MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32768
SPARSE = ("pieces",)
"""Outputs with places no thread owns: the striped schedule's slots. The next kernel must not read
those: they hold NaN.
"""
_VARIABLE = re.compile(r"^@(?P<name>\S+) = internal (?:unnamed_addr )?global (?P<type>.+) undef, align \d+$", re.M)


class MetalFaultError(AssertionError):
    """What a kernel did that a GPU would not forgive."""


class MetalCompileError(AssertionError):
    """What the compiler would not take."""


def available() -> bool:
    """True when the compiler is installed."""
    return shutil.which(CLANG) is not None


def _invoke(arguments: Sequence[str]) -> None:
    done = subprocess.run([CLANG, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise MetalCompileError(done.stderr[:4000])


@contextlib.contextmanager
def _building(name: str) -> Iterator[Path | None]:
    """A scratch folder while `name` is missing from the cache, None once it is there; other
    processes wait.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (CACHE / name).exists():
            yield None
            return
        scratch = CACHE / f"{name}.build"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@functools.cache
def _tools() -> str:
    """Hash of everything but the shader: a change of any of these rebuilds all objects."""
    h = hashlib.sha256(" ".join([CLANG, *FRONT, *BACK, *CODE, str(GUARD_BYTES)]).encode())
    for f in sorted([*HERE.glob("include/*"), HERE / "runtime.cpp", HERE / "signature.py", HERE / "machine.py"]):
        h.update(f.read_bytes())
    return h.hexdigest()


@functools.cache
def _runtime() -> ctypes.CDLL:
    name = f"runtime-{_tools()[:16]}.so"
    with _building(name) as scratch:
        if scratch is not None:
            built = str(scratch / name)
            _invoke(
                [
                    "--driver-mode=g++",
                    "-x",
                    "c++",
                    "-std=c++17",
                    "-O2",
                    "-fPIC",
                    "-shared",
                    str(HERE / "runtime.cpp"),
                    "-o",
                    built,
                ]
            )
            os.replace(built, CACHE / name)
    lib = ctypes.CDLL(str(CACHE / name), ctypes.RTLD_GLOBAL)
    lib.hb_run.restype = ctypes.c_char_p
    lib.hb_first_unwritten.restype = ctypes.c_int64
    lib.hb_count.restype = lib.hb_accesses.restype = ctypes.c_uint64
    return lib


def _guarded(ir: str) -> str:
    """The IR with a guard zone behind every threadgroup variable and a table of them, `hb_table`."""
    table = []

    def widen(m: re.Match[str]) -> str:
        table.append((m["name"], m["type"]))
        return f"@{m['name']} = global {{ {m['type']}, [{GUARD_BYTES} x i8] }} undef, align 16"

    ir = _VARIABLE.sub(widen, ir)
    if re.search(r"^@\S+ = internal (?:unnamed_addr )?global ", ir, re.M):
        raise MetalCompileError("a threadgroup variable of a shape the harness does not know")
    rows = []
    for i, (name, type_) in enumerate(table):
        label = f"{name}\\00"
        ir += f'\n@hb_label{i} = private constant [{len(name) + 1} x i8] c"{label}"'
        size = f"i64 ptrtoint (ptr getelementptr ({type_}, ptr null, i32 1) to i64)"
        rows.append(f"{{ ptr, ptr, i64 }} {{ ptr @hb_label{i}, ptr @{name}, {size} }}")
    kind = f"[{len(rows)} x {{ ptr, ptr, i64 }}]"
    ir += f"\n@hb_count = constant i64 {len(rows)}\n@hb_table = constant {kind} [{', '.join(rows)}]\n"
    return ir


_BYTES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8, "i128": 16}
_TRACED = (1, 2, 4, 8, 16)


def _all_checked(ir: str) -> None:
    """MetalCompileError when the optimiser left an access that no check sees: a block copy, or a
    width that is not traced.
    """
    for m in re.finditer(r"= load (?:volatile )?(<(\d+) x (\w+)>|\w+), ptr|store (?:volatile )?(<(\d+) x (\w+)>|\w+) ", ir):
        kind, count, element = (m[1], m[2], m[3]) if m[1] else (m[4], m[5], m[6])
        if _BYTES.get(element or kind, 0) * int(count or 1) not in _TRACED:
            raise MetalCompileError(f"an access of type {kind}, whose width is not checked; read two, four, or one at a time")
    for body in re.split(r"^define ", ir, flags=re.M)[1:]:
        own = set(re.findall(r"(%[\w.]+) = alloca ", body)) | set(re.findall(r"@__const\S*", body))
        own |= {m[1] for m in re.finditer(r"(%[\w.]+) = getelementptr .*?, ptr (%[\w.]+)", body) if m[2] in own}
        for copy in re.findall(r"call void @llvm\.mem(?:cpy|set|move)\S*\(.*\)", body):
            if not all(p in own for p in re.findall(r"ptr .*?([%@][\w.$]+)", copy)):
                raise MetalCompileError(f"a block copy that is not checked: {copy}")


class Library:
    """A compiled source."""

    def __init__(self, source: str, path: Path) -> None:
        self.kernels: dict[str, Signature] = signatures(source)
        self.counts: dict[str, int] = {}
        self._runtime = _runtime()
        self._lib = ctypes.CDLL(str(path))
        self._segments = [
            (int(low, 16), int(high, 16), permissions)
            for low, high, permissions in re.findall(
                rf"^(\w+)-(\w+) (\S+) .*{re.escape(path.name)}$", Path("/proc/self/maps").read_text(), re.M
            )
        ]
        count = ctypes.c_int64.in_dll(self._lib, "hb_count").value
        rows = (ctypes.c_uint64 * (3 * count)).in_dll(self._lib, "hb_table")
        self._variables = [(ctypes.string_at(rows[3 * i]), rows[3 * i + 1], rows[3 * i + 2]) for i in range(count)]

    def threadgroup_bytes(self, name: str) -> int:
        """Bytes of a kernel's threadgroup variables."""
        return sum(size for _, _, size in self._of(name))

    def _of(self, kernel: str) -> list[tuple[bytes, int, int]]:
        prefix = f"_ZZ{len(kernel)}{kernel}".encode()
        return [v for v in self._variables if v[0].startswith(prefix)]

    def run(
        self,
        name: str,
        arguments: Sequence[Any],
        grid: Sequence[int],
        group: Sequence[int],
        *,
        flush: bool = True,
        may_leave: Sequence[str] = (),
    ) -> None:
        """Run a grid of threads.

        arguments    arrays for pointers (written in place where the kernel writes), ints or lists
                     of ints for `constant` values
        flush        float32 subnormals count as zero, as on the GPU
        may_leave    outputs of which some bytes may stay unwritten; every byte of the others must
                     have been written
        Raises MetalFaultError with the first fault.
        """
        signature = self.kernels[name]
        grid, group = [*grid, 1, 1][:3], [*group, 1, 1][:3]
        if np.prod(group) > MAX_THREADS or min(*grid, *group) < 1:
            raise MetalFaultError(
                f"{name}: grid {grid}, group {group}; groups have 1 to {MAX_THREADS} threads, grids at least one"
            )
        if self.threadgroup_bytes(name) > MAX_THREADGROUP_BYTES:
            raise MetalFaultError(
                f"{name}: {self.threadgroup_bytes(name)} bytes of threadgroup memory; {MAX_THREADGROUP_BYTES} is all"
            )
        if len(arguments) != len(signature.buffers):
            raise MetalFaultError(f"{name} takes {len(signature.buffers)} buffers, {len(arguments)} given")
        runtime = self._runtime
        variables = [v for v in self._variables if v[2]]
        low = min((address for _, address, _ in variables), default=0)
        high = max((address + size + GUARD_BYTES for _, address, size in variables), default=0)
        runtime.hb_begin(ctypes.c_void_p(low), ctypes.c_void_p(high))
        keep: list[Any] = []
        named: list[tuple[str, int]] = []
        outputs: list[tuple[np.ndarray, np.ndarray, bytes]] = []
        addresses = (ctypes.c_uint64 * max(1, len(arguments)))()
        for low, high, permissions in self._segments:
            if permissions.startswith("r-"):
                self._region(keep, b"program constants", low, high - low, 0, 0)
        for i, (p, value) in enumerate(zip(signature.buffers, arguments, strict=True)):
            label = p.name.encode()
            raw = np.ascontiguousarray(value if isinstance(value, np.ndarray) else np.asarray(value, np.int64))
            # A copy between guard zones, the bytes around it nobody's, beginning as far from a
            # multiple of 16 as the array does.
            area = np.full(raw.nbytes + 2 * GUARD_BYTES, 0xA5, np.uint8)
            start = -area.ctypes.data % 16 + GUARD_BYTES // 2 + raw.ctypes.data % 16
            held = area[start : start + raw.nbytes]
            held[:] = raw.reshape(-1).view(np.uint8)
            written = p.space == "device" and not p.const
            if written:
                held[:] = 0xFF
                outputs.append((value, held, label))
            keep.append(area)
            self._region(keep, label, held.ctypes.data if raw.nbytes else area.ctypes.data, raw.nbytes, written, 0)
            addresses[i] = held.ctypes.data if raw.nbytes else area.ctypes.data
            named.append((p.name, addresses[i]))
        for label, address, size in self._of(name):
            short = re.fullmatch(rb".*E\d+([A-Za-z_]\w*)", label)
            self._region(keep, short[1] if short else label, address, size, 1, 1)
            named.append(((short[1] if short else label).decode(), address))
        entry = ctypes.cast(getattr(self._lib, f"hb_call_{name}"), ctypes.c_void_p)
        fault = runtime.hb_run(
            entry,
            addresses,
            ctypes.c_size_t(len(addresses)),
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*group),
            int(flush),
        )
        if fault is not None:
            raise MetalFaultError(f"{name}: {fault.decode()}")
        self.counts = self._counted(named)
        for value, held, label in outputs:
            at = runtime.hb_first_unwritten(ctypes.c_void_p(held.ctypes.data)) if held.size else -1
            if at >= 0 and label.decode() not in may_leave:
                raise MetalFaultError(f"{name}: byte {at} of the output {label.decode()} was never written")
            value.reshape(-1).view(np.uint8)[:] = held

    def _counted(self, regions: Sequence[tuple[str, int]]) -> dict[str, int]:
        """What the threads of the last run did together: barriers and matrix products they took
        part in, accesses by name.
        """
        runtime = self._runtime
        out = {name: runtime.hb_count(i) for i, name in enumerate(("threadgroup_barrier", "simdgroup_barrier", "matrix product"))}
        for name, address in regions:
            for what, writes in (("reads", 0), ("writes", 1)):
                out[f"{name} {what}"] = out.get(f"{name} {what}", 0) + runtime.hb_accesses(ctypes.c_void_p(address), writes)
        return out

    def _region(self, keep: list[Any], label: bytes, address: int, size: int, writable: int, shared: int) -> None:
        text = ctypes.create_string_buffer(label)
        keep.append(text)
        self._runtime.hb_region(text, ctypes.c_void_p(address), ctypes.c_size_t(size), int(writable), int(shared))


@functools.cache
def compile_source(source: str) -> Library:
    """Compile MSL text as Apple's compiler would take it.

    Raises MetalCompileError with clang's message, or the lint's for what clang takes and MSL does
    not.
    """
    check_source(source)
    name = f"{hashlib.sha256((_tools() + source).encode()).hexdigest()[:24]}.so"
    with _building(name) as scratch:
        if scratch is not None:
            runtime = _runtime()._name
            text = source + "\n" + "".join(s.entry() for s in signatures(source).values())
            (scratch / "k.metal").write_text(text)
            _invoke([*FRONT, "-I", str(HERE / "include"), str(scratch / "k.metal"), "-o", str(scratch / "k.ll")])
            (scratch / "g.ll").write_text(_guarded((scratch / "k.ll").read_text()))
            _invoke([*BACK, str(scratch / "g.ll"), "-o", str(scratch / "o.ll")])
            _all_checked((scratch / "o.ll").read_text())
            _invoke([*CODE, str(scratch / "o.ll"), "-x", "none", runtime, "-o", str(scratch / name)])
            os.replace(scratch / name, CACHE / name)
    return Library(source, CACHE / name)
