"""CUDA kernels against the referee, on a GPU: every format, every operation, odd shapes, outputs
written whole.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor, format_named, ops

torch = pytest.importorskip("torch")

from support.gpu_weights import DTYPES, cuda, equals_weight, make, random_parts, same, served, unit, within  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("word", served())
def test_dequantize_is_exact(word):
    cuda()
    rng = np.random.default_rng(1)
    for n, groups in ((1, 1), (7, 3), (33, 2), (64, 5)):
        q = make(word, n, groups, rng)
        p = ops.prepare(q, device="cuda")
        for name in DTYPES:
            equals_weight(ops.dequantize(p, name), q, name)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("word", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4", "nvfp4_ue4m3", "fp4:g32"])
def test_every_byte_of_an_8_bit_scale_decodes(word):
    """0, 255, NaN, sign bits and all between, one a group."""
    cuda()
    q = make(word, 64, 8, np.random.default_rng(21))
    if q.format.scale not in ("e8m0", "e4m3", "ue4m3"):
        pytest.skip(f"{word} has {q.format.scale} scales")
    scales = np.resize(np.arange(256, dtype=np.uint8), q.parts["scales"].shape)
    q = QTensor(q.format, q.shape, {**q.parts, "scales": scales})
    with np.errstate(over="ignore", invalid="ignore"):
        same(ops.dequantize(ops.prepare(q, device="cuda"), "float32"), q.dequantize("float32"))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("word", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("m", [1, 4, 16, 40, 128])
def test_wide_scales_multiply_exactly_in_bfloat16(word, m):
    """Scales of every size and sign: one input at a time gives back the weight; m chooses the
    kernel.
    """
    cuda()
    fmt = format_named(word)
    parts = random_parts(fmt, (40, 256), np.random.default_rng(22), wide=True)
    if fmt.scale == "e8m0":  # below 2^-126 and above 2^120 the values themselves leave bfloat16
        parts["scales"] = np.clip(parts["scales"], 20, 240).astype(np.uint8)
    q = QTensor(fmt, (40, 256), parts)
    p = ops.prepare(q, device="cuda")
    for first in range(0, 256, 128):
        rows = [(first + i) % 256 for i in range(m)]
        x = torch.nn.functional.one_hot(torch.tensor(rows), 256).to("cuda", torch.bfloat16)
        equals_weight(ops.linear(x, p), q, "bfloat16", lambda v, rows=rows: v.T[rows])


TILED = ("mxfp4", "nvfp4", "int4", "uint4", "affine4")
"""Formats that every schedule runs with every dtype."""
PLANES = ("int3", "uint6", "mxfp8_e4m3", "nf4", "q8_0", "q6_K")
"""One of each way to store codes beside them, for `striped`; the others share the code that decodes
them.
"""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("word", served())
@pytest.mark.parametrize("name", list(DTYPES))
def test_one_hot_activations_return_the_weight(word, name):
    backend = cuda()
    rng = np.random.default_rng(2)
    q = make(word, 37, 3, rng)
    k = q.shape[1]
    p = ops.prepare(q, device="cuda")
    eye = torch.eye(k, dtype=DTYPES[name], device="cuda")
    from halfbyte.backends.cuda import launch
    from halfbyte.backends.cuda.tuning.mma_tiles import FragmentTile

    rows = [0, 1, k // 2, k - 1]
    for schedule, y in {
        "matvec": torch.cat([launch.matvec(eye[r : r + 1], p.data, None) for r in rows]),
        "matvec8": launch.matvec(eye[rows].contiguous(), p.data, None),
        "matmul": launch.matmul(eye[: min(k, 64)].contiguous(), p.data, None),
        "fragments": launch.fragments(eye[: min(k, 64)].contiguous(), p.data, None)
        if p.data.fragments and name != "float32"
        else None,
        "scaled": launch.fragments(eye[: min(k, 64)].contiguous(), p.data, None, FragmentTile(2, 2, 4, 1, 1, 0, 2, True))
        if p.data.units and name == "float16"
        else None,
        "dense": launch.dense_matmul(eye, p.data, None),
        "single-stage": launch.tiled(eye, p.data, None, "single-stage") if word in TILED else None,
        "double-buffered": launch.tiled(eye, p.data, None, "double-buffered") if word in TILED else None,
        "striped": launch.tiled(eye, p.data, None, "striped") if word in (*TILED, *PLANES) else None,
        "linear": ops.linear(eye, p),
    }.items():
        if y is None:
            continue
        assert torch.isfinite(y).all(), schedule
        index = rows if schedule.startswith("matvec") else slice(0, y.shape[0])
        equals_weight(y, q, name, lambda v, index=index: v.T[index])
    del backend


@pytest.mark.parametrize(
    "word",
    [
        "int4:g128",
        "uint4:g128",
        "mxfp4",
        "nvfp4",
        "affine4:g64",
        "q4_K",
        "q6_K",
        "q8_0",
        "int3:g64",
        "uint8:g32",
        "nf4:g64",
        "mxfp8_e4m3",
        "affine8:g64",
    ],
)
@pytest.mark.parametrize("name", list(DTYPES))
def test_products_are_within_rounding(word, name):
    cuda()
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    for n, groups, m in (
        (1, 1, 1),
        (65, 9, 1),
        (128, 8, 3),
        (130, 11, 8),
        (256, 4, 16),
        (100, 10, 33),
        (64, 6, 64),
        (96, 5, 200),
    ):
        q = make(word, n, groups, rng)
        p = ops.prepare(q, device="cuda")
        x = torch.randn(m, q.shape[1], device="cuda").to(DTYPES[name])
        bias = torch.randn(n, device="cuda").to(DTYPES[name])
        y = ops.linear(x, p, bias)
        again = ops.linear(x, p, bias)
        assert torch.equal(y, again)
        x64, w64 = x.double().cpu().numpy(), q.dequantize("float64")
        want = x64 @ w64.T + bias.double().cpu().numpy()
        size = np.abs(x64) @ np.abs(w64.T)
        u = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[name]
        # One rounding of each decoded weight, one of the output, and float32 sums.
        slack = (
            u * size * (0 if name == "float32" else 1)
            + u * np.abs(want) * 1.01
            + 1e-5 * size
            + (2.0**-24 if name == "float16" else 0)
        )
        error = np.abs(y.double().cpu().numpy() - want)
        assert (error <= slack).all(), (n, groups, m, float((error / slack).max()))
        if name == "float32" and want.size > 1:  # a single output may cancel; its own bound is above
            assert np.linalg.norm(error) <= 2e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("word", ["int4:g128", "nvfp4"])
@pytest.mark.parametrize("tile", [(1, 1, 8, 1, 8, 2, 1), (1, 1, 16, 1, 4, 1, 2), (2, 1, 8, 1, 2, 2, 2), (1, 1, 8, 1, 4, 3, 0)])
def test_words_asked_for_early_late_and_in_two_buffers_are_the_same_products(word, tile):
    """Turns and steps of every parity; at m = 1 groups share the registers of x, at m = 4 products
    take turns in two sums.
    """
    cuda()
    from halfbyte.backends.cuda import launch
    from halfbyte.backends.cuda.tuning.mma_tiles import FragmentTile

    fmt = format_named(word)
    for n, k in ((300, 4096), (5000, 1920)):
        q = QTensor(fmt, (n, k), random_parts(fmt, (n, k), np.random.default_rng(n)))
        p = ops.prepare(q, device="cuda")
        for m in (1, 4):
            x = torch.randn(m, k, device="cuda").to(torch.float16) * (2.0**-8 if word == "nvfp4" else 1)
            y = launch.fragments(x, p.data, None, FragmentTile(*tile))
            within(y, x, q, torch.zeros(n, device="cuda"), "float16")


SCHEDULES = ("single-stage", "double-buffered", "striped")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("word", ["fp4:g32", "mxfp4", "nvfp4", "int4:g128", "uint4:g32", "affine4:g64", "uint4:g-1", "q6_K"])
def test_schedules_are_within_rounding_on_odd_shapes(schedule, word):
    """k shorter and longer than a step, tails of n, k and m, more and fewer tiles than programs;
    run to run the same.
    """
    cuda()
    rng = np.random.default_rng(11)
    torch.manual_seed(11)
    fmt = format_named(word)
    one = unit(fmt) if fmt.group_size > 0 else 8
    cases = [(130, 2880, 100, "float16"), (96, 96, 7, "bfloat16")]
    if schedule != "double-buffered":  # the baseline with loads further ahead
        cases += [(1, 8, 1, "float16"), (1856, 1040, 129, "bfloat16"), (300, 4096, 50, "float16")]
    for n, k, m, name in cases:
        k = max(one, k // one * one)
        q = QTensor(fmt, (n, k), random_parts(fmt, (n, k), rng))
        p = ops.prepare(q, device="cuda")
        x = (torch.randn(m, k, device="cuda") * (2.0**-8 if word == "nvfp4" else 1)).to(DTYPES[name])
        bias = torch.randn(n, device="cuda").to(DTYPES[name])
        y = ops.linear(x, p, bias, schedule=schedule)
        assert torch.equal(y, ops.linear(x, p, bias, schedule=schedule))
        within(y, x, q, bias, name)


def test_mx_exponents_beyond_float16_give_right_float16_results():
    cuda()
    fmt = format_named("mxfp4")
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (16, 32), dtype=np.uint8)
    scales = np.full((16, 2), 127, np.uint8)
    scales[:, 0] = 127 - 40  # decoded values near 2^-40 meet activations of 2^14
    scales[:8, 1] = 127 + 20
    q = QTensor(fmt, (16, 64), {"codes": codes, "scales": scales})
    p = ops.prepare(q, device="cuda")
    for m in (1, 4, 20, 100):
        x = torch.zeros(m, 64, device="cuda", dtype=torch.float16)
        x[:, 40] = 2.0**-12
        y = ops.linear(x, p)
        want = (x.double().cpu().numpy() @ q.dequantize("float64").T).astype(np.float16)
        same(y, want)
        for schedule in SCHEDULES:
            same(ops.linear(x, p, schedule=schedule), want)


@pytest.mark.parametrize("shape", [(0, 128), (4, 7, 128), (2, 3, 1, 128), (128,)])
def test_leading_axes_strides_and_no_tokens(shape):
    cuda()
    q = make("int4:g128", 64, 1, np.random.default_rng(5))
    p = ops.prepare(q, device="cuda")
    x = torch.randn(*shape, device="cuda", dtype=torch.float16)
    y = ops.linear(x, p)
    assert y.shape == (*shape[:-1], 64)
    big = torch.randn(6, 512, device="cuda", dtype=torch.float16)
    for view in (big[:, 64:192], big[:, ::4], big[::2, :128]):
        assert torch.equal(ops.linear(view, p), ops.linear(view.contiguous(), p))


def test_embedding_gathers_exact_rows():
    cuda()
    q = make("q8_0", 50, 4, np.random.default_rng(6))
    ids = torch.tensor([[0, 49], [3, 3]], device="cuda")
    got = ops.embedding(ids, ops.prepare(q, device="cuda"), dtype="float32")
    same(got, q.dequantize()[ids.cpu().numpy()])


@pytest.mark.parametrize("place", ["shared", "lanes", "bytes", "tree"])
def test_a_table_in_every_place_gives_every_code(place):
    """The look-up twins of the bit moves, all 16 codes in all eight nibbles of a word."""
    cuda()
    from dataclasses import replace

    from halfbyte.backends.cuda import launch
    from halfbyte.backends.cuda.lookups import PLACES, byte_planes
    from halfbyte.backends.cuda.portable.dequantize import dequantize_kernel
    from halfbyte.numerics.bits import pack
    from halfbyte.numerics.minifloat import element_table

    codes = np.stack([np.roll(np.arange(16, dtype=np.uint8), r) for r in range(16)])
    q = QTensor(format_named("nf4:g16"), (16, 16), {"codes": pack(codes, 4), "scales": np.ones((16, 1), np.float32)})
    w = ops.prepare(q, device="cuda").data
    table = element_table("nf4", 4).astype(np.float32)
    if place == "bytes":  # float16 only
        table = element_table("e2m1", 4).astype(np.float32)
        w = replace(w, table=torch.from_numpy(byte_planes(table.astype(np.float16))).cuda().view(torch.float32))
    out = torch.full((16, 16), float("nan"), device="cuda")
    form = launch.format_of(w)._replace(kind=PLACES[place])
    dequantize_kernel[(2, 1)](
        out, w.scales, launch.pointers_of(w), 16, 16, 1, 1.0, format=form, GATHER=False, BN=8, BW=16, num_warps=4
    )
    np.testing.assert_array_equal(out.cpu().numpy(), table[codes])


def test_act_order_sorts_away():
    cuda()
    rng = np.random.default_rng(7)
    fmt = format_named("uint4:g32")
    parts = random_parts(fmt, (24, 128), rng)
    parts["group_index"] = rng.permutation(np.repeat(np.arange(4, dtype=np.int32), 32)).astype(np.int32)
    q = QTensor(fmt, (24, 128), parts)
    p = ops.prepare(q, device="cuda")
    same(ops.dequantize(p, "float32"), q.dequantize())
    same(ops.linear(torch.eye(128, device="cuda"), p), q.dequantize().T)


def test_case_54_graph_capture_replays_the_same():
    cuda()
    q = make("mxfp4", 256, 8, np.random.default_rng(8))
    p = ops.prepare(q, device="cuda")
    for m in (1, 8, 33):
        x = torch.randn(m, 256, device="cuda", dtype=torch.float16)
        eager = ops.linear(x, p)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.linear(x, p)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, eager)


def test_case_26_more_rows_than_a_grid_axis():
    cuda()
    q = make("int4:g32", 64, 2, np.random.default_rng(9))
    p = ops.prepare(q, device="cuda")
    x = torch.randn(92029, 64, device="cuda", dtype=torch.float16)
    y = ops.linear(x, p)
    for row in (0, 65535, 65536, 92028):
        want = x[row].double().cpu().numpy() @ q.dequantize("float64").T
        np.testing.assert_allclose(y[row].double().cpu().numpy(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("word", ["q6_K", "nf4:g64", "int3:g128", "q4_K", "hqq4:g64", "int4:g128"])
@pytest.mark.parametrize("m", [3, 40, 300])
def test_no_product_expands_a_weight(word, m):
    """A weight of 67 MB in float16: a call takes at most 32 MiB beside x and y, with a bias and
    without.
    """
    cuda()
    from halfbyte.backends.cuda.weight import WORKSPACE_BYTES
    from halfbyte.bench.weights import random_weight

    n, k = 8200, 4096
    p = ops.prepare(random_weight(word, n, k, 1), device="cuda")
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    for bias in (None, torch.randn(n, device="cuda", dtype=torch.float16)):
        y = ops.linear(x, p, bias)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        again = ops.linear(x, p, bias)
        assert torch.cuda.max_memory_allocated() - before - 2 * m * n <= WORKSPACE_BYTES
        assert torch.equal(y, again)
        dense = ops.dequantize(p, "float16")
        whole = torch.nn.functional.linear(x.float(), dense.float(), None if bias is None else bias.float())
        assert (y.float() - whole).norm() <= 2e-3 * whole.norm()
        del y, again, dense, whole
