"""Verbs inside `torch.compile`: one operation of the graph, with the bits of the plain call."""

from __future__ import annotations

import gc

import pytest

import halfbyte as hb
import torch
from halfbyte.errors import BackendError, ShapeError
from halfbyte.numerics import opaque_call
from halfbyte.torch import linear
from support.transform_matrix import activations, weight

X, IDS = activations(3, 64), torch.tensor([[0, 7]])
ROUTED = (X, torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]))
UP, DOWN = weight("int4:g32", 2, 128, 64), weight("int4:g32", 2, 64, 64)
BIAS = torch.linspace(-1, 1, 32)
CALLS = {
    "linear": (lambda x: hb.linear(x, weight_of["int4"], BIAS, activations="int8") + 1, (X,)),
    "linear of a prepared weight": (lambda x: hb.linear(x, prepared["int4"], invariant=True), (X.bfloat16(),)),
    "halfbyte.torch.linear": (lambda x: linear(x, prepared["int4"], BIAS), (X,)),
    "embedding": (lambda ids: hb.embedding(ids, weight_of["nvfp4"], dtype="float16"), (IDS,)),
    "experts": (lambda *args: hb.experts(args[0], UP, DOWN, *args[1:], gate="geglu"), ROUTED),
}
weight_of = {"int4": weight("int4:g32", 32, 64), "nvfp4": weight("nvfp4", 32, 64)}
prepared = {name: hb.prepare(w) for name, w in weight_of.items()}


def compiled(function, backend="eager"):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_a_verb_is_one_operation_of_a_graph(name, backend):
    call, args = CALLS[name]
    got, want = compiled(call, backend)(*args), call(*args)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_another_weight_is_another_call():
    call = compiled(lambda x, w: hb.linear(x, w))
    for w in (*weight_of.values(), prepared["nvfp4"], *weight_of.values()):
        assert torch.equal(call(X, w), hb.linear(X, w))


def test_a_graph_refuses_with_the_sentence_of_the_plain_call():
    with pytest.raises(ShapeError, match=r"^\[linear\] x has shape \(3, 63\); its last axis must be k = 64"):
        compiled(lambda x: hb.linear(x, weight_of["int4"]))(X[:, :-1])
    with pytest.raises(ShapeError, match=r"^\[embedding\] ids run from 99 to 99; the table has rows 0 to 31"):
        compiled(lambda ids: hb.embedding(ids, weight_of["int4"]))(torch.tensor([99]))


def test_a_bias_that_records_a_gradient_is_not_dropped():
    bias = BIAS.clone().requires_grad_()
    call = torch.compile(lambda x: linear(x, prepared["int4"], bias).sum(), backend="aot_eager", fullgraph=True)
    call(X).backward()
    assert torch.equal(bias.grad, torch.full((32,), 3.0))


def test_what_is_recorded_goes_with_the_weight():
    w = weight("int4:g32", 8, 64)
    before = set(opaque_call._remembered)
    name = opaque_call.record(lambda w, x: x.clone(), lambda x: x.new_empty(x.shape), w)
    assert torch.equal(opaque_call.call(name, X), X)
    del w
    gc.collect()
    assert set(opaque_call._remembered) == before
    with pytest.raises(BackendError, match=r"^\[compile\] call \d+ of a graph whose weight no longer exists"):
        opaque_call.call(name, X)
