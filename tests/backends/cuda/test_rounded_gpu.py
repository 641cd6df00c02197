"""Products with rounded activations on a GPU: int8 has the bits of the CPU's kernels, fp8 lies
within float32's error of the product of the rounded activations.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor, ops
from halfbyte.backends import backend_named
from halfbyte.errors import BackendError
from halfbyte.numerics import activations as definition
from halfbyte.numerics.minifloat import element_table
from support.gluon_numpy import Source
from support.gpu_weights import DTYPES, cuda, make, numpy_dtype, served

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

FP8_ERROR = 2.0**-13
"""Of a row's absolute sum: Hopper's matrix unit adds products of E4M3 with 13 bits below the
largest one, 128 inputs at a time (2^-15.4 of it was seen on an H200).
"""


def words(mode):
    return [word for word in served() if definition.refusal(make(word, 1, 1, np.random.default_rng(0)).format, mode) is None]


def activations(m, k, name, seed=5):
    x = np.random.default_rng(seed).standard_normal((m, k)).astype(numpy_dtype(name))
    x[0] = 0
    x[0, k // 2] = 1
    return x


def on_gpu(x, name):
    return torch.from_numpy(x.astype(np.float32)).cuda().to(DTYPES[name])


def same_bits(got, want, name):
    got = got.float().cpu().numpy()
    np.testing.assert_array_equal(got, want.astype(np.float32))


def cases(mode):
    """Every format in float16, some in the other types."""
    some = ("int4:g128", "uint4:g32", "mxfp4", "nvfp4", "mxfp8_e4m3", "q4_K")
    return [(word, name) for word in words(mode) for name in DTYPES if name == "float16" or word in some]


@pytest.mark.parametrize(("word", "name"), cases("int8"))
def test_int8_has_the_bits_of_the_cpu(word, name):
    cuda()
    cpu = backend_named("cpu")
    if cpu.reason():
        pytest.skip(cpu.reason())
    rng = np.random.default_rng(3)
    q = make(word, 200, -(-700 // make(word, 1, 1, rng).shape[1]), rng)
    p, here = ops.prepare(q, device="cuda"), cpu.prepare(q)
    for m in (1, 16, 17, 64, 130):
        x = activations(m, q.shape[1], name)
        bias = rng.standard_normal(200).astype(numpy_dtype(name))
        want = cpu.linear(x, here, bias.astype(np.float32), activations="int8")
        same_bits(ops.linear(on_gpu(x, name), p, on_gpu(bias, name), activations="int8"), want, name)


@pytest.mark.parametrize(("word", "name"), cases("fp8"))
def test_fp8_errs_as_its_rounding(word, name):
    cuda()
    rng = np.random.default_rng(4)
    q = make(word, 200, -(-700 // make(word, 1, 1, rng).shape[1]), rng)
    p, dense = ops.prepare(q, device="cuda"), q.dequantize("float64")
    for m in (1, 17, 130):
        x = activations(m, q.shape[1], name)
        y = ops.linear(on_gpu(x, name), p, activations="fp8").double().cpu().numpy()
        rounded = definition.rounded(x.astype(np.float32), q.format, "fp8").astype(np.float64)
        step = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}[name]
        true = rounded @ dense.T
        bound = FP8_ERROR * (np.abs(rounded) @ np.abs(dense).T) + step * np.abs(true) + 2.0**-24
        assert (np.abs(y - true) <= bound).all(), (m, np.abs((y - true) / bound).max())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_activations_are_rounded_as_defined(mode, name):
    cuda()
    from halfbyte.backends.cuda.rounded import launch, quantize

    segments = launch.segments_of(mode, make("int4:g32", 1, 1, np.random.default_rng(0)).format, 1000)
    x = activations(9, 1000, name)
    x[1] = 0
    x[2] = (x[2] * (2.0**-14 if name == "float16" else 1e-37)).astype(x.dtype)
    x[3, 17], x[4, 500], x[5] = np.nan, np.inf, x[5] * 60
    wide = np.zeros((9, segments.padded), np.float32)
    wide[:, :1000] = x
    for order in (quantize.STRAIGHT, quantize.BY_NIBBLES, quantize.BY_BYTES, quantize.BY_E2M1):
        for by_token in (True, False):
            got = launch.quantized(on_gpu(x, name), mode, segments, True, order.value, by_token)
            codes, scales = definition.round_int8(wide, segments.span) if mode == "int8" else definition.round_e4m3(wide)
            at = Source(quantize).function("stored_at")(np.arange(segments.padded), order.value)
            np.testing.assert_array_equal(got.codes.cpu().numpy()[:, at].view(codes.dtype), codes)
            found = got.scales.cpu().numpy()
            if mode == "int8":
                found = found if by_token else found.T[:9]
                assert scales.shape == found.shape
            np.testing.assert_array_equal(found[:9], scales)
            values = codes.astype(np.float64) if mode == "int8" else element_table("e4m3", 8)[codes]
            sums = got.sums.cpu().numpy()
            sums = sums if by_token else sums.T[:9]
            want = values.reshape(9, -1, segments.segment).sum(-1)
            np.testing.assert_allclose(sums, want, rtol=1e-6, atol=0 if mode == "int8" else 1e-3)


@pytest.mark.parametrize("mode", ["int8", "fp8"])
@pytest.mark.parametrize("word", ["int4:g128", "uint4:g32", "mxfp4", "mxfp8_e4m3", "int8:g64", "q4_K"])
def test_rows_do_not_depend_on_the_others(word, mode):
    cuda()
    q = make(word, 300, 4 if word == "q4_K" else 8, np.random.default_rng(6))
    if definition.refusal(q.format, mode):
        pytest.skip(definition.refusal(q.format, mode))
    p = ops.prepare(q, device="cuda")
    x = on_gpu(activations(200, q.shape[1], "float16"), "float16")
    y = ops.linear(x, p, activations=mode, invariant=True)
    for m in (1, 5, 16, 17, 64, 65, 129):
        assert torch.equal(ops.linear(x[:m], p, activations=mode, invariant=True), y[:m]), m
        if mode == "int8":
            assert torch.equal(ops.linear(x[:m], p, activations=mode), y[:m]), m


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_strides_act_order_and_graphs(mode):
    cuda()
    plain = make("int4:g32", 200, 8, np.random.default_rng(7))
    index = np.random.default_rng(8).permutation(np.repeat(np.arange(8, dtype=np.int32), 32))
    q = QTensor(plain.format, plain.shape, {**plain.parts, "group_index": index})
    p = ops.prepare(q, device="cuda")
    for m in (3, 100):
        x = on_gpu(activations(m, 256, "float16"), "float16")
        y = ops.linear(x, p, activations=mode)
        strided = torch.stack([x, x], -1)[..., 1]
        assert torch.equal(ops.linear(strided, p, activations=mode), y)
        wide = torch.zeros(m, 300, device="cuda", dtype=torch.float16)
        wide[:, 3:259] = x
        assert torch.equal(ops.linear(wide[:, 3:259], p, activations=mode), y)
        true = definition.rounded(x.float().cpu().numpy(), q.format, mode, q.parts["group_index"]).astype(np.float64)
        error = np.abs(y.double().cpu().numpy() - true @ q.dequantize("float64").T)
        assert error.max() <= 2e-3 * (np.abs(true) @ np.abs(q.dequantize("float64")).T).max()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ops.linear(x, p, activations=mode)
        other = on_gpu(activations(m, 256, "float16", 8), "float16")
        x.copy_(other)
        graph.replay()
        assert torch.equal(captured, ops.linear(other, p, activations=mode))


def test_what_is_refused():
    cuda()
    x = torch.zeros(1, 128, device="cuda", dtype=torch.float16)
    for word, mode, why in (
        ("nf4:g64", "int8", "not whole numbers"), ("int8:g64", "fp8", "E4M3 does not hold exactly"),
        ("hqq4:g64", "int8", "float zero"),
    ):  # fmt: skip
        with pytest.raises(BackendError, match=why):
            ops.linear(x, make(word, 16, 2, np.random.default_rng(0)), activations=mode)
    with pytest.raises(BackendError, match="leave schedule='fused' out"):
        ops.linear(x, make("int4:g128", 16, 1, np.random.default_rng(0)), activations="int8", schedule="fused")
