"""Processor time that a test can compare: seconds of a quiet machine.

A shared machine runs the same code at half the speed from one minute to the next, and the cyclic
garbage collector walks everything that earlier tests left. So the collector is off while the time
is taken, and a fixed loop, run before and after, says how fast the machine is now. Start and stop
tracemalloc within the block: traced, the loop would call every machine slow.

    with cpu_time() as spent:
        ...
    assert spent.seconds < 1
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOOP_SECONDS = 0.02
"""Processor seconds of the fixed loop on a quiet AMD EPYC (Zen 3 to 5 take 0.012 to 0.02)."""


class Spent:
    """Processor seconds of a block: `measured`, and `seconds` of a quiet machine."""

    measured = seconds = float("nan")


def _loop() -> float:
    start, text = time.process_time(), ""
    for i in range(100_000):
        text = text[-64:] + chr(97 + i % 26)
    return time.process_time() - start


@contextmanager
def cpu_time() -> Iterator[Spent]:
    """The processor time of this process within the block."""
    spent, on = Spent(), gc.isenabled()
    gc.disable()
    try:
        before, start = _loop(), time.process_time()
        try:
            yield spent
        finally:
            spent.measured = time.process_time() - start
            slowness = max(1.0, before / LOOP_SECONDS, _loop() / LOOP_SECONDS)
            spent.seconds = spent.measured / slowness
    finally:
        if on:
            gc.enable()
