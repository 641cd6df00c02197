"""Times of every schedule of the CPU product over shapes: small k, few and many outputs, short
groups, one token to many.

    fused                  codes decoded in registers or one cache block at a time: what `linear`
                           does
    fused, int8            the same with activations rounded to 8 bits
    dequantize_then_gemm   the weight decoded to float32, then torch's product (NumPy's where
                           torch is missing)

Ratios are to `fused`, which is exact as the dense product is; int8 is given beside it. The protocol
is that of `bench.cpu.linear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from ... import ops
from ...backends import Prepared
from ..records import Record, rates
from ..weights import random_weight
from .limits import last_cache_bytes, limits, machine_name
from .linear import CLOCKS, LEAST_WEIGHTS, ROTATE_BYTES, race
from .peers.base import F32, Calls


class Case(NamedTuple):
    """One weight of the sweep, and what it represents."""

    why: str
    codec: str
    n: int
    k: int


CASES = (
    Case("square", "int4:g128", 4096, 4096),
    Case("small k", "int4:g128", 4096, 256),
    Case("few outputs", "int4:g128", 64, 4096),
    Case("wide n", "int4:g128", 32768, 1024),
    Case("long k", "int4:g128", 1024, 14336),
    Case("short groups", "nvfp4", 4096, 4096),
    Case("groups of 32", "q4_0", 4096, 4096),
    Case("two levels of scales", "q4_K", 4096, 4096),
    Case("three bits, two planes", "int3:g128", 4096, 4096),
    Case("eight bits", "q8_0", 4096, 4096),
    Case("a table, no whole numbers", "nf4:g64", 4096, 4096),
)
TOKENS = (1, 2, 4, 8, 16, 64, 256)
MOST_WEIGHTS = 64
"""Most copies of a small weight; making more would take longer than the sweep."""
FUSED, FUSED_INT8, DENSE = "fused", "fused, int8", "dequantize_then_gemm"
HEADS = ("why", "format", "weight", "m", "fused, us", "fused int8, us", "dense, us", "dense / fused", "int8 / fused")
"""Headings of `row_of`."""


def dense_product(threads: int) -> Callable[[F32, Prepared], Any]:
    """x · wᵀ by way of a dense float32 weight."""
    if find_spec("torch") is None:
        return lambda x, w: x @ ops.dequantize(w).T
    import torch

    torch.set_num_threads(threads)
    return lambda x, w: torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(ops.dequantize(w)))


def sweep(
    cases: Sequence[Case] = CASES, tokens: Sequence[int] = TOKENS, *, threads: int = 1, rounds: int = 3, clock: str = "wall"
) -> Iterator[Record]:
    """The limits, then for each case and m a record "sweep" with `time_us` of each schedule, and
    the records "time" of the fused ones.
    """
    from ...backends.cpu import native, set_threads

    native()  # its own sentence when it is not there
    set_threads(threads)
    common = {"op": "linear", "device": "cpu", "threads": threads, "clock": clock}
    limit: Record = {"record": "limits", **common, "name": machine_name(), **limits(threads, CLOCKS[clock])}
    yield limit
    dense = dense_product(threads)
    for case in cases:
        first = ops.prepare(random_weight(case.codec, case.n, case.k, 0), backend="cpu")
        touched = 2 * first.nbytes + 4 * case.n * case.k  # the dense weight passes through the caches too
        count = max(LEAST_WEIGHTS, math.ceil(max(ROTATE_BYTES, 3 * last_cache_bytes()) / touched))
        others = range(1, min(count, MOST_WEIGHTS))
        weights = [first, *(ops.prepare(random_weight(case.codec, case.n, case.k, i), backend="cpu") for i in others)]
        for m in tokens:
            x = np.random.default_rng(9).standard_normal((m, case.k)).astype(np.float32)
            medians = race(_schedules(x, weights, dense), rounds, 0.0, CLOCKS[clock])
            seconds = dict(zip((FUSED, FUSED_INT8, DENSE), medians, strict=True))
            shape = {"m": m, "n": case.n, "k": case.k, "format": str(first.format), "bits": first.bits_per_weight}
            for name, kind in ((FUSED, "exact"), (FUSED_INT8, "int8")):
                ours = {"peer": "halfbyte", "kind": kind, "activations": kind, "schedule": FUSED}
                yield rates({"record": "time", **common, **ours, **shape}, first.nbytes, seconds[name], limit)
            yield {"record": "sweep", **common, "why": case.why, **shape, "time_us": {s: t * 1e6 for s, t in seconds.items()}}
        del weights


def _schedules(x: F32, weights: list[Prepared], dense: Callable[[F32, Prepared], Any]) -> list[Calls]:
    def fused(w: Prepared, mode: str) -> Callable[[], Any]:
        return lambda: ops.linear(x, w, activations=mode)

    def by_way_of_dense(w: Prepared) -> Callable[[], Any]:
        return lambda: dense(x, w)

    # A dense weight is far larger than the cache, so a few are enough.
    few = [by_way_of_dense(w) for w in weights[:LEAST_WEIGHTS]]
    half = len(weights) // 2  # another half of the weights: none that the other mode left in the cache
    return [[fused(w, "exact") for w in weights], [fused(w, "int8") for w in weights[half:] + weights[:half]], few]


def row_of(r: Record) -> list[str]:
    """One record `sweep` as cells under `HEADS`."""
    us = r["time_us"]
    return [
        r["why"], r["format"], f"{r['n']}x{r['k']}", str(r["m"]), f"{us[FUSED]:,.0f}", f"{us[FUSED_INT8]:,.0f}",
        f"{us[DENSE]:,.0f}", f"{us[DENSE] / us[FUSED]:.2f}", f"{us[FUSED_INT8] / us[FUSED]:.2f}",
    ]  # fmt: skip


def markdown(records: Sequence[Record]) -> Iterator[str]:
    """One row for each case and one column for each m: dense / fused, then int8 / fused; above 1
    the fused schedule is faster.
    """

    def line(mine: ByTokens) -> Iterator[Line]:
        rows = {m: row_of(r) for m, r in mine.items()}
        why, word, weight, *_ = next(iter(rows.values()))
        yield [why, f"`{word}`", weight], {m: f"{row[-2]}, {row[-1]}" for m, row in rows.items()}

    yield from table(records, ("dense / fused, int8 / fused", "format", "weight"), line)


ByTokens = dict[int, Record]
"""The records of one case, by m."""
Line = tuple[list[str], dict[int, str]]
"""The first cells of a line, and its cell for each m."""


def table(records: Sequence[Record], heads: Sequence[str], lines: Callable[[ByTokens], Iterator[Line]]) -> Iterator[str]:
    """Records `sweep` as Markdown with a column an m: what `lines` makes of each case."""
    rows = [r for r in records if r["record"] == "sweep"]
    columns = sorted({r["m"] for r in rows})
    yield "| " + " | ".join([*heads, *(f"m = {m}" for m in columns)]) + " |"
    yield "|---" * (len(columns) + len(heads)) + "|"
    for why in dict.fromkeys(r["why"] for r in rows):
        for first, cells in lines({r["m"]: r for r in rows if r["why"] == why}):
            yield "| " + " | ".join([*first, *(cells.get(m, "") for m in columns)]) + " |"
