"""Groups of ggml's first types: values on a grid are kept, and a scale of 0 has a mean."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import quantize

STEPS = [2.0**e for e in range(-6, 5)]


@pytest.mark.parametrize("rule", ["search", "extreme"])
@pytest.mark.parametrize("bits", [4, 5])
def test_values_on_a_grid_with_an_offset_are_kept(bits, rule):
    """Each group has its own step and offset; the step 1 is one of them."""
    rng = np.random.default_rng(bits)
    top = (1 << bits) - 1
    codes = rng.integers(0, top + 1, (len(STEPS), 4, 32))
    codes[..., 0], codes[..., 1] = 0, top
    step = np.array(STEPS)[:, None, None]
    x = (step * (codes - np.array([1, 3, top, 40])[:, None])).astype(np.float32)
    q = quantize(x.reshape(len(STEPS), -1), f"q{bits}_1", scale=rule)
    np.testing.assert_array_equal(q.dequantize(), x.reshape(len(STEPS), -1))


@pytest.mark.parametrize("rule", ["search", "extreme"])
@pytest.mark.parametrize(("codec", "low", "high"), [("q4_0", -8, 7), ("q5_0", -16, 15), ("q8_0", -127, 127)])
def test_values_on_a_grid_around_zero_are_kept(codec, low, high, rule):
    rng = np.random.default_rng(high)
    codes = rng.integers(low, high + 1, (len(STEPS), 4, 32))
    codes[..., 5] = low
    x = (np.array(STEPS)[:, None, None] * codes).astype(np.float32).reshape(len(STEPS), -1)
    np.testing.assert_array_equal(quantize(x, codec, scale=rule).dequantize(), x)
    np.testing.assert_array_equal(quantize(-x[:, ::-1], codec, scale=rule).dequantize(), -x[:, ::-1])


@pytest.mark.parametrize("codec", ["q4_1", "q5_1"])
def test_a_group_whose_step_is_0_in_float16_has_its_mean(codec):
    x = np.full((3, 32), 2.0**-20, np.float32)  # far less than the smallest float16 step a value
    x[1, ::4] += 2.0**-26
    x[2] = 5.0
    q = quantize(x, codec)
    assert q.parts["scales"].tolist() == [[0.0]] * 3
    np.testing.assert_array_equal(q.parts["biases"], x.mean(axis=1, keepdims=True).astype(np.float16))


@pytest.mark.parametrize("rule", ["search", "extreme"])
@pytest.mark.parametrize("codec", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_zeros_are_kept_without_a_warning(codec, rule):
    x = np.zeros((2, 64), np.float32)
    x[0, 32:] = 1
    with np.errstate(all="raise"):
        values = quantize(x, codec, scale=rule).dequantize()
    assert not values[x == 0].any()
    assert (abs(values[x == 1] - 1) < 2.0**-10).all()
