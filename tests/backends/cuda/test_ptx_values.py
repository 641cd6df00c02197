"""The CUDA kernels as they are compiled for Hopper, their PTX run on the CPU (ptx_machine): every
output against the referee.

The fragment kernel above all: programs walk over several tiles, warps over one step and over
several, n and k leave tails. A few of its kernels always; every tile that a card's file or tune.py
names, with every family that has it, under `slow`. Not the fused schedule (wgmma, TMA).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")

from halfbyte import QTensor, format_named, ops  # noqa: E402
from halfbyte.backends.cuda import launch  # noqa: E402
from halfbyte.backends.cuda import moe as experts  # noqa: E402
from halfbyte.backends.cuda.rounded import launch as rounded  # noqa: E402
from halfbyte.backends.cuda.tuning import table as found  # noqa: E402
from halfbyte.backends.cuda.tuning.mma_tiles import FRAGMENT_TILES, BlockTile, FragmentTile, Tile  # noqa: E402
from halfbyte.backends.cuda.weight import to_device  # noqa: E402
from halfbyte.numerics import activations  # noqa: E402
from support.gpu_weights import (  # noqa: E402
    DTYPES,
    close,
    make,
    numpy_dtype,
    random_parts,
    same,
    within,
)
from support.ptx_launch import hopper  # noqa: E402
from support.ptx_machine import Entry, execute  # noqa: E402


@pytest.fixture
def card(tmp_path):
    with hopper(multiprocessors=1, cache=tmp_path, card="NVIDIA H200", assemble=True):
        yield


def sparse(count, k, span, rng):
    """Tokens of sixteen inputs each, ±1: together every place of the `span` inputs that a warp
    multiplies at once.
    """
    x = np.zeros((count, k), np.float32)
    for place in range(16 * count):
        x[place // 16, (place % span + span * rng.integers(-(-k // span))) % k] = rng.choice((-1, 1))
    return x


def check(word, name, m, n, k, tile, biased=False):
    """One-hot activations return decoded weights, rounded once; a few inputs, and all of them, with
    a bias or without, are within rounding, which of a few is less than a wrong bit of a code. A
    bias goes to the first two of these.
    """
    fmt, rng = format_named(word), np.random.default_rng(n + k)
    q = QTensor(fmt, (n, k), random_parts(fmt, (n, k), rng))
    w, dtype = to_device(q, "cpu"), DTYPES[name]
    tile = FragmentTile(*tile)
    rows = [(k - 1 - 67 * i) % k for i in range(m)]
    y = launch.fragments(torch.nn.functional.one_hot(torch.tensor(rows), k).to(dtype), w, None, tile)
    same(y, q.dequantize("float32").astype(numpy_dtype(name)).astype(np.float32).T[rows])
    torch.manual_seed(m)
    bias = torch.randn(n).to(dtype)
    span = 64 * tile.step
    few = torch.from_numpy(sparse(-(-span // (16 * m)) * m, k, span, rng)).to(dtype)
    for i, x in enumerate((torch.randn(m, k).to(dtype), *few.split(m))):
        x = x * (2.0**-8 if word == "nvfp4" else 1)
        adds = biased and i < 2
        within(launch.fragments(x, w, bias if adds else None, tile), x, q, bias if adds else torch.zeros(n), name)


FEW = [
    ("int4:g128", "float16", 1, 70, 4096, (1, 1, 16, 1, 4, 1, 1)),
    ("int4:g128", "bfloat16", 1, 37, 1408, (1, 1, 8, 1, 4, 2, 2)),
    ("int4:g32", "float16", 4, 70, 544, (2, 1, 4, 1, 2, 1, 0)),
    ("uint4:g32", "float16", 1, 70, 1120, (1, 1, 4, 1, 4, 1, 2)),
    ("uint4:g128", "bfloat16", 17, 70, 640, (2, 4, 4, 1, 2, 0, 1, True)),
    ("mxfp4", "float16", 16, 70, 480, (2, 2, 4, 1, 2, 4, 1, True)),
    ("mxfp4", "bfloat16", 2, 70, 1056, (1, 1, 8, 1, 8, 1, 1)),
    ("nvfp4", "float16", 1, 70, 1040, (1, 1, 8, 1, 2, 1, 2)),
    ("nvfp4", "float16", 33, 37, 272, (2, 8, 2, 2, 1, 0, 1, True)),
    ("affine4:g64", "float16", 8, 70, 576, (2, 1, 8, 1, 4, 2, 2)),
    ("q8_0", "bfloat16", 5, 70, 544, (1, 1, 4, 1, 4, 1, 1)),
    ("mxfp8_e4m3", "float16", 1, 37, 544, (1, 1, 8, 1, 4, 1, 1)),
    ("q4_K", "float16", 3, 37, 512, (1, 1, 4, 1, 2, 1, 1)),
]


@pytest.mark.parametrize(("word", "name", "m", "n", "k", "tile"), FEW)
def test_outputs_are_right(word, name, m, n, k, tile, card):
    """Two of the kernels with a bias, too."""
    check(word, name, m, n, k, tile, biased=(word, name) in (("int4:g128", "bfloat16"), ("mxfp4", "float16")))


@pytest.mark.parametrize(
    ("word", "name", "m"),
    [("int4:g128", "float16", 3), ("nvfp4", "bfloat16", 1), ("mxfp4", "float16", 16), ("uint4:g32", "bfloat16", 9)],
)
def test_few_tokens_are_rounded_to_e4m3(word, name, m, card):
    """The rounding kernel and the product of its values: within float32's error, and the rounding
    of y. Token 0 has the largest float16, which E4M3 rounds to 65536 and float16 does not hold.
    """
    fmt, rng = format_named(word), np.random.default_rng(m)
    n, k = 37, 384
    q = QTensor(fmt, (n, k), random_parts(fmt, (n, k), rng))
    x = rng.standard_normal((m, k)).astype(numpy_dtype(name)).astype(np.float32)
    x[0] *= 2.0**-6
    x[0, 5], x[-1, 7] = 65504, x[-1, 7] if m == 1 else np.inf
    x = torch.from_numpy(x).to(DTYPES[name])
    bias = torch.from_numpy(rng.standard_normal(n).astype(np.float32)).to(x.dtype)
    w64 = q.dequantize("float64")
    y = rounded.linear(x, to_device(q, "cpu"), bias, "fp8").double().numpy()
    x64 = activations.rounded(x.float().numpy(), fmt, "fp8").astype(np.float64)
    if m > 1:
        assert np.isnan(y[-1]).all()
        x64, y = x64[:-1], y[:-1]
    true = x64 @ w64.T + bias.double().numpy()
    size = np.abs(x64) @ np.abs(w64).T
    largest = 65504.0 if name == "float16" else np.inf
    kept = np.abs(true) < largest
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[name]
    assert kept.mean() > 0.5
    assert (np.abs(y - true) <= 2.0**-20 * size + step * np.abs(true) + 2.0**-24)[kept].all()


@pytest.mark.parametrize(
    ("word", "name", "m", "top", "gate", "interleaved"),
    [
        ("mxfp4", "bfloat16", 3, 2, "swiglu_clamped", True),
        ("int4:g32", "float16", 33, 2, "geglu", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mxfp4", "float16", 1, 2, "swiglu_clamped", True),
                ("mxfp4", "float16", 8, 2, "swiglu", True),
                ("nvfp4", "float16", 7, 3, "swiglu", False),
                ("nvfp4", "bfloat16", 40, 4, "geglu", True),
                ("mxfp4", "float16", 40, 4, "swiglu", True),
                ("mxfp8_e4m3", "float16", 5, 2, "swiglu", False),
                ("affine4:g64", "bfloat16", 8, 2, "swiglu", False),
                ("q8_0", "float16", 2, 1, "swiglu", True),
            )
        ),
    ],
)
def test_experts_equal_the_reference(word, name, m, top, gate, interleaved, card):
    """The plan, both products, the activation where it is a kernel's own, the weighted sum."""
    e, k, f, h = 4, 192, 64, 70
    rng = np.random.default_rng(m)
    up, down = (QTensor(format_named(word), s, random_parts(format_named(word), s, rng)) for s in ((e, 2 * f, k), (e, h, f)))
    torch.manual_seed(m)
    x, ub, db = (torch.randn(s).to(DTYPES[name]) for s in ((m, k), (e, 2 * f), (e, h)))
    index = torch.from_numpy(np.stack([rng.permutation(e)[:top] for _ in range(m)]))
    share = torch.from_numpy(rng.random((m, top), dtype=np.float32))
    x *= 0.001 if word == "nvfp4" else 0.05  # results stay below 65504
    y = experts.mixture(x, ((to_device(up, "cpu"), ub),), to_device(down, "cpu"), index, share, gate, interleaved, db)
    want = ops.experts(
        x.float().numpy(),
        up,
        down,
        index.numpy(),
        share.numpy(),
        backend="reference",
        gate=gate,
        interleaved=interleaved,
        gate_up_bias=ub.float().numpy(),
        down_bias=db.float().numpy(),
    )
    close(y, want, DTYPES[name])


