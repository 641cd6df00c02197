"""No product expands its weight: the memory of a call is a workspace far below the dense matrix."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest

from halfbyte.formats import format_named
from support.cpu_weights import CPU, needs_native, ordinary_tensor

pytestmark = [needs_native, pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux reports peak memory")]

N, K, M = 1088, 8192, 16
DENSE = 4 * N * K
"""34 MiB."""
WORKSPACE = 4 << 20


def grown_by(call) -> int:
    """Bytes by which the process's peak of resident memory exceeds what it had before `call`."""

    def status(name):
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.partition(f"{name}:")[2].split()[0])

    # What other tests left would be freed during the call, or serve it from the heap's free top.
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


@pytest.mark.parametrize("word", ["int4:g32", "uint3:g128", "affine4:g64", "mxfp8_e4m3", "nvfp4", "nf4:g64", "q4_K"])
def test_a_product_takes_a_small_workspace(word):
    fmt = format_named(word)
    w = CPU.prepare(ordinary_tensor(fmt, (N, K), 1))
    x = np.random.default_rng(0).standard_normal((M, K)).astype(np.float32)
    CPU.linear(x[:1], w, None)
    for activations in ("exact", "int8"):
        for m in (1, M):
            assert grown_by(lambda m=m, a=activations: CPU.linear(x[:m], w, None, activations=a)) < WORKSPACE


def test_the_measure_sees_a_dense_copy():
    assert grown_by(lambda: np.ones((N, K), np.float32)) > DENSE - (1 << 20)
