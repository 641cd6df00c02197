"""Quark: what a config says of written weights, and weights that come back with it."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from support.random_tensors import random_tensor

QUARK = LAYOUTS["quark"]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("int4:g32", {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}),
        ("uint4:g32", {"dtype": "uint4", "qscheme": "per_group", "group_size": 32, "symmetric": False}),
        ("int4:channel", {"dtype": "int4", "qscheme": "per_channel", "symmetric": True}),
        ("uint4:channel", {"dtype": "uint4", "qscheme": "per_channel", "symmetric": False}),
    ],
)
def test_a_config_of_4_bits_says_groups_and_symmetry(word: str, wanted: dict) -> None:
    q = random_tensor(format_named(word), (16, 64), 1)
    config = QUARK.config(q)
    assert {key: value for key, value in config.items() if key != "pack_method"} == wanted
    back = QUARK.unpack(QUARK.pack(q, config), config)
    assert back.format == q.format
    assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True)
