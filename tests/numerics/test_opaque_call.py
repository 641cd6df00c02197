"""Verbs inside `torch.compile`: one operation of the graph, with the bits of the plain call."""

from __future__ import annotations

import gc
import inspect
import sys

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


OTHER = {
    "linear": (lambda x, w: hb.linear(x, w), (X,), [*weight_of.values(), *prepared.values()]),
    "halfbyte.torch.linear": (lambda x, w: linear(x, w), (X,), list(prepared.values())),
    "embedding": (lambda ids, w: hb.embedding(ids, w), (IDS,), [*weight_of.values(), *prepared.values()]),
    "experts": (lambda x, ids, share, up: hb.experts(x, up, DOWN, ids, share), ROUTED, [UP, weight("nvfp4", 2, 128, 64)]),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_weight_is_another_call(name):
    verb, args, weights = OTHER[name]
    call = compiled(verb)
    for w in weights * 2:
        assert torch.equal(call(*args, w), verb(*args, w))


def test_no_object_is_an_argument_of_what_runs_once_while_a_graph_is_traced():
    """Before torch 2.13 Dynamo ends with an internal error there."""
    found = []
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "halfbyte"]:
        for function in vars(module).values():
            if inspect.isfunction(function) and function.__dict__.get("_dynamo_marked_constant"):
                kinds = inspect.get_annotations(function).items()
                found += [(function.__name__, kind) for name, kind in kinds if name not in ("return", "self", "dtype")]
    assert {name for name, _ in found} >= {"_linear_call", "_embedding_call", "_experts_call", "_handle"}
    assert {kind for _, kind in found} <= {"str", "str | None", "bool"}


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
