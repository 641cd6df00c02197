"""Metal dequantize and embedding through the CPU build: every format, every dtype, equal to the
exact values rounded once.
"""

from __future__ import annotations

import numpy as np
import pytest

import torch
from halfbyte.backends.metal import kernels
from halfbyte.errors import BackendError, ShapeError
from halfbyte.formats import format_named
from halfbyte.tensor.qtensor import QTensor
from support.metal_cpu.machine import available
from support.metal_formats import FORMATS, TORCH, as_float, backend, on_device, stand
from support.random_tensors import finite_tensor, random_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")

EVERY_DTYPE = (
    "mxfp4:g32",
    "nvfp4:g16",
    "nvfp4 amax",
    "affine4:g64",
    "fp4:g32 float32",
    "affine5:g32 float32",
    "uint4:g128",
    "mxfp8_e5m2:g32",
)
"""Formats tested in all three dtypes: between them every way a value can be inexact in float32. The
others in float32.
"""
CASES = [(name, dtype) for name in FORMATS for dtype in TORCH if dtype == "float32" or name in EVERY_DTYPE]


@pytest.fixture(scope="module", params=range(4))
def quarter(request):
    """A quarter of the cases, compiled together: a worker that runs some of them need not compile
    all.
    """
    cases = CASES[request.param :: 4]
    stand().load([kernels.dequantize(on_device(FORMATS[name]), dtype) for name, dtype in cases])
    return cases


def test_every_format_decodes_to_its_exact_values_rounded_once(quarter):
    b = backend()
    for name, dtype in quarter:
        for seed, shape in enumerate(((3, 256), (1, 512))):
            q = random_tensor(FORMATS[name], shape, seed)  # NaN, infinite, negative and subnormal scales among them
            if q.format.zero == "float":
                q = _finite_scales(q)
            with np.errstate(over="ignore", invalid="ignore"):
                right = q.dequantize(dtype).astype(np.float32)
            got = as_float(b.dequantize(b.prepare(q), dtype))
            wrong = ~((got == right) | (np.isnan(got) & np.isnan(right)))
            # float32 arithmetic takes subnormals for zero on the GPU: a subnormal scale or result
            # may be lost, nothing else.
            if q.format.scale in ("bfloat16", "float32") or q.format.global_op:
                wrong &= ~_passes_subnormals(q, right)
            assert not wrong.any(), (name, dtype, shape, got[wrong][:4], right[wrong][:4])


def _finite_scales(q: QTensor) -> QTensor:
    return QTensor(q.format, q.shape, {**q.parts, "scales": np.where(np.isfinite(q.parts["scales"]), q.parts["scales"], 1)})


def test_a_float_zero_point_beside_an_infinite_scale_is_refused():
    q = finite_tensor(format_named("hqq4"), (2, 64), 0)
    q = QTensor(q.format, q.shape, {**q.parts, "scales": np.full((2, 1), np.inf, np.float16)})
    with pytest.raises(BackendError, match="hqq4 with scales that are infinite or NaN"):
        backend().prepare(q)


