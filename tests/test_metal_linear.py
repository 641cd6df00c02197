"""Metal products through the CPU build: one-hot activations return the weight, error bounds an element, all schedules."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.backends.base import Call
from halfbyte.backends.metal import kernels, launch
from halfbyte.backends.metal.weight import refusal
from halfbyte.errors import BackendError
from halfbyte.formats import format_named
from halfbyte.qtensor import QTensor
from metal_cpu.machine import available
from metal_formats import FORMATS, SIX, TORCH, as_float, backend, on_device, stand
from random_tensors import finite_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")

ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TILED = ("single-stage", "double-buffered", "striped")
FUSED = ("fused plain", "fused wide", "fused registers")
MAKERS = {
    "single-stage": kernels.gemm_single_stage, "double-buffered": kernels.gemm_double_buffered, "striped": kernels.gemm_striped,
    "fused plain": kernels.gemm_fused, "fused wide": lambda f, t: kernels.gemm_fused(f, t, "wide"),
    "fused registers": lambda f, t: kernels.gemm_fused(f, t, "registers"), "matvec": kernels.matvec,
}  # fmt: skip


def product(schedule, x, q, bias=None, layout=0, flush=True):
    """x · wᵀ by one schedule."""
    b = backend(layout, flush)
    p = b.prepare(q)
    if schedule in FUSED:
        variant = schedule.removeprefix("fused ").replace("plain", "")
        return launch.fused(launch.Product(b.route, x, p.data, bias), variant)
    if schedule == "matvec":
        return launch.matvec(launch.Product(b.route, x, p.data, bias))
    return b.linear(x, p, bias, schedule=schedule)


def tokens(m, k, dtype="float16", seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(m, k, generator=g)).to(TORCH[dtype])


def numbers(fmt, shape, seed):
    """A weight whose codes are all numbers: 0 · NaN and 0 · ∞ would fill a one-hot product with NaN, as they must."""
    q = finite_tensor(fmt, shape, seed)
    if fmt.element in ("e4m3", "e5m2"):
        q = QTensor(q.format, q.shape, {**q.parts, "codes": q.parts["codes"] & np.uint8(0xBF)})
    return q


def one_hot(q, dtype):
    """What x = identity must give: the value rounded once, or by way of float32 where the kernel's own sum rounds first."""
    f = q.format
    if f.bias or f.scale == "float32":
        return q.dequantize("float32").astype(NUMPY[dtype]).astype(np.float32).T
    return q.dequantize(dtype).astype(np.float32).T


def assert_product(y, x, q, dtype, bias=None):
    """|y − x·wᵀ| per element: one rounding of y's dtype and k of float32 on the row's absolute sum, bias products included."""
    x64, w64 = x.double().numpy(), q.dequantize("float32").astype(np.float64)
    exact, size = x64 @ w64.T, np.abs(x64) @ np.abs(w64.T)
    if q.format.bias:  # code · scale and bias cancel: the bound is on both
        group = -(-q.shape[1] // q.parts["biases"].shape[1])
        b = np.abs(np.repeat(q.parts["biases"].astype(np.float64), group, 1)[:, : q.shape[1]])
        size = np.abs(x64) @ (np.abs(w64) + 2 * b).T
    if bias is not None:
        exact, size = exact + bias.double().numpy(), size + np.abs(bias.double().numpy())
    smallest = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}[dtype]
    slack = ULP[dtype] * np.abs(exact) + 2.0**-24 * (x64.shape[1] + 8) * size + smallest
    error = np.abs(y.double().numpy() - exact)
    assert (error <= slack).all(), (error / slack).max()
    if error.size >= 256:  # a rounding is uniform: 1 / √3 of its bound, over many
        assert np.sqrt((error**2).mean()) <= 0.6 * np.sqrt((slack**2).mean())


@pytest.fixture(scope="module")
def tiled():
    stand().load([MAKERS[s](SIX[f], "float16") for s in TILED for f in SIX])


