"""bitsandbytes: random bytes, drawn shapes with odd and partial blocks, the JSON state, the table,
storage dtypes, int8.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import LayoutError, UnsupportedError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.numerics.bits import unpack
from halfbyte.numerics.minifloat import element_table
from halfbyte.tensor.quantize import quantize
from support.golden_case import same_tensors
from support.layout_tensors import headers
from support.random_tensors import check_return, check_round_trip, finite_tensor, random_array, random_tensor

BNB = LAYOUTS["bitsandbytes"]
KINDS = {"nf4": "nf4", "fp4": "bnb_fp4"}


def table(kind: str) -> np.ndarray:
    return element_table(KINDS[kind], 4).astype(np.float32)


def state_bytes(kind: str, group: int, shape: tuple[int, ...], nested: bool, dtype: str = "bfloat16") -> np.ndarray:
    state = {"quant_type": kind, "blocksize": group, "dtype": dtype, "shape": list(shape)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.07945098727941513}
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def foreign(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...], group: int, nested: bool = False, storage=np.uint8
) -> dict[str, np.ndarray]:
    size = int(np.prod(shape))
    blocks = -(-size // group)
    item = np.dtype(storage).itemsize
    tensors = {
        "weight": random_array(rng, storage, -(-(size + size % 2) // 2 // item), 1),
        "weight.absmax": random_array(rng, np.uint8 if nested else np.float32, blocks),
        "weight.quant_map": table(kind),
        f"weight.quant_state.bitsandbytes__{kind}": state_bytes(kind, group, shape, nested),
    }
    if nested:
        tensors["weight.nested_absmax"] = random_array(rng, np.float32, -(-blocks // 256))
        tensors["weight.nested_quant_map"] = random_array(rng, np.float32, 256)
    return tensors


@pytest.mark.parametrize("nested", [False, True], ids=["float", "nested"])
@pytest.mark.parametrize("shape", [(8, 128), (5, 21), (33, 640), (1, 100), (0, 64), (4, 0), (3, 2, 64), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_bytes_come_back(kind: str, shape: tuple[int, ...], nested: bool) -> None:
    for group in (64, 128, 4096):
        q = check_round_trip(BNB, foreign(np.random.default_rng(group), kind, shape, group, nested), {})
        assert q.shape == shape
        assert q.format.scale == ("nested" if nested else "float32")


@pytest.mark.parametrize(
    "storage", [np.uint8, np.int8, np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda d: np.dtype(d).name
)
def test_any_storage_dtype_over_the_same_bytes(storage) -> None:
    for shape in ((8, 64), (3, 5), *((1, size) for size in range(1, 18))):
        tensors = foreign(np.random.default_rng(1), "nf4", shape, 64, storage=storage)
        q = check_round_trip(BNB, tensors, {})
        plain = BNB.unpack(
            {**tensors, "weight": tensors["weight"].reshape(-1).view(np.uint8)[: (np.prod(shape) + 1) // 2, None]}, {}
        )
        assert q == plain


@given(
    kind=st.sampled_from(sorted(KINDS)), nested=st.booleans(), lead=st.sampled_from([(), (0,), (2,)]), n=st.integers(0, 6),
    k=st.integers(0, 90), group=st.sampled_from([1, 16, 64, 100, 1024, 4096]), seed=st.integers(0, 1 << 16),
)  # fmt: skip
def test_drawn_tensors_come_back(kind, nested, lead, n, k, group, seed) -> None:
    q = random_tensor(format_named(KINDS[kind], group, nested=nested), (*lead, n, k), seed)
    check_return(BNB, q)


@given(n=st.integers(0, 9), k=st.integers(0, 40), seed=st.integers(0, 1 << 16))
def test_drawn_int8_tensors_come_back(n, k, seed) -> None:
    if k:
        check_return(BNB, random_tensor(format_named("bnb_int8"), (n, k), seed))


@pytest.mark.parametrize("order", [None, (), (1,)])
def test_int8_random_bytes_come_back(order) -> None:
    rng = np.random.default_rng(0)
    tensors = {"weight": random_array(rng, np.int8, 6, 40), "SCB": random_array(rng, np.float32, 6)}
    if order is not None:
        tensors["weight_format"] = np.zeros(order, np.uint8)
    q = check_round_trip(BNB, tensors, {})
    assert np.array_equal(unpack(q.parts["codes"], 8, 40).astype(int) - 128, tensors["weight"])
    if order is not None:
        with pytest.raises(UnsupportedError, match=r"m\.weight_format is 2, a tiled order of old GPU kernels; read: 0"):
            BNB.unpack({**tensors, "weight_format": np.full(order, 2, np.uint8)}, {}, "m")


def test_the_high_nibble_is_the_even_element_of_the_flattened_tensor() -> None:
    tensors = foreign(np.random.default_rng(3), "nf4", (5, 21), 64)
    codes = unpack(BNB.unpack(tensors, {}).parts["codes"], 4, 21).reshape(-1)
    raw = tensors["weight"].reshape(-1)
    assert codes.tolist() == [int(raw[i // 2]) >> 4 if i % 2 == 0 else int(raw[i // 2]) & 15 for i in range(105)]


def test_nested_scales_are_map_times_absmax_plus_offset() -> None:
    shape = (40, 640)  # 400 blocks: two entries of nested_absmax
    tensors = foreign(np.random.default_rng(4), "nf4", shape, 64, nested=True)
    tensors["weight.nested_absmax"] = np.array([0.5, 2.0], np.float32)
    tensors["weight.nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
    q = BNB.unpack(tensors, {})
    flat = unpack(q.parts["codes"], 4, 640).reshape(-1)
    mapped = tensors["weight.nested_quant_map"][tensors["weight.absmax"]]
    absmax = mapped * np.repeat(tensors["weight.nested_absmax"], 256)[:400] + np.float32(0.07945098727941513)
    expected = table("nf4")[flat] * np.repeat(absmax, 64)
    assert np.array_equal(q.dequantize("float32", "producer").reshape(-1), expected)
    assert np.array_equal(q[17:23].dequantize("float32", "producer"), expected.reshape(shape)[17:23])


@pytest.mark.parametrize("kind", KINDS)
def test_case_15_a_partial_last_block_has_its_own_absmax(kind: str) -> None:
    weight = np.zeros((4, 25), np.float32)  # 100 elements in blocks of 64
    weight[0, 0], weight[2, 20], weight[3, 24] = 2.0, -0.5, 0.25
    fmt = format_named(KINDS[kind], 64)
    q = quantize(weight, KINDS[kind])
    assert q.format == fmt.with_(grouping="flat")
    assert q.parts["scales"].tolist() == [2.0, 0.5]
    tensors = check_return(BNB, q)
    assert tensors["weight.absmax"].shape == (2,)
    assert tensors["weight"].shape == (50, 1)
    value = q.dequantize()
    assert (value[0, 0], value[2, 20]) == (2.0, -0.5)


def test_case_15_nine_blocks_and_what_follows_absmax_is_not_touched() -> None:
    guarded = np.full(16, 7.0, np.float32)
    tensors = foreign(np.random.default_rng(0), "nf4", (9, 64), 64)
    guarded[:9] = 1.0
    q = BNB.unpack({**tensors, "weight.absmax": guarded[:9]}, {})
    out = BNB.pack(q, {})
    assert out["weight.absmax"].shape == (9,)
    q.dequantize("float32", "producer")
    assert (guarded[9:] == 7.0).all()
    with pytest.raises(LayoutError, match=r"m\.weight\.absmax has shape \[16\]; wanted \[9\] \(one a block of 64\)"):
        BNB.unpack({**tensors, "weight.absmax": guarded}, {}, "m")


@pytest.mark.parametrize("group", [64, 128, 256, 512, 1024, 2048, 4096])
def test_case_16_every_block_size_up_to_4096(group: int) -> None:
    rng = np.random.default_rng(group)
    q = finite_tensor(format_named("nf4", group), (4, 4096), group)
    check_return(BNB, q)
    codes = rng.integers(0, 16, 16, dtype=np.uint8)
    small = {
        "weight": (codes[0::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": np.array([0.5], np.float32),
        "weight.quant_map": table("nf4"),
        "weight.quant_state.bitsandbytes__nf4": state_bytes("nf4", group, (4, 4), False),
    }
    few = check_round_trip(BNB, small, {})  # 16 elements in a block of 1024 or 4096
    assert np.array_equal(few.dequantize().reshape(-1), table("nf4")[codes] * np.float32(0.5))


def test_the_state_is_kept_to_the_byte_and_rewritten_when_it_no_longer_holds() -> None:
    tensors = foreign(np.random.default_rng(0), "nf4", (8, 64), 64)
    key = "weight.quant_state.bitsandbytes__nf4"
    spaced = json.dumps(json.loads(tensors[key].tobytes()), indent=2, sort_keys=True)
    tensors[key] = np.frombuffer(spaced.encode(), np.uint8)
    q = check_round_trip(BNB, tensors, {})
    assert q.details["dtype"] == "bfloat16"
    part = BNB.pack(q[2:5], {})
    assert json.loads(part[key].tobytes())["shape"] == [3, 64]
    assert BNB.unpack(part, {}) == q[2:5]


def test_without_a_state_the_config_says_the_shape() -> None:
    tensors = foreign(np.random.default_rng(0), "fp4", (8, 64), 64)
    del tensors["weight.quant_state.bitsandbytes__fp4"]
    config = {"shape": [8, 64], "quant_type": "fp4", "blocksize": 64}
    q = check_round_trip(BNB, tensors, config)
    assert q.format == format_named("bnb_fp4")
    with pytest.raises(LayoutError, match=r"m\.weight has no quant_state tensor and the config no shape, quant_type, blocksize"):
        BNB.describe(headers(tensors), {}, "m")


def test_a_table_that_the_decoder_would_not_use_is_refused_and_rounding_of_it_kept() -> None:
    tensors = foreign(np.random.default_rng(0), "fp4", (8, 64), 64)
    near = tensors["weight.quant_map"].copy()
    near[1] = np.nextafter(near[1], np.float32(1))
    assert same_tensors(
        BNB.pack(check_round_trip(BNB, {**tensors, "weight.quant_map": near}, {}), {}), {**tensors, "weight.quant_map": near}
    )
    for other in (table("nf4"), np.full(16, np.nan, np.float32)):
        with pytest.raises(LayoutError, match=r"m\.weight\.quant_map has .* for code 0; bnb_fp4 has 0\.0"):
            BNB.unpack({**tensors, "weight.quant_map": other}, {}, "m")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_config_of_a_weight_is_bitsandbytes_own(kind: str, nested: bool) -> None:
    q = random_tensor(format_named(KINDS[kind], 64, nested=nested), (4, 64), 0)
    assert BNB.config(q) == {
        "quant_method": "bitsandbytes",
        "load_in_8bit": False,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
    }
    whole = BNB.config(random_tensor(format_named("bnb_int8"), (4, 64), 0))
    assert whole == {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}


def test_what_does_not_fit_is_refused() -> None:
    tensors = foreign(np.random.default_rng(0), "nf4", (8, 64), 64)
    key = "weight.quant_state.bitsandbytes__nf4"
    with pytest.raises(LayoutError, match=r"m\.weight has 256 bytes for shape \[8, 65\]; wanted 260"):
        BNB.unpack({**tensors, key: state_bytes("nf4", 64, (8, 65), False)}, {}, "m")
    for junk in (b"{", b"[]", b'{"shape": 3}', b"\xff\xfe", b"[" * 5000):
        with pytest.raises(LayoutError, match="is not a quantization state in JSON"):
            BNB.unpack({**tensors, key: np.frombuffer(junk, np.uint8)}, {}, "m")
    for shape, group in (((-8, 64), 64), ((8, -64), 64), ((-8, -64), 64), ((8, 64), 0), ((8, 64), -64)):
        with pytest.raises(LayoutError, match="wanted quant_type 'nf4', a blocksize of 1 or more, sizes of 0 or more"):
            BNB.unpack({**tensors, key: state_bytes("nf4", group, shape, False)}, {}, "m")
    with pytest.raises(LayoutError, match="says quant_type 'fp4'"):
        BNB.unpack({**tensors, key: state_bytes("fp4", 64, (8, 64), False)}, {}, "m")
    with pytest.raises(LayoutError, match="was passed as a header; its bytes say the shape"):
        BNB.describe(headers(tensors), {}, "m")
    nested = foreign(np.random.default_rng(0), "nf4", (8, 64), 64, nested=True)
    with pytest.raises(LayoutError, match="has no nested_offset"):
        BNB.unpack({**nested, key: state_bytes("nf4", 64, (8, 64), False)}, {}, "m")
    for fmt in (format_named("int4", 64), format_named("nf4", 64, scale_dtype="float16")):
        with pytest.raises(LayoutError, match="bitsandbytes holds nf4 and bnb_fp4"):
            BNB.pack(random_tensor(fmt, (2, 64), 0), {})
    flat = random_tensor(format_named("nf4", 64), (4, 21), 0)
    with pytest.raises(LayoutError, match="a slice of rows of a weight whose blocks run over the whole"):
        BNB.pack(flat[1:3], {})


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit", "blocksize", "other"])
def test_a_config_without_a_method_is_known_by_any_of_three_keys(key: str) -> None:
    assert BNB.config_reader.recognises({key: False}) == (key != "other")


@pytest.mark.parametrize("storage", [np.uint8, np.float16, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 4), (1, 7), (1, 8), (1, 9), (0, 4)])
def test_a_weight_has_the_words_that_its_codes_fill(storage: type, shape: tuple[int, ...]) -> None:
    tensors = foreign(np.random.default_rng(1), "nf4", shape, 64, storage=storage)
    words = -(-int(np.prod(shape)) // (2 * np.dtype(storage).itemsize))
    for count in range(words + 3):
        tensors["weight"] = np.zeros((count, 1), storage)
        if count == words:
            assert BNB.describe(tensors, {}, "m").shape == shape
        else:
            with pytest.raises(LayoutError, match=f"weight has {count * np.dtype(storage).itemsize} bytes for shape"):
                BNB.describe(tensors, {}, "m")


@pytest.mark.parametrize(("shape", "group", "fits"), [([4, 16], 64, True), ([4, -1], 64, False), ([-1, 16], 64, False),
                                                      ([4, 16], 0, False), ([4, 16], 1, True), ([64], 64, False)])  # fmt: skip
def test_a_state_has_sizes_of_0_or_more_and_blocks_of_1_or_more(shape: list[int], group: int, fits: bool) -> None:
    tensors = foreign(np.random.default_rng(1), "nf4", (4, 16), max(group, 1))
    tensors["weight.quant_state.bitsandbytes__nf4"] = state_bytes("nf4", group, tuple(shape), False)
    if fits:
        assert BNB.describe(tensors, {}, "m").shape == (4, 16)
    else:
        with pytest.raises(LayoutError, match=r"wanted quant_type 'nf4', a blocksize of 1 or more|bytes for shape"):
            BNB.describe(tensors, {}, "m")
