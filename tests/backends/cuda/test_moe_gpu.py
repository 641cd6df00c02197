"""The mixture of experts on an NVIDIA GPU against the reference backend: routing, empty experts,
activations, CUDA graphs.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor, ops
from halfbyte.errors import BackendError
from support.gpu_weights import close, cuda, routing, stack

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.gpu

E, K, F, H = 6, 256, 128, 96


def block(word, seed, two_f=2 * F):
    rng = np.random.default_rng(seed)
    return stack(word, (E, two_f, K), rng), stack(word, (E, H, F), rng)


@pytest.mark.parametrize("word", ["mxfp4", "nvfp4", "int4:g32", "uint4:g128", "affine4:g64", "q8_0", "mxfp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_equal_the_reference(word, dtype):
    cuda()
    up, down = block(word, 1)
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    torch.manual_seed(1)
    for m, top in ((1, 2), (1, 1), (3, 2), (7, 3), (33, 2), (70, 4), (0, 2)):
        x = (torch.randn(m, K, device="cuda") * (0.001 if word == "nvfp4" else 0.05)).to(dtype)  # results stay below 65504
        index, share = routing(m, top, m)
        y = ops.experts(x, pu, pd, index, share)
        assert y.shape == (m, H)
        assert y.dtype == dtype
        assert torch.equal(y, ops.experts(x, pu, pd, index, share))
        want = ops.experts(x.float().cpu().numpy(), up, down, index.cpu().numpy(), share.cpu().numpy(), backend="reference")
        close(y, want, dtype)


@pytest.mark.parametrize("gate", ["swiglu", "swiglu_clamped", "geglu", "none"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_activations_and_biases(gate, interleaved):
    cuda()
    up, down = block("mxfp4", 2, F if gate == "none" else 2 * F)
    torch.manual_seed(2)
    x = torch.randn(5, K, device="cuda", dtype=torch.float16) * 0.1
    index, share = routing(5, 2, 2)
    ub, db = torch.randn(E, up.shape[1], device="cuda"), torch.randn(E, H, device="cuda")
    ub, db = ub.half(), db.half()
    options = {"gate": gate, "interleaved": interleaved}
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    y = ops.experts(x, pu, pd, index, share, gate_up_bias=ub, down_bias=db, **options)
    want = ops.experts(
        x.float().cpu().numpy(),
        up,
        down,
        index.cpu().numpy(),
        share.cpu().numpy(),
        backend="reference",
        gate_up_bias=ub.float().cpu().numpy(),
        down_bias=db.float().cpu().numpy(),
        **options,
    )
    close(y, want, torch.float16)


def test_routes_on_the_device_are_torchs():
    """Top-k shares and the plan of blocks, few pairs (one kernel) and many (torch's sort), ties and
    idle experts included.
    """
    cuda()
    from halfbyte.backends.cuda.moe import routing

    torch.manual_seed(8)
    for m, experts, top, tokens in ((1, 6, 2, 1), (7, 6, 3, 4), (64, 32, 4, 16), (200, 128, 8, 16), (2000, 32, 4, 16)):
        logits = torch.randn(m, experts, device="cuda").bfloat16()
        logits[: m // 2, 0] = logits[: m // 2, 1]
        share, index = routing.top_k(logits, top)
        values, _ = logits.float().topk(top)
        assert torch.equal(logits.float().gather(1, index.long()), values)
        torch.testing.assert_close(share, values.softmax(-1), rtol=1e-6, atol=1e-7)
        table = routing.route(index, experts, tokens).blocks
        flat, count = index.reshape(-1).cpu().numpy(), int(table.count)
        order = np.argsort(flat, kind="stable")
        seen = []
        for b in range(count):
            first, last, expert = int(table.first[b]), int(table.last[b]), int(table.expert[b])
            assert 0 < last - first <= tokens
            rows = table.y_row[first:last].cpu().numpy()
            assert (flat[rows] == expert).all()
            np.testing.assert_array_equal(table.x_row[first:last].cpu().numpy(), rows // top)
            seen += rows.tolist()
        np.testing.assert_array_equal(seen, order if m > 1 else np.arange(top))


def test_case_32_experts_without_tokens_and_all_tokens_on_one():
    cuda()
    up, down = block("int4:g32", 3)
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    torch.manual_seed(3)
    x = torch.randn(40, K, device="cuda", dtype=torch.float16) * 0.05
    share = torch.ones(40, 1, device="cuda")
    for only in (0, E - 1):
        index = torch.full((40, 1), only, device="cuda")
        want = ops.experts(x.float().cpu().numpy(), up, down, index.cpu().numpy(), share.cpu().numpy(), backend="reference")
        close(ops.experts(x, pu, pd, index, share), want, torch.float16)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("m", [16383, 16384, 16385])
def test_case_21_many_tokens_at_once_equal_chunks(m, interleaved):
    """Row counts about a multiple of every tile: every row as of 2048 tokens at a time, and the
    reference's numbers.
    """
    cuda()
    up, down = block("mxfp4", 9)
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    torch.manual_seed(9)
    x = (torch.randn(m, K, device="cuda") * 0.05).bfloat16()
    index, share = routing(m, 2, 9)
    y = ops.experts(x, pu, pd, index, share, interleaved=interleaved)
    for first in (*range(0, m - 2047, 2048), m - 2048):
        rows = slice(first, first + 2048)
        part = ops.experts(x[rows], pu, pd, index[rows], share[rows], interleaved=interleaved)
        assert torch.equal(y[rows], part)
    some = torch.tensor([*range(0, m, 1021), m - 2, m - 1], device="cuda")
    x, index, share = (t[some].float().cpu().numpy() for t in (x, index, share))
    want = ops.experts(x, up, down, index.astype(int), share, interleaved=interleaved, backend="reference")
    close(y[some], want, torch.bfloat16)


@pytest.mark.parametrize("m", [1, 4, 20])
def test_a_graph_replays_with_other_tokens_and_routes(m):
    cuda()
    up, down = block("mxfp4", 4)
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    torch.manual_seed(4)
    x = torch.randn(m, K, device="cuda", dtype=torch.float16) * 0.05
    index, share = routing(m, 2, 4)
    ops.experts(x, pu, pd, index, share)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.experts(x, pu, pd, index, share)
    for seed in (5, 6):
        other, weights = routing(m, 2, seed)
        index.copy_(other)
        share.copy_(weights)
        x.copy_(torch.randn(m, K, device="cuda") * 0.05)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, ops.experts(x, pu, pd, index, share))


def two_stacks(seed):
    """Gates and ups in NVFP4 with other factors, downs in MXFP4."""
    rng = np.random.default_rng(seed)
    gates, ups = (stack("nvfp4", (E, F, K), rng) for _ in range(2))
    factors = [rng.uniform(1e-3, 4e-3, E).astype(np.float32) for _ in range(2)]
    both = (QTensor(q.format, q.shape, {**q.parts, "global_scale": g}) for q, g in zip((gates, ups), factors, strict=True))
    return *both, stack("mxfp4", (E, H, F), rng)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gate", ["swiglu", "swiglu_clamped", "geglu"])
def test_case_44_gates_and_ups_with_a_factor_each(dtype, gate):
    """In two stacks, one of them captured and replayed with other tokens and routes."""
    cuda()
    gates, ups, down = two_stacks(6)
    held = [ops.prepare(q, device="cuda") for q in (gates, down)]
    up, biases = ops.prepare(ups, device="cuda"), [torch.randn(E, n, device="cuda").to(dtype) for n in (F, F, H)]
    options = {"gate": gate, "gate_up_bias": biases[0], "up_bias": biases[1], "down_bias": biases[2]}
    torch.manual_seed(6)
    for m, top in ((1, 2), (7, 3), (70, 4), (0, 2)):
        x = (torch.randn(m, K, device="cuda") * 0.05).to(dtype)
        index, share = routing(m, top, m)
        y = ops.experts(x, *held, index, share, up=up, **options)
        assert y.dtype == dtype
        host = {name: b.float().cpu().numpy() for name, b in options.items() if name != "gate"}
        want = ops.experts(
            x.float().cpu().numpy(),
            gates,
            down,
            index.cpu().numpy(),
            share.cpu().numpy(),
            up=ups,
            backend="reference",
            gate=gate,
            **host,
        )
        close(y, want, dtype)
        if m:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = ops.experts(x, *held, index, share, up=up, **options)
            other, weights = routing(m, top, m + 100)
            index.copy_(other)
            share.copy_(weights)
            again.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(again, ops.experts(x, *held, index, share, up=up, **options))


def test_what_is_not_served_is_a_sentence():
    cuda()
    up, down = block("uint7:g64", 5)
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    x = torch.randn(2, K, device="cuda", dtype=torch.float16)
    index, share = routing(2, 2, 5)
    with pytest.raises(BackendError, match=r"\[experts\] experts on CUDA take codes of up to 6 and of 8 bits"):
        ops.experts(x, pu, pd, index, share)
