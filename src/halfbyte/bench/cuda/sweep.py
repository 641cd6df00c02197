"""Times of every schedule of the CUDA product over shapes (small k, wide n, many groups) and
numbers of tokens by their residues, and the schedule that `linear` chooses.

    fragments              codes decoded in registers, for few tokens
    fused                  the same for many tokens, wgmma's register operand (compute
                           capability 9.0)
    dequantize_then_gemm   the weight decoded to a dense one, then cuBLAS
    cuBLAS float16         a dense weight in memory: the peer

Protocol: that of `bench.cuda.linear`. Each measurement is one CUDA graph of as many calls as there
are weights, together past the last-level cache; float16 activations. Kernels are compiled by
several processes before anything is timed.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..cpu.sweep import ByTokens, Case, Line, table
from ..records import Record, rates
from ..weights import random_weight

CASES = (
    Case("square", "int4:g128", 4096, 4096),
    Case("small k", "int4:g128", 4096, 512),
    Case("small k, twice that", "int4:g128", 4096, 1024),
    Case("wide n", "int4:g128", 65536, 1024),
    Case("long k", "int4:g128", 4096, 14336),
    Case("few outputs", "int4:g128", 512, 4096),
    Case("many groups", "int4:g32", 4096, 4096),
    Case("many groups, E4M3 scales", "nvfp4", 4096, 4096),
    Case("eight bits", "q8_0", 4096, 4096),
)


def residues(most: int) -> tuple[int, ...]:
    """Numbers of tokens up to `most`: every power of two, its neighbours, the middle between it and
    the next, and ragged ones: m modulo the width of any tile is 0, 1, a half, one less, or none of
    these.
    """
    near = {p + d for b in range(most.bit_length()) for p in (1 << b,) for d in (-1, 0, 1, p // 2)}
    return tuple(sorted(m for m in near | {3, 7, 100, 200, 777, 1500, 3001} if 1 <= m <= most))


TOKENS = residues(4096)
FRAGMENTS, FUSED, DENSE, CUBLAS = "fragments", "fused", "dequantize_then_gemm", "cuBLAS float16"
MOST_FRAGMENT_TOKENS = 256
"""Most tokens for which the fragment kernel is timed: it reads the weight once for every 64."""
MOST_WEIGHTS = 256
"""Copies of a small weight: of 1 MB each they exceed the cache."""
DEVICE = "cuda"
HEADS = (
    "why", "format", "weight", "m", "fragments, us", "fused, us", "dequantize, us", "cuBLAS, us", "linear takes", "of cuBLAS",
    "of fastest",
)  # fmt: skip
"""Headings of `row_of`; `of cuBLAS` and `of fastest`: the time of what `linear` takes over cuBLAS',
and over our fastest.
"""

Job = tuple[str, int, int, int, str]
"""Codec, n, k, m and schedule."""


def served(x: Any, w: Any) -> dict[str, Callable[[], Any]]:
    """The schedules that take x (m, k) and a weight, each as a call."""
    from ...backends.cuda import launch
    from ...backends.cuda.wgmma import schedule as fused

    out: dict[str, Callable[[], Any]] = {}
    if w.fragments and len(x) <= MOST_FRAGMENT_TOKENS:
        out[FRAGMENTS] = partial(launch.fragments, x, w, None)
    if fused.refusal(x, w) is None:
        out[FUSED] = partial(fused.fused, x, w, None)
    return {**out, DENSE: partial(launch.dense_matmul, x, w, None)}


def jobs_for(cases: Sequence[Case], tokens: Sequence[int]) -> list[Job]:
    """One job for every kernel of a sweep. m and n are part of a kernel through its tile alone; k
    is no part of the fused kernel.
    """
    import torch

    from ...backends.cuda.weight import to_device

    jobs: dict[Any, Job] = {}
    for case in cases:
        one = to_device(random_weight(case.codec, 16, case.k, 0), DEVICE)
        for m in tokens:
            for schedule in served(torch.empty(m, case.k, dtype=torch.float16, device=DEVICE), one):
                tile = _tile(schedule, one, case.n, m)
                for part in tile if schedule == FUSED else (tile,):
                    key = case.codec, None if schedule == FUSED else case.k, schedule, part
                    jobs.setdefault(key, (case.codec, case.n, case.k, m, schedule))
    return list(dict.fromkeys(jobs.values()))


def _tile(schedule: str, w: Any, n: int, m: int) -> Any:
    """The tile of a schedule for m tokens and n outputs of a weight like w."""
    import torch

    from ...backends.cuda import device as gpu
    from ...backends.cuda import launch
    from ...backends.cuda.tuning.mma_tiles import fragment_tile
    from ...backends.cuda.wgmma.schedule import steps_for

    card = gpu.card_name(torch.device(DEVICE))
    if schedule == FRAGMENTS:
        return fragment_tile(w.fragments, n, launch.tile_tokens(w, n, m), launch.family_of(w), card)
    if schedule != FUSED:
        return None
    return tuple(step.tile for step in steps_for(m, replace(w, shape=(n, w.shape[-1])), True))


def compile_one(job: Job) -> None:
    """Compile a job's kernel into Triton's cache, on a weight of few rows with the tile of many."""
    import torch

    from ...backends.cuda import launch
    from ...backends.cuda.weight import to_device
    from ...backends.cuda.wgmma import schedule as fused
    from .timing import UNFIT

    codec, n, k, m, schedule = job
    w = to_device(random_weight(codec, 256, k, 0), DEVICE)
    x = torch.zeros(min(m, 64), k, device=DEVICE, dtype=torch.float16)
    tile = _tile(schedule, w, n, m)
    try:
        if schedule == FRAGMENTS:
            launch.fragments(x, w, None, tile)
        elif schedule == FUSED:
            for one in tile:
                fused.fused(x, w, None, one)
        else:
            launch.dequantize(w, x.dtype)
    except UNFIT:  # reported when it is timed
        return


def sweep(cases: Sequence[Case] = CASES, tokens: Sequence[int] = TOKENS, *, jobs: int = 8) -> Iterator[Record]:
    """The limits, then for each case and m a record "time" of the schedule that `linear` chooses,
    and a record "sweep" with `time_us` of each schedule that takes the shape, `taken`, the chosen
    one, and `fastest`.
    """
    import triton

    import torch

    from ...backends.cuda import CUDABackend
    from ...backends.cuda.weight import nbytes, to_device
    from . import timing

    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.map(compile_one, jobs_for(cases, tokens), chunksize=1)
    limit: Record = {
        "record": "limits",
        "device": "cuda",
        "name": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gflops_of": "bfloat16 product",
        **timing.limits(),
    }
    yield limit
    common = {"op": "linear", "device": "cuda", "dtype": "float16"}
    peer: dict[tuple[int, int], dict[int, float]] = {}
    for case in cases:
        shape = case.n, case.k
        xs = {m: torch.randn(m, case.k, device=DEVICE, dtype=torch.float16) for m in tokens}
        if shape not in peer:
            peer[shape] = _dense_times(xs, case.n)
        one = to_device(random_weight(case.codec, *shape, 0), DEVICE)
        size = nbytes(one)
        ws = timing.copies(one, _count(size))
        for m, x in xs.items():
            times = {}
            for schedule in served(x, one):
                try:
                    times[schedule] = timing.graph_time_us([served(x, w)[schedule] for w in ws], 5)
                except timing.UNFIT as error:
                    print(f"{schedule} is left out at {case.n}x{case.k}, m = {m}: {error}", file=sys.stderr)
            taken, base = CUDABackend.schedule_of(x, one), peer[shape][m]
            about = {**common, "m": m, "n": case.n, "k": case.k, "format": str(one.format), "bits": 8 * size / (case.n * case.k)}
            if taken in times:
                ours = {"peer": "halfbyte", "kind": "half", "schedule": taken, "ratio": times[taken] / base, "best_peer": CUBLAS}
                yield rates({"record": "time", **about, **ours}, size, times[taken] / 1e6, limit)
            fastest = min(times, key=lambda s: times[s])
            yield {
                "record": "sweep",
                "why": case.why,
                **about,
                "taken": taken,
                "fastest": fastest,
                "time_us": {**times, CUBLAS: base},
            }
        del ws, one


def _count(size: float) -> int:
    """Number of weights of so many bytes that together exceed the cache."""
    from .timing import ROTATE_BYTES

    return max(4, min(MOST_WEIGHTS, int(ROTATE_BYTES // size) + 1))


def _dense_times(xs: dict[int, Any], n: int) -> dict[int, float]:
    """Microseconds of cuBLAS for each m."""
    import torch

    from . import timing

    k = next(iter(xs.values())).shape[1]
    ws = [torch.randn(n, k, device=DEVICE, dtype=torch.float16) for _ in range(_count(2 * n * k))]
    return {m: timing.graph_time_us([partial(torch.nn.functional.linear, x, w) for w in ws], 5) for m, x in xs.items()}


def of_cublas(r: Record) -> float:
    """Time of what `linear` takes over cuBLAS' in a record `sweep`; 0 where it was not timed."""
    us = r["time_us"]
    return float(us[r["taken"]] / us[CUBLAS]) if r["taken"] in us else 0.0


