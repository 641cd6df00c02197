"""Metal-Marlin buffers: eight inputs of one output a word, zero points as float numbers, both
directions, and refusals.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import LayoutError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.numerics.bits import unpack
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.layout_tensors import field, halves, headers, integer_tensor, words

LAYOUT = LAYOUTS["metal-marlin"]


def foreign(rng: np.random.Generator, codec: str, lead: tuple[int, ...] = (), n: int = 24, k: int = 64) -> dict[str, np.ndarray]:
    tensors = {"qweight": words(rng, *lead, k // 8, n).view(np.uint32), "scales": halves(rng, *lead, k // 32, n)}
    if codec == "uint4":
        tensors["zeros"] = rng.integers(-20, 20, tensors["scales"].shape).astype(np.float16)
        tensors["zeros"][tensors["zeros"] == 0] = np.float16(-0.0)
    return tensors


@pytest.mark.parametrize("codec", ["int4", "uint4", "fp4"])
@pytest.mark.parametrize("lead", [(), (3,), (0,)])
def test_random_bytes_come_back(codec: str, lead: tuple[int, ...]) -> None:
    for n in (24, 1, 0):
        tensors = foreign(np.random.default_rng(0), codec, lead, n)
        config = {"codec": codec, "group_size": 32}
        q = LAYOUT.unpack(tensors, config, "m")
        assert q.shape == (*lead, n, 64)
        assert q.format == format_named(codec, 32)
        assert same_tensors(LAYOUT.pack(q, config), tensors)
        assert LAYOUT.describe(headers(tensors), config) == (q.format, q.shape)


@given(
    lead=st.sampled_from([(), (2,)]),
    n=st.integers(0, 20),
    k=st.integers(0, 12),
    group=st.sampled_from([8, 16, 24, 128, -1]),
    zeros=st.sampled_from([None, (0, 15), (-300, 300)]),
    scale=st.sampled_from(["float16", "float32"]),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_come_back(lead, n, k, group, zeros, scale, seed) -> None:
    q = integer_tensor(4, (*lead, n, 8 * k), group, seed, zeros=zeros, scale_dtype=scale)
    config = LAYOUT.config(q)
    assert LAYOUT.unpack(LAYOUT.pack(q, config), config) == q


def test_a_word_holds_eight_inputs_of_one_output_low_nibble_first() -> None:
    tensors = foreign(np.random.default_rng(1), "int4")
    codes = unpack(LAYOUT.unpack(tensors, {"group_size": 32}).parts["codes"], 4, 64)
    for r in range(24):
        for j in range(64):
            assert codes[r, j] == field(tensors["qweight"][j // 8 : j // 8 + 1, r].view(np.int32), 4, j % 8)


def test_it_is_the_order_of_gptq_words_with_zero_points_spread_out() -> None:
    q = integer_tensor(4, (32, 64), 32, zeros=(0, 15))
    ours, gptq = LAYOUT.pack(q, {}), LAYOUTS["gptq"].pack(q, {"checkpoint_format": "gptq_v2"})
    assert np.array_equal(ours["qweight"].view(np.int32), gptq["qweight"])
    assert np.array_equal(ours["scales"], gptq["scales"])
    assert np.array_equal(ours["zeros"], q.parts["zeros"].T.astype(np.float16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": np.zeros((8, 24), np.int32)}, r"down\.qweight is int32; allowed: uint32"),
        ({"qweight": np.zeros(8, np.uint32)}, r"down\.qweight has shape \[8\]; wanted \[k/8, n\] or \[experts, k/8, n\]"),
        ({"scales": np.zeros((2, 23), np.float16)}, r"down\.scales has shape \[2, 23\]; wanted \[\*, 24\]"),
        ({"zeros": np.zeros((2, 24), np.float32)}, r"down\.zeros is float32; allowed: float16"),
        ({"zeros": np.full((2, 24), 0.5, np.float16)}, r"down\.zeros holds 0\.5 at group \(0, 0\); zero points are integers"),
        ({"zeros": np.full((2, 24), np.nan, np.float16)}, r"down\.zeros holds nan"),
        ({"group_size": 16}, r"down\.scales has 2 groups; 64 inputs in groups of 16 are 4"),
        ({"codec": "int4"}, r"codec 'int4' with zeros; allowed: uint4 with zeros, int4 or fp4 without"),
        ({"codec": "nf4"}, r"codec 'nf4' with zeros"),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_their_sizes(changes: dict, message: str) -> None:
    tensors = foreign(np.random.default_rng(0), "uint4")
    config = {"group_size": 32}
    for key, value in changes.items():
        (tensors if key in tensors else config)[key] = value
    with pytest.raises(LayoutError, match=message):
        LAYOUT.unpack(tensors, config, "down")


@pytest.mark.parametrize(
    ("q", "config", "message"),
    [
        (integer_tensor(8, (8, 64), 32), {}, "holds 4 bits, not 8"),
        (integer_tensor(4, (8, 60), 32), {}, "60 inputs are not whole words of 8"),
        (integer_tensor(4, (8, 64), 32, act_order=True), {}, "act-order group index"),
        (integer_tensor(4, (8, 64), 32), {"codec": "fp4"}, "the config asks for codec 'fp4'; this weight has 'int4'"),
        (integer_tensor(4, (8, 64), 32, zeros=(2049, 2049)), {}, "a zero point of up to 2049 is no float16 number"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(q: QTensor, config: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        LAYOUT.pack(q, config)


@pytest.mark.parametrize("bound", [32767, -32767])
def test_zero_points_reach_to_the_ends_of_16_bits_and_no_further(bound: int) -> None:
    q = integer_tensor(4, (8, 64), 32, zeros=(bound, bound), scale_dtype="float32")
    tensors = LAYOUT.pack(q, LAYOUT.config(q))
    back = LAYOUT.unpack(tensors, LAYOUT.config(q), "down")
    assert back == q
    assert back.parts["zeros"].tolist() == np.full((8, 2), bound).tolist()
    for beyond in (bound + np.sign(bound), np.inf * np.sign(bound)):
        tensors["zeros"][1, 3] = beyond
        with pytest.raises(LayoutError, match=r"down\.zeros holds -?(32768|inf).* at group \(3, 1\)"):
            LAYOUT.unpack(tensors, LAYOUT.config(q), "down")
