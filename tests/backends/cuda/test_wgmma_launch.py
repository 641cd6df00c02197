"""What the fused schedule hands to its kernel, without a GPU: every argument once, in order, on the
first call and later.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

import numpy as np

import torch
from halfbyte.backends.cuda.tuning.wgmma_tiles import FusedTile
from halfbyte.backends.cuda.weight import NEAR, to_device
from halfbyte.backends.cuda.wgmma import launch as fused_launch
from halfbyte.backends.cuda.wgmma import schedule as fused
from halfbyte.bench.weights import random_weight
from halfbyte.numerics.minifloat import element_table
from support.cuda_recorder import Recorder
from support.ptx_launch import bound

NAMES = fused_launch.wgmma_kernel.arg_names


@pytest.fixture
def recorder(monkeypatch):
    held = Recorder(NAMES)
    monkeypatch.setattr(fused_launch, "wgmma_kernel", held)
    monkeypatch.setattr(fused.gpu, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return held


@pytest.mark.parametrize("word", ["int4:g128", "mxfp4", "nvfp4", "uint4:g64", "affine8:g64", "q8_0", "mxfp8_e4m3", "int2:g64"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "m"), [(4096, 512, 64), (14336, 256, 40), (100, 320, 300)])
def test_a_second_call_hands_over_what_the_first_did(recorder, word, dtype, n, k, m):
    k = k // 128 * 128 if word == "int4:g128" else k
    w = to_device(random_weight(word, n, k, 0), "cpu")
    x, bias = torch.zeros(m, k, dtype=dtype), torch.zeros(n, dtype=dtype)
    assert fused.refusal(x, w) is None
    for _ in range(2):
        fused.fused(x, w, bias)
    (grid, first), (again, second) = recorder.calls
    programs = grid[0]
    assert grid == again == (programs, 1, 1)
    assert programs <= 132
    plain = {name for name, value in first.items() if isinstance(value, int | float)}
    assert {name: first[name] for name in plain} == {name: second[name] for name in plain}
    kept = ("w_map", "s_map", "a_map", "pointers.bias", "pointers.global_scale", "config.decoder")
    assert all(second[name] is first[name] for name in kept)
    assert first["pointers.bias"] is bias
    assert first["pointers.global_scale"] is w.global_scale
    assert [first[f"numbers.{name}"] for name in ("m", "n", "units")] == [m, n, -(-k // 64)]
    rows = -(-n // (64 * first["config.row_blocks"] * first["config.row_groups"]))
    tiles = rows * -(-m // first["config.tokens"])
    bits = w.format.bits
    assert list(first["w_map"].block_shape) == [4 * first["config.row_blocks"] * first["config.row_groups"], bits, 32]
    assert tuple(first["w_map"].shape) == (-(-n // 16), bits * w.tiled, 32)
    sharing = int(first["numbers.sharing"])
    cut = sharing > tiles % programs > 0
    size = 2 * sharing * 64 * first["config.row_blocks"] * first["config.row_groups"] * first["config.tokens"]
    assert first["pointers.partial"].numel() == (size if cut else 1)


@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2"])
def test_shifted_mx_scales_lose_nothing_in_float16(element):
    """The largest scale becomes 2^(LARGEST - 113), the smallest 2^NEAR less: every code times
    either is a float16 number.
    """
    bits = 4 if element == "e2m1" else 8
    values = np.abs(element_table(element, bits).astype(np.float64))
    values = values[np.isfinite(values) & (values > 0)]
    raw = 2.0**-14 if element == "e2m1" else 1.0  # patterns that still lack 2^14
    largest = 2.0 ** (fused_launch.LARGEST[element] - 113)
    for scale in (largest, largest * 2.0 ** -NEAR[element]):
        products = values * raw * scale
        np.testing.assert_array_equal(products.astype(np.float16).astype(np.float64), products)
        np.testing.assert_array_equal(np.float64(np.float16(scale)), scale)


@pytest.mark.parametrize("word", ["mxfp4", "q8_0", "mxfp8_e4m3", "int2:g64"])
@pytest.mark.parametrize(("n", "k", "wanted"), [
    (1024, 2048, [17, 64, 65, 4096]), (1024, 1920, [65, 4096]), (8192, 128, [17, 64, 65, 4096]), (512, 2048, [17, 64, 65]),
    (512, 128, [65]),
])  # fmt: skip
def test_linear_takes_the_schedule_on_its_own_where_it_was_the_fastest(word, n, k, wanted):
    """Few inputs are left to the kernel for few tokens, few rows at many tokens to the dense
    product.
    """
    w = to_device(random_weight(word, n, k, 0), "cpu")
    assert [m for m in (1, 16, 17, 64, 65, 4096) if fused.pays(m, w)] == wanted


def test_another_tile_dtype_or_bias_is_another_kernel(recorder):
    w = to_device(random_weight("mxfp4", 4096, 128, 0), "cpu")
    for m, dtype, bias in ((64, torch.float16, None), (64, torch.bfloat16, None), (64, torch.float16, torch.zeros(4096)),
                           (300, torch.float16, None)):  # fmt: skip
        fused.fused(torch.zeros(m, 128, dtype=dtype), w, bias)
    assert len(w.launches) == 4
    unaligned = torch.zeros(4097)[1:]
    fused.fused(torch.zeros(64, 128, dtype=torch.float16), w, unaligned)  # its alignment is compiled in
    assert len(w.launches) == 5
    fused.fused(torch.zeros(63, 128, dtype=torch.float16), w, None)
    assert len(w.launches) == 5


def test_no_size_is_part_of_a_kernel():
    """So Triton's cache on disk serves every layer of a format, whatever m, n and k."""
    with bound() as seen:
        for n, k in ((128, 128), (4096, 640), (1000, 256)):
            w, x = to_device(random_weight("int4:g128", n, k, 0), "cpu"), torch.zeros(1024, k, dtype=torch.float16)
            for m in (1, 16, 17, 63, 64, 65, 1000, 1024):
                w.launches.clear()
                fused.fused(x[:m], w, None, FusedTile(64, 1, 2, 4))
    assert len(seen) == 1