def test_gates_and_ups_in_two_stacks_equal_one(card):
    """Halves of one stack as stacks of their own: the same products, so the same bits."""
    e, k, f, h, m = 4, 192, 64, 70, 3
    rng = np.random.default_rng(9)
    fmt = format_named("mxfp4")
    gate, up, down = (QTensor(fmt, s, random_parts(fmt, s, rng)) for s in ((e, f, k), (e, f, k), (e, h, f)))
    both = QTensor(fmt, (e, 2 * f, k), {p: np.concatenate([gate.parts[p], up.parts[p]], 1) for p in gate.parts})
    torch.manual_seed(9)
    x, bias, db = (torch.randn(s).half() for s in ((m, k), (e, 2 * f), (e, h)))
    index = torch.from_numpy(np.stack([rng.permutation(e)[:2] for _ in range(m)]))
    rest = (to_device(down, "cpu"), index, torch.from_numpy(rng.random((m, 2), dtype=np.float32)), "swiglu", False, db)
    ends = tuple((to_device(q, "cpu"), b.contiguous()) for q, b in zip((gate, up), bias.chunk(2, 1), strict=True))
    one = ((to_device(both, "cpu"), bias),)
    assert torch.equal(experts.mixture(x * 0.05, ends, *rest), experts.mixture(x * 0.05, one, *rest))