def row_of(r: Record) -> list[str]:
    """One record `sweep` as cells under `HEADS`."""
    us, taken = r["time_us"], r["taken"]
    times = [f"{us[s]:,.1f}" if s in us else "" for s in (FRAGMENTS, FUSED, DENSE, CUBLAS)]
    ratios = [f"{us[taken] / us[s]:.2f}" if taken in us else "" for s in (CUBLAS, r["fastest"])]
    return [r["why"], r["format"], f"{r['n']}x{r['k']}", str(r["m"]), *times, taken, *ratios]


def markdown(records: Sequence[Record]) -> Iterator[str]:
    """Lines a case: the microseconds of each schedule and their ratio to cuBLAS, what `linear`
    takes in bold; then its time over that of our fastest.
    """
    from ..tables import limits_line

    for r in records:
        if r["record"] == "limits":
            yield from (limits_line(r) + ".", "")

    def lines(mine: ByTokens) -> Iterator[Line]:
        one = next(iter(mine.values()))
        about = [one["why"], f"`{one['format']}`", f"{one['n']}x{one['k']}"]
        for schedule in (FRAGMENTS, FUSED, DENSE, CUBLAS):
            cells = {m: _cell(r, schedule) for m, r in mine.items() if schedule in r["time_us"]}
            if cells:
                yield [*about, schedule], cells
                about = ["", "", ""]
        yield [*about, "`linear` / fastest"], {m: row_of(r)[-1] for m, r in mine.items()}

    yield from table(records, ("us · of cuBLAS", "format", "weight", "schedule"), lines)


def _cell(r: Record, schedule: str) -> str:
    us = r["time_us"]
    if schedule == CUBLAS:
        return f"{us[CUBLAS]:,.1f}"
    text = f"{us[schedule]:,.1f} · {us[schedule] / us[CUBLAS]:.2f}"
    return f"**{text}**" if schedule == r["taken"] else text
