"""HQQ slabs: random bytes of every packing and axis, drawn shapes, independent readings, the saved
module's own parameters.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import LayoutError, UnsupportedError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.numerics.bits import unpack
from support.golden_case import same_tensors
from support.layout_tensors import headers
from support.random_tensors import check_return, check_round_trip, random_array, random_tensor

HQQ = LAYOUTS["hqq"]
SLOTS = {8: (np.uint8, 1), 4: (np.uint8, 2), 3: (np.int32, 10), 2: (np.uint8, 4), 1: (np.uint8, 8)}
FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def foreign(rng: np.random.Generator, bits: int, n: int, k: int, group: int, axis: int, dtype=np.float16) -> tuple[dict, dict]:
    word, per = SLOTS[bits]
    count = n * k // group
    rows, columns = (count, group) if axis else (group, count)
    scale = (count, 1) if axis else (1, count)
    tensors = {
        "W_q": random_array(rng, word, -(-rows // per), columns),
        "scale": random_array(rng, dtype, *scale),
        "zero": random_array(rng, dtype, *scale),
    }
    return tensors, {"nbits": bits, "group_size": group, "axis": axis, "shape": [n, k]}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", SLOTS)
def test_random_bytes_come_back_unused_bits_and_padded_rows_included(bits: int, axis: int, dtype: str) -> None:
    for n, k, group in ((16, 128, 64), (8, 96, 32), (64, 16, 32), (24, 64, 8)):
        tensors, config = foreign(np.random.default_rng(n), bits, n, k, group, axis, FLOATS[dtype])
        q = check_round_trip(HQQ, tensors, config)
        assert q.format.name == f"hqq{bits}"
        assert q.format.grouping == ("strided" if axis == 0 else "row" if k % group == 0 else "flat")
        assert q.format.scale == dtype


@pytest.mark.parametrize("bits", SLOTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_slab_i_of_rows_lies_high_bits_first(bits: int, axis: int) -> None:
    n, k, group = 16, 64, 32
    tensors, config = foreign(np.random.default_rng(1), bits, n, k, group, axis)
    _, per = SLOTS[bits]
    words = tensors["W_q"].astype(np.int64) & 0xFFFFFFFF
    steps = words.shape[0]
    flat = unpack(HQQ.unpack(tensors, config).parts["codes"], bits, k).reshape(-1)
    rows, columns = (n * k // group, group) if axis else (group, n * k // group)
    for r, c in np.ndindex(rows, columns):
        slab, line = divmod(r, steps)
        expected = int(words[line, c]) >> (bits * (per - 1 - slab)) & ((1 << bits) - 1)
        assert flat[r * columns + c] == expected


def test_axis_0_groups_run_down_columns() -> None:
    tensors, config = foreign(np.random.default_rng(2), 8, 4, 16, 8, 0)
    tensors["scale"] = np.arange(1, 9, dtype=np.float16)[None]
    tensors["zero"] = np.zeros((1, 8), np.float16)
    value = HQQ.unpack(tensors, config).dequantize().reshape(8, 8)
    assert np.array_equal(value, tensors["W_q"].astype(np.float32) * np.arange(1, 9, dtype=np.float32))


@given(
    bits=st.integers(1, 8),
    axis=st.sampled_from([0, 1]),
    n=st.integers(0, 6),
    k=st.integers(0, 6),
    group=st.sampled_from([8, 16, 40]),
    dtype=st.sampled_from(sorted(FLOATS)),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_come_back(bits, axis, n, k, group, dtype, seed) -> None:
    q = random_tensor(
        format_named(f"hqq{bits}", group, axis=axis, scale_dtype=dtype), (8 * n, group * k if axis else 40 * k), seed
    )
    tensors = check_return(HQQ, q)
    assert tensors["shape"].tolist() == list(q.shape)
    assert HQQ.unpack(tensors, {}) == q  # the parameters it writes beside are enough


def test_groups_that_straddle_rows() -> None:
    q = random_tensor(format_named("hqq4", 64), (16, 40), 0)
    assert q.format.grouping == "flat"
    check_return(HQQ, q)


def test_a_saved_module_describes_itself() -> None:
    tensors, config = foreign(np.random.default_rng(0), 4, 16, 128, 64, 1)
    text = lambda s: np.frombuffer(s.encode(), np.uint8)  # noqa: E731
    module = {
        **tensors, "nbits": np.array(4, np.int32), "group_size": np.array(64, np.int32), "shape": np.array([16, 128], np.int64),
        "axis": np.array(1, np.int32), "packing": text("4bit_u8"), "unpack_view_dtype": text("torch.uint8"),
        "view_as_float": np.array(0, np.uint8),
        "quant_scale": np.array(0, np.uint8), "quant_zero": np.array(0, np.uint8), "compute_dtype": text("torch.float16"),
        "encoded_state_dict": np.array(1, np.uint8), "round_zero": np.array(1, np.uint8),
    }  # fmt: skip
    q = check_round_trip(HQQ, module, {})
    assert q == HQQ.unpack(tensors, config)
    assert q.details["compute_dtype"] == "float16"
    assert set(HQQ.claims(module)) == set(module)
    part = HQQ.pack(q[0:8], {})
    assert part["shape"].tolist() == [8, 128]
    assert HQQ.unpack(part, {}) == q[0:8]
    for flag in ("quant_zero", "quant_scale"):
        with pytest.raises(UnsupportedError, match=f"{flag} is set"):
            HQQ.describe({**module, flag: np.array(1, np.uint8)}, {}, "m")


@pytest.mark.parametrize("bits", [4, 3])
def test_words_viewed_as_floats(bits: int) -> None:
    tensors, config = foreign(np.random.default_rng(0), bits, 16, 128, 64, 1)
    raw = tensors["W_q"].view(np.uint8)
    viewed = {**tensors, "W_q": raw.view(np.float16)}
    q = check_round_trip(HQQ, viewed, config)
    assert q == HQQ.unpack(tensors, config)


def test_widths_without_a_packing_of_their_own_take_a_byte() -> None:
    for bits in (5, 6, 7):
        q = random_tensor(format_named(f"hqq{bits}", 64), (4, 64), bits)
        tensors = HQQ.pack(q, {})
        assert tensors["W_q"].shape == (4, 64)
        with pytest.raises(LayoutError, match=rf"m\.W_q holds code 255; {bits} bits reach {(1 << bits) - 1}"):
            HQQ.unpack({**tensors, "W_q": np.full((4, 64), 255, np.uint8)}, {}, "m")


def test_three_codes_are_a_width_of_1_58_bits() -> None:
    """Saved as a float32 tensor; the codes lie in slots of two bits."""
    tensors, config = foreign(np.random.default_rng(0), 2, 16, 128, 64, 1)
    saved = {**tensors, "nbits": np.array(1.58, np.float32)}
    rest = {key: value for key, value in config.items() if key != "nbits"}
    q = check_round_trip(HQQ, saved, rest)
    assert str(q.format) == "hqq2:g64"
    assert q == HQQ.unpack(tensors, config) == HQQ.unpack(tensors, {**config, "nbits": 1.58})
    assert HQQ.pack(q, {"nbits": 1.58})["nbits"] == np.float32(1.58)
    for wrong in (1.5, np.nan, np.inf):
        with pytest.raises(LayoutError, match=r"m\.nbits is (1\.5|nan|inf); allowed: 1 to 8, and 1\.58 for three codes"):
            HQQ.describe({**saved, "nbits": np.array(wrong, np.float32)}, rest, "m")


def test_one_scale_for_everything() -> None:
    rng = np.random.default_rng(0)
    tensors = {"W_q": random_array(rng, np.uint8, 8, 64), "scale": np.array(0.5, np.float16), "zero": np.array(3, np.float16)}
    q = check_round_trip(HQQ, tensors, {"nbits": 4, "shape": [16, 64]})
    assert q.dequantize()[0, 0] == (int(tensors["W_q"][0, 0]) >> 4) * 0.5 - 1.5


def test_what_does_not_fit_is_refused() -> None:
    tensors, config = foreign(np.random.default_rng(0), 4, 16, 128, 64, 1)
    with pytest.raises(LayoutError, match=r"m: nbits 4, shape None; both are needed"):
        HQQ.describe(headers(tensors), {"nbits": 4}, "m")
    with pytest.raises(LayoutError, match=r"m\.W_q is uint8 \[16, 64\]; 32 × 64 codes in 2bit_u8 are uint8 \[8, 64\]"):
        HQQ.describe(tensors, {**config, "nbits": 2}, "m")
    with pytest.raises(LayoutError, match=r"m\.scale has shape \[32, 1\] for a weight of \[16, 128\] with axis 0"):
        HQQ.describe(tensors, {**config, "axis": 0}, "m")
    with pytest.raises(LayoutError, match=r"m\.zero is float32 \[32, 1\], m\.scale float16 \[32, 1\]; they must agree"):
        HQQ.describe({**tensors, "zero": tensors["zero"].astype(np.float32)}, config, "m")
    with pytest.raises(LayoutError, match="HQQ holds hqq1 to hqq8"):
        HQQ.pack(random_tensor(format_named("uint4", 64), (2, 64), 0), {})
    with pytest.raises(LayoutError, match="takes whole groups in multiples of 2"):
        HQQ.pack(random_tensor(format_named("hqq4", 64), (3, 64), 0), {})
    with pytest.raises(LayoutError, match="a slice of a weight"):
        HQQ.pack(random_tensor(format_named("hqq4", 8, axis=0), (16, 64), 0)[0:2], {})
    assert same_tensors(HQQ.pack(HQQ.unpack(tensors, config), config), tensors)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_group_that_is_the_whole_row_comes_back(bits: int) -> None:
    q = random_tensor(format_named(f"hqq{bits}", -1), (8, 24), 5)
    config = HQQ.config(q)
    assert config["group_size"] == 24
    back = HQQ.unpack(HQQ.pack(q, config), config)
    assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", SLOTS)
@pytest.mark.parametrize("left_out", [("axis",), ("group_size",), ("axis", "group_size")])
def test_shapes_say_what_a_config_leaves_out(bits: int, axis: int, left_out: tuple[str, ...]) -> None:
    for n, k, group in ((16, 128, 64), (8, 96, 32), (2, 64, 16)):
        tensors, config = foreign(np.random.default_rng(n), bits, n, k, group, axis)
        less = {key: value for key, value in config.items() if key not in left_out}
        if bits == 8 or n == 16:
            assert HQQ.describe(tensors, less, "m") == HQQ.describe(tensors, config, "m")
            assert HQQ.unpack(tensors, less, "m").identical(HQQ.unpack(tensors, config, "m"))


@pytest.mark.parametrize(("stated", "group"), [({}, 64), ({"group_size": 16}, 16), ({"group_size": 128}, 128)])
def test_a_weight_without_elements_has_groups_of_64_unless_the_config_says(stated: dict, group: int) -> None:
    tensors = {"W_q": np.zeros((0, 64), np.uint8), "scale": np.zeros((0, 1), np.float16), "zero": np.zeros((0, 1), np.float16)}
    for axis in (0, 1):
        shaped = tensors if axis else {name: np.zeros(t.shape[::-1], t.dtype) for name, t in tensors.items()}
        shaped["W_q"] = np.zeros((0, group) if axis else (0, 0), np.uint8)
        fmt, shape = HQQ.describe(shaped, {"nbits": 8, "shape": [0, 64], "axis": axis, **stated}, "m")
        assert (fmt.group_size, shape) == (group, (0, 64))
