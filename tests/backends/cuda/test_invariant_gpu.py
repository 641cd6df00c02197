"""The batch-invariant mode on a GPU: a row has the same bits for any number of rows and any
neighbours, in every format, and lies within the ordinary product's bounds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfbyte import QTensor, ops
from halfbyte.errors import BackendError
from support.gpu_weights import DTYPES, close, cuda, make, routing, served, stack, within

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65, 100, 129)
WORDS = (*served(), "hqq4:g64", "bnb_fp4:g64", "q5_K")


def assert_rows(product, x):
    """`product` of some rows of x is those rows of its product of all; returns the latter."""
    y = product(x)
    for m in TOKENS:
        for first in (0, len(x) - m):
            assert torch.equal(product(x[first : first + m]), y[first : first + m]), (m, first)
    return y


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", DTYPES)
def test_a_row_does_not_depend_on_the_others(word, name):
    cuda()
    rng = np.random.default_rng(31)
    q = make(word, 200, -(-600 // make(word, 1, 1, rng).shape[1]), rng)
    p = ops.prepare(q, device="cuda")
    torch.manual_seed(31)
    size = 2.0**-10 if "e5m2" in word else 1  # so that no product leaves float16
    x = (torch.randn(150, q.shape[1], device="cuda") * size).to(DTYPES[name])
    bias = torch.randn(200, device="cuda").to(DTYPES[name])
    y = assert_rows(lambda rows: ops.linear(rows, p, bias, invariant=True), x)
    others = torch.full_like(x, torch.inf)
    others[[0, 77, 149]] = x[[0, 77, 149]]
    assert torch.equal(ops.linear(others, p, bias, invariant=True)[[0, 77, 149]], y[[0, 77, 149]])
    if name != "float32":
        within(y, x, q, bias, name)
    assert torch.equal(ops.linear(x, replace(p, invariant=True), bias), y)


@pytest.mark.parametrize("word", ["int4:g128", "mxfp4", "nvfp4", "q8_0", "q4_K"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_many_outputs_and_inputs(word, name):
    """More tiles than programs, and tiles of every height."""
    cuda()
    q = make(word, 3000, 4096 // max(make(word, 1, 1, np.random.default_rng(0)).shape[1], 1), np.random.default_rng(32))
    p = ops.prepare(q, device="cuda")
    x = torch.randn(300, q.shape[1], device="cuda").to(DTYPES[name])
    assert_rows(lambda rows: ops.linear(rows, p, invariant=True), x)


@pytest.mark.parametrize("word", ["mxfp4", "nvfp4", "int4:g32", "q8_0", "q4_K"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_token_of_experts_does_not_depend_on_the_others(word, interleaved):
    cuda()
    rng = np.random.default_rng(33)
    size = 256 if word == "q4_K" else 128
    up, down = stack(word, (6, 2 * size, size), rng), stack(word, (6, 96, size), rng)
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    x = (torch.randn(150, size, device="cuda") * (0.001 if word in ("nvfp4", "q4_K") else 0.05)).half()
    index, share = routing(150, 2, 33)
    options = {"gate": "swiglu", "interleaved": interleaved}

    def block(rows):
        first = int((x == rows[0]).all(1).nonzero()[0])
        some = slice(first, first + len(rows))
        return ops.experts(rows, pu, pd, index[some], share[some], invariant=True, **options)

    y = assert_rows(block, x)
    want = ops.experts(
        x.float().cpu().numpy(), up, down, index.cpu().numpy(), share.cpu().numpy(), backend="reference", **options
    )
    close(y, want, torch.float16)


def test_a_schedule_and_a_backend_that_cannot_are_refused():
    cuda()
    q = make("mxfp4", 8, 2, np.random.default_rng(34))
    p = ops.prepare(q, device="cuda")
    with pytest.raises(BackendError, match=r"\[linear\] schedule='fused' of an invariant product"):
        ops.linear(torch.zeros(1, q.shape[1], device="cuda"), p, schedule="fused", invariant=True)
    with pytest.raises(BackendError, match="leave invariant=True out"):
        ops.linear(
            np.zeros((1, q.shape[1]), np.float32), QTensor(q.format, q.shape, q.parts), backend="reference", invariant=True
        )
