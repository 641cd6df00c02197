"""Gradients through packed weights: with respect to x that of the decoded weight; none for the
weight, and a sentence for that.

The reference is float64 autograd on the decoded weight; an adapter beside packed weights trains as
beside dense ones.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
import torch
from halfbyte import ops
from halfbyte.errors import BackendError
from halfbyte.formats import format_named
from halfbyte.torch import ConcatLinear, QEmbedding, QExperts, QLinear, fuse, linear
from halfbyte.torch import functional as products
from support.random_tensors import finite_tensor

FORMATS = ("int4", "uint4", "mxfp4", "nvfp4", "q4_0", "q4_K", "q6_K", "affine4", "nf4")
BACKENDS = ("cpu", "reference")


def weight(word, n=24, k=256, seed=0):
    fmt = format_named(word)
    return finite_tensor(fmt, (n, max(k, fmt.super_size)), seed)


def dense64(q):
    return torch.from_numpy(np.asarray(q.dequantize("float32"), np.float64))


def close(got, want, scale):
    """Within float32's error for sums of these terms, element by element."""
    assert torch.all((got.double() - want).abs() <= 1e-5 * scale + 1e-30), (got.double() - want).abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("word", FORMATS)
def test_the_gradient_is_that_of_the_decoded_weight(word, backend):
    q = weight(word)
    layer = QLinear(q, torch.zeros(q.shape[0]), backend=backend)
    layer.bias.requires_grad_(True)
    x = torch.randn(2, 5, q.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    g = torch.randn(2, 5, q.shape[0], generator=torch.Generator().manual_seed(2))
    layer(x).backward(g)
    w = dense64(q)
    close(x.grad, g.double() @ w, g.double().abs() @ w.abs())
    close(layer.bias.grad, g.double().sum((0, 1)), g.double().abs().sum((0, 1)))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 70), groups=st.integers(1, 4), m=st.integers(0, 9), seed=st.integers(0, 99))
