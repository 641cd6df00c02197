"""linear on the CPU beside its peers: one run, interleaved, medians, ratios, fractions of limits measured in the same run.

Protocol. Each contender has as many distinct random weights as together pass the last-level cache several times
(`ROTATE_BYTES` for small m); one round calls every contender once a weight, in turn, so that a change of the machine's speed
meets all of them; the median over rounds and weights counts. The limits are the best of several read loops and a float32
matrix product of NumPy's BLAS.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import ops
from ..backends import Prepared, backend_named
from .peers import Calls, Peer
from .weights import random_weight

ROTATE_BYTES = 256e6
LEAST_WEIGHTS = 3


@dataclass(frozen=True)
class Limits:
    """What this machine can do, measured now: GB/s read, GFLOP/s of a float32 product, both on the threads of the run."""

    read_gbps: float
    gflops: float


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_gbps(threads: int, nbytes: int = 1 << 28) -> float:
    """Bytes a second of the best of three read loops over `nbytes`, split among threads (they release the GIL)."""
    floats = np.random.default_rng(0).random(nbytes // 4, dtype=np.float32)
    parts = np.array_split(floats, threads)
    loops: list[Callable[[Any], Any]] = [
        lambda p: np.dot(p, p),
        lambda p: np.add.reduce(p.view(np.int32)),
        lambda p: np.maximum.reduce(p.view(np.int32)),
    ]

    def run(loop: Callable[[Any], Any]) -> float:
        workers = [threading.Thread(target=loop, args=(p,)) for p in parts]

        def together() -> None:
            for w in workers:
                w.start()
            for w in workers:
                w.join()

        return _timed(together)

    return max(nbytes / min(run(loop) for _ in range(5)) / 1e9 for loop in loops)


def limits(threads: int) -> Limits:
    """Measure both limits. NumPy's BLAS takes its thread count from the environment at import, so the product is of all."""
    a = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
    b = a.T.copy()
    best = min(_timed(lambda: a @ b) for _ in range(7))
    return Limits(read_gbps(threads), 2 * 1024**3 / best / 1e9)


@dataclass(frozen=True)
class Contender:
    """One line of the table: what runs, what it reads, its calls."""

    fields: dict[str, Any]
    nbytes: int
    calls: Calls


def ours(codec: str, n: int, k: int, x: Any, activations: str, backend: str, count: int | None) -> Contender:
    """halfbyte's own product, `count` weights or as many as pass the cache."""
    first = ops.prepare(random_weight(codec, n, k, 0), backend=backend)
    total = count or max(LEAST_WEIGHTS, int(ROTATE_BYTES // max(1, first.nbytes)) + 1)
    held = [first, *(ops.prepare(random_weight(codec, n, k, i), backend=backend) for i in range(1, total))]

    def call(w: Prepared) -> Callable[[], Any]:
        return lambda: ops.linear(x, w, activations=activations)

    mode = {"activations": activations, "kind": activations}
    fields = {"peer": "halfbyte", "format": str(first.format), "backend": backend, "bits": first.bits_per_weight, **mode}
    return Contender(fields, first.nbytes, [call(w) for w in held])


def theirs(peer: Peer, n: int, k: int, x: Any, threads: int, count: int | None) -> Contender:
    """A peer's product over dense random weights, which it packs itself."""
    nbytes = int(n * k * peer.bits / 8)
    total = count or max(LEAST_WEIGHTS, int(ROTATE_BYTES // nbytes) + 1)
    weights = [(np.random.default_rng(i).standard_normal((n, k)) * 0.03).astype(np.float32) for i in range(total)]
    calls = peer.calls(weights, x, threads)
    fields = {"peer": peer.name, "format": peer.name, "activations": peer.kind, "kind": peer.kind, "bits": peer.bits}
    return Contender(fields, nbytes, calls)


def race(contenders: list[Contender], rounds: int) -> list[float]:
    """Median seconds a call for each contender, all of them called in turn in every round."""
    times: list[list[float]] = [[] for _ in contenders]
    for c in contenders:
        c.calls[0]()  # the first call may compile or allocate
    longest = max(len(c.calls) for c in contenders)
    for _ in range(rounds):
        for i in range(longest):
            for c, held in zip(contenders, times, strict=True):
                held.append(_timed(c.calls[i % len(c.calls)]))
    return [statistics.median(t) for t in times]


def bench(
    shapes: list[tuple[int, int]],
    tokens: list[int],
    codecs: list[str],
    peers: list[Peer],
    *,
    threads: int = 1,
    activations: tuple[str, ...] = ("exact", "int8"),
    backend: str = "cpu",
    rounds: int = 3,
) -> Iterator[dict[str, Any]]:
    """One record a contender, shape and m, in the field's words; the first record holds the limits.

    ratio     our time over the best peer's of the same kind and bits within 5 %, from the same rounds; absent without such a peer
    fraction  of the read limit for m ≤ 8 in the format's own bytes, of the float32 product beyond
    """
    os.environ["HALFBYTE_THREADS"] = str(threads)
    chosen = backend_named(backend)
    why = chosen.reason()
    if why:
        from ..errors import BackendError

        raise BackendError(f"[bench] backend {backend!r} cannot run here: {why}")
    limit = limits(threads)
    common = {"op": "linear", "device": "cpu", "threads": threads}
    yield {"record": "limits", **common, "read_gbps": limit.read_gbps, "gflops": limit.gflops, "name": chosen.describe()}
    for n, k in shapes:
        for m in tokens:
            x = np.random.default_rng(9).standard_normal((m, k)).astype(np.float32)
            count = None if m <= 8 else LEAST_WEIGHTS
            field = [theirs(p, n, k, x, threads, count) for p in peers]
            field += [ours(codec, n, k, x, mode, backend, count) for codec in codecs for mode in activations]
            seconds = race(field, rounds)
            for c, s in zip(field, seconds, strict=True):
                gbps = c.nbytes / s / 1e9
                gflops = 2 * m * n * k / s / 1e9
                fraction = gbps / limit.read_gbps if m <= 8 else gflops / limit.gflops
                record = {"record": "time", **common, **c.fields, "m": m, "n": n, "k": k, "time_us": s * 1e6, "gbps": gbps,
                          "gflops": gflops, "fraction": fraction}  # fmt: skip
                rivals = [
                    t for o, t in zip(field, seconds, strict=True)
                    if o.fields["peer"] != "halfbyte" and o.fields["kind"] == c.fields["kind"]
                    and abs(o.fields["bits"] / c.fields["bits"] - 1) <= 0.05
                ]  # fmt: skip
                if c.fields["peer"] == "halfbyte" and rivals:
                    record["ratio"] = s / min(rivals)
                yield record
            del field
