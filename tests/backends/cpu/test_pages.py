"""Memory of packed weights: on cache lines, apart from each other, shared huge pages given back
with the last weight on them.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import numpy as np
import pytest

from halfbyte.backends.cpu import pack as cpu_weight
from halfbyte.backends.cpu.pack import HUGE_PAGE, SMALL, address, aligned_empty

SIZES = (1, 63, 64, SMALL - 1, SMALL, SMALL + 1, 1_000_003, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1)


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_array_starts_on_a_cache_line_and_is_writable(nbytes):
    a = aligned_empty(nbytes)
    assert a.nbytes == nbytes
    assert address(a) % 64 == 0
    a[:] = 7
    assert int(a.sum(dtype=np.int64)) == 7 * nbytes


def test_arrays_never_overlap_whichever_thread_asks():
    held: list[np.ndarray] = []

    def ask(seed):
        held.extend(aligned_empty(nbytes) for nbytes in np.random.default_rng(seed).integers(SMALL, HUGE_PAGE, 20).tolist())

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    spans = sorted((address(a), address(a) + a.nbytes) for a in held)
    assert len(spans) == 80
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.skipif(not hasattr(cpu_weight.mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_shared_pages_go_with_the_last_weight_on_them(monkeypatch):
    made = []
    make = cpu_weight._on_huge_pages

    def recorded(nbytes):
        array = make(nbytes)
        made.append(weakref.ref(array.base if isinstance(array.base, memoryview) else array))
        return array

    monkeypatch.setattr(cpu_weight, "_on_huge_pages", recorded)
    pages = cpu_weight._SharedPages()
    first, second = pages.take(100_000), pages.take(100_000)
    assert len(made) == 1
    assert address(second) == address(first) + 100_032
    del first, pages
    gc.collect()
    assert made[0]() is not None
    del second
    gc.collect()
    assert made[0]() is None
