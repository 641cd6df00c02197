"""Timing of calls on an NVIDIA GPU: one CUDA graph of many calls over weights past the last-level
cache, and the card's own limits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources, PTXASError

import torch

from ...backends.cuda.weight import CudaWeight, synchronize

ROTATE_BYTES = 256e6
UNFIT = (OutOfResources, PTXASError)
"""What Triton raises for a tile that the card has no shared memory, threads or registers for."""


@triton.jit
def read_kernel(X, Y, BLOCK: tl.constexpr):
    """Reads X and, but for one sum that does not occur, writes nothing."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    s = tl.sum(tl.load(X + o), 0)
    if s == 123456789:
        tl.store(Y, s)


def lane_order() -> bool:
    """Whether weights lie in lane order here (`weight.to_device`)."""
    return torch.cuda.is_available()


def graph_time_us(calls: list[Callable[[], Any]], replays: int = 9) -> float:
    """Median microseconds a call over replays of one CUDA graph of all calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for c in calls[:2]:
            c()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls:
            c()
    graph.replay()
    times = []
    for _ in range(replays):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    del graph
    return statistics.median(times)


def limits() -> dict[str, float]:
    """Measured read and copy bandwidth, GB/s, and GFLOP/s of a large bfloat16 product."""
    n = 1 << 29
    x = torch.randint(0, 1 << 30, (n,), device="cuda", dtype=torch.int32)
    y = torch.zeros(4, device="cuda", dtype=torch.int32)
    read = max(
        4 * n / graph_time_us([partial(read_kernel[(n // b,)], x, y, BLOCK=b, num_warps=w)] * 2) / 1e3
        for b in (2048, 4096, 8192)
        for w in (4, 8)
    )
    z = torch.empty_like(x)
    copy = 8 * n / graph_time_us([partial(z.copy_, x)] * 2) / 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / graph_time_us([partial(torch.matmul, a, b)] * 4) / 1e3
    return {"read_gbps": read, "copy_gbps": copy, "gflops": product}


FIELDS = ("scales", "addend", "super_scales", "super_mins", "global_scale")


def copies(w: CudaWeight, count: int) -> list[CudaWeight]:
    """`count` weights with other bits: the bit planes are rolled, so every byte is at another
    address.
    """
    out = [w]
    for i in range(1, count):
        others: dict[str, Any] = {f: None if getattr(w, f) is None else getattr(w, f).clone() for f in FIELDS}
        out.append(replace(w, planes={b: torch.roll(p, 17 * i) for b, p in w.planes.items()}, **others))
    synchronize("cuda")
    return out


def stack_of(w: CudaWeight, count: int) -> CudaWeight:
    """A stack of `count` weights with other bits."""
    some = copies(w, count)
    planes = {b: torch.stack([one.planes[b] for one in some]) for b in w.planes}
    others: dict[str, Any] = {
        f: None if getattr(w, f) is None else torch.stack([getattr(one, f) for one in some]) for f in FIELDS
    }
    synchronize("cuda")
    return replace(w, shape=(count, *w.shape), planes=planes, **others)