@pytest.mark.parametrize("word", ["mxfp4", "q6_K", pytest.param("uint3:g64", marks=pytest.mark.slow),
    pytest.param("nf4:g64", marks=pytest.mark.slow), pytest.param("int4:g128", marks=pytest.mark.slow)])  # fmt: skip
def test_portable_kernels_return_the_weight(word, card):
    """cuda_interpreter.py's cases as they are compiled: packed conversions, ldmatrix, asynchronous
    copies, split inputs.
    """
    q = make(word, 5, 2, np.random.default_rng(1))
    w, k = to_device(q, "cpu"), q.shape[1]
    same(launch.dequantize(w, torch.float32), q.dequantize())
    same(launch.dequantize(w, torch.float16), q.dequantize().astype(np.float16))
    x = torch.nn.functional.one_hot(torch.tensor([3, k - 1]), k).float()
    want = q.dequantize().T[[3, k - 1]]
    same(launch.matvec(x, w, None, Tile(2, 32, 4)), want)
    x, want = x.half(), want.astype(np.float16)
    same(launch.matmul(x, w, None, Tile(16, 4, 4, 16, 1, 1)), want)
    same(launch.matmul(x, w, None, Tile(16, 4, 4, 16, 3, 2)), want)
    for schedule in ("single-stage", "double-buffered", "striped"):
        same(launch.tiled(x, w, None, schedule, BlockTile(16, 16, 8, 4)), want)


ENTRY = """
.extern .shared .align 16 .b8 memory[];
.visible .entry copy(
	.param .u64 .ptr .global .align 1 copy_param_0,
	.param .u64 .ptr .global .align 1 copy_param_1
)
{
	.reg .b32 %r<8>;
	.reg .b64 %rd<4>;
	mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; cvt.u64.u32 %rd3, %r2;
	ld.param.b64 %rd1, [copy_param_0]; ld.param.b64 %rd2, [copy_param_1];
	add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
	ld.global.b32 %r3, [%rd1]; mov.b32 %r4, memory; add.s32 %r5, %r4, %r2;
	st.shared.b32 [%r5], %r3;
	BARRIER
	xor.b32 %r6, %r5, 128; ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd2], %r7;
	ret;
}
"""
"""Two warps exchange their words."""


def copied(barrier, size=64):
    x, y = torch.arange(size, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    execute(Entry(ENTRY.replace("BARRIER", barrier)), 64, 256, (1,), [x, y])
    return y.tolist()


def test_the_machine_notices_what_a_gpu_may_not():
    assert copied("bar.sync 0;") == [i ^ 32 for i in range(64)]
    with pytest.raises(RuntimeError, match="without a barrier"):
        copied("")
    with pytest.raises(RuntimeError, match="do not reach"):
        copied("bar.sync 0, 96;")
    with pytest.raises(IndexError, match="of a span"):
        copied("bar.sync 0;", 63)
    with pytest.raises(NotImplementedError, match="nanosleep"):
        copied("nanosleep.u32 1;")


FAMILIES = {
    "int": ("int4:g128", "int4:g32"), "affine": ("uint4:g32", "uint4:g128"), "biased": ("affine4:g64",), "e2m1": ("mxfp4",),
    "fine": ("nvfp4",), "wide": ("q8_0", "mxfp8_e4m3"),
}  # fmt: skip
TOKENS = {2: (1, 2), 8: (3, 8), 16: (9, 16), 32: (17, 33), 64: (64,)}


def every_tile():
    """(family, tokens up to, tile) of the cards' files and of the rules."""
    files = [json.loads(f.read_text())["tiles"] for f in sorted(Path(found.DEFAULT).glob("*.json"))]
    named = [(e["family"], e["m"], tuple(e["tile"])) for f in files for e in f if e["kernel"] == "fragments"]
    ruled = [(family, m, tile) for m, row in FRAGMENT_TILES.items() for family, tiles in row.items() for tile in tiles]
    return sorted(set(named) | {(family, m, (*tile, 0, 1, False)[: max(8, len(tile))]) for family, m, tile in ruled}, key=str)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "limit", "tile"), every_tile())
def test_every_tile_is_right(family, limit, tile, card):
    one_step = 64 * tile[4] * tile[2]
    for word in FAMILIES[family]:
        for name in ("float16", "bfloat16"):
            for m in TOKENS[limit]:
                for k in (one_step, 2 * one_step + 384):
                    check(word, name, m, 70, k, tile, biased=m % 2 == 0)
