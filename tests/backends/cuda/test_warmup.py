"""Which kernels a mixture of experts on CUDA needs for which number of tokens, and that a warm-up
has called them all.

The launches are the project's own, on CPU tensors: Triton's binder says what each would compile,
and nothing runs.
"""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")

from halfbyte import QTensor, format_named  # noqa: E402
from halfbyte.backends.cuda import moe as experts  # noqa: E402
from halfbyte.backends.cuda.moe import wgmma as fused_experts  # noqa: E402
from halfbyte.backends.cuda.rounded import launch as rounded  # noqa: E402
from halfbyte.backends.cuda.weight import to_device  # noqa: E402
from halfbyte.torch import QExperts  # noqa: E402
from halfbyte.torch.warmup import TOKENS, _steps  # noqa: E402
from support.gpu_weights import random_parts  # noqa: E402
from support.ptx_launch import bound  # noqa: E402

HALF = torch.float16
PAIRS = [(e, top) for e in (1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 32, 60, 64, 100, 128, 256, 384, 512) for top in (1, 2, 3, 4, 6, 8, 10)
         if top <= e]  # fmt: skip


@pytest.fixture
def launched():
    """Names and specializations of the kernels launched since it was cleared."""
    with bound() as seen:
        yield seen


def block(e, word="mxfp4", n=64, k=64):
    fmt, rng = format_named(word), np.random.default_rng(e)
    return [to_device(QTensor(fmt, s, random_parts(fmt, s, rng)), "cpu") for s in ((e, 2 * n, k), (e, k, n))]


def compiled_by(launched, weights, calls, top, dtype=torch.int64):
    """Everything that calls of so many tokens, with shares of a dtype, would compile."""
    up, down = weights
    launched.clear()
    for m, share in calls:
        index = torch.arange(m * top).reshape(m, top).to(dtype) % up.shape[0]
        x = torch.zeros(m, up.shape[-1], dtype=HALF)
        experts.mixture(x, ((up, None),), down, index, torch.ones(m, top, dtype=share), "swiglu", True, None)
    return frozenset(launched)


def layer_of(e):
    """A layer of e experts that says it is on a GPU."""
    fmt, rng = format_named("mxfp4"), np.random.default_rng(5)
    shapes = {"gate_up_proj": (e, 64, 64), "down_proj": (e, 64, 32)}
    return QExperts({name: QTensor(fmt, s, random_parts(fmt, s, rng)) for name, s in shapes.items()})


@pytest.mark.parametrize("takes", [False, True], ids=["fragments", "fused"])
@pytest.mark.parametrize(("e", "top"), [(5, 2), (7, 3), (8, 2), (3, 1), (60, 4), (128, 8)])
def test_after_a_warm_up_no_number_of_tokens_compiles_anything(launched, e, top, takes):
    with mock.patch.object(QExperts, "device", "cuda:1"):
        steps = _steps(layer_of(e), TOKENS, top, HALF)
    edges = [40, 129, 333, 1023, 1025, 4095, 4096]
    for m in range(2, 4097):
        if experts.kernels(m, top, e, takes) != experts.kernels(m - 1, top, e, takes):
            edges += [m - 1, m, m + 1]
    with mock.patch.object(fused_experts, "serves", return_value=takes):
        weights = block(e)
        called = compiled_by(launched, weights, steps, top)
        every = [(m, share) for m in sorted({*range(1, 70), *edges}) for share in (HALF, torch.float32)]
        needed = compiled_by(launched, block(e), every, top)
        assert needed <= called, {name for name, *_ in needed - called}
        if takes and (e, top) == (5, 2):  # neither powers of two do, nor shares of one dtype
            for few in ([(m, share) for m in TOKENS for share in (HALF, torch.float32)], [(m, HALF) for m, _ in steps]):
                assert not needed <= compiled_by(launched, block(e), few, top)
    steps_of_plans = {key[1] for m in range(1, 4097) for key in experts.kernels(m, top, e, takes) if key[0] == "plan"} - {0}
    assert sum(name == "routing_kernel" for name, *_ in called) == len(steps_of_plans)  # of both ways, whatever a block takes


