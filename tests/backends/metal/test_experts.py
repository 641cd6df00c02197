"""Metal experts and the fused RMSNorm product through the CPU build, against the referee."""

from __future__ import annotations

import numpy as np
import pytest

import torch
from halfbyte import ops
from halfbyte.backends import backend_named
from halfbyte.backends.metal import experts as metal_experts
from halfbyte.backends.metal import kernels, launch
from halfbyte.errors import ShapeError
from halfbyte.formats import format_named
from halfbyte.numerics.bits import pack
from halfbyte.tensor.qtensor import QTensor
from support import metal_bounds as bounds
from support.metal_cpu.machine import available
from support.metal_formats import TORCH, as_float, backend, stand
from support.metal_products import assert_one_hot
from support.random_tensors import finite_tensor, random_tensor

pytestmark = pytest.mark.skipif(not available(), reason="clang-19 is not installed")


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """All kernels of this file, compiled together."""
    if not available():
        return
    f32, few = "float32", []
    for make in (kernels.experts_gemm, kernels.experts_matvec):
        few += [make(format_named("mxfp4"), "float16", gate, down=False) for gate in kernels.GATES]
    few += [make(format_named("mxfp4"), f32, "none", down=True) for make in (kernels.experts_gemm, kernels.experts_matvec)]
    for fmt in (format_named("nvfp4"), format_named("affine4", 32), format_named("int4", 32)):
        few += [kernels.experts_gemm(fmt, dtype, "swiglu", down=False) for dtype in TORCH]
        few.append(kernels.experts_gemm(fmt, f32, "none", down=True))
    stand().load([*few, *(kernels.experts_combine(dtype) for dtype in TORCH)])


def stack(word, shape, seed, **options):
    """A stack with weights near 1, so that activations neither vanish nor overflow."""
    q = random_tensor(format_named(word, **options), shape, seed)
    rng = np.random.default_rng(seed)
    parts = dict(q.parts)
    if q.format.scale == "e8m0":
        parts["scales"] = rng.integers(121, 126, parts["scales"].shape, dtype=np.uint8)
    elif q.format.scale == "e4m3":
        parts["scales"] = rng.integers(24, 48, parts["scales"].shape, dtype=np.uint8)
        parts["global_scale"] = rng.uniform(0.5, 2, shape[0]).astype(np.float32)
    else:
        for p in ("scales", "biases"):
            if p in parts:
                parts[p] = rng.uniform(-0.1, 0.1, parts[p].shape).astype(parts[p].dtype)
    return QTensor(q.format, shape, parts)


def routed(m, experts, top_k, seed=0):
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(m, experts, generator=g)
    return scores.topk(top_k).indices, torch.rand(m, top_k, generator=g)


def check(y, x, up, down, index, share, dtype, *, gate_up_bias=None, down_bias=None, **how):
    """Each element within what float32 sums of the two products, carried through the gate,
    and one rounding allow.
    """
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    how |= {name: None if b is None else b.double().numpy() for name, b in biases.items()}
    exact, bound = bounds.experts(x.double().numpy(), up, down, index.numpy(), share.double().numpy(), **how)
    bounds.assert_within(as_float(y), exact, bound, dtype, min(up.shape[2], down.shape[2]))


@pytest.mark.parametrize("gate", ["none", "swiglu", "swiglu_clamped", "geglu"])
def test_the_checker_fails_on_one_wrong_element_and_on_many_near_their_bounds(gate):
    up, down = stack("mxfp4", (2, 32 if gate == "none" else 64, 96), 1), stack("mxfp4", (2, 64, 32), 2)
    x, (index, share) = torch.randn(6, 96, generator=torch.Generator().manual_seed(4)), routed(6, 2, 2)
    y = ops.experts(x, up, down, index, share, gate=gate, backend="reference")
    args = x, up, down, index, share, "float32"
    check(y, *args, gate=gate)
    exact, bound = bounds.experts(x.double().numpy(), up, down, index.numpy(), share.double().numpy(), gate=gate)
    at = np.unravel_index(bound.argmin(), bound.shape)
    off = 2 * (bound[at] + bounds.ULP["float32"] * abs(exact[at]))
    assert off < 1e-5 * np.abs(exact).max()  # a bound by the largest output would have to be tighter than float32 is
    y[at] += off
    with pytest.raises(AssertionError):
        check(y, *args, gate=gate)
    with pytest.raises(AssertionError):
        check(torch.from_numpy(exact + 0.5 * bound).float(), *args, gate=gate)