def test_one_hot_gradients_return_rows_bit_for_bit(n, groups, m, seed):
    q = finite_tensor(format_named("int4", 32), (n, 32 * groups), seed)
    w = torch.from_numpy(np.asarray(q.dequantize("float32")))
    x = torch.zeros(m, 32 * groups, requires_grad=True)
    rows = torch.randint(0, n, (m,), generator=torch.Generator().manual_seed(seed))
    linear(x, ops.prepare(q)).backward(torch.eye(n)[rows])
    assert torch.equal(x.grad, w[rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_rounded_once(dtype):
    q = weight("mxfp4")
    g = torch.randn(4, q.shape[0], generator=torch.Generator().manual_seed(3)).to(dtype)
    x = torch.zeros(4, q.shape[1], dtype=dtype, requires_grad=True)
    linear(x, ops.prepare(q)).backward(g)
    want = g.double() @ dense64(q)
    assert x.grad.dtype == dtype
    assert torch.all((x.grad.double() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 1e-5)


def test_slabs_add_up(monkeypatch):
    q = weight("q4_0", n=70)
    g = torch.randn(3, 70)
    whole = products.gradient(g, ops.prepare(q))
    monkeypatch.setattr(products, "SLAB_BYTES", 4 * q.shape[1] * 9)
    w = dense64(q)
    close(products.gradient(g, ops.prepare(q)), whole.double(), g.double().abs() @ w.abs())


def test_the_int8_mode_passes_the_exact_products_gradient():
    q = weight("int4")
    x = torch.randn(3, q.shape[1], requires_grad=True)
    both = []
    for mode in ("exact", "int8"):
        x.grad = None
        linear(x, ops.prepare(q), activations=mode).sum().backward()
        both.append(x.grad)
    assert torch.equal(*both)


def test_strided_x_and_no_grad_give_the_same_product():
    q = weight("q4_K")
    wide = torch.randn(4, 2 * q.shape[1])
    x = wide[:, ::2]
    taped = x.detach().clone().requires_grad_(True)
    with torch.no_grad():
        y = linear(taped, ops.prepare(q))
    assert not y.requires_grad
    assert torch.equal(y, linear(x, ops.prepare(q)))
    assert torch.equal(y, linear(taped, ops.prepare(q)).detach())
    assert torch.equal(y, ops.linear(x, q))


def adapter_step(base, w, steps=12):
    """Losses of a low-rank adapter beside `base`, which stays as it is."""
    n, k = w.shape
    torch.manual_seed(0)
    a, b = torch.randn(4, k) * 0.1, torch.zeros(n, 4)
    for p in (a, b):
        p.requires_grad_(True)
    first = torch.nn.Linear(k, k, bias=False)  # below the packed weight: its gradient comes through it
    x, y = torch.randn(16, k), torch.randn(16, n)
    optimizer = torch.optim.Adam([a, b, first.weight], lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        h = first(x)
        loss = ((base(h) + h @ a.T @ b.T - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_an_adapter_trains_on_packed_weights_as_on_dense_ones():
    q = weight("affine4")
    w = torch.from_numpy(np.asarray(q.dequantize("float32")))
    packed = adapter_step(QLinear(q), w)
    dense = adapter_step(lambda h: h @ w.T, w)
    np.testing.assert_allclose(packed, dense, rtol=1e-4)
    assert packed[-1] < packed[0]


def test_there_is_no_gradient_for_the_weight():
    layer = QLinear(weight("mxfp4"))
    assert layer.weight.requires_grad is False
    assert layer.weight.requires_grad_(False) is layer.weight
    said = r"\[linear\] a packed mxfp4:g32 weight of shape \(24, 256\) has no gradient.*adapter"
    for ask in (lambda: layer.weight.requires_grad_(), lambda: setattr(layer.weight, "requires_grad", True)):
        with pytest.raises(BackendError, match=said):
            ask()
    assert [name for name, _ in layer.named_parameters()] == []


@pytest.mark.parametrize("verb", ["linear", "experts"])
def test_verbs_that_pass_no_gradient_on_say_so(verb):
    q = finite_tensor(format_named("int4", 32), (2, 32, 32), 0)
    x = torch.randn(3, 32, requires_grad=True)
    index, share = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    with pytest.raises(BackendError, match=rf"\[{verb}\] x requires a gradient, and this verb passes none on.*x\.detach\(\)"):
        hb.linear(x, q[0]) if verb == "linear" else ops.experts(x, q, q, index, share, gate="none")
    with torch.no_grad():
        assert hb.linear(x, q[0]).shape == (3, 32)
    assert hb.linear(x.detach(), q[0]).shape == (3, 32)


def test_rows_and_fused_layers_pass_the_gradient_of_their_rows():
    first, second = weight("int4", 16), weight("q4_0", 8, seed=1)
    w = torch.cat([dense64(first), dense64(second)])
    x = torch.randn(3, 256, requires_grad=True)
    g = torch.randn(3, 24)
    ConcatLinear([first, second])(x).backward(g)
    close(x.grad, g.double() @ w, g.double().abs() @ w.abs())

    model = torch.nn.Module()
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        setattr(model, name, QLinear(weight("int4", 16, seed=i)))
    dense = [dense64(weight("int4", 16, seed=i)) for i in range(3)]
    assert fuse(model) == 1
    x = torch.randn(3, 256, requires_grad=True)
    parts = [model.q_proj(x), model.k_proj(x), model.v_proj(x)]
    torch.cat(parts, -1).backward(torch.cat([g[:, :16]] * 3, -1))
    joined = torch.cat(dense)
    close(x.grad, g[:, :16].double() @ sum(dense), g[:, :16].double().abs() @ joined.abs().reshape(3, 16, -1).sum(0))
    for i, layer in enumerate((model.q_proj, model.k_proj, model.v_proj)):
        assert torch.equal(layer.gradient(g[:, :16]), products.gradient(g[:, :16], ops.prepare(weight("int4", 16, seed=i))))


def test_experts_pass_a_gradient_to_tokens_and_shares():
    fmt = format_named("int4", 32)
    up, down = finite_tensor(fmt, (3, 64, 32), 0), finite_tensor(fmt, (3, 32, 32), 1)
    module = QExperts({"gate_up_proj": up, "down_proj": down})
    x = (torch.randn(5, 32) * 0.1).requires_grad_(True)
    index = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    share = torch.rand(5, 2, requires_grad=True)
    module(x, index, share).sum().backward()
    wu, wd = (torch.from_numpy(np.asarray(w.dequantize("float32"), np.float64)) for w in (up, down))
    x64, share64 = x.detach().double().requires_grad_(True), share.detach().double().requires_grad_(True)
    total = torch.zeros(5, 32, dtype=torch.float64)
    for t in range(2):
        gate, upper = torch.einsum("mk,mnk->mn", x64, wu[index[:, t]]).chunk(2, -1)
        product = torch.einsum("mk,mnk->mn", torch.nn.functional.silu(gate) * upper, wd[index[:, t]])
        total = total + share64[:, t, None] * product
    total.sum().backward()
    for got, want in ((x.grad, x64.grad), (share.grad, share64.grad)):
        assert (got.double() - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("kind", ["linear", "bias", "rows", "fused"])
def test_one_compiled_graph_forward_and_back(kind):
    q = weight("mxfp4", 16)
    model = torch.nn.Module()
    model.q_proj = QLinear(q, torch.randn(16) if kind == "bias" else None)
    if kind == "rows":
        model.q_proj = ConcatLinear([q, weight("int4", 8)])
    if kind == "fused":
        model.k_proj, model.v_proj = QLinear(weight("mxfp4", 16, seed=1)), QLinear(weight("mxfp4", 16, seed=2))
        assert fuse(model) == 1
    layer = model.q_proj
    compiled = torch.compile(lambda x: (layer(x * 2.0) ** 2).sum(), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 256)
    grads = []
    for run in (compiled, lambda x: (layer(x * 2.0) ** 2).sum()):
        leaf = x.clone().requires_grad_(True)
        run(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_compiled_experts_pass_the_gradients_of_the_plain_call():
    """Of x and of the routing weights, also where stacks are of different formats."""
    fmt = format_named("int4", 32)
    gate, up, down = finite_tensor(fmt, (2, 32, 32), 0), finite_tensor(format_named("uint3", 32), (2, 32, 32), 1), (2, 32, 32)
    separate = {"gate_proj": gate, "up_proj": up, "down_proj": finite_tensor(fmt, down, 2)}
    for weights in ({"gate_up_proj": finite_tensor(fmt, (2, 64, 32), 0), "down_proj": finite_tensor(fmt, down, 1)}, separate):
        module, found = QExperts(weights), []
        ids, start = torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.randn(3, 32)
        for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
            x, share = start.clone().requires_grad_(), torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]], requires_grad=True)
            call(x, ids, share).sum().backward()
            found.append((x.grad, share.grad))
        assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["linear", "linear_gradient", "embedding", "experts"])
def test_fake_kernels_give_the_shape_and_dtype_of_the_true_ones(name):
    fmt = format_named("int4", 32)
    layer, table = QLinear(weight("mxfp4", 16)), QEmbedding(weight("mxfp4", 16), dtype=torch.bfloat16)
    experts = QExperts({"gate_up_proj": finite_tensor(fmt, (2, 64, 32), 0), "down_proj": finite_tensor(fmt, (2, 32, 32), 1)})
    x = torch.randn(2, 3, 256)
    arguments = {
        "linear": (x, torch.zeros(16), layer.handle.number, 16),
        "linear_gradient": (torch.randn(2, 3, 16), layer.handle.number, 256),
        "embedding": (torch.tensor([[0, 3]]), table.handle.number, 256, torch.bfloat16),
        "experts": (torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1), experts.handle.number),
    }[name]  # fmt: skip
    torch.library.opcheck(getattr(torch.ops.halfbyte, name).default, arguments, test_utils=("test_schema", "test_faketensor"))
