"""torch modules over packed weights on an NVIDIA GPU: torch.compile as one graph, CUDA graphs,
state, several GPUs.
"""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest

from halfbyte import QTensor, format_named, ops
from support.gpu_weights import cuda, make, random_parts, served, unit

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def stack(word, shape, seed):
    fmt = format_named(word)
    return QTensor(fmt, shape, random_parts(fmt, shape, np.random.default_rng(seed)))


def modules():
    """One of each kind on the GPU, and the arguments of a call."""
    from halfbyte.torch import ConcatLinear, QEmbedding, QExperts, QLinear

    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    bias = torch.randn(48, device="cuda", dtype=torch.float16)
    x = torch.randn(5, 256, device="cuda", dtype=torch.float16) * 0.1
    index = torch.tensor([[0, 3], [2, 1], [0, 2], [3, 2], [1, 0]], device="cuda")
    share = torch.rand(5, 2, device="cuda")
    experts = {"gate_up_proj": stack("mxfp4", (4, 256, 256), 2), "down_proj": stack("mxfp4", (4, 256, 128), 3)}
    return {
        "linear": (QLinear(make("int4:g128", 48, 2, rng), bias, device="cuda"), (x,)),
        "plain planes": (QLinear(make("q6_K", 48, 1, rng), None, device="cuda"), (x,)),
        "rows": (ConcatLinear([make("nvfp4", 32, 16, rng), make("nvfp4", 16, 16, rng)], bias, device="cuda"), (x * 1e-3,)),
        "embedding": (QEmbedding(make("q8_0", 50, 8, rng), device="cuda"), (torch.tensor([[0, 49, 7]], device="cuda"),)),
        "experts": (QExperts(experts, device="cuda"), (x, index, share)),
    }


KINDS = ["linear", "plain planes", "rows", "embedding", "experts"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(kind, compiler):
    cuda()
    module, args = modules()[kind]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: module(*a) * 2.0, fullgraph=True, backend=compiler)
    with torch.inference_mode():
        assert torch.equal(compiled(*args), module(*args) * 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_case_54_modules_in_a_cuda_graph(kind):
    cuda()
    module, args = modules()[kind]
    with torch.inference_mode():
        want = module(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(*args)
        y.fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, want)


def test_compiled_with_cuda_graphs():
    """torch's own capture around the operators (mode reduce-overhead), several tokens."""
    cuda()
    module, (x,) = modules()["linear"]
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: module(a).relu(), fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for rows in (5, 5, 5):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x[:rows]).clone(), module(x[:rows]).relu())


@pytest.mark.parametrize("word", served())
def test_a_weight_comes_back_from_the_gpu(word):
    """Bit for bit; tests/backends/cuda/test_canonical.py walks shapes and act-order without a GPU."""
    cuda()
    q = make(word, 19, 3, np.random.default_rng(5))
    parts = cuda().canonical(ops.prepare(q, device="cuda"))
    assert parts.keys() == dict(q.parts).keys()
    for name, part in q.parts.items():
        assert parts[name].tobytes() == np.ascontiguousarray(part).tobytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_case_51_state_copies_and_moves(kind):
    cuda()
    module, args = modules()[kind]
    with torch.inference_mode():
        want = module(*args)
        assert torch.equal(copy.deepcopy(module)(*args), want)
        again = copy.deepcopy(module)
        again.load_state_dict(module.state_dict(), strict=True)
        assert torch.equal(again(*args), want)
        there_and_back = copy.deepcopy(module).to("cpu").to("cuda")
        assert torch.equal(there_and_back(*args), want)