@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize(
    ("gate", "interleaved"), [("swiglu", False), ("swiglu_clamped", True), ("geglu", False), ("none", False)]
)
def test_activations_and_both_kernels(gate, interleaved, m):
    f2 = 32 if gate == "none" else 64
    up, down = stack("mxfp4", (4, f2, 96), 1), stack("mxfp4", (4, 10, 32), 2)
    g = torch.Generator().manual_seed(1)
    x, ub, db = torch.randn(m, 96, generator=g).half(), torch.randn(4, f2, generator=g), torch.randn(4, 10, generator=g)
    index, share = routed(m, 4, 2)
    b = backend()
    options = {"gate": gate, "interleaved": interleaved, "gate_up_bias": ub, "down_bias": db}
    y = b.experts(x, b.prepare(up), b.prepare(down), index, share, **options)
    assert y.dtype == torch.float16
    assert (m * 2 <= metal_experts.FEW_ROUTED) == (m < 70)
    check(y, x, up, down, index, share, "float16", **options)


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize("word", ["nvfp4", "affine4", "int4"])
def test_formats_and_dtypes(word, dtype):
    options = {} if word == "nvfp4" else {"group_size": 32}
    up, down = stack(word, (3, 64, 64), 1, **options), stack(word, (3, 7, 32), 2, **options)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).to(TORCH[dtype])
    index, share = routed(40, 3, 2)
    b = backend()
    check(b.experts(x, b.prepare(up), b.prepare(down), index, share), x, up, down, index, share, dtype)


@pytest.mark.parametrize("m", [9, 40])  # 18 and 80 routed rows: both kernels
def test_each_expert_has_a_factor_of_its_own(m):
    up, down = stack("nvfp4", (3, 64, 64), 1), stack("nvfp4", (3, 7, 32), 2)
    assert len({float(g) for q in (up, down) for g in q.parts["global_scale"]}) == 6
    x, (index, share) = torch.randn(m, 64, generator=torch.Generator().manual_seed(2)).half(), routed(m, 3, 2)
    b = backend()
    check(b.experts(x, b.prepare(up), b.prepare(down), index, share), x, up, down, index, share, "float16")


@pytest.mark.parametrize("m", [0, 63, 64, 65, 200])
def test_case_21_32_unaligned_row_counts_and_starved_experts(m):
    up, down = stack("mxfp4", (5, 64, 32), 1), stack("mxfp4", (5, 9, 32), 2)
    x = torch.randn(m, 32, generator=torch.Generator().manual_seed(2)).half()
    b = backend()
    for only in ([0, 4], [3, 3], [1, 2]):  # experts between starve, then all but one, then those around
        index = torch.tensor(only).expand(m, 2)
        share = torch.rand(m, 2, generator=torch.Generator().manual_seed(3))
        y = b.experts(x, b.prepare(up), b.prepare(down), index, share)
        assert y.shape == (m, 9)
        check(y, x, up, down, index, share, "float16")


def test_one_call_equals_its_pieces():
    up, down = stack("mxfp4", (4, 64, 32), 1), stack("mxfp4", (4, 8, 32), 2)
    x = torch.randn(100, 32, generator=torch.Generator().manual_seed(2))
    index, share = routed(100, 4, 2)
    b = backend()
    p = b.prepare(up), b.prepare(down)
    whole = b.experts(x, *p, index, share)
    parts = torch.cat([b.experts(x[i : i + 50], *p, index[i : i + 50], share[i : i + 50]) for i in (0, 50)])
    assert torch.equal(whole, parts)


