"""Metal products through the CPU build: one-hot activations return the weight, error bounds an element, all schedules."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metal_bounds as bounds
from halfbyte.backends.base import Call
from halfbyte.backends.metal import MetalBackend, kernels, launch
from halfbyte.backends.metal.torch_route import TorchRoute
from halfbyte.backends.metal.weight import refusal
from halfbyte.errors import BackendError
from halfbyte.formats import format_named
from halfbyte.qtensor import QTensor
from metal_cpu.machine import MetalFaultError, available
from metal_cpu.torch_stand_in import compile_shader
from metal_formats import FORMATS, SIX, TORCH, as_float, backend, on_device, stand
from random_tensors import finite_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TILED = ("single-stage", "double-buffered", "striped")
FUSED = ("fused plain", "fused wide")
MAKERS = {
    "single-stage": kernels.gemm_single_stage, "double-buffered": kernels.gemm_double_buffered, "striped": kernels.gemm_striped,
    "fused plain": kernels.gemm_fused, "fused wide": lambda f, t: kernels.gemm_fused(f, t, "wide"),
    "matvec": kernels.matvec,
}  # fmt: skip


def product(schedule, x, q, bias=None, flush=True):
    """x · wᵀ by one schedule."""
    b = backend(flush)
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
    """|y − x·wᵀ| per element: one rounding of y's dtype and k of float32 on the row's absolute sum."""
    exact, bound = bounds.product(x.double().numpy(), q, None if bias is None else bias.double().numpy())
    bounds.assert_within(y.double().numpy(), exact, bound, dtype, q.shape[1])


@pytest.fixture(scope="module")
def six():
    """The 4-bit formats of most tests with every kernel of tiles, compiled together."""
    stand().load([MAKERS[s](SIX[f], "float16") for s in (*TILED, *FUSED) for f in SIX])


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_one_hot_activations_return_the_weight(six, schedule, name):
    q = finite_tensor(SIX[name], (70, 96), 1)
    y = product(schedule, torch.eye(96).half(), q)
    np.testing.assert_array_equal(as_float(y), one_hot(q, "float16"))


PARTS = 6
TILED_AND_FUSED = [(s, f) for f in FORMATS for s in (*TILED, *FUSED) if s in TILED or FORMATS[f].bits == 4]


@pytest.fixture(scope="module", params=range(PARTS))
def sixth(request):
    """A sixth of the formats with every tiled and fused kernel, compiled together."""
    names = list(FORMATS)[request.param :: PARTS]
    cases = [(s, f) for s, f in TILED_AND_FUSED if f in names]
    stand().load([MAKERS[s](on_device(FORMATS[f]), "float32") for s, f in cases])
    return cases


def test_every_format_through_every_tiled_kernel(sixth):
    """64 of 256 inputs, each place of eight and of a group's 32 among them; two tiles of outputs would be a second's work."""
    x = torch.eye(256)[(5 * torch.arange(64)) % 256]
    for schedule, name in sixth:
        q = numbers(FORMATS[name], (9, 256), 3)
        y = as_float(product(schedule, x, q))
        np.testing.assert_array_equal(y, q.dequantize("float32").T[(5 * np.arange(64)) % 256], f"{schedule} {name}")


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
@pytest.mark.parametrize("schedule", [*TILED, *FUSED, "matvec"])
def test_any_m_n_and_whole_groups_of_k(schedule, m, n, groups, seed):
    q = finite_tensor(SIX["nvfp4"] if seed % 2 else SIX["uint4"], (n, 16 * groups if seed % 2 else 32 * groups), seed)
    x, bias = tokens(m, q.shape[1], seed=seed, scale=0.1), torch.randn(n, generator=torch.Generator().manual_seed(seed))
    assert_product(product(schedule, x, q, bias if seed % 3 else None), x, q, "float16", bias if seed % 3 else None)


@pytest.mark.parametrize("decoder", [d for d in kernels.E2M1_DECODERS if d])
def test_every_way_to_decode_e2m1_gives_the_same_bits(decoder):
    b = backend()
    for q in (finite_tensor(SIX["mxfp4"], (9, 96), 5), finite_tensor(SIX["fp4"], (67, 64), 5)):
        x, held = tokens(3, q.shape[1]), b.prepare(q).data
        for run in (lambda p, d: launch.matvec(p, d), lambda p, d: launch.fused(p, "wide", d)):
            pair = [run(launch.Product(b.route, x, held, None), d) for d in ("", decoder)]
            assert torch.equal(*pair)


LONG = 8 * (64 + 64 + 4)
"""Inputs past two turns of both simdgroups of a matrix-vector product: units 0 to 31 and 64 to 95 are the first's, 32 to 63 and
96 to 127 the second's, and the last four the first's again."""


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("name", SIX)
def test_matvec_one_hot_in_every_unit_of_both_simdgroups(name, m):
    q = finite_tensor(SIX[name], (5, LONG), 7)
    at = 8 * np.arange(LONG // 8) + np.arange(LONG // 8) % 8
    x = torch.zeros(LONG // 8, LONG).half()
    x[torch.arange(LONG // 8), torch.from_numpy(at)] = 1
    y = torch.cat([product("matvec", rows, q) for rows in x.split(m)])
    np.testing.assert_array_equal(as_float(y), one_hot(q, "float16")[at])


@pytest.mark.parametrize("k", [250, 257, 511, 517, 1029, LONG - 3])
def test_matvec_with_odd_tails(k):
    q = finite_tensor(format_named("int4", -1), (5, k), 7)
    at = np.array([0, 255, 256, k - 9, k - 8, k - 2, k - 1]) % k
    y = product("matvec", torch.eye(k)[torch.from_numpy(at)], q)
    np.testing.assert_array_equal(as_float(y), one_hot(q, "float32")[at])
    x = tokens(3, k)
    assert_product(product("matvec", x, q), x, q, "float16")


def whole_numbers(k, n=7):
    """A weight of small integers: every float32 sum of its products with integers is exact, in any order."""
    q = finite_tensor(format_named("int4", -1), (n, k), 2)
    return QTensor(q.format, q.shape, {**q.parts, "scales": np.ones_like(q.parts["scales"])})


@pytest.mark.parametrize("m", [1, 2, 4])
def test_each_simdgroups_share_is_in_the_sum(m):
    q = whole_numbers(LONG)
    owner = np.arange(LONG) // 8 // 32 % kernels.MATVEC_SIMDGROUPS
    x = np.random.default_rng(0).integers(-3, 4, (m, LONG)).astype(np.float32)
    for only in (*range(kernels.MATVEC_SIMDGROUPS), None):
        part = x if only is None else np.where(owner == only, x, 0)
        right = part @ q.dequantize("float32").T
        assert (right != 0).any()
        np.testing.assert_array_equal(as_float(product("matvec", torch.from_numpy(part), q)), right)


def test_a_reduction_that_leaves_a_simdgroup_out_is_seen():
    def broken(source):
        assert "s < MATVEC_SIMDGROUPS; ++s) sum +=" in source
        return compile_shader(source.replace("s < MATVEC_SIMDGROUPS; ++s) sum +=", "s < 1; ++s) sum +="))

    b = MetalBackend(TorchRoute(broken, "cpu"))
    q, x = whole_numbers(LONG), torch.ones(1, LONG)
    short = whole_numbers(256)
    assert torch.equal(b.linear(x[:, :256], b.prepare(short), None), product("matvec", x[:, :256], short))
    assert not torch.equal(b.linear(x, b.prepare(q), None), product("matvec", x, q))


@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_each_simdgroup_of_a_tile_and_each_stripe_is_in_the_result(schedule):
    """Whole numbers, three tiles each way, more steps than stripes: equality everywhere."""
    q = whole_numbers(32 * 23, 131)
    x = np.random.default_rng(1).integers(-3, 4, (131, 32 * 23)).astype(np.float32)
    np.testing.assert_array_equal(as_float(product(schedule, torch.from_numpy(x), q)), x @ q.dequantize("float32").T)


@pytest.mark.parametrize("n", [1, 3, 4, 7, 33, 65])
def test_case_17_small_and_odd_n(n):
    q = finite_tensor(SIX["mxfp4"], (n, 1024), 1)
    x = tokens(1, 1024)
    assert_product(product("matvec", x, q), x, q, "float16")


@pytest.mark.parametrize("k", [528, 1040])
def test_case_18_nvfp4_with_a_tail_of_half_a_tile(six, k):
    q = finite_tensor(SIX["nvfp4"], (20, k), 1)
    for schedule, m in (("matvec", 1), ("single-stage", 50), ("double-buffered", 50), ("striped", 50), ("fused wide", 50)):
        x = tokens(m, k, scale=0.05)
        assert_product(product(schedule, x, q), x, q, "float16")


@pytest.mark.parametrize("schedule", [*TILED, *FUSED])
def test_case_19_n_of_one_tile_and_identity(schedule):
    q = finite_tensor(format_named("uint4", 64), (64, 128), 4)
    np.testing.assert_array_equal(as_float(product(schedule, torch.eye(128).half(), q)), one_hot(q, "float16"))


def test_case_20_groups_that_tiles_span(six):
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
        big.flatten()[1:193].view(3, 64),
        big[:, ::4],
        big[::2, :64],
        big[:4].t()[:64].t(),
        tokens(64, 6).t(),
        big[0:1, :64].expand(3, 64),
    ):
        assert torch.equal(b.linear(x, p, None), b.linear(x.contiguous().clone(), p, None))


def at_odd_offset(t):
    """The same tensor as a view that begins one element into its storage."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@pytest.mark.parametrize("word", ["uint4", "int8", "int6", "int2", "affine3"])
