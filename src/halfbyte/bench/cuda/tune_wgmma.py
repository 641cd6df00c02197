"""The fastest tiles of the fused schedule for shapes and tokens on a Hopper card, as entries of
backends/cuda/tuning/table.py.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...backends.cuda.tuning.table import Entry
from ...backends.cuda.tuning.wgmma_model import candidates as modelled
from ...backends.cuda.tuning.wgmma_tiles import LEAST_TOKENS, FusedTile
from ...backends.cuda.weight import nbytes, to_device
from ...backends.cuda.wgmma import schedule as fused
from ..weights import random_weight
from .timing import ROTATE_BYTES, UNFIT, copies, graph_time_us


def candidates(m: int) -> list[FusedTile]:
    """Tiles worth trying at m tokens: no more than four times as many, no less than a sixteenth."""
    every = modelled("int", True)
    return sorted((t for t in every if t.tokens < 4 * m and 16 * t.tokens >= min(m, 1024)), key=str)


def compile_one(job: tuple[str, FusedTile]) -> None:
    """Compile one tile into Triton's cache; no shape is part of a kernel."""
    codec, tile = job
    try:
        x = torch.zeros(8, 256, device="cuda", dtype=torch.float16)
        fused.fused(x, to_device(random_weight(codec, 64, 256, 0), "cuda"), None, tile)
    except UNFIT:  # reported when it is timed
        return


def tune(
    shapes: list[tuple[int, int]], formats: list[str], ms: list[int], jobs: int, report: Callable[[dict[str, Any]], None]
) -> list[Entry]:
    """Entries for every shape and m from LEAST_TOKENS on; all formats share a tile, the one with
    the least product of times.
    """
    ms = [m for m in ms if m >= LEAST_TOKENS]
    if not ms or torch.cuda.get_device_capability()[0] != 9:
        return []
    x = torch.zeros(1, 4096, dtype=torch.float16)
    chosen = [c for c in formats if fused.refusal(x, to_device(random_weight(c, 16, 4096, 0), "cpu", lanes=True)) is None]
    todo = [(c, t) for c in chosen for t in sorted({t for m in ms for t in candidates(m)}, key=str)]
    if jobs > 1 and todo:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.map(compile_one, todo, chunksize=1)
    entries: list[Entry] = []
    for n, k in shapes:
        times: dict[tuple[int, FusedTile], list[float]] = defaultdict(list)
        for codec in chosen:
            one = to_device(random_weight(codec, n, k, 0), "cuda")
            ws = copies(one, max(4, min(64, int(ROTATE_BYTES // nbytes(one)) + 1)))
            for m in ms:
                x = torch.randn(m, k, device="cuda", dtype=torch.float16)
                for tile in candidates(m):
                    try:
                        us = graph_time_us([partial(fused.fused, x, w, None, tile) for w in ws], 5)
                    except UNFIT:
                        us = math.inf
                    times[m, tile].append(us)
                    record = {"op": "tune", "format": codec, "n": n, "k": k, "m": m, "tile": list(vars(tile).values())}
                    report({**record, "time_us": us})
        for m in ms:
            best = min(candidates(m), key=lambda t: math.prod(times[m, t]) if times[m, t] else math.inf)
            entries.append({"kernel": "fused", "family": "4-bit", "n": n, "k": k, "m": m, "tile": list(vars(best).values())})
    return entries if chosen else []
