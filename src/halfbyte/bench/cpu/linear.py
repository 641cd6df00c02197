"""`linear` on the CPU and its peers, interleaved in one run: medians, ratios, and fractions of
limits measured in the same run.

Protocol. Contenders are called alternately, one weight each, so that a change of the machine's
speed affects all of them. Every contender has distinct random weights, at least `LEAST_WEIGHTS`,
and so many that between two uses of one weight at least `ROTATE_BYTES` of others and three times
the last cache are read. Every call runs once before any is timed (a peer may compile or pack then).
The result is the median.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import ops
from ...backends import Prepared, backend_named
from ...errors import BackendError
from ..records import Record, rates, with_ratios
from ..weights import random_weight
from .limits import Clock, last_cache_bytes, limits, machine_name
from .peers.base import F32, Calls, Peer, Ready

ROTATE_BYTES = 256e6
LEAST_WEIGHTS = 3
PATIENCE = 3.0
"""After so many seconds of timed calls a contender is called once a round."""
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
"""`wall` for a quiet machine; `processor`, the processor time of this process, for one thread on a
machine where others run.
"""


@dataclass(frozen=True)
class Contender:
    """One line of the table: the product, the bytes it reads, its calls for an x."""

    fields: dict[str, Any]
    nbytes: float
    ready: Ready


def ours(codec: str, n: int, k: int, modes: Sequence[str], backend: str, count: int) -> list[Contender]:
    """halfbyte's product in each mode of activations, on the same weights. Each mode starts at
    another weight, as far from the others as possible, so that none finds its weight in the cache.
    """
    weights = [ops.prepare(random_weight(codec, n, k, i), backend=backend) for i in range(count)]

    def ready(mode: str) -> Ready:
        start = modes.index(mode) * count // len(modes)
        order = weights[start:] + weights[:start]

        def call(w: Prepared, x: F32) -> Callable[[], Any]:
            return lambda: ops.linear(x, w, activations=mode)

        return lambda x: [call(w, x) for w in order]

    first = weights[0]
    common = {"peer": "halfbyte", "format": str(first.format), "backend": backend, "bits": first.bits_per_weight}
    return [Contender({**common, "activations": mode, "kind": mode}, first.nbytes, ready(mode)) for mode in modes]


def peer_contender(peer: Peer, weights: list[F32], threads: int) -> Contender:
    """A peer's product over dense random weights, which it packs itself."""
    n, k = weights[0].shape
    fields = {"peer": peer.name, "format": peer.name, "activations": peer.kind, "kind": peer.kind, "bits": peer.bits}
    return Contender(fields, n * k * peer.bits / 8, peer.pack(weights, threads))


def contenders_for(
    n: int, k: int, codecs: Sequence[str], peers: Sequence[Peer], modes: Sequence[str], backend: str, threads: int
) -> list[Contender]:
    """All contenders for a shape, peers first."""
    own = [ops.prepare(random_weight(codec, n, k, 0), backend=backend).nbytes for codec in codecs]
    turn = sum(n * k * p.bits / 8 for p in peers) + sum(own) * len(modes)
    count = max(LEAST_WEIGHTS, math.ceil(len(modes) * max(ROTATE_BYTES, 3 * last_cache_bytes()) / max(1.0, turn)))
    out: list[Contender] = []
    if peers:
        dense = [(np.random.default_rng(i).standard_normal((n, k), np.float32) * np.float32(0.03)) for i in range(count)]
        out += [peer_contender(p, dense, threads) for p in peers]
    for codec in codecs:
        out += ours(codec, n, k, modes, backend, count)
    return out


def race(calls: Sequence[Calls], rounds: int, seconds: float = 0.0, clock: Clock = time.perf_counter) -> list[float]:
    """Median seconds a call for each contender, called alternately for at least `rounds` rounds and
    `seconds` seconds.
    """
    times: list[list[float]] = [[] for _ in calls]
    for weights in calls:
        for call in weights:
            call()
    longest = max(len(weights) for weights in calls)
    start, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - start < seconds:
        for i in range(longest):
            for weights, mine in zip(calls, times, strict=True):
                if i and sum(mine) > PATIENCE:
                    continue
                call = weights[i % len(weights)]
                before = clock()
                call()
                mine.append(clock() - before)
        done += 1
    return [statistics.median(t) for t in times]


def bench(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    codecs: Sequence[str],
    peers: Sequence[Peer],
    *,
    threads: int = 1,
    activations: Sequence[str] = ("exact", "int8"),
    backend: str = "cpu",
    rounds: int = 3,
    seconds: float = 0.0,
    clock: str = "wall",
) -> Iterator[Record]:
    """One record for each contender, shape and m, with the keys of `records`; the first record is
    the limits.
    """
    chosen = backend_named(backend)
    why = chosen.reason()
    if why:
        raise BackendError(f"[bench] backend {backend!r} cannot run here: {why}")
    if backend == "cpu":
        from ...backends.cpu import set_threads

        set_threads(threads)
    common = {"op": "linear", "device": "cpu", "threads": threads, "clock": clock}
    name = f"{machine_name()}, {chosen.describe() or backend}"
    limit: Record = {"record": "limits", **common, "name": name, **limits(threads, CLOCKS[clock])}
    yield limit
    for n, k in shapes:
        field = contenders_for(n, k, codecs, peers, activations, backend, threads)
        for m in tokens:
            x = np.random.default_rng(9).standard_normal((m, k)).astype(np.float32)
            medians = race([c.ready(x) for c in field], rounds, seconds, CLOCKS[clock])
            records = [
                rates({"record": "time", **common, **c.fields, "m": m, "n": n, "k": k}, c.nbytes, s, limit)
                for c, s in zip(field, medians, strict=True)
            ]
            yield from with_ratios(records)
        del field