def test_ops_reach_the_metal_experts(monkeypatch):
    """The verb checks shapes, prepares each stack once and hands over; on a Mac the tensors are on
    mps.
    """
    up, down = stack("mxfp4", (3, 64, 32), 1), stack("mxfp4", (3, 8, 32), 2)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    index, share = routed(4, 3, 2)
    b = backend()
    monkeypatch.setattr(ops, "backend_named", lambda name: b if name == "metal" else backend_named(name))
    y = ops.experts(x, up, down, index, share, backend="metal")
    check(y, x, up, down, index, share, "float32")
    with pytest.raises(ShapeError, match="topk_ids run from 0 to 3; there are experts 0 to 2"):
        ops.experts(x, up, down, index + (index == 2).long(), share, backend="metal")
    with pytest.raises(ShapeError, match=r"\(m, top_k\) twice is allowed"):
        ops.experts(x, up, down, index[:3], share, backend="metal")
    for biases, why in (
        ({"gate_up_bias": torch.ones(64)}, r"gate_up_bias has shape \(64,\); \(3, 64\) is allowed"),
        ({"down_bias": torch.ones(1, 8)}, r"down_bias has shape \(1, 8\); \(3, 8\) is allowed"),
    ):
        for name in ("metal", "reference"):
            with pytest.raises(ShapeError, match=why):
                ops.experts(x, up, down, index, share, backend=name, **biases)
    with pytest.raises(ShapeError, match="allowed: swiglu"):
        ops.experts(x, up, down, index, share, gate="relu", backend="metal")
    ids = torch.tensor([2, 0])
    assert torch.equal(ops.embedding(ids, up[0], backend="metal"), torch.from_numpy(up[0].dequantize())[ids])
    y = ops.linear(x, up[1], torch.ones(64), backend="metal", schedule="striped")
    np.testing.assert_allclose(as_float(y), x.numpy() @ up[1].dequantize().T + 1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("word", ["mxfp4", "nvfp4", "affine4", "uint4"])
def test_rmsnorm_dequantize_and_product_in_one_kernel(word):
    q = stack(word, (1, 9, 160), 3, **({"group_size": 32} if word in ("affine4", "uint4") else {}))[0]
    g = torch.Generator().manual_seed(0)
    x, gain = torch.randn(160, generator=g).half(), torch.rand(160, generator=g).half()
    b = backend()
    y = launch.rmsnorm_matvec(b.runtime, x, gain, b.prepare(q).data, 1e-6)
    xd = x.double()
    normal = xd * torch.rsqrt((xd * xd).mean() + 1e-6) * gain.double()
    w = torch.from_numpy(q.dequantize()).double()
    error = (y.double() - normal @ w.T).abs()
    assert (error <= 2.0**-11 * (normal @ w.T).abs() + 1e-5 * (normal.abs() @ w.abs().T)).all()


@pytest.mark.parametrize("repeats", [1, 3])  # 32 and 96 routed rows: both kernels
def test_one_hot_activations_return_the_weight_through_experts(repeats):
    """x · upᵀ · downᵀ where one of the two is an identity and x is the other."""
    identity = {"codes": np.zeros((2, 32, 16), np.uint8), "scales": np.full((2, 32, 1), 127, np.uint8)}
    i = np.arange(32)
    identity["codes"][:, i, i // 2] = 2 << (4 * (i % 2))  # E2M1's 1
    one, q = QTensor(format_named("mxfp4"), (2, 32, 32), identity), stack("mxfp4", (2, 32, 32), 4)
    b = backend()
    p_one, p_q = b.prepare(one), b.prepare(q)
    x = torch.eye(32).half().repeat(repeats, 1)
    for e in (0, 1):
        index = torch.full((32 * repeats, 1), e)
        for up, down in ((p_q, p_one), (p_one, p_q)):
            y = b.experts(x, up, down, index, torch.ones(32 * repeats, 1), gate="none")
            np.testing.assert_array_equal(as_float(y), np.tile(q[e].dequantize("float16").astype(np.float32).T, (repeats, 1)))


@pytest.mark.parametrize("word", ["mxfp4", "nvfp4", "affine4", "uint4"])
def test_one_hot_activations_return_the_weight_through_rmsnorm(word):
    """k = 1024, two turns of both simdgroups, and an input of 32: the mean of the squares is 1, a
    gain of 1/32 undoes the 32.
    """
    q = stack(word, (1, 9, 1024), 3, **({"group_size": 32} if word in ("affine4", "uint4") else {}))[0]
    b = backend()
    held, gain = b.prepare(q).data, torch.full((1024,), 1 / 32).half()
    for k in range(0, 1024, 27):
        y = launch.rmsnorm_matvec(b.runtime, 32 * torch.eye(1024)[k].half(), gain, held, 0.0)
        assert_one_hot(as_float(y), q, "float16", k)


@pytest.mark.parametrize("k", [1003, 1056])  # a tail of three codes, and a third turn of the first simdgroup
def test_rmsnorm_sums_squares_and_products_of_both_simdgroups(k):
    q = finite_tensor(format_named("int4", -1), (9, k), 3)
    b = backend()
    held, gain = b.prepare(q).data, torch.ones(k)
    owner = np.arange(k) // 8 // 32 % kernels.MATVEC_SIMDGROUPS
    for only in (*range(kernels.MATVEC_SIMDGROUPS), None):
        x = np.random.default_rng(0).standard_normal(k).astype(np.float32)
        x = x if only is None else np.where(owner == only, x, 0)
        y = launch.rmsnorm_matvec(b.runtime, torch.from_numpy(x), gain, held, 1e-6)
        x64 = x.astype(np.float64)
        exact, bound = bounds.product((x64 / np.sqrt((x64**2).mean() + 1e-6))[None], q)
        # The norm's own sum of k squares, its root's reciprocal and the product with it.
        bounds.assert_within(as_float(y)[None], exact, bound + (k / 2 + 8) * bounds.EPS * np.abs(exact), "float32", k)


@pytest.mark.parametrize("k", [1003, 1056])
def test_few_routed_rows_sum_both_simdgroups(k):
    """One-hot inputs in every unit of a long row through the kernel without sorting; an identity
    for the other product.
    """
    n = 8
    codes = pack(8 + np.eye(n, dtype=np.uint8), 4)[None]
    identity = QTensor(format_named("int4", -1), (1, n, n), {"codes": codes, "scales": np.ones((1, n, 1), np.float16)})
    q = finite_tensor(format_named("int4", -1), (1, n, k), 3)
    at = np.minimum(8 * np.arange(-(-k // 8)) + np.arange(-(-k // 8)) % 8, k - 1)
    x = torch.zeros(at.size, k)
    x[torch.arange(at.size), torch.from_numpy(at)] = 1
    b = backend()
    p = b.prepare(q), b.prepare(identity)
    for rows, some in zip(x.split(metal_experts.FEW_ROUTED), torch.from_numpy(at).split(metal_experts.FEW_ROUTED), strict=True):
        index = torch.zeros(rows.shape[0], 1, dtype=torch.int32)
        y = b.experts(rows, *p, index, torch.ones(index.shape), gate="none")
        np.testing.assert_array_equal(as_float(y), q[0].dequantize("float32").T[some])