@pytest.fixture(scope="module", params=range(3))
def layout(request):
    """Where lanes hold the elements of a matrix: what is seen on Apple GPUs, and two other ways."""
    stand(request.param).load([MAKERS[s](SIX[f], "float16") for s in FUSED for f in SIX])
    return request.param


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("schedule", TILED)
def test_one_hot_activations_return_the_weight_tiled(tiled, schedule, name):
    q = finite_tensor(SIX[name], (70, 96), 1)
    y = product(schedule, torch.eye(96).half(), q)
    np.testing.assert_array_equal(as_float(y), one_hot(q, "float16"))


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("schedule", FUSED)
def test_one_hot_activations_return_the_weight_fused(layout, schedule, name):
    q = finite_tensor(SIX[name], (70, 96), 1)
    y = product(schedule, torch.eye(96).half(), q, layout=layout)
    np.testing.assert_array_equal(as_float(y), one_hot(q, "float16"))


OTHER = {s: "affine4" if s == "fused wide" else "uint4" if s in FUSED else "nvfp4" for s in (*TILED, *FUSED)}
"""Format in which a schedule is tested with the other dtypes."""


@pytest.fixture(scope="module")
def other_dtypes():
    reduce = [kernels.gemm_striped_reduce("multiply", dtype) for dtype in ("float32", "bfloat16")]
    stand().load([*(MAKERS[s](SIX[f], dtype) for s, f in OTHER.items() for dtype in ("float32", "bfloat16")), *reduce])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_case_31_the_other_dtypes(other_dtypes, schedule, dtype):
    name = OTHER[schedule]
    q = finite_tensor(SIX[name], (37, 96), 2)
    np.testing.assert_array_equal(as_float(product(schedule, torch.eye(96).to(TORCH[dtype]), q)), one_hot(q, dtype))
    x = tokens(66, 96, dtype)
    y = product(schedule, x, q)
    assert y.dtype == TORCH[dtype]
    assert_product(y, x, q, dtype)


@pytest.mark.parametrize("part", range(4))
def test_matvec_of_every_format(part):
    """One-hot in float32 for equality, random in float16 for the bound, with and without a bias."""
    names = list(FORMATS)[part::4]
    stand().load([kernels.matvec(on_device(FORMATS[f]), "float32", 4) for f in names])
    for name in names:
        q = numbers(FORMATS[name], (6, 256), 3)
        y = product("matvec", torch.eye(256)[::7], q)
        np.testing.assert_array_equal(as_float(y), q.dequantize("float32").T[::7], name)
        x, bias = tokens(5, 256, "float32"), torch.randn(6, generator=torch.Generator().manual_seed(3))
        assert_product(product("matvec", x, q, bias), x, q, "float32", bias)


AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]