def test_every_number_of_tokens_has_its_kernels_among_the_steps():
    for (e, top), fused_too in itertools.product(PAIRS, (False, True)):
        steps = experts.warming_tokens(TOKENS, top, e)
        assert set(TOKENS) <= set(steps) <= set(range(1, 4097))
        assert len(steps) <= len(TOKENS) + 4
        called = {key for m in steps for key in experts.kernels(m, top, e, fused_too)}
        assert all(experts.kernels(m, top, e, fused_too) <= called for m in (*range(1, 1025), *range(1025, 4096, 7), 4096)), (
            e,
            top,
        )


def test_steps_lie_between_the_tokens_asked_for():
    """With 5 experts, 2 a token, blocks of 16 tokens begin at 33, the fused schedule at 40, its
    next tile at 41.
    """
    assert set(experts.warming_tokens(TOKENS, 2, 5)) - set(TOKENS) == {33, 40}
    assert set(experts.warming_tokens(TOKENS, 2, 8)) - set(TOKENS) == {33}
    assert experts.warming_tokens((1,), 2, 5) == (1,)
    assert experts.warming_tokens((), 2, 5) == ()
    assert experts.warming_tokens((34, 41), 2, 5) == (34, 40, 41)


def test_experts_on_a_gpu_are_called_at_these_steps():
    layer, full = layer_of(5), torch.float32
    assert _steps(layer, TOKENS, 2, HALF) == [(m, HALF) for m in TOKENS]
    with mock.patch.object(QExperts, "device", "cuda:1"):
        steps = experts.warming_tokens(TOKENS, 2, 5)
        assert _steps(layer, TOKENS, 2, HALF) == [*((m, HALF) for m in steps), (1, full), (4096, full)]
        assert _steps(layer, TOKENS, 2, full) == [(m, full) for m in steps]
        assert _steps(layer, (3,), 2, HALF) == [(3, HALF), (3, full)]
        assert _steps(layer, (), 2, HALF) == []


@pytest.mark.parametrize("m", [1, 40])
def test_indices_of_either_type_make_one_kernel_for_products(launched, m):
    """The fused kernel is kept with the weight, so its table of experts is int32 whatever type the
    indices have.
    """
    seen = []
    yes = {"return_value": True}
    with mock.patch.object(fused_experts, "serves", **yes), mock.patch.object(fused_experts, "enough", **yes):
        for dtype in (torch.int64, torch.int32):
            got = compiled_by(launched, block(5), [(m, HALF)], 2, dtype)
            seen.append({one for one in got if one[0] in ("wgmma_kernel", "gather_kernel", "combine_kernel")})
    assert seen[0] == seen[1]
    assert {name for name, *_ in seen[0]} == {"wgmma_kernel", "gather_kernel", "combine_kernel"}


@pytest.mark.parametrize("mode", ["fp8", "int8"])
@pytest.mark.parametrize("word", ["mxfp4", "int4:g128", "nvfp4"])
def test_rounded_activations_of_any_length_find_their_kernels(word, mode, launched):
    fmt, rng = format_named(word), np.random.default_rng(1)
    w = to_device(QTensor(fmt, (384, 256), random_parts(fmt, (384, 256), rng)), "cpu")
    x = torch.zeros(1100, 256, dtype=HALF)
    tokens = tuple(m for m in TOKENS if m <= 1024)

    def compiled(lengths):
        launched.clear()
        for m in lengths:
            w.launches.clear()
            rounded.linear(x[:m], w, None, mode)
        return set(launched)

    with mock.patch.object(rounded.gpu, "capability", return_value=(9, 0)):
        warm = compiled({*tokens, *rounded.warming_tokens(tokens, x[:1], w, mode, False)})
        assert len(warm) > 1
        assert compiled((3, 5, 17, 33, 100, 129, 200, 257, 300, 513, 777, 1000)) <= warm
