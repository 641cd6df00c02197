"""The fragment kernel's own source executed by NumPy (gluon_numpy.py), every lane and register,
with the default tiles.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

import torch
from halfbyte import QTensor, format_named
from halfbyte.backends.cuda import launch
from halfbyte.backends.cuda.mma import accumulate
from halfbyte.backends.cuda.moe import routing
from halfbyte.backends.cuda.tuning import table as found
from halfbyte.backends.cuda.tuning.mma_tiles import FragmentTile
from halfbyte.backends.cuda.weight import to_device
from support.gluon_numpy import Kernel
from support.gpu_weights import random_parts

FAMILIES = {
    "int": ("int4:g128", "int4:g32"), "affine": ("uint4:g128",), "biased": ("affine4:g64",), "e2m1": ("mxfp4",),
    "fine": ("nvfp4",), "wide": ("int8:g32", "mxfp8_e4m3"),
}  # fmt: skip


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "fragment_kernel", Kernel())
    monkeypatch.setattr(launch.gpu, "converts_fp8", lambda device: True)


def relative_error(word, n, k, m, tile, dtype="float16"):
    """The largest error of an output over the sum of its products' sizes, float32 outputs."""
    fmt = format_named(word)
    q = QTensor(fmt, (n, k), random_parts(fmt, (n, k), np.random.default_rng(1)))
    x = torch.from_numpy(np.random.default_rng(5).standard_normal((m, k)).astype(np.float32)).to(getattr(torch, dtype))
    y = launch.fragments(x, to_device(q, "cpu", lanes=True), None, FragmentTile(*tile), dtype=torch.float32)
    x64, w64 = x.double().numpy(), q.dequantize("float64")
    return float((np.abs(y.double().numpy() - x64 @ w64.T) / (np.abs(x64) @ np.abs(w64.T))).max())


def default_tiles(limit):
    """(family, tile) of the H200 for up to `limit` tokens, without repetition."""
    entries = json.loads((found.DEFAULT / "h200.json").read_text())["tiles"]
    return sorted({(e["family"], *e["tile"]) for e in entries if e["kernel"] == "fragments" and e["m"] == limit})


@pytest.mark.parametrize(("limit", "m"), [(2, 1), (2, 2), (8, 4), (16, 9)])
def test_default_tiles_multiply_as_float64_does(kernel, limit, m):
    """k that fills a warp's step and k that does not; ragged rows. Weights finished in float16 are
    rounded once.
    """
    for family, *tile in default_tiles(limit):
        for word in FAMILIES[family]:
            error = relative_error(word, 40, 1920 if tile[4] == 4 else 4096, m, tile)
            assert error <= (2.0**-11 if tile[7] and family != "e2m1" else 1e-6), (word, tile, error)


WORDS = [word for words in FAMILIES.values() for word in words]
EARLY_AND_LATE = (
    (4096, (1, 1, 8, 1, 8, 1, 1)), (1920, (1, 1, 4, 1, 4, 1, 0)), (4096, (2, 1, 16, 1, 4, 1, 2)), (1920, (1, 1, 2, 1, 4, 1, 2)),
)  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shared_registers_of_x_and_every_time_of_asking(kernel, word, dtype):
    """m = 1, where groups share x: words early (1), late (0) and in two buffers (2), steps and
    turns of every parity.
    """
    for k, tile in EARLY_AND_LATE:
        assert relative_error(word, 104, k, 1, tile, dtype) <= 1e-6


LANES = ["q6_K", "q5_K", "nf4:g64", "q3_K", "iq4_xs", "mxfp6_e2m3"]
REST_OF_LANES = ["q2_K", "iq4_nl", "int3:g64", "uint3:g128", "q5_0", "q5_1", "uint6:g64", "affine1:g64", "mxfp6_e3m2"]
OF_LANES = (
    (1, 2048, (1, 1, 8, 1, 4, 1)), (2, 1792, (1, 1, 4, 1, 4, 1, 2)), (4, 768, (2, 1, 2, 1, 2, 0, 0)),
    (9, 768, (2, 2, 2, 2, 2, 1)),
)  # fmt: skip


@pytest.mark.parametrize("word", [*LANES, *(pytest.param(word, marks=pytest.mark.slow) for word in REST_OF_LANES)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_planes_in_lane_order_multiply_as_float64_does(kernel, word, dtype):
    for m, k, tile in OF_LANES:
        finished = (2.0**-11 if dtype == "float16" else 2.0**-8) if word == "nf4:g64" else 1e-6  # rounded once to x's type
        assert relative_error(word, 40, k, m, tile, dtype) <= finished, (m, k, tile)


def test_a_wrong_register_of_x_is_seen(kernel, monkeypatch):
    broken = Kernel()
    space = broken.run.__globals__
    first = space["x_register"]
    space["x_register"] = lambda block, pair: first(block, pair) ^ 2
    monkeypatch.setattr(launch, "fragment_kernel", broken)
    assert accumulate.x_register(5, 2) == first(5, 2)
    assert relative_error("int4:g128", 16, 4096, 1, (1, 1, 8, 1, 8, 1, 1)) > 1e-3


@pytest.mark.parametrize("m", [1, 3, 7, 20])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stacks_of_experts_with_gates(kernel, monkeypatch, m, dtype):
    monkeypatch.setattr(routing, "COMPARED", -1)  # the table by torch: the other kernel is not executed here
    rng = np.random.default_rng(3)
    fmt, shape = format_named("mxfp4"), (4, 96, 192)
    q = QTensor(fmt, shape, random_parts(fmt, shape, rng))
    w = to_device(q, "cpu")
    x = torch.from_numpy(rng.standard_normal((m, 192)).astype(np.float32)).to(getattr(torch, dtype))
    index = torch.stack([torch.from_numpy(rng.permutation(4)[:2]) for _ in range(m)]).to(torch.int32)
    bias = torch.from_numpy(rng.standard_normal((4, 96)).astype(np.float32)).to(x.dtype)
    per = 1 if m == 1 else 4 if m <= 4 else 8 if m <= 8 else 16
    table = routing.route(index, 4, per)
    tile = (2, 2, 2, 2, 1, 4, 1, True) if per == 16 else (2, 1, 2, 1, 4, 6, 1, per == 8)
    y = launch.fragments(x, w, bias, FragmentTile(*tile), table, torch.float32, gate=2)
    dense, x64 = q.dequantize("float64"), x.double().numpy()
    for i in range(m):
        for t in range(2):
            e = int(index[i, t])
            both = dense[e] @ x64[i] + bias[e].double().numpy()
            gate, up = np.minimum(both[::2], 7.0), np.clip(both[1::2], -7.0, 7.0)
            want = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            np.testing.assert_allclose(y[2 * i + t].double().numpy(), want, rtol=1e-4, atol=1e-4)