def _passes_subnormals(q: QTensor, right: np.ndarray) -> np.ndarray:
    """Elements whose scale, bias, factor or value is a float32 subnormal or makes one on the way."""
    tiny = 2.0**-100  # a remainder is 24 places below its value
    lost = np.abs(right) < tiny
    with np.errstate(over="ignore"):
        for part in ("scales", "biases"):
            if part in q.parts and q.parts[part].dtype != np.uint8:
                a = np.abs(q.parts[part].astype(np.float32))
                lost |= np.repeat((a < tiny) | (a > 2.0**100), -(-right.shape[1] // a.shape[1]), 1)[:, : right.shape[1]]
        if q.format.global_op:
            g = abs(float(q.parts["global_scale"]))
            lost |= g < tiny or g > 2.0**100
    return lost


def test_ordinary_values_are_exact_with_no_exception(quarter):
    b = backend()
    for name, dtype in quarter:
        q = finite_tensor(FORMATS[name], (3, 256), 7)
        np.testing.assert_array_equal(as_float(b.dequantize(b.prepare(q), dtype)), q.dequantize(dtype).astype(np.float32), name)


@pytest.mark.parametrize("flush", [True, False])
def test_case_06_07_e8m0_bytes_0_and_255(flush):
    codes = np.tile(np.arange(256, dtype=np.uint8)[:16], (3, 1))
    q = QTensor(format_named("mxfp4"), (3, 32), {"codes": codes, "scales": np.array([[0], [255], [122]], np.uint8)})
    b = backend(flush=flush)
    for dtype in ("float32", "bfloat16"):
        got = as_float(b.dequantize(b.prepare(q), dtype))
        np.testing.assert_array_equal(got, q.dequantize(dtype).astype(np.float32))
        assert got[0, 4] == 2.0**-127
        assert np.isnan(got[1]).all()
        assert got[2, 4] == 0.03125


@pytest.mark.parametrize("word", ["mxfp4", "affine3", "uint8"])
def test_embedding_gathers_rows_repeated_and_out_of_order(word):
    q = finite_tensor(format_named(word), (11, 128), 1)
    b = backend()
    for ids in (
        torch.tensor([[10, 0, 3], [3, 3, 9]]),
        torch.tensor([7], dtype=torch.int32),
        torch.zeros((0, 2), dtype=torch.long),
    ):
        got = b.embedding(ids, b.prepare(q), "float16")
        assert got.shape == (*ids.shape, 128)
        assert got.dtype == torch.float16
        np.testing.assert_array_equal(as_float(got), q.dequantize("float16").astype(np.float32)[ids.numpy()])


def test_embedding_refuses_ids_out_of_range_and_floats():
    q = finite_tensor(format_named("mxfp4"), (11, 64), 1)
    b = backend()
    for ids, why in (
        (torch.tensor([11]), "rows are 0 to 10"),
        (torch.tensor([-1]), "run from -1"),
        (torch.tensor([0.5]), "integers"),
    ):
        with pytest.raises(ShapeError, match=why):
            b.embedding(ids, b.prepare(q), "float32")


def test_act_order_is_undone():
    q = finite_tensor(format_named("int4", 32), (5, 96), 3)
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(3, dtype=np.int32), 32))
    q = QTensor(q.format, q.shape, {**q.parts, "group_index": index})
    b = backend()
    np.testing.assert_array_equal(as_float(b.dequantize(b.prepare(q), "float32")), q.dequantize())
    uneven = QTensor(q.format, q.shape, {**q.parts, "group_index": np.repeat(np.array([0, 1, 2], np.int32), (40, 24, 32))})
    with pytest.raises(BackendError, match="act-order groups hold 24 to 40 inputs; kernels take 32 each"):
        b.prepare(uneven)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0)])
def test_empty_weights(shape):
    fmt = format_named("int8", 32)
    q = random_tensor(fmt, shape, 0)
    b = backend()
    assert b.dequantize(b.prepare(q), "float16").shape == shape


@pytest.mark.parametrize("k", [33, 40, 71])
def test_inputs_that_are_no_whole_eights(k):
    q = finite_tensor(format_named("int3", -1), (4, k), 2)
    b = backend()
    np.testing.assert_array_equal(as_float(b.dequantize(b.prepare(q), "float32")), q.dequantize())


def test_a_stack_of_experts_keeps_each_matrix_and_its_factor():
    q = finite_tensor(format_named("nvfp4"), (3, 5, 32), 2)
    b = backend()
    p = b.prepare(q)
    np.testing.assert_array_equal(as_float(b.dequantize(p, "float32")), q.dequantize())
    np.testing.assert_array_equal(as_float(b.dequantize(b.expert(p, 2), "float32")), q[2].dequantize())


@pytest.mark.parametrize("shape", [(3, 256), (2, 3, 256)])
def test_the_canonical_parts_come_back_byte_for_byte(shape):
    b = backend()
    for name, fmt in FORMATS.items():
        q = finite_tensor(fmt, shape, 5)
        p = b.prepare(q)
        assert QTensor(q.format, shape, b.canonical(p)) == q, name
        if len(shape) == 3:
            assert QTensor(q.format, shape[1:], b.canonical(b.expert(p, 1))) == q[1], name


def test_act_order_and_odd_k_come_back_too():
    b = backend()
    q = finite_tensor(format_named("int4", 32), (5, 96), 3)
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(3, dtype=np.int32), 32))
    for w in (QTensor(q.format, q.shape, {**q.parts, "group_index": index}), finite_tensor(format_named("int3", -1), (4, 71), 2)):
        assert QTensor(w.format, w.shape, b.canonical(b.prepare(w))) == w
