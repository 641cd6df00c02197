"""Products that decode rows of a weight: in blocks within the workspace, whatever the shape; no GPU
needed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")

import torch
from halfbyte.backends.cuda import launch, weight
from halfbyte.backends.cuda.weight import TILE_ROWS, WORKSPACE_BYTES, row_blocks, to_device
from halfbyte.bench.weights import random_weight


@pytest.mark.parametrize("row_bytes", [2, 512, 5376, 8192, 57344, 262144, 1 << 22])
@pytest.mark.parametrize("n", [1, 16, 127, 2880, 4096, 14336, 151936])
def test_blocks_cover_every_row_once_within_the_workspace(n, row_bytes):
    blocks = list(row_blocks(n, row_bytes))
    assert [first for first, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
    assert blocks[-1][1] == n
    assert all(first % TILE_ROWS == 0 for first, _ in blocks)
    most = max(end - first for first, end in blocks)
    assert most * row_bytes <= WORKSPACE_BYTES or most <= TILE_ROWS
    assert most == blocks[0][1] - blocks[0][0]  # the first block's buffer serves all


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_in_blocks_is_the_product(monkeypatch, dtype, biased):
    """Whole numbers: every sum is exact in float16, so cutting rows and tokens changes nothing."""
    monkeypatch.setattr(weight, "WORKSPACE_BYTES", 8_000)
    generator = torch.Generator().manual_seed(1)
    w = torch.randint(-3, 4, (90, 64), generator=generator).to(torch.float16)
    x = torch.randint(-3, 4, (1100, 64), generator=generator).to(torch.float16)
    bias = torch.randint(-3, 4, (90,), generator=generator).to(torch.float16) if biased else None
    seen = []

    def decode(first, end, out):
        seen.append((first, end, out.dtype, out.numel() * out.element_size()))
        out.copy_(w[first:end])

    y = launch.blockwise_matmul(x, (90, 64), dtype, bias, decode)
    assert y.dtype == torch.float16
    assert torch.equal(y, torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double()).half())
    assert len(seen) > 1
    assert {d for *_, d, _ in seen} == {dtype}
    assert all(size <= 8_000 or end - first <= TILE_ROWS for first, end, _, size in seen)


@pytest.mark.parametrize("codec", ["int4:g128", "q6_K", "q4_K", "nvfp4", "affine4:g64", "nf4:g64"])
def test_a_block_of_rows_is_a_view_of_its_weight(codec):
    """Every tensor of a block lies in the weight's own memory, at the rows that it names."""
    q = random_weight(codec, 96, 256, 2)
    w = to_device(q, "cpu")
    block = w.row_block(32, 64)
    assert block.shape == (32, 256)
    assert w.row_block(32, 64) is block
    assert w.row_block(0, 96) is w
    storages = {t.untyped_storage().data_ptr() for t in w.tensors()}
    for ours, theirs in zip(block.tensors(), w.tensors(), strict=True):
        assert ours.untyped_storage().data_ptr() in storages
        assert ours.numel() in (theirs.numel(), theirs.numel() // 3)
