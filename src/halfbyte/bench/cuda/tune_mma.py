"""The fastest tiles of the fragment kernel for shapes, formats and tokens on this card, as entries
of backends/cuda/tuning/table.py.

Formats of one family (`int`, `affine`, `e2m1`, `wide`) share a tile: the one with the least product
of times. Everything is compiled by `jobs` processes before anything is timed.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...backends.cuda import launch
from ...backends.cuda.tuning.mma_tiles import FragmentTile
from ...backends.cuda.tuning.table import Entry
from ...backends.cuda.weight import nbytes, to_device
from ..weights import random_weight
from .linear import compile_tile
from .timing import ROTATE_BYTES, UNFIT, copies, graph_time_us, lane_order
from .tune_wgmma import tune as tune_fused

CANDIDATES: dict[int, tuple[tuple[Any, ...], ...]] = {
    # tokens up to: tiles (tune.FragmentTile) worth trying
    8: ((1, 1, 16, 1, 4, 1), (1, 1, 16, 1, 4, 1, 2), (2, 1, 16, 1, 4, 1), (1, 1, 8, 1, 8, 2), (1, 1, 8, 1, 4, 3),
        (2, 1, 8, 1, 4, 2)),
    16: ((1, 2, 16, 1, 4, 1), (1, 2, 16, 1, 4, 1, 1, True), (2, 2, 8, 1, 4), (2, 2, 8, 1, 4, 0, 1, True), (1, 2, 16, 1, 2, 1),
         (2, 2, 8, 1, 2, 1, 1, True), (2, 2, 4, 1, 2, 3)),
    64: ((2, 4, 4, 2, 2), (2, 4, 4, 2, 2, 0, 1, True), (2, 4, 4, 1, 2, 0, 1, True), (2, 8, 4, 1, 1), (2, 8, 8, 1, 1, 0, 1, True),
         (2, 8, 2, 2, 1, 0, 1, True)),
}  # fmt: skip


def tiles_for(m: int) -> list[FragmentTile]:
    """Candidates at m tokens."""
    return [FragmentTile(*t) for t in CANDIDATES[min(limit for limit in CANDIDATES if m <= limit)]]


def tune(
    shapes: list[tuple[int, int]], formats: list[str], ms: list[int], jobs: int, report: Callable[[dict[str, Any]], None]
) -> list[Entry]:
    """Entries for every family, shape and m up to 64; `report` gets one record for each
    measurement.
    """
    later = tune_fused(shapes, formats, ms, jobs, report)
    ms = [m for m in ms if m <= max(CANDIDATES)]
    weights = {codec: to_device(random_weight(codec, 16, 4096, 0), "cpu", lane_order()) for codec in formats}
    chosen = [codec for codec in formats if weights[codec].fragments]
    ks = sorted({k for _, k in shapes})
    todo = [(codec, k, m, "fragments", t, "float16") for codec in chosen for k in ks for m in ms for t in tiles_for(m)]
    if jobs > 1 and todo:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.map(compile_tile, todo, chunksize=1)
    entries: list[Entry] = []
    for n, k in shapes:
        xs = {m: torch.randn(m, k, device="cuda", dtype=torch.float16) for m in ms}
        times: dict[tuple[str, int, FragmentTile], list[float]] = defaultdict(list)
        for codec in chosen:
            one = to_device(random_weight(codec, n, k, 0), "cuda")
            ws = copies(one, max(4, min(64, int(ROTATE_BYTES // nbytes(one)) + 1)))
            for m in ms:
                for tile in tiles_for(m):
                    try:
                        us = graph_time_us([partial(launch.fragments, xs[m], w, None, tile) for w in ws], 5)
                    except UNFIT:
                        us = math.inf
                    times[launch.family_of(one), m, tile].append(us)
                    record = {"op": "tune", "format": codec, "n": n, "k": k, "m": m, "tile": list(vars(tile).values())}
                    report({**record, "time_us": us})
        for family in sorted({f for f, _, _ in times}):
            for m in ms:
                best = min((t for f, at, t in times if f == family and at == m), key=lambda t: math.prod(times[family, m, t]))
                entries.append(
                    {"kernel": "fragments", "family": family, "n": n, "k": k, "m": m, "tile": list(vars(best).values())}
                )
    return entries + later
