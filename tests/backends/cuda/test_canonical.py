"""A weight in the GPU's order gives back the canonical parts it was made from, bit for bit; no GPU
needed.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor, format_named
from halfbyte.backends.cuda.canonical import canonical_parts
from halfbyte.backends.cuda.order import by_tiles, untile
from halfbyte.backends.cuda.weight import in_lanes, to_device
from support.gpu_weights import make, random_parts, served, unit

pytest.importorskip("torch")


def equal(got, want):
    assert got.keys() == want.keys()
    for name, part in want.items():
        assert got[name].dtype == part.dtype, name
        assert got[name].shape == part.shape, name
        assert got[name].tobytes() == np.ascontiguousarray(part).tobytes(), name


@pytest.mark.parametrize("word", served())
def test_every_format_comes_back(word):
    rng = np.random.default_rng(1)
    for n, groups in ((1, 1), (7, 3), (33, 2)):
        q = make(word, n, groups, rng)
        equal(canonical_parts(to_device(q, "cpu")), dict(q.parts))


@pytest.mark.parametrize("word", [word for word in served() if in_lanes(format_named(word), unit(format_named(word)))])
def test_lane_order_comes_back(word):
    """As a weight lies on a GPU; views of rows and of experts too."""
    rng = np.random.default_rng(4)
    for n, groups in ((1, 1), (39, 3)):
        q = make(word, n, groups, rng)
        w = to_device(q, "cpu", lanes=True)
        assert w.lanes
        assert w.fragments == w.tiled == -(-q.shape[1] // 64)
        equal(canonical_parts(w), dict(q.parts))
    each = {name: part if name == "global_scale" else part[16:] for name, part in q.parts.items()}
    equal(canonical_parts(w.row_block(16, n)), each)
    shape = (3, 20, unit(q.format))
    stack = QTensor(q.format, shape, random_parts(q.format, shape, rng))
    held = to_device(stack, "cpu", lanes=True)
    equal(canonical_parts(held), dict(stack.parts))
    equal(canonical_parts(held.expert(1)), {name: part[1] for name, part in stack.parts.items()})


@pytest.mark.parametrize("word", ["mxfp4", "nvfp4", "affine4:g64", "q6_K", "int8:g32"])
def test_stacks_come_back(word):
    fmt = format_named(word)
    shape = (3, 20, unit(fmt) * 2)
    q = QTensor(fmt, shape, random_parts(fmt, shape, np.random.default_rng(2)))
    equal(canonical_parts(to_device(q, "cpu")), dict(q.parts))


@pytest.mark.parametrize("word", ["uint4:g32", "int8:g32", "int3:g64"])
def test_act_order_comes_back(word):
    rng = np.random.default_rng(3)
    q = make(word, 24, 4, rng)
    size = q.format.group_size
    index = rng.permutation(np.repeat(np.arange(4, dtype=np.int32), size)).astype(np.int32)
    q = QTensor(q.format, q.shape, {**q.parts, "group_index": index})
    equal(canonical_parts(to_device(q, "cpu")), dict(q.parts))


def test_rows_side_by_side_come_apart():
    scales = np.arange(37 * 3, dtype=np.float32).reshape(37, 3)
    np.testing.assert_array_equal(untile(by_tiles(scales), 37), scales)
