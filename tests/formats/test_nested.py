"""bitsandbytes' nested scales: the order of sums."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from halfbyte.formats.nested import dynamic_map, lane_sum, nest_modelopt, nested_values


@pytest.mark.parametrize("sizes", [range(1, 80), (511, 512, 513, 2047, 2048, 2049, 4093, 32_767)], ids=["few", "many"])
def test_sums_are_pytorchs(sizes) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    for size in sizes:
        for scale in (1, 1e4):
            x = (rng.standard_normal(size) * np.exp(rng.standard_normal(size) * np.log(scale))).astype(np.float32)
            assert lane_sum(x) == torch.from_numpy(x).sum().numpy(), size


def test_the_table_is_bitsandbytes_own(golden) -> None:
    tensors = load_file(golden / "bitsandbytes" / "nf4_bf16_b64_dq_real.safetensors")
    (table,) = (v for k, v in tensors.items() if k.endswith("nested_quant_map"))
    dynamic_map.cache_clear()
    assert np.array_equal(dynamic_map(), table)


def test_the_block_with_the_largest_scale_takes_the_last_step():
    """bfloat16's quotient times the value is 126.5 to 127.5: above 127 it stays 127."""
    for m in range(128):
        value = 1 + m / 128
        absmax = np.zeros(256, np.float32)
        absmax[:2] = value, -value
        parts = nest_modelopt(absmax)
        quotient = ml_dtypes.bfloat16(1) / ml_dtypes.bfloat16(value) * ml_dtypes.bfloat16(127)
        steps = min(int(np.rint(float(ml_dtypes.bfloat16(value) * quotient))), 127)
        assert parts["nested_absmax"][0] == float(quotient)
        assert parts["scales"][:3].tolist() == [128 + steps, 128 - steps, 128], m


def test_scales_that_are_all_their_mean_have_a_second_scale_of_1():
    """ModelOpt's rule for a difference of 0, beside blocks that differ."""
    absmax = np.full(768, 2, np.float32)
    absmax[256], absmax[257] = 1, 3
    parts = nest_modelopt(absmax)
    bf16 = ml_dtypes.bfloat16
    assert parts["nested_offset"] == 2
    assert parts["nested_absmax"].tolist() == [1, float(bf16(1) / bf16(1) * bf16(127)), 1]
    assert parts["scales"][[0, 255, 256, 257, 258, 512, 767]].tolist() == [128, 128, 1, 255, 128, 128, 128]
    assert np.array_equal(nested_values(parts, inverse=True), absmax)
    zeros = nest_modelopt(np.zeros(300, np.float32))
    assert (zeros["nested_absmax"].tolist(), zeros["nested_offset"]) == ([1, 1], 0)


@pytest.mark.parametrize(("at", "kept"), [(range(8, 16), False), (range(16, 32), True), (range(32, 48), True)])
def test_a_sum_is_carried_to_the_next_level_after_16_steps(at: range, kept: bool):
    """Ones added to 2^24 in float32 are lost; ones that have a level of their own until they are 16
    are not.
    """
    x = np.zeros((64, 32), np.float32)
    x[0, 0] = 1 << 24
    x[at, 0] = 1
    assert lane_sum(x.reshape(-1)) == (1 << 24) + (16 if kept else 0)


@pytest.mark.parametrize("size", [*range(130), 511, 512, 513, 8191, 8192, 16_384 + 33])
def test_a_sum_without_rounding_is_the_sum(size: int):
    x = np.random.default_rng(size).integers(-100, 100, size).astype(np.float32)
    assert lane_sum(x) == x.sum(dtype=np.float64)
