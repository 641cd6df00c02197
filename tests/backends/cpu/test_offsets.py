"""Offsets past 2^31 in activations and results (cases 27 and 28); the memory of the first is only
asked for, not touched.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from halfbyte.backends.cpu import CPUBackend
from halfbyte.formats import format_named
from support.random_tensors import finite_tensor

CPU = CPUBackend()
pytestmark = pytest.mark.skipif(CPU.reason() is not None, reason="no native core")


def reserved(nbytes: int) -> np.ndarray:
    """Zero bytes that take memory only where they are written."""
    if sys.platform != "linux":
        pytest.skip("memory that is asked for and not taken is Linux'")
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("which", ["rows", "columns"])
def test_case_27_activations_whose_strides_pass_2_to_31_elements(which, activations):
    q = finite_tensor(format_named("int4", 32), (20, 64), 0)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float16)
    far = 2**31 // (2 if which == "rows" else 63) + 64  # the last element lies past 2^31 elements from the first
    shape, strides = ((3, 64), (2 * far, 2)) if which == "rows" else ((3, 64), (128, 2 * far))
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 2
    apart = np.lib.stride_tricks.as_strided(reserved(span)[:span].view(np.float16), shape, strides)
    assert span > 2**32
    apart[...] = x
    prepared = CPU.prepare(q)
    got = CPU.linear(apart, prepared, None, activations=activations)
    np.testing.assert_array_equal(got, CPU.linear(x, prepared, None, activations=activations))


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_case_27_results_past_2_to_31_elements(activations):
    """2^31 + 655,424 results: 4.3 GB of float16."""
    m, n, k = 2**16 + 4, 2**15 + 8, 32
    prepared = CPU.prepare(finite_tensor(format_named("mxfp4"), (n, k), 2))
    x = (np.random.default_rng(3).standard_normal((m, k)) * 0.01).astype(np.float16)
    y = CPU.linear(x, prepared, None, activations=activations)
    assert y.size > 2**31
    for row in (0, 1, 65_470, 65_530, m - 2, m - 1):
        np.testing.assert_array_equal(y[row], CPU.linear(x[row : row + 1], prepared, None, activations=activations)[0])


@pytest.mark.slow
def test_case_28_rows_past_2_to_31_elements_by_index():
    """A gather of 2^31 + 131,072 elements: 4.3 GB of float16."""
    q = finite_tensor(format_named("int4", 32), (50, 2**16), 4)
    ids = np.random.default_rng(5).integers(0, 50, 2**15 + 2)
    prepared = CPU.prepare(q)
    rows = CPU.embedding(ids, prepared, "float16")
    assert rows.size > 2**31
    dense = q.dequantize("float16")
    for at in (0, 32_766, 32_767, 32_768, 32_769):
        np.testing.assert_array_equal(rows[at], dense[ids[at]])