def test_matvec_of_every_affine_width_and_group():
    formats = [format_named(f"affine{bits}", group) for bits, group in AFFINE]
    stand().load([kernels.matvec(f, "float16", 1) for f in formats])
    for fmt in formats:
        q = finite_tensor(fmt, (5, 256), 3)
        x = torch.zeros(1, 256).half()
        x[0, 77] = 1
        np.testing.assert_array_equal(as_float(product("matvec", x, q)), one_hot(q, "float16")[77:78])
        x = tokens(1, 256)
        assert_product(product("matvec", x, q), x, q, "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_matvec_tokens(m, dtype):
    q = finite_tensor(SIX["mxfp4"], (13, 160), 5)
    x = tokens(m, 160, dtype)
    assert_product(product("matvec", x, q), x, q, dtype)


@settings(max_examples=12)
@given(m=st.integers(1, 70), n=st.integers(1, 70), groups=st.integers(1, 5), seed=st.integers(0, 99))
@pytest.mark.parametrize("schedule", [*TILED, "fused wide", "fused registers", "matvec"])
def test_any_m_n_and_whole_groups_of_k(schedule, m, n, groups, seed):
    q = finite_tensor(SIX["nvfp4"] if seed % 2 else SIX["uint4"], (n, 16 * groups if seed % 2 else 32 * groups), seed)
    x, bias = tokens(m, q.shape[1], seed=seed, scale=0.1), torch.randn(n, generator=torch.Generator().manual_seed(seed))
    assert_product(product(schedule, x, q, bias if seed % 3 else None), x, q, "float16", bias if seed % 3 else None)


def test_the_look_up_twin_gives_the_same_bits():
    q = finite_tensor(SIX["mxfp4"], (9, 96), 5)
    b, x = backend(), tokens(3, 96)
    products = [launch.matvec(launch.Product(b.route, x, b.prepare(q).data, None), table) for table in (False, True)]
    assert torch.equal(*products)


@pytest.mark.parametrize("n", [1, 3, 4, 7, 33, 65])
def test_case_17_small_and_odd_n(n):
    q = finite_tensor(SIX["mxfp4"], (n, 1024), 1)
    x = tokens(1, 1024)
    assert_product(product("matvec", x, q), x, q, "float16")


@pytest.mark.parametrize("k", [528, 1040])
def test_case_18_nvfp4_with_a_tail_of_half_a_tile(tiled, k):
    q = finite_tensor(SIX["nvfp4"], (20, k), 1)
    for schedule, m in (("matvec", 1), ("single-stage", 50), ("double-buffered", 50), ("striped", 50), ("fused wide", 50)):
        x = tokens(m, k, scale=0.05)
        assert_product(product(schedule, x, q), x, q, "float16")


@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_case_19_n_of_one_tile_and_identity(schedule):
    q = finite_tensor(format_named("uint4", 64), (64, 128), 4)
    np.testing.assert_array_equal(as_float(product(schedule, torch.eye(128).half(), q)), one_hot(q, "float16"))


def test_case_20_groups_that_tiles_span(tiled):
    for name in ("uint4", "nvfp4"):
        q = finite_tensor(SIX[name], (5, 96), 6)
        for schedule in (*TILED, *FUSED):
            np.testing.assert_array_equal(as_float(product(schedule, torch.eye(96).half(), q)), one_hot(q, "float16"))


def test_case_24_strided_offset_and_transposed_x():
    q = finite_tensor(SIX["mxfp4"], (9, 64), 1)
    b = backend()
    p = b.prepare(q)
    big = tokens(6, 256)
    for x in (
        big[:, 64:128],
        big[:, 1:65],
        big[:, ::4],
        big[::2, :64],
        big[:4].t()[:64].t(),
        tokens(64, 6).t(),
        big[0:1, :64].expand(3, 64),
    ):
        assert torch.equal(b.linear(x, p, None), b.linear(x.contiguous().clone(), p, None))


def test_case_26_more_rows_than_sixteen_bits():
    q = finite_tensor(SIX["int4"], (2, 8), 1)
    b = backend()
    x = tokens(65600, 8)
    y = b.linear(x, b.prepare(q), None)
    assert_product(y[-100:], x[-100:], q, "float16")
    assert_product(y[:100], x[:100], q, "float16")


@pytest.mark.parametrize("schedule", ["matvec", *TILED, *FUSED])
def test_case_29_partial_sums_beyond_float16(schedule):
    q = QTensor(
        SIX["int4"], (8, 128), {"codes": np.full((8, 64), 0xFF, np.uint8), "scales": np.full((8, 1), 8, np.float16)}
    )  # every weight 56
    x = torch.cat([torch.full((9, 64), 32.0), torch.full((9, 64), -32.0)], 1).half()
    assert (product(schedule, x, q) == 0).all()


def test_case_32_no_tokens_no_outputs_no_inputs():
    b = backend()
    bias = torch.ones(5).half()
    p = b.prepare(finite_tensor(SIX["mxfp4"], (5, 64), 0))
    assert b.linear(torch.zeros(0, 64).half(), p, bias).shape == (0, 5)
    p = b.prepare(finite_tensor(SIX["mxfp4"], (0, 64), 0))
    assert b.linear(torch.zeros(3, 64).half(), p, None).shape == (3, 0)
    p = b.prepare(finite_tensor(SIX["mxfp4"], (5, 0), 0))
    assert torch.equal(b.linear(torch.zeros(3, 0).half(), p, bias), torch.ones(3, 5).half())


@pytest.mark.parametrize("schedule", ["matvec", "single-stage", *FUSED])
def test_nan_and_infinite_scales_stay_in_their_rows(schedule):
    q = finite_tensor(SIX["mxfp4"], (6, 64), 2)
    scales = np.array(q.parts["scales"])
    scales[2, 1] = 255
    q = QTensor(q.format, q.shape, {**q.parts, "scales": scales})
    y = as_float(product(schedule, torch.ones(2, 64).half() * 2.0**-8, q))
    assert np.isnan(y[:, 2]).all()
    assert np.isfinite(np.delete(y, 2, 1)).all()


def test_act_order_and_odd_k_reach_the_products():
    q = finite_tensor(SIX["uint4"], (7, 96), 3)
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(3, dtype=np.int32), 32))
    for w in (QTensor(q.format, q.shape, {**q.parts, "group_index": index}), finite_tensor(format_named("int4", -1), (7, 91), 1)):
        k = w.shape[1]
        for schedule in ("matvec", "double-buffered", "fused wide"):
            np.testing.assert_array_equal(as_float(product(schedule, torch.eye(k).half(), w)), one_hot(w, "float16"))


