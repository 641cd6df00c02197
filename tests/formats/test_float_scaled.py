"""Scales of FP4 and FP8 under floats."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import quantize


@pytest.mark.parametrize("codec", ["fp4:g16", "fp8_e4m3:g16", "fp8_e5m2:g16"])
def test_a_group_of_zeros_has_the_scale_0_unless_a_rule_replaces_it(codec):
    x = np.zeros((1, 32), np.float32)
    x[0, 20] = 3.0
    scales = quantize(x, codec).parts["scales"]
    assert (scales[0, 0], scales[0, 1] > 0) == (0, True)
    replaced = quantize(x, codec, zero_scale=0.125).parts["scales"]
    assert (replaced[0, 0], replaced[0, 1]) == (0.125, scales[0, 1])
