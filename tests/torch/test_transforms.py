"""Packed modules under everything torch does to a call: tracing, compiling, transforms, modes, and
tensors without memory.

Each gives the numbers of the plain call, or a sentence; none takes the address of a tensor that has
none.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import halfbyte as hb
import torch
from halfbyte.errors import BackendError, ShapeError
from halfbyte.torch import ConcatLinear, QEmbedding, QExperts, QLinear, linear
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def weight(*shape: int, codec: str = "int4:g32") -> hb.QTensor:
    return hb.quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32), codec)


LINEAR = {
    "bias": lambda: QLinear(weight(32, 64), torch.linspace(-1, 1, 32)),
    "plain": lambda: QLinear(weight(32, 64)),
    "reference": lambda: QLinear(weight(32, 64), backend="reference"),
    "rows": lambda: ConcatLinear([weight(16, 64), weight(16, 64, codec="nvfp4")]),
}
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[0, 49, 7]])
ROUTED = (torch.randn(3, 32), torch.tensor([[0, 3], [2, 1], [0, 2]]), torch.rand(3, 2))


def table() -> QEmbedding:
    return QEmbedding(weight(50, 64))


def experts() -> QExperts:
    return QExperts({"gate_up_proj": weight(4, 64, 32), "down_proj": weight(4, 32, 32)})


ALL = [(LINEAR["bias"], (X,)), (LINEAR["rows"], (X,)), (table, (IDS,)), (experts, ROUTED)]


@pytest.mark.parametrize(("make", "args"), ALL)
def test_fake_tensors_give_shapes(make, args):
    module, want = make(), make()(*args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inside = module(*(torch.empty_like(a) for a in args))
        assert type(inside).__name__ == "FakeTensor"
        assert (inside.shape, inside.dtype) == (want.shape, want.dtype)
    assert module(*(mode.from_tensor(a) for a in args)).shape == want.shape
    meta = module(*(a.to("meta") for a in args))
    assert (meta.device.type, meta.shape) == ("meta", want.shape)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(("make", "args"), [(LINEAR["plain"], (X,)), *ALL[1:]])
def test_make_fx_records_the_operator(make, args, tracing):
    module = make()
    graph = make_fx(lambda *a: module(*a) * 1, tracing_mode=tracing)(*args)
    assert "halfbyte" in graph.code
    other = args if args[0].dtype == torch.int64 else (torch.flip(args[0], [0]), *args[1:])
    assert torch.equal(graph(*other), module(*other))


@pytest.mark.parametrize(("make", "args"), ALL)
def test_traced_and_exported_modules_give_the_same(make, args):
    module = make()
    want = module(*args)
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(module) if len(args) == 1 else module)(*args), want)
    assert torch.equal(torch.jit.trace(module, args)(*args), want)
    for strict in (True, False):
        wrapped = nn.Sequential(module) if len(args) == 1 else module
        assert torch.equal(torch.export.export(wrapped, args, strict=strict).module()(*args), want)


@pytest.mark.parametrize("kind", LINEAR)
def test_vmap(kind):
    module, batch = LINEAR[kind](), torch.randn(5, 3, 64)
    want = torch.stack([module(x) for x in batch])
    assert torch.allclose(torch.vmap(module)(batch), want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(torch.vmap(module, in_dims=1)(batch.transpose(0, 1)), want, rtol=1e-5, atol=1e-5)


def test_vmap_of_tables_experts_and_biases():
    ids = torch.tensor([[1, 2], [3, 4], [49, 0]])
    assert torch.equal(torch.vmap(table())(ids), table()(ids))
    module = experts()
    batch = [torch.stack([t, torch.flip(t, [0])]) for t in ROUTED]
    want = torch.stack([module(*each) for each in zip(*batch, strict=True)])
    assert torch.allclose(torch.vmap(module)(*batch), want, rtol=1e-5, atol=1e-5)
    layer, biases = LINEAR["bias"](), torch.randn(2, 32)
    got = torch.vmap(lambda b: torch.func.functional_call(layer, {"bias": b}, (X,)))(biases)
    assert torch.allclose(got, LINEAR["plain"]()(X) + biases[:, None], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LINEAR)
def test_derivatives(kind):
    """Reverse, forward and mixed mode against the dense matrix."""
    module = LINEAR[kind]()
    dense = torch.cat([torch.from_numpy(w.canonical().dequantize()) for w in module.packed.values()])
    close = {"rtol": 1e-4, "atol": 1e-4}
    g = torch.func.grad(lambda x: (module(x) * 2).sum())(X)
    assert torch.allclose(g, (2 * dense.sum(0)).expand_as(X), **close)
    assert torch.allclose(torch.vmap(torch.func.grad(lambda x: module(x).sum()))(X), dense.sum(0).expand_as(X), **close)
    assert torch.allclose(torch.func.jacrev(module)(X[0]), dense, **close)
    assert torch.allclose(torch.func.jacfwd(module)(X[0]), dense, **close)
    assert torch.allclose(torch.func.jvp(module, (X,), (X,))[1], X @ dense.T, **close)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(X, X))).tangent
    assert torch.allclose(tangent, X @ dense.T, **close)
    hessian = torch.func.hessian(lambda x: module(x).square().sum())(X[0])
    assert torch.allclose(hessian, 2 * dense.T @ dense, rtol=1e-4, atol=1e-3)


def test_experts_refuse_forward_mode():
    with pytest.raises(BackendError, match="packed experts have no forward-mode derivative; use reverse mode"):
        torch.func.jvp(lambda x: experts()(x, *ROUTED[1:]), (ROUTED[0],), (ROUTED[0],))


@pytest.mark.parametrize(("make", "args"), ALL)
def test_modes_leave_the_numbers_alone(make, args):
    module = make()
    want = module(*args)
    with FlopCounterMode(display=False):
        assert torch.equal(module(*args), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(*args), want)
    with torch.inference_mode():
        assert torch.equal(module(*args), want)
        assert torch.equal(module(*(a.clone() for a in args)), want)
    assert torch.equal(torch.func.functionalize(module)(*args), want)
    assert torch.equal(torch.func.functional_call(module, dict(module.named_parameters()), args), want)
    assert torch.equal(copy.deepcopy(module)(*args), want)
    if args[0].is_floating_point():
        x = args[0].clone().requires_grad_()
        assert torch.equal(checkpoint(module, x, *args[1:], use_reentrant=False), module(x, *args[1:]))


class Marked(torch.Tensor):
    """A subclass with memory of its own and no dispatch of its own."""


def test_tensors_that_look_plain():
    """Lazy negation, a lazy zero, strides, a subclass: what lies in memory is not what the tensor
    holds.
    """
    module = LINEAR["bias"]()
    assert torch.equal(module(torch._neg_view(X)), module(-X))
    assert torch.equal(module(torch._efficientzerotensor(3, 64)), module(torch.zeros(3, 64)))
    assert torch.equal(module(X.T.contiguous().T), module(X))
    assert torch.equal(module(X[:, None].expand(3, 4, 64))[:, 2], module(X))
    assert torch.equal(module(X.as_subclass(Marked)), module(X))
    assert module(X[:0]).shape == (0, 32)


BAD = {
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("kind", BAD)
def test_other_layouts_get_a_sentence(kind):
    x = BAD[kind](X)
    prepared = LINEAR["plain"]().weight.prepared
    for call in (LINEAR["bias"](), lambda x: linear(x, prepared), lambda x: hb.linear(x, prepared)):
        with pytest.raises(ShapeError, match=r"\[linear\] .*allowed: "):
            call(x)


def test_the_functions_refuse_what_only_modules_can():
    prepared = LINEAR["plain"]().weight.prepared
    for call in (lambda x: linear(x, prepared), lambda x: hb.linear(x, prepared)):
        with pytest.raises(ShapeError, match=r"\[linear\] .*torch traces the modules of halfbyte.torch"):
            torch.vmap(call)(X[None])
        with pytest.raises(ShapeError, match=r"\[linear\] FakeTensor"), FakeTensorMode(allow_non_fake_inputs=True):
            call(torch.empty(3, 64))
    with pytest.raises(ShapeError, match=r"\[embedding\] FakeTensor"), FakeTensorMode(allow_non_fake_inputs=True):
        hb.embedding(torch.zeros(3, dtype=torch.int64), prepared)


def test_layers_of_one_shape_are_compiled_once():
    """Layers that are compiled one by one, as transformers does, share a graph but for their
    handle.
    """
    torch._dynamo.reset()
    compiles = 0

    def count(graph, inputs):
        nonlocal compiles
        compiles += 1
        return graph.forward

    layers = [LINEAR["bias"]() for _ in range(12)]
    want = [layer(X) for layer in layers]
    for layer in layers:
        layer.compile(backend=count, fullgraph=True)
    assert all(torch.equal(layer(X), y) for layer, y in zip(layers, want, strict=True))
    assert compiles <= 2
    torch._dynamo.reset()


def _square(module_bytes: bytes) -> np.ndarray:
    return pickle.loads(module_bytes)(X).numpy()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(method):
    module = LINEAR["bias"]()
    with multiprocessing.get_context(method).Pool(1) as pool:
        got = pool.apply_async(_square, (pickle.dumps(module),)).get(timeout=120)
    assert np.array_equal(got, module(X).numpy())


class Rows(torch.utils.data.Dataset):
    """A data set that embeds in its workers."""

    def __init__(self) -> None:
        self.table = table()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        with torch.inference_mode():
            return self.table(torch.tensor([i, i + 1])).clone()


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(workers):
    rows = list(DataLoader(Rows(), batch_size=2, num_workers=workers))
    assert torch.equal(torch.cat(rows), table()(torch.tensor([[i, i + 1] for i in range(4)])))