def test_case_53_after_warmup_no_call_compiles_anything():
    """Shapes that no other test has, so that nothing is compiled yet; every miss of Triton's
    in-memory caches is counted.
    """
    cuda()
    from triton import knobs

    import halfbyte as hb
    from halfbyte.backends.cuda import warming_tokens_of
    from halfbyte.torch import QEmbedding, QExperts, QLinear
    from halfbyte.torch.warmup import TOKENS

    rng = np.random.default_rng(10)
    experts = {"gate_up_proj": stack("mxfp4", (5, 320, 320), 2), "down_proj": stack("mxfp4", (5, 320, 160), 3)}
    model = torch.nn.ModuleDict({
        "a": QLinear(make("int4:g64", 208, 5, rng), torch.zeros(208, device="cuda", dtype=torch.float16), device="cuda"),
        "b": QLinear(make("q6_K", 208, 3, rng), device="cuda"), "e": QEmbedding(make("q8_0", 208, 10, rng), device="cuda"),
        "same": QLinear(make("q6_K", 208, 3, rng), device="cuda"), "x": QExperts(experts, device="cuda"),
    })  # fmt: skip
    compiled = []
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda **call: compiled.append(call["repr"])  # None: go on and compile
    try:
        linear = [model[name].packed[""].prepared for name in "ab"]
        fused = sum(len(set(warming_tokens_of(w, TOKENS, True)) - set(TOKENS)) for w in linear)
        # Experts at 33 and 40 tokens, too, and with float32 shares; the fused schedule's tiles.
        assert hb.warmup(model, dtype=torch.float16) == 4 * len(TOKENS) + 4 + fused
        assert compiled
        compiled.clear()
        with torch.inference_mode():
            for m in (1, 3, 7, 16, 17, 33, 39, 40, 41, 64, 65, 100, 300, 4096):
                model["a"](torch.randn(m, 320, device="cuda", dtype=torch.float16))
                model["b"](torch.randn(m, 768, device="cuda", dtype=torch.float16))
                model["e"](torch.zeros(m, dtype=torch.int64, device="cuda"))
                index = torch.randint(0, 5, (m, 2), device="cuda")
                for share in (torch.rand(m, 2, device="cuda").half(), torch.rand(m, 2, device="cuda")):
                    model["x"](torch.randn(m, 320, device="cuda").half(), index, share)
        assert compiled == []
    finally:
        knobs.runtime.jit_cache_hook = before


def test_case_33_threads_share_a_cold_weight():
    """Eight threads call a weight that nothing was prepared or compiled for: with as many tokens
    each, then with 1 to 8.
    """
    cuda()
    q = make("mxfp4", 112, 9, np.random.default_rng(33))
    xs = [torch.randn(m, q.shape[1], device="cuda").half() for m in range(1, 9)]
    for tokens in ([3] * 8, range(8)):
        fresh, start = QTensor(q.format, q.shape, dict(q.parts)), threading.Barrier(8)
        got: list[torch.Tensor | None] = [None] * 8

        def work(i, fresh=fresh, start=start, got=got, tokens=tokens):
            start.wait()
            got[i] = ops.linear(xs[tokens[i]], fresh)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = ops.prepare(q, device="cuda")
        for i, y in enumerate(got):
            assert y is not None
            assert torch.equal(y, ops.linear(xs[tokens[i]], held))


def two_devices():
    cuda()
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here; the device guard needs two")


@pytest.mark.parametrize("word", ["mxfp4", "int4:g128", "q6_K", "uint8:g32"])
def test_weights_on_another_device_than_the_current_one(word):
    """Weights on both devices, called in turn while cuda:0 is current: each kernel runs where its
    weight is.
    """
    two_devices()
    q = make(word, 96, 512 // unit(format_named(word)), np.random.default_rng(6))
    held = [ops.prepare(q, device=f"cuda:{d}") for d in (0, 1)]
    assert torch.cuda.current_device() == 0
    for dtype in (torch.float16, torch.float32):
        for m in (1, 3, 16, 40, 100):
            torch.manual_seed(m)
            x = torch.randn(m, q.shape[1]).to(dtype)
            there = [x.to(f"cuda:{d}") for d in (0, 1)]
            first = [ops.linear(there[d], held[d]) for d in (0, 1)]
            again = [ops.linear(there[d], held[d]) for d in (1, 0)]
            assert [y.device.index for y in first] == [0, 1]
            for y in (*first, *again):
                assert torch.equal(y.cpu(), first[0].cpu())
    for d in (0, 1):
        assert torch.equal(ops.dequantize(held[d], "float16").cpu(), ops.dequantize(held[0], "float16").cpu())
    assert torch.cuda.current_device() == 0


def test_experts_on_another_device_than_the_current_one():
    two_devices()
    up, down = stack("mxfp4", (4, 256, 256), 7), stack("mxfp4", (4, 96, 128), 8)
    torch.manual_seed(7)
    x, share = torch.randn(9, 256).half() * 0.1, torch.rand(9, 2)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    results = []
    for d in (1, 0, 1):
        device = f"cuda:{d}"
        held = [ops.prepare(w, device=device) for w in (up, down)]
        y = ops.experts(x.to(device), *held, index.to(device), share.to(device))
        assert y.device.index == d
        results.append(y.cpu())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_x_elsewhere_is_a_sentence():
    two_devices()
    from halfbyte.errors import ShapeError

    p = ops.prepare(make("mxfp4", 16, 2, np.random.default_rng(9)), device="cuda:1")
    with pytest.raises(ShapeError, match=r"x is on cuda:0, the weight on cuda:1"):
        ops.linear(torch.zeros(1, 64, device="cuda:0"), p)
