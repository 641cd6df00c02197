"""A sample of `support/transform_matrix.py`, and the whole of it as a slow test."""

from __future__ import annotations

import os

import numpy as np
import pytest

import halfbyte as hb
import torch
from halfbyte.errors import BackendError, ShapeError
from halfbyte.torch import QEmbedding, QExperts, QLinear, linear
from halfbyte.torch.scaled_linear import scaled
from support.transform_matrix import SLOW, TRANSFORMS, Subject, in_child, subjects, verdict, weight
from torch import nn

QUICK = [name for name in TRANSFORMS if name not in SLOW]


def of_every_kind(formats):
    """One subject of each kind: the kinds take the formats in turn."""
    kinds = {}
    for name, make in subjects(formats):
        kinds.setdefault(name.rpartition(" ")[0] if name.rpartition(" ")[2] in formats else name, []).append((name, make))
    return [made[i % len(made)] for i, made in enumerate(kinds.values())]


@pytest.mark.parametrize(("name", "make"), [pytest.param(n, m, id=n) for n, m in of_every_kind(("nvfp4", "affine4:g32", "q4_K"))])
def test_a_call_gives_the_plain_bits_or_a_sentence(name, make):
    subject, found = make(), {}
    for transform in QUICK[len(name) % 3 :: 3]:
        found[transform] = verdict(subject, TRANSFORMS[transform])
    assert not {t: v for t, v in found.items() if v[0] == "fault"}
    assert sum(kind == "right" for kind, _ in found.values()) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [pytest.param(n, m, id=n) for n, m in subjects()])
def test_the_whole_matrix(name, make):
    cells = in_child(make, list(TRANSFORMS))
    assert not [c for c in cells if c[1] == "fault"]


def test_the_verdict_sees_wrong_bits_and_words_of_torch():
    """The machine itself: a product that is off by a bit under one mode, an error of torch's, a
    process that ends.
    """
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    off = Subject("off", lambda a: layer(a) if torch.is_grad_enabled() else torch.nextafter(layer(a), x.new_tensor(9.0)), (x,))
    assert verdict(off, TRANSFORMS["no_grad"])[0] == "fault"
    assert verdict(off, TRANSFORMS["a profiler"])[0] == "right"
    assert verdict(Subject("torch", layer, (x,)), TRANSFORMS["sparse rows"])[0] == "fault"

    def ends(a):
        os._exit(3)

    kinds = [kind for _, kind, _ in in_child(lambda: Subject("ends", ends, (x,)), ["a list", "None"])]
    assert kinds == ["fault", "fault"]


@pytest.mark.parametrize("x", [None, [[1.0]], np.ones((1, 64), np.float32)], ids=["None", "list", "NumPy"])
def test_modules_say_that_they_take_tensors(x):
    packed = weight("int4:g32", 32, 64)
    for call in (QLinear(packed), QEmbedding(packed), lambda a: linear(a, hb.prepare(packed))):
        with pytest.raises(ShapeError, match=rf"\[(linear|embedding)\] .* is a {type(x).__name__}; a torch.Tensor is allowed"):
            call(x)


def test_verbs_say_what_is_no_array():
    traced = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    packed = weight("int4:g32", 32, 64)
    for call in (lambda: hb.linear(traced, packed), lambda: hb.embedding(traced, packed)):
        with pytest.raises(ShapeError, match="is a Proxy; NumPy arrays and torch tensors are allowed"):
            call()


def test_indices_that_are_no_integers():
    up, down, x = weight("int4:g32", 4, 64, 32), weight("int4:g32", 4, 32, 32), torch.ones(1, 32)
    ids, share = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    with pytest.raises(ShapeError, match="ids are float8_e4m3fn; integers are allowed"):
        hb.embedding(ids.to(torch.float8_e4m3fn), weight("int4:g32", 32, 64))
    with pytest.raises(ShapeError, match="topk_ids are float32; integers are allowed"):
        hb.experts(x, up, down, share, share)
    with pytest.raises(ShapeError, match="topk_weights are int64; float32, float16, bfloat16 and float64 are allowed"):
        hb.experts(x, up, down, ids, ids)


@pytest.mark.parametrize("nbytes", [0, 3 * 64 * 4 - 1])
@pytest.mark.parametrize("form", ["contiguous", "columns"])
def test_memory_that_is_gone_is_refused(nbytes, form):
    """Sharding frees parameters by `resize_(0)`: NumPy would give such a tensor new memory, and the
    native core would read past a storage that was shortened.
    """
    packed, x = weight("int4:g32", 32, 64), torch.ones(3, 64)
    if form == "columns":
        x = torch.ones(64, 3).T
    x.untyped_storage().resize_(nbytes)
    for call in (QLinear(packed), lambda a: hb.linear(a, packed), lambda a: linear(a, hb.prepare(packed))):
        with pytest.raises(ShapeError, match=rf"dtype float32 and shape \(3, 64\) whose memory was freed.* {nbytes} bytes"):
            call(x)


def test_memory_that_is_gone_is_refused_of_a_bias_and_of_an_index():
    packed, bias, ids = weight("int4:g32", 32, 64), torch.ones(32), torch.ones(1, dtype=torch.int64)
    bias.untyped_storage().resize_(127)
    ids.untyped_storage().resize_(7)
    for call in (lambda: QLinear(packed, bias)(torch.ones(3, 64)), lambda: hb.linear(torch.ones(3, 64), packed, bias)):
        with pytest.raises(ShapeError, match=r"dtype float32 and shape \(32,\) whose memory was freed"):
            call()
    for call in (lambda: QEmbedding(packed)(ids), lambda: hb.embedding(ids, packed)):
        with pytest.raises(ShapeError, match=r"dtype int64 and shape \(1,\) whose memory was freed"):
            call()


def test_derivatives_of_derivatives_without_a_transform():
    packed, x = weight("int4:g32", 32, 64), torch.randn(3, 64, requires_grad=True)
    dense = torch.from_numpy(packed.dequantize())
    (first,) = torch.autograd.grad(QLinear(packed)(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, (2 * dense.T @ dense).sum(0).expand_as(x), rtol=1e-4, atol=1e-3)


def test_layers_that_compute_before_the_product_check_x_first():
    """A number would be broadcast to a whole row of x · scale."""
    layer = scaled(QLinear(weight("int4:g32", 32, 64)), torch.ones(64))
    for x, words in ((torch.tensor(1.0), r"shape \(\); its last axis must be k = 64"), (torch.ones(3, 1), r"shape \(3, 1\)")):
        with pytest.raises(ShapeError, match=words):
            layer(x)


@pytest.mark.parametrize("name", ["ScaledLinear", "CompositeLinear"])
def test_layers_with_dense_parts_want_them_where_x_is(name):
    subject = dict(subjects(("int4:g32",)))[name]()
    with pytest.raises(ShapeError, match=r"^\[linear\] x is on meta, a dense part of the layer on cpu; move one of them$"):
        subject.with_x(subject.x.to("meta"))


def test_experts_under_torch_func():
    module = QExperts({"gate_up_proj": weight("int4:g32", 4, 64, 32), "down_proj": weight("int4:g32", 4, 32, 32)})
    ids, share = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    with pytest.raises(BackendError, match=r"no derivative under torch.func .* use backward\(\)"):
        torch.func.grad(lambda x: module(x, ids, share).sum())(torch.ones(1, 32))
