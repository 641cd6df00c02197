"""Limits of this CPU, measured on the threads of the run: bytes read, float32 fused multiply-adds
and 8-bit products, a second.

Loops of the native core in the instruction set in use; without it, NumPy's reductions and its BLAS'
float32 product.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.cpu import aligned_empty
from ..records import Record

Clock = Callable[[], float]
READ_BYTES = 1 << 28
"""Least number of bytes of one read; it is also at least three times the last cache."""
SECONDS = 0.05
"""Seconds of one loop of arithmetic; the result is the best of nine."""


def machine_name() -> str:
    """`AMD EPYC`, `Intel(R) Xeon(R) Platinum 8480C`, or what the platform calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def last_cache_bytes() -> int:
    """Size of the largest cache that the system reports, 0 where it reports none."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        sizes.append(int(digits) * unit if digits.isdigit() else 0)
    return max(sizes)


def parallel_rate(loops: Sequence[Callable[[], float]], clock: Clock = time.perf_counter) -> float:
    """Work a second of loops that run at the same time, one a thread, and return the work they did;
    the best of nine.
    """

    def once() -> float:
        done = [0.0] * len(loops)

        def run(i: int) -> None:
            done[i] = loops[i]()

        workers = [threading.Thread(target=run, args=(i,)) for i in range(1, len(loops))]
        start = clock()
        for w in workers:
            w.start()
        run(0)
        for w in workers:
            w.join()
        return sum(done) / (clock() - start)

    return max(once() for _ in range(9))


def limits(threads: int, clock: Clock = time.perf_counter) -> Record:
    """read_gbps, gflops (float32, a product and a sum are two) and gops (8-bit products, likewise)."""
    from ...backends.cpu import native
    from ...errors import BackendError

    try:
        core = native()
    except BackendError:
        return _numpy_limits(_memory(), threads, clock)
    # Pairs of equal bytes times 1 and −1: products of ordinary size whose sums stay small.
    operands = aligned_empty(512)
    operands[:256] = np.repeat(np.random.default_rng(1).integers(0, 128, 128, np.uint8), 2)
    operands[256:] = np.tile(np.array([1, 255], np.uint8), 128)

    def rate(kind: Any) -> float:
        rounds = 1000
        start = time.perf_counter()
        core.probe(kind, operands, rounds)
        rounds = max(1000, int(rounds * SECONDS / (time.perf_counter() - start)))
        return parallel_rate([lambda: float(core.probe(kind, operands, rounds))] * threads, clock)

    return {
        "read_gbps": read_gbps(threads, clock),
        "gflops": rate(core.Probe.fma) / 1e9,
        "gops": rate(core.Probe.dot) / 1e9,
    }


def _memory() -> NDArray[np.uint8]:
    """Random bytes that no cache holds."""
    memory = aligned_empty(max(READ_BYTES, 3 * last_cache_bytes()))
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
    return memory


def read_gbps(threads: int, clock: Clock = time.perf_counter) -> float:
    """10⁹ bytes that the native core reads a second from memory, on so many threads. BackendError
    where there is no native core.
    """
    from ...backends.cpu import native

    core = native()

    def reader(part: NDArray[np.uint8]) -> Callable[[], float]:
        return lambda: float(core.probe(core.Probe.read, part, 0))

    return parallel_rate([reader(p) for p in np.array_split(_memory(), threads)], clock) / 1e9


def _numpy_limits(memory: NDArray[np.uint8], threads: int, clock: Clock) -> Record:
    """The same by NumPy. Its BLAS reads the number of threads from the environment at import, so
    the product uses all of those.
    """

    def reader(part: NDArray[Any]) -> Callable[[], float]:
        def run() -> float:
            np.bitwise_or.reduce(part)
            return float(part.nbytes)

        return run

    a = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
    b = a.T.copy()

    def product() -> float:
        np.matmul(a, b)
        return 2.0 * 1024**3

    words = memory.view(np.int64)
    read = parallel_rate([reader(p) for p in np.array_split(words, threads)], clock)
    return {"read_gbps": read / 1e9, "gflops": parallel_rate([product], clock) / 1e9, "gops": 0.0, "gflops_of": "float32 product"}
