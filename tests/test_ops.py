"""The verbs on the reference backend: shapes, strides, dtypes, choice of backend, and a checker
that fails on wrong arrays.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings

import ml_dtypes
import numpy as np
import pytest

from halfbyte import QTensor, format_named, ops, quantize
from halfbyte.backends import AbsentBackend, backend_named, names
from halfbyte.errors import BackendError, ShapeError

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def weight(rng, n, k, lead=()):
    return QTensor(
        format_named("mxfp4"),
        (*lead, n, k),
        {
            "codes": rng.integers(0, 256, (*lead, n, k // 2), dtype=np.uint8),
            "scales": rng.integers(118, 130, (*lead, n, k // 32), dtype=np.uint8),
        },
    )


def assert_product(y, x, dense, ulp):
    """|y − x·Wᵀ| per element within one rounding of y's dtype and k roundings of float32 on the
    row's absolute sum.
    """
    x64, w64 = np.asarray(x, np.float64), np.asarray(dense, np.float64)
    exact = x64 @ w64.T
    slack = ulp * np.abs(exact) + 2.0**-24 * x64.shape[-1] * (np.abs(x64) @ np.abs(w64.T))
    assert (np.abs(np.asarray(y, np.float64) - exact) <= slack).all()


ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 4, 7, 33, 65])
def test_case_17_31_small_and_odd_n_in_every_dtype(rng, n, dtype):
    w = weight(rng, n, 4096)
    x = rng.standard_normal((1, 4096)).astype(dtype)
    y = ops.linear(x, w, backend="reference")
    assert y.dtype == dtype
    assert y.shape == (1, n)
    assert_product(y, x, w.dequantize(), ULP[np.dtype(dtype).name])


def test_the_checker_fails_on_one_wrong_column(rng):
    w = weight(rng, 64, 128)
    x = rng.standard_normal((3, 128)).astype(np.float32)
    y = ops.linear(x, w, backend="reference")
    y[1, 40] *= 1.001
    with pytest.raises(AssertionError):
        assert_product(y, x, w.dequantize(), ULP["float32"])


def test_identity_returns_the_decoded_weight(rng):
    w = weight(rng, 70, 96)
    y = ops.linear(np.eye(96, dtype=np.float32), w, backend="reference")
    np.testing.assert_array_equal(y.T, w.dequantize())


@pytest.mark.parametrize("shape", [(96,), (0, 96), (4, 7, 96), (2, 3, 1, 96), (5, 0, 96)])
def test_case_25_32_leading_axes_and_no_tokens(rng, shape):
    w = weight(rng, 5, 96)
    x = rng.standard_normal(shape).astype(np.float32)
    y = ops.linear(x, w, bias=np.ones(5, np.float32), backend="reference")
    assert y.shape == (*shape[:-1], 5)
    assert y.dtype == np.float32
    assert_product(y.reshape(-1, 5) - 1, x.reshape(-1, 96), w.dequantize(), 1e-5)


def test_case_24_strided_and_transposed_x(rng):
    w = weight(rng, 9, 64)
    big = rng.standard_normal((6, 256)).astype(np.float32)
    for x in (big[:, 64:128], big[:, ::4], np.asfortranarray(big[:, :64]), big[::2, :64]):
        np.testing.assert_array_equal(
            ops.linear(x, w, backend="reference"), ops.linear(np.ascontiguousarray(x), w, backend="reference")
        )


def test_case_36_a_weight_of_the_other_orientation_is_refused(rng):
    w = weight(rng, 64, 96)
    with pytest.raises(ShapeError, match=r"x has shape \(2, 64\); its last axis must be k = 96"):
        ops.linear(np.zeros((2, 64), np.float32), w)


def test_torch_tensors_that_are_no_plain_arrays(rng):
    """A view whose signs are kept as a bit is a tensor like others; a sparse one is refused."""
    torch = pytest.importorskip("torch")
    w = weight(rng, 9, 64)
    z = torch.randn(2, 64, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert z.conj().imag.is_neg()
    assert torch.equal(ops.linear(z.conj().imag, w), ops.linear(-z.imag, w))
    with pytest.raises(ShapeError, match=r"x is laid out as torch.sparse_coo; torch.strided is allowed"):
        ops.linear(z.imag.to_sparse(), w)


def test_torch_tensors_come_back_as_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    w = weight(rng, 9, 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        y = ops.linear(x, w, bias=torch.ones(9), backend="reference")
        assert y.dtype == dtype
        assert y.shape == (2, 3, 9)
        ids = torch.tensor([[0, 8], [8, 3]])
        e = ops.embedding(ids, w, dtype=dtype, backend="reference")
        assert torch.equal(e, torch.from_numpy(w.dequantize()).to(dtype)[ids])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: ops.linear(np.zeros((1, 64), np.float64), w), "x is float64; allowed: float32, float16, bfloat16"),
        (lambda w: ops.linear(np.zeros((1, 64), np.float32), w, bias=np.zeros(4)), r"bias has shape \(4,\)"),
        (lambda w: ops.linear(np.zeros((1, 64), np.float32), "w"), "the weight is str"),
        (lambda w: ops.embedding(np.array([9]), w), "ids run from 9 to 9; the table has rows 0 to 8"),
        (lambda w: ops.embedding(np.array([-1]), w), "ids run from -1"),
        (lambda w: ops.embedding(np.array([0.5]), w), "integers are allowed"),
    ],
)
def test_bad_arguments_say_what_is_allowed(rng, call, message):
    with pytest.raises(ShapeError, match=message):
        call(weight(rng, 9, 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gpu"}, "known: cpu, reference, cuda, metal"),
        ({"activations": "int4"}, "allowed: exact, int8, int8_token, fp8"),
        ({"schedule": "fast"}, "allowed: single-stage"),
        ({"backend": "cpu", "activations": "fp8"}, "the native core computes exact, int8, int8_token activations, not 'fp8'"),
        ({"backend": "reference", "schedule": "fused"}, "one schedule"),
    ],
)
def test_modes_that_cannot_be_served_are_sentences(rng, options, message):
    with pytest.raises(BackendError, match=message):
        ops.linear(np.zeros((1, 64), np.float32), weight(rng, 9, 64), **options)


def test_every_backend_runs_or_says_why():
    for name in names():
        reason = backend_named(name).reason()
        assert reason is None or len(reason) > 20


def test_prepared_weights_die_with_their_tensor(rng):
    w = weight(rng, 9, 64)
    ops.linear(np.zeros((1, 64), np.float32), w)
    key = id(w)
    assert key in ops._prepared
    del w
    gc.collect()
    assert key not in ops._prepared


def test_case_33_threads_share_a_cold_weight(rng):
    w = weight(rng, 33, 256)
    x = rng.standard_normal((8, 256)).astype(np.float32)
    wanted = [ops.linear(x[: i + 1], weight_copy(w), backend="reference") for i in range(8)]
    for _ in range(3):
        got = [None] * 8
        fresh = weight_copy(w)

        def run(i, got=got, fresh=fresh):
            got[i] = ops.linear(x[: i + 1], fresh, backend="reference")

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_better_backend_is_passed_over_with_one_warning_a_reason(rng, monkeypatch):
    absent = AbsentBackend("fast", "cpu", "it is not built")
    monkeypatch.setattr(ops, "backends_for", lambda device: [absent, backend_named("reference")])
    monkeypatch.setattr(ops, "_warned", set())
    x, w = np.zeros((1, 64), np.float32), weight(rng, 4, 64)
    other = quantize(np.ones((4, 64), np.float32), "int4:g32")
    with pytest.warns(RuntimeWarning, match=r"mxfp4:g32 runs on the reference backend, slowly: fast: it is not built$") as told:
        ops.linear(x, w)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.linear(x, w)
        ops.linear(x, other)
        ops.embedding([0], other)
    absent.sentence = "its driver is gone"
    with pytest.warns(RuntimeWarning, match="its driver is gone"):
        ops.linear(x, w)


def weight_copy(w):
    return QTensor(w.format, w.shape, dict(w.parts))


def slow_experts(x, up, down, topk_ids, topk_weights, act):
    y = np.zeros((len(x), down.shape[1]))
    for i in range(len(x)):
        for t in range(topk_ids.shape[1]):
            e = topk_ids[i, t]
            h = np.asarray(ops.apply_gate(act, (x[i].astype(np.float64) @ up[e].astype(np.float64).T)[None].astype(np.float32)))[
                0
            ]
            y[i] += topk_weights[i, t] * (h.astype(np.float64) @ down[e].astype(np.float64).T)
    return y


@pytest.mark.parametrize("starve", ["none", "one", "all but one"])
@pytest.mark.parametrize("act", ["swiglu", "geglu", "swiglu_clamped"])
def test_case_32_experts_with_starved_experts(rng, starve, act):
    up, down = weight(rng, 64, 96, (4,)), weight(rng, 40, 32, (4,))
    x = rng.standard_normal((10, 96)).astype(np.float32) * 0.05
    pool = {"none": [0, 1, 2, 3], "one": [0, 1, 3], "all but one": [2]}[starve]
    topk_ids = rng.choice(pool, (10, 2))
    topk_weights = rng.random((10, 2)).astype(np.float32)
    y = ops.experts(x, up, down, topk_ids, topk_weights, gate=act, backend="reference")
    wanted = slow_experts(x, up.dequantize(), down.dequantize(), topk_ids, topk_weights, act)
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


def test_case_21_routed_tokens_in_one_call_equal_chunks(rng):
    up, down = weight(rng, 64, 32, (8,)), weight(rng, 32, 32, (8,))
    for m in (31, 32, 33, 65):
        x = rng.standard_normal((m, 32)).astype(np.float32)
        topk_ids = rng.integers(0, 8, (m, 2))
        topk_weights = rng.random((m, 2)).astype(np.float32)
        whole = ops.experts(x, up, down, topk_ids, topk_weights, backend="reference")
        parts = [
            ops.experts(x[i : i + 8], up, down, topk_ids[i : i + 8], topk_weights[i : i + 8], backend="reference")
            for i in range(0, m, 8)
        ]
        # BLAS may sum in another order for another number of rows: one float32 rounding a term on
        # the absolute sum.
        np.testing.assert_allclose(whole, np.concatenate(parts), rtol=0, atol=64 * 2.0**-24 * np.abs(whole).max())


def of_two_factors(rng, shape):
    """A stack of NVFP4 matrices, a factor each."""
    fmt = format_named("nvfp4")
    parts = {
        "codes": rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8),
        "scales": rng.integers(0x30, 0x48, (*shape[:-1], shape[-1] // 16), dtype=np.uint8),
        "global_scale": rng.uniform(1e-2, 4e-2, shape[0]).astype(np.float32),
    }
    return QTensor(fmt, shape, parts)


@pytest.mark.parametrize("act", ["swiglu", "geglu", "swiglu_clamped"])
def test_case_44_gates_and_ups_with_a_factor_each(rng, act):
    """In two stacks: what the dense matrices give, not what one factor for both would."""
    gates, ups, down = (of_two_factors(rng, s) for s in ((3, 32, 96), (3, 32, 96), (3, 40, 32)))
    x, topk_ids = rng.standard_normal((10, 96)).astype(np.float32), rng.integers(0, 3, (10, 2))
    topk_weights, biases = rng.random((10, 2)).astype(np.float32), rng.standard_normal((2, 3, 32)).astype(np.float32)
    options = {"gate": act, "backend": "reference"}
    y = ops.experts(x, gates, down, topk_ids, topk_weights, up=ups, **options)
    dense = np.concatenate([gates.dequantize(), ups.dequantize()], axis=1)
    wanted = slow_experts(x, dense, down.dequantize(), topk_ids, topk_weights, act)
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())
    one_factor = QTensor(ups.format, ups.shape, {**ups.parts, "global_scale": gates.parts["global_scale"]})
    off = ops.experts(x, gates, down, topk_ids, topk_weights, up=one_factor, **options) - wanted
    assert np.abs(off).max() > 0.1 * np.abs(wanted).max()
    biased = ops.experts(x, gates, down, topk_ids, topk_weights, up=ups, gate_up_bias=biases[0], up_bias=biases[1], **options)
    apart = [ops.linear(x, w[0], b[0], backend="reference") for w, b in ((gates, biases[0]), (ups, biases[1]))]
    first = ops.linear(ops.apply_gate(act, np.concatenate(apart, axis=1)), down[0], backend="reference")
    only = ops.experts(
        x, gates, down, 0 * topk_ids[:, :1], np.ones((10, 1)), up=ups, gate_up_bias=biases[0], up_bias=biases[1], **options
    )
    np.testing.assert_array_equal(only, first)
    assert not np.array_equal(biased, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up": (3, 16, 96)}, r"gates \(3, 32, 96\), up \(3, 16, 96\), 'swiglu'; with up, two stacks of one shape"),
        ({"gate": "none"}, r"up \(3, 32, 96\), 'none'; with up, two stacks of one shape, gated"),
        ({"interleaved": True}, r"up \(3, 32, 96\), 'swiglu', interleaved; with up"),
        ({"up_bias": np.zeros((3, 64))}, r"up_bias has shape \(3, 64\); \(3, 32\) is allowed"),
        ({"up": None, "up_bias": np.zeros((3, 32))}, r"up_bias without up; .* gate_up_bias, \(e, 2f\)"),
    ],
)
def test_gates_and_ups_that_do_not_fit(rng, change, message):
    gates, ups, down = (of_two_factors(rng, s) for s in ((3, 32, 96), (3, 32, 96), (3, 40, 32)))
    given = {"up": ups, **change}
    if isinstance(given["up"], tuple):
        given["up"] = of_two_factors(rng, given["up"])
    if given["up"] is None:
        down = of_two_factors(rng, (3, 40, 16))
    with pytest.raises(ShapeError, match=message):
        ops.experts(np.ones((2, 96), np.float32), gates, down, np.zeros((2, 1), int), np.ones((2, 1)), **given)


def test_no_tokens_gives_an_empty_result(rng):
    up, down = weight(rng, 64, 32, (2,)), weight(rng, 40, 32, (2,))
    y = ops.experts(np.zeros((0, 32), np.float16), up, down, np.zeros((0, 2), int), np.zeros((0, 2)), backend="reference")
    assert y.shape == (0, 40)
    assert y.dtype == np.float16


def test_import_needs_neither_torch_nor_transformers():
    heavy = ("torch", "transformers", "triton", "mlx")
    code = f"import halfbyte, halfbyte.ops, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_lists_are_arrays(rng):
    w = weight(rng, 4, 64)
    x = np.ones((2, 64), np.float32)
    plain = ops.linear(x, w)
    np.testing.assert_array_equal(ops.linear(x, w, bias=[1.0, 2.0, 3.0, 4.0]), plain + np.arange(1, 5, dtype=np.float32))
    with pytest.raises(ShapeError, match=r"bias has shape \(3,\); the weight has n = 4 outputs"):
        ops.linear(x, w, bias=[1.0, 2.0, 3.0])
    assert ops.embedding([], w).shape == (0, 64)
    assert ops.embedding([[3], [0]], w).shape == (2, 1, 64)


def test_a_second_call_with_a_torch_tensor_asks_for_no_backend(rng, monkeypatch):
    import torch

    w, x = weight(rng, 24, 64), torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float32))
    first = ops.linear(x, w)
    monkeypatch.setattr(ops, "choose", lambda *call: pytest.fail("the backend was chosen before"))
    assert torch.equal(ops.linear(x, w), first)
    assert torch.equal(ops.linear(x, w, torch.ones(24)), first + 1)
