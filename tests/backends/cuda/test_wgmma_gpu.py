"""The fused schedule on Hopper: what it multiplies with, bit for bit; products within rounding;
experts at many tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor, format_named, ops
from halfbyte.errors import BackendError
from support.gpu_weights import DTYPES, close, cuda, equals_weight, random_parts, routing, same, stack, within

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

WORDS = ["int4:g128", "int4:g32", "uint4:g64", "mxfp4", "nvfp4", "nvfp4_ue4m3", "affine4:g64", "fp4:g16", "q4_0", "uint4:g-1"]
WORDS += ["q8_0", "int8:g128", "uint8:g64", "uint8:g16", "affine8:g64", "mxfp8_e4m3", "mxfp8_e5m2"]
WORDS += ["int2:g64", "uint2:g32", "uint2:g16", "affine2:g64"]
SUPERS = ["q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs"]
WORDS += [*SUPERS, "int3:g128", "uint3:g64", "int5:g32", "uint5:g16", "uint6:g128", "int6:g-1", "q5_0", "q5_1", "nf4:g64",
          "iq4_nl", "mxfp6_e2m3", "mxfp6_e3m2", "affine1:g64", "affine3:g64", "affine6:g64"]  # fmt: skip


def hopper():
    cuda()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is compute capability 9.0")


def weight(word, n, k, seed, **parts):
    fmt = format_named(word)
    return QTensor(fmt, (n, k), {**random_parts(fmt, (n, k), np.random.default_rng(seed)), **parts})


def tiles():
    """Every tile of the table, the one for a shape first: they differ in what a program holds and
    in how tiles are cut.
    """
    from halfbyte.backends.cuda.tuning.wgmma_model import candidates
    from halfbyte.backends.cuda.tuning.wgmma_tiles import FusedTile

    others = {
        FusedTile(64, 1, 2, 8, 3, deep=2), FusedTile(32, 1, 1, 8, 2, deep=4), FusedTile(64, 1, 1, 6, 1, deep=3),
        FusedTile(64, 2, 1, 8, 2, deep=2, ahead=1), FusedTile(64, 1, 2, 6, ahead=0), FusedTile(128, 2, 2, 4, 3),
        FusedTile(32, 2, 2, 6, 5), FusedTile(16, 2, 2, 6),
    }  # fmt: skip
    return sorted({*candidates("int", True), *candidates("e2m1", True), *others}, key=str)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_one_hot_activations_return_the_weight_rounded_once(word, name):
    hopper()
    k = 8 if word == "uint4:g-1" else 768 if word in SUPERS else 640
    for n, inputs in ((200, k), (72, max(k, 128)), (37, 2 * k)):  # 37 rows: no copy engine at the end
        q = weight(word, n, inputs, 1)
        p = ops.prepare(q, device="cuda")
        eye = torch.eye(inputs, dtype=DTYPES[name], device="cuda")
        y = ops.linear(eye, p, schedule="fused")
        assert torch.isfinite(y).all()
        equals_weight(y, q, name, np.transpose)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_products_are_within_rounding_on_odd_shapes(word, name):
    """Tails of n, m and k, more and fewer tiles than programs, tiles cut in parts; run to run the
    same.
    """
    hopper()
    torch.manual_seed(2)
    fmt = format_named(word)
    one = max(fmt.super_size, fmt.group_size, 64)
    for n, k, m in ((1, one, 1), (65, 9 * one, 33), (1000, 1152, 130), (520, 2880, 70), (4096, 512, 300), (136, 4096, 17)):
        k = k // one * one
        q = weight(word, n, k, 2)
        p = ops.prepare(q, device="cuda")
        x = (torch.randn(m, k, device="cuda") * (2.0**-8 if "nvfp4" in word else 1)).to(DTYPES[name])
        bias = torch.randn(n, device="cuda").to(DTYPES[name])
        y = ops.linear(x, p, bias, schedule="fused")
        assert torch.equal(y, ops.linear(x, p, bias, schedule="fused"))
        within(y, x, q, bias, name)


@pytest.mark.parametrize("word", ["int4:g128", "mxfp4", "q8_0"])
def test_every_tile_gives_the_same_kind_of_answer(word):
    hopper()
    from halfbyte.backends.cuda.wgmma import schedule as fused

    torch.manual_seed(3)
    q = weight(word, 1000, 1152, 3)
    p = ops.prepare(q, device="cuda")
    for m in (5, 64, 300, 777):
        x = torch.randn(m, 1152, device="cuda", dtype=torch.float16)
        for tile in tiles():
            y = fused.fused(x, p.data, None, tile)
            assert torch.equal(y, fused.fused(x, p.data, None, tile)), tile
            within(y, x, q, torch.zeros(1000, device="cuda", dtype=torch.float16), "float16")


def test_mx_exponents_far_from_float16_give_right_results():
    """E8M0 scales within 2^24 of each other are shifted into float16 and back; wider ones are
    refused with the reason.
    """
    hopper()
    rng = np.random.default_rng(4)
    for low in (20, 90, 200):
        scales = rng.integers(low, low + 25, (64, 6), dtype=np.uint8)
        q = weight("mxfp4", 64, 192, 4, scales=scales)
        p = ops.prepare(q, device="cuda")
        x = torch.zeros(3, 192, device="cuda", dtype=torch.float16)
        x[0, 5], x[1, 100], x[2, 191] = 1.0, 2.0**-14, 2.0**10
        want = x.double().cpu().numpy() @ q.dequantize("float64").T
        with np.errstate(over="ignore"):
            same(ops.linear(x, p, schedule="fused"), want.astype(np.float16))
            same(ops.linear(x.bfloat16(), p, schedule="fused"), torch.from_numpy(want).to(torch.bfloat16).float().numpy())
    scales[0, 0] = 1
    p = ops.prepare(weight("mxfp4", 64, 192, 4, scales=scales), device="cuda")
    with pytest.raises(BackendError, match=r"\[linear\] schedule 'fused' takes float16 where E8M0 scales lie within 2\^24"):
        ops.linear(x, p, schedule="fused")
    assert torch.isfinite(ops.linear(x.bfloat16(), p, schedule="fused")[:2]).all()


def test_what_the_schedule_does_not_take_is_a_sentence():
    hopper()
    p = ops.prepare(weight("int4:g128", 64, 128, 5), device="cuda")
    with pytest.raises(BackendError, match=r"'fused' takes float16 and bfloat16 activations, not torch.float32"):
        ops.linear(torch.zeros(2, 128, device="cuda"), p, schedule="fused")
    p = ops.prepare(weight("uint7:g64", 64, 256, 5), device="cuda")
    text = r"'fused' takes integers of up to 6 and of 8 bits, floats of 4, 6 and 8 and tables, .*, not uint7"
    with pytest.raises(BackendError, match=text):
        ops.linear(torch.zeros(2, 256, device="cuda", dtype=torch.float16), p, schedule="fused")


def test_strides_leading_axes_and_act_order():
    hopper()
    rng = np.random.default_rng(6)
    p = ops.prepare(weight("int4:g128", 64, 128, 6), device="cuda")
    big = torch.randn(6, 520, device="cuda", dtype=torch.float16)
    for view in (big[:, 64:192], big[:, 3:131], big[:, 0:512:4], big[::2, :128], big[:1, 1:129], big[0, :128].expand(6, 128)):
        assert torch.equal(ops.linear(view, p, schedule="fused"), ops.linear(view.contiguous(), p, schedule="fused"))
    x = torch.randn(4, 7, 128, device="cuda", dtype=torch.float16)
    assert torch.equal(ops.linear(x, p, schedule="fused").reshape(28, 64), ops.linear(x.reshape(28, 128), p, schedule="fused"))
    index = rng.permutation(np.repeat(np.arange(4, dtype=np.int32), 32)).astype(np.int32)
    q = weight("uint4:g32", 24, 128, 7, group_index=index)
    eye = torch.eye(128, device="cuda", dtype=torch.float16)
    same(ops.linear(eye, ops.prepare(q, device="cuda"), schedule="fused"), q.dequantize("float16").T)


def test_case_54_a_graph_replays_the_same():
    hopper()
    p = ops.prepare(weight("mxfp4", 1000, 1152, 8), device="cuda")
    for m in (40, 300):
        x = torch.randn(m, 1152, device="cuda", dtype=torch.float16)
        eager = ops.linear(x, p, schedule="fused")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.linear(x, p, schedule="fused")
        y.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, eager)


STACKS = ["mxfp4", "nvfp4", "int4:g32", "uint4:g64", "affine4:g64", "q8_0", "mxfp8_e4m3"]
STACKS += ["q4_K", "q6_K", "q5_K", "q3_K", "nf4:g64", "iq4_xs", "uint3:g64", "q5_0"]


@pytest.mark.parametrize("word", STACKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_of_experts_equal_the_reference(word, dtype):
    hopper()
    from halfbyte.backends.cuda.moe import GATES
    from halfbyte.backends.cuda.moe import wgmma as fused_experts

    experts, k, f, h = 5, 256, 256 if word in SUPERS else 128, 96
    torch.manual_seed(9)
    kinds = [(a, True) for a in GATES] + [("geglu", False)] if word == "mxfp4" else [("swiglu", True)]
    for gate, interleaved in kinds:
        rng = np.random.default_rng(9)
        up = stack(word, (experts, f if gate == "none" else 2 * f, k), rng)
        down = stack(word, (experts, h, f), rng)
        pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
        biases = [torch.randn(experts, n, device="cuda").to(dtype) * 0.1 for n in (up.shape[1], h)]
        for m, top in ((7, 3), (150, 2)):
            x = (torch.randn(m, k, device="cuda") * (0.001 if word == "nvfp4" else 0.0002 if word in SUPERS else 0.05)).to(dtype)
            index, share = routing(m, top, m, experts)
            kind = GATES[gate]
            assert fused_experts.serves(x, (pu.data,), pd.data, kind, interleaved)
            rest = (pd.data, index, share, kind, interleaved, biases[1])
            y = fused_experts.mixture(x, ((pu.data, biases[0]),), *rest)
            assert torch.equal(y, fused_experts.mixture(x, ((pu.data, biases[0]),), *rest))
            if not interleaved:  # a stack each
                halves = [{name: part[:, i : i + f] for name, part in up.parts.items()} for i in (0, f)]
                stacks = [ops.prepare(QTensor(up.format, (experts, f, k), parts), device="cuda").data for parts in halves]
                own = [biases[0][:, i : i + f].contiguous() for i in (0, f)]
                assert torch.equal(y, fused_experts.mixture(x, tuple(zip(stacks, own, strict=True)), *rest))
            want = ops.experts(
                x.float().cpu().numpy(),
                up,
                down,
                index.cpu().numpy(),
                share.cpu().numpy(),
                backend="reference",
                gate=gate,
                interleaved=interleaved,
                gate_up_bias=biases[0].float().cpu().numpy(),
                down_bias=biases[1].float().cpu().numpy(),
            )
            close(y, want, dtype)
            own = {"gate_up_bias": biases[0], "down_bias": biases[1]}
            close(ops.experts(x, pu, pd, index, share, gate=gate, interleaved=interleaved, **own), want, dtype)


def test_case_32_all_tokens_on_one_expert_at_many_tokens():
    hopper()
    from halfbyte.backends.cuda.moe import wgmma as fused_experts

    rng = np.random.default_rng(10)
    up, down = stack("int4:g32", (6, 256, 256), rng), stack("int4:g32", (6, 96, 128), rng)
    pu, pd = ops.prepare(up, device="cuda"), ops.prepare(down, device="cuda")
    x = torch.randn(200, 256, device="cuda", dtype=torch.float16) * 0.05
    share = torch.ones(200, 1, device="cuda")
    for only in (0, 5):
        index = torch.full((200, 1), only, device="cuda")
        y = fused_experts.mixture(x, ((pu.data, None),), pd.data, index, share, 1, True, None)
        want = ops.experts(
            x.float().cpu().numpy(), up, down, index.cpu().numpy(), share.cpu().numpy(), backend="reference", interleaved=True
        )
        close(y, want, torch.float16)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_division_gives_the_weight_back(name):
    """One launch and two, tiles of one product and of two, every cut that the cost model considers."""
    hopper()
    from halfbyte.backends.cuda.tuning.wgmma_model import candidates, divisions
    from halfbyte.backends.cuda.wgmma import schedule as fused
    from halfbyte.backends.cuda.wgmma.launch import launch

    q = weight("int4:g128", 136, 640, 6)
    p = ops.prepare(q, device="cuda")
    eye = torch.eye(640, dtype=DTYPES[name], device="cuda")
    for tile in candidates("int", True):
        for m in (640, 77):
            for split in divisions(m, 136, 10, tile, 132):
                y = torch.full((m, 136), torch.nan, dtype=eye.dtype, device="cuda")
                launch(eye[:m], p.data, None, y, tile, split)
                equals_weight(y, q, name, lambda v, m=m: v.T[:m])
    assert len({step.tile for m in (40, 200, 777) for step in fused.steps_for(m, p.data, True)}) > 1