def test_weights_that_are_views_at_odd_offsets(word, monkeypatch):
    """Codes that begin between words are copied first; all else is read one number at a time. Without the copy, a fault."""
    q = finite_tensor(format_named(word, 32), (9, 64), 3)
    b = backend()
    held = b.prepare(q).data
    parts = {name: getattr(held, name) for name in ("codes", "scales", "addends", "factors")}
    odd = replace(held, **{name: None if a is None else at_odd_offset(a) for name, a in parts.items()})
    x, bias = at_odd_offset(tokens(20, 64)), at_odd_offset(torch.randn(9))
    for schedule in (None, "double-buffered", *(["fused"] if q.format.bits == 4 else [])):
        for rows in (x, x[3:4]):
            y, right = (launch.linear(b.route, rows, w, bias, schedule) for w in (odd, held))
            assert torch.equal(y, right)
    assert torch.equal(launch.dequantize(b.route, odd, "float32"), launch.dequantize(b.route, held, "float32"))
    if held.word_bytes > 1:
        monkeypatch.setattr(b.route, "aligned", lambda codes, nbytes: codes)
        with pytest.raises(MetalFaultError, match="misaligned"):
            launch.dequantize(b.route, odd, "float32")


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


def test_every_schedule_gives_the_same_answer_twice(six):
    q = finite_tensor(SIX["affine4"], (40, 160), 2)
    x = tokens(30, 160)
    for schedule in ("matvec", *TILED, *FUSED, "dequantize_then_gemm"):
        assert torch.equal(product(schedule, x, q), product(schedule, x, q))


def test_zero_points_of_any_size_are_exact():
    q = finite_tensor(SIX["uint4"], (8, 32), 0)
    zeros = np.array([[300], [-3000], [15], [0], [1], [7], [256], [32767]], np.int16)
    q = QTensor(q.format, q.shape, {**q.parts, "zeros": zeros})
    for schedule in ("matvec", *TILED, *FUSED):
        np.testing.assert_array_equal(as_float(product(schedule, torch.eye(32), q)), one_hot(q, "float32"))


def test_what_a_schedule_cannot_hold_is_refused_with_the_reason():
    b = backend()
    wide = b.prepare(finite_tensor(format_named("int8", 32), (8, 32), 0)).data
    with pytest.raises(BackendError, match="reads words of eight 4-bit codes, not int8"):
        launch.fused(launch.Product(b.route, tokens(2, 32), wide, None), "")
    assert "reads words of eight 4-bit codes, not int8" in b.refuses(Call("linear", format_named("int8"), schedule="fused"))
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