def test_metal_marlin_words_are_read_where_they_lie():
    """[k/8, n] words and [G, n] scales: the fused kernels' strides, no copy into rows."""
    from halfbyte.layouts import LAYOUTS

    for name in ("fp4", "uint4"):
        q = finite_tensor(format_named(name, 32), (70, 96), 8)
        t = LAYOUTS["metal-marlin"].pack(q, {})
        b = backend()
        route, kernel = b.route, kernels.gemm_fused(q.format, "float16", "wide")
        zeros = t["zeros"].astype(np.int16) if "zeros" in t else t["scales"]
        x, n = torch.eye(96).half(), 70
        inputs = [torch.from_numpy(a) for a in (t["qweight"].view(np.int32), t["scales"], zeros)]
        one = torch.ones(8)
        (y,) = route.run(kernel, [*inputs, x, one, one], [12, 1, n, 1, n, 96, n, 96, 0], [1.0], [(96, n)], (2 * 128, 2, 1))
        np.testing.assert_array_equal(as_float(y), one_hot(q, "float16"))


def test_every_schedule_gives_the_same_answer_twice(tiled):
    q = finite_tensor(SIX["affine4"], (40, 160), 2)
    x = tokens(30, 160)
    for schedule in ("matvec", *TILED, *FUSED, "dequantize_then_gemm"):
        assert torch.equal(product(schedule, x, q), product(schedule, x, q))


def test_what_a_schedule_cannot_hold_is_refused_with_the_reason():
    b = backend()
    big = finite_tensor(SIX["uint4"], (8, 32), 0)
    big = QTensor(big.format, big.shape, {**big.parts, "zeros": np.full((8, 1), 300, np.int16)})
    with pytest.raises(BackendError, match="a zero point of 300 leaves differences that bfloat16 does not hold"):
        b.linear(torch.zeros(20, 32).bfloat16(), b.prepare(big), None, schedule="fused")
    x = tokens(20, 32, "bfloat16")
    assert_product(b.linear(x, b.prepare(big), None), x, big, "bfloat16")  # another schedule serves it
    assert "stages 4-bit integers and E2M1, not int8" in b.refuses(Call("linear", format_named("int8"), schedule="fused"))
    assert "exact activations only" in b.refuses(Call("linear", format_named("int8"), activations="int8"))
    assert "raw ggml blocks" in refusal(format_named("iq1_s"))
    assert "float32 zero points" in refusal(format_named("hqq4", 64, scale_dtype="float32"))


def test_the_checker_fails_on_one_wrong_column():
    q = finite_tensor(SIX["mxfp4"], (64, 128), 0)
    x = tokens(3, 128, "float32")
    y = product("matvec", x, q)
    assert_product(y, x, q, "float32")
    y[1, 40] *= 1.001
    with pytest.raises(AssertionError):
        assert_product(y, x, q, "float32")
