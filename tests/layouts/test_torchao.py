"""torchao's flattened subclasses: random bytes of every kind, both name styles, tiled scales,
signed zero points, refusals.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import CheckpointError, LayoutError, UnsupportedError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.common.scale_tiles import tile, tiled_shape, untile
from halfbyte.numerics.bits import unpack
from halfbyte.numerics.exact import DTYPES
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_numbers
from support.layout_tensors import headers
from support.random_tensors import check_return, check_round_trip, finite_tensor, random_array, random_tensor

TORCHAO = LAYOUTS["torchao"]
E4M3, E5M2, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16


def foreign(kind: str, rng: np.random.Generator, shape: tuple[int, ...] = (6, 128), prefix: str = "weight_") -> tuple[dict, dict]:
    *rows, k = shape
    r = lambda dtype, *tail: random_array(rng, dtype, *rows, *tail)  # noqa: E731
    below = lambda top, *tail: rng.integers(0, top, (*rows, *tail), dtype=np.uint8)  # noqa: E731
    tensors, config = {
        "mxfp4": lambda: ({"qdata": r(np.uint8, k // 2), "scale": r(np.uint8, k // 32)}, {"elem_dtype": "float4_e2m1fn_x2"}),
        "mxfp4 typed": lambda: ({"qdata": r(np.uint8, k // 2), "scale": r(E8M0, k // 32)}, {}),
        "mxfp6": lambda: (
            {"qdata": below(64, k), "scale": r(np.uint8, k // 32)},
            {"_type": "MXTensor", "elem_dtype": {"_type": "torch.dtype", "_data": "fp6_e3m2"}, "block_size": 32},
        ),
        "mxfp8 e4m3": lambda: ({"qdata": r(E4M3, k), "scale": r(np.uint8, k // 32)}, {}),
        "mxfp8 e5m2": lambda: ({"qdata": r(E5M2, k), "scale": r(E8M0, k // 32)}, {}),
        "nvfp4": lambda: ({"qdata": r(np.uint8, k // 2), "scale": r(E4M3, k // 16)}, {}),
        "intx4": lambda: (
            {"qdata": r(np.int8, k) >> 4, "scale": r(BF16, k // 32), "zero_point": r(np.int8, k // 32) >> 4},
            {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [*[1] * len(rows), 32]},
        ),
        "affine uint4": lambda: (
            {"qdata": below(16, k), "scale": r(BF16, k // 32), "zero_point": below(16, k // 32).astype(np.int32)},
            {"bits": 4, "block_size": [*[1] * len(rows), 32]},
        ),
        "int8": lambda: ({"qdata": r(np.int8, k), "scale": r(np.float32, 1)}, {"block_size": [*[1] * len(rows), k]}),
        "float8 row": lambda: ({"qdata": r(E4M3, k), "scale": r(np.float32, 1)}, {"block_size": [*[1] * len(rows), k]}),
        "float8 group": lambda: ({"qdata": r(E5M2, k), "scale": r(np.float32, k // 32)}, {"block_size": [*[1] * len(rows), 32]}),
    }[kind]()
    return {prefix + s: t for s, t in tensors.items()}, config


KINDS = (
    "mxfp4", "mxfp4 typed", "mxfp6", "mxfp8 e4m3", "mxfp8 e5m2", "nvfp4", "intx4", "affine uint4", "int8", "float8 row",
    "float8 group",
)  # fmt: skip


@pytest.mark.parametrize("prefix", ["weight_", "_weight_"])
@pytest.mark.parametrize("shape", [(6, 128), (0, 128), (3, 4, 128)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_bytes_come_back(kind: str, shape: tuple[int, ...], prefix: str) -> None:
    tensors, config = foreign(kind, np.random.default_rng(1), shape, prefix)
    assert check_round_trip(TORCHAO, tensors, config).shape == shape


def test_the_factor_of_a_tensor_comes_back_in_its_shape() -> None:
    tensors, _ = foreign("nvfp4", np.random.default_rng(0))
    for shape in ((), (1,), (1, 1)):
        q = check_round_trip(TORCHAO, {**tensors, "weight_per_tensor_scale": np.full(shape, 0.5, np.float32)}, {})
        assert q.format == format_named("nvfp4")
    assert TORCHAO.unpack(tensors, {}).format == format_named("nvfp4", global_scale="none")


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8 e4m3", "nvfp4"])
@pytest.mark.parametrize("n", [1, 32, 100, 128, 130])
def test_scales_in_tensor_core_tiles_come_back_padding_included(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    tensors, config = foreign(kind, rng, (n, 160))
    plain = TORCHAO.unpack(tensors, config)
    scale = tensors["weight_scale"]
    tiled = tile(scale.view(np.uint8)).view(scale.dtype)
    q = check_round_trip(TORCHAO, {**tensors, "weight_scale": tiled}, config)
    assert q == plain
    check_round_trip(TORCHAO, {**tensors, "weight_scale": random_array(rng, scale.dtype, *tiled.shape)}, config)


@pytest.mark.parametrize(("n", "groups"), [(1, 1), (128, 4), (129, 5), (300, 9), (0, 3)])
def test_where_a_scale_lies_in_its_tile(n: int, groups: int) -> None:
    scales = np.random.default_rng(0).integers(0, 256, (n, groups), dtype=np.uint8)
    tiled = tile(scales)
    assert tiled.shape == tiled_shape(n, groups)
    tiles = tiled.reshape(-1, 32, 16)
    for r, c in np.ndindex(n, groups):
        number = (r // 128) * -(-groups // 4) + c // 4
        assert tiles[number, r % 32, 4 * (r % 128 // 32) + c % 4] == scales[r, c]
    assert np.array_equal(untile(tiled, n, groups)[0], scales)


WORDS = (
    format_named("mxfp4"), format_named("mxfp6_e2m3"), format_named("mxfp6_e3m2"), format_named("mxfp8_e4m3"),
    format_named("mxfp8_e5m2"),
    format_named("nvfp4"), format_named("nvfp4", global_scale="none"), format_named("uint4", 32, scale_dtype="bfloat16"),
    format_named("uint2", 32), format_named("uint8", -1, scale_dtype="float32"), format_named("int8", -1, scale_dtype="float32"),
    format_named("int8", 32), format_named("fp8_e4m3"), format_named("fp8_e5m2", 32), format_named("fp8_e4m3", rows=-1),
    format_named("fp8_e4m3", 32, rows=2),
)  # fmt: skip


@given(
    fmt=st.sampled_from(WORDS),
    lead=st.sampled_from([(), (2,)]),
    n=st.integers(2, 5),
    units=st.integers(2, 4),
    seed=st.integers(0, 1 << 16),
)
def test_drawn_tensors_come_back(fmt, lead, n, units, seed) -> None:
    check_return(TORCHAO, random_tensor(fmt, (*lead, n, 32 * units), seed))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 3, 64), (1, 32), (1, 1, 64)], ids=str)
@pytest.mark.parametrize("fmt", [f for f in WORDS if f.family in ("mx", "nvfp4", "integer")], ids=str)
def test_empty_and_single_rows_come_back(fmt, shape) -> None:
    q = random_tensor(fmt, shape, 0)
    config = TORCHAO.config(q)
    assert TORCHAO.unpack(TORCHAO.pack(q, config), config).parts["codes"].shape == q.parts["codes"].shape


def test_case_10_signed_codes_and_zero_points_keep_their_upper_half() -> None:
    # q 8..15 of an unsigned code and zero point 10 are 0..7 and 2 when both are signed; a clamp
    # would lose half of every group.
    signed = {
        "weight_qdata": np.arange(-8, 8, dtype=np.int8)[None],
        "weight_scale": np.ones((1, 1), np.float32),
        "weight_zero_point": np.array([[2]], np.int8),
    }
    q = check_round_trip(TORCHAO, signed, {"bits": 4})
    assert unpack(q.parts["codes"], 4, 16)[0].tolist() == list(range(16))
    assert q.parts["zeros"].tolist() == [[10]]
    for arithmetic in ("exact", "producer"):
        assert q.dequantize("float32", arithmetic)[0].tolist() == [c - 10 for c in range(16)]
    unsigned = {**signed, "weight_qdata": np.arange(16, dtype=np.uint8)[None], "weight_zero_point": np.array([[10]], np.int32)}
    other = check_round_trip(TORCHAO, unsigned, {"bits": 4})
    assert other == q


@pytest.mark.parametrize("out", ["float32", "float16", "bfloat16"])
def test_the_difference_is_rounded_in_the_output_dtype(out: str) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "weight_qdata": random_array(rng, np.int8, 4, 64), "weight_scale": np.asarray(rng.uniform(0.01, 1, (4, 2)), np.float32),
        "weight_zero_point": random_array(rng, np.int8, 4, 2),
    }  # fmt: skip
    q = TORCHAO.unpack(tensors, {"bits": 8, "block_size": [1, 32]})
    dt = DTYPES[out]
    difference = (
        tensors["weight_qdata"].astype(np.float32) - np.repeat(tensors["weight_zero_point"].astype(np.float32), 32, 1)
    ).astype(dt)
    expected = (difference.astype(np.float32) * np.repeat(tensors["weight_scale"], 32, 1)).astype(dt)
    assert same_numbers(q.dequantize(out, "producer"), expected)


def test_float8_scales_by_row_tensor_and_tile() -> None:
    rng = np.random.default_rng(0)
    qdata = random_array(rng, E4M3, 4, 64)
    for shape, block, fmt in (
        ((4, 1), [1, 64], format_named("fp8_e4m3")),
        ((1, 1), [4, 64], format_named("fp8_e4m3", rows=-1)),
        ((), [4, 64], format_named("fp8_e4m3", rows=-1)),
        ((2, 2), [2, 32], format_named("fp8_e4m3", 32, rows=2)),
        ((4, 2), [1, 32], format_named("fp8_e4m3", 32)),
    ):
        tensors = {"weight_qdata": qdata, "weight_scale": np.asarray(rng.uniform(1, 2, shape), np.float32)}
        assert check_round_trip(TORCHAO, tensors, {"block_size": block}).format == fmt


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0), (4,)])
@pytest.mark.parametrize("config", [{}, {"block_size": [2, 32]}])
def test_a_float8_scale_of_another_number_is_refused(shape: tuple[int, ...], config: dict) -> None:
    tensors = {"weight_qdata": np.zeros((4, 64), E4M3), "weight_scale": np.ones(shape, np.float32)}
    with pytest.raises(LayoutError, match="for a float8 weight of"):
        TORCHAO.unpack(tensors, config)


def test_what_does_not_fit_is_refused() -> None:
    rng = np.random.default_rng(0)
    six, _ = foreign("mxfp6", rng)
    for other in ("qdata", "scale", "zero_point"):
        with pytest.raises(LayoutError, match=r"m has tensors under _?weight_ and _?weight_; one of them is a weight"):
            TORCHAO.describe(headers({**six, f"_weight_{other}": six["weight_scale"]}), {}, "m")
    with pytest.raises(LayoutError, match=r"m\.weight_qdata has a code a byte: fp6, and only the config's elem_dtype says"):
        TORCHAO.describe(headers(six), {}, "m")
    stack, _ = foreign("mxfp6", rng, (2, 6, 128))
    with pytest.raises(LayoutError, match=r"m\.weight_qdata has a code a byte: fp6, and only the config's elem_dtype says"):
        TORCHAO.describe(headers(stack), {}, "m")
    with pytest.raises(LayoutError, match=r"m\.weight_qdata holds a code outside 6 bits"):
        TORCHAO.unpack({**six, "weight_qdata": np.full((6, 128), 64, np.uint8)}, {"elem_dtype": "fp6_e2m3"}, "m")
    four, config = foreign("intx4", rng)
    with pytest.raises(LayoutError, match="holds a code outside 4 bits"):
        TORCHAO.unpack({**four, "weight_qdata": np.full((6, 128), 8, np.int8)}, config, "m")
    with pytest.raises(UnsupportedError, match=r"m\.weight_zero_point is bfloat16: an Int4Tensor"):
        TORCHAO.describe({**four, "weight_zero_point": four["weight_scale"]}, config, "m")
    with pytest.raises(UnsupportedError, match="is an Int4TilePackedTo4dTensor, an order of one GPU kernel"):
        TORCHAO.describe(four, {**config, "_type": "Int4TilePackedTo4dTensor"}, "m")
    nv, _ = foreign("nvfp4", rng)
    with pytest.raises(LayoutError, match=r"m\.weight_scale has shape \[6, 7\] .* wanted \[6, 8\] or \[32, 32\] in tiles"):
        TORCHAO.describe({**nv, "weight_scale": nv["weight_scale"][:, :7]}, {}, "m")
    with pytest.raises(LayoutError, match="wanted weight_qdata or _weight_qdata"):
        TORCHAO.describe({"weight": np.zeros((2, 2), np.float32)}, {}, "m")
    for fmt, shape, why in (
        (format_named("int4", 32), (2, 64), "torchao holds uint2 to uint8"),
        (format_named("nvfp4", global_scale="divide"), (2, 64), "torchao holds"),
        (format_named("uint4", 48), (2, 64), "not whole groups of 48"),
    ):
        with pytest.raises(LayoutError, match=why):
            TORCHAO.pack(random_tensor(fmt, shape, 0), {})
    q = finite_tensor(format_named("uint4", 32), (2, 64), 0)
    far = QTensor(q.format, q.shape, {**q.parts, "zeros": np.full((2, 2), 300, np.int16)})
    with pytest.raises(LayoutError, match="zero points run from 292 to 292, beyond int8"):
        TORCHAO.pack(far, {})


def test_a_configuration_whose_data_is_no_object_is_refused() -> None:
    def module(quant_type: object) -> dict | None:
        return TORCHAO.config_reader({"quant_method": "torchao", "quant_type": quant_type}, "config.json").parameters("m")

    own = {"_type": "Int8WeightOnlyConfig", "_data": {"version": 2}}
    for found in (module({"default": own}), module(own)):
        assert (found["_type"], found["version"]) == ("Int8WeightOnlyConfig", 2)
    assert module({"default": {"_type": "Int8WeightOnlyConfig"}})["_type"] == "Int8WeightOnlyConfig"
    for data in ("version", [2], 2):
        with pytest.raises(CheckpointError, match=r"quant_type has _data .*; wanted an object"):
            module({"default": {**own, "_data": data}})


@pytest.mark.parametrize(("zero", "fits"), [(-(1 << 14), True), ((1 << 14) - 1, True), (-(1 << 14) - 1, False), (1 << 14, False)])
def test_zero_points_far_outside_the_codes_are_refused(zero: int, fits: bool) -> None:
    tensors, config = foreign("affine uint4", np.random.default_rng(0))
    tensors["weight_zero_point"] = np.full((6, 4), zero, np.int32)
    if fits:
        check_round_trip(TORCHAO, tensors, config)
    else:
        with pytest.raises(LayoutError, match=rf"weight_zero_point runs from {zero} to {zero}; wanted those of 4-bit codes"):
            TORCHAO.unpack(tensors, config, "m")


@pytest.mark.parametrize(("shape", "scale"), [((0, 64), (0, 1)), ((0, 64), (0, 2)), ((2, 0, 64), (2, 0, 1)), ((4, 0), (4, 0))])
def test_a_weight_without_elements_has_one_group_unless_the_config_says_more(shape: tuple, scale: tuple) -> None:
    tensors = {"weight_qdata": np.zeros(shape, np.int8), "weight_scale": np.zeros(scale, np.float32)}
    assert TORCHAO.describe(tensors, {}, "m") == (format_named("int8", -1, scale_dtype="float32"), shape)
    block = {"block_size": [*[1] * (len(shape) - 1), 32]}
    group = 32 if shape[-1] else -1
    assert TORCHAO.describe(tensors, block, "m") == (format_named("int8", group, scale_dtype="float32"), shape)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4, 64])
def test_without_a_block_size_the_scales_tell_the_groups(n: int, groups: int) -> None:
    for lead in ((), (2,)):
        shape = (*lead, n, 64)
        tensors = {"weight_qdata": np.zeros(shape, np.int8), "weight_scale": np.zeros((*lead, n, groups), np.float32)}
        size = 64 // groups if groups > 1 else -1
        assert TORCHAO.describe(tensors, {}, "m") == (format_named("int8", size, scale_dtype="float32"), shape)


@pytest.mark.parametrize("element", ["", "fp6_e2m3", "fp6_e3m2", "float4_e2m1fn_x2"])
@pytest.mark.parametrize("block", [None, 16, 32])
def test_bytes_and_scales_tell_a_code_a_byte_from_two(element: str, block: int | None) -> None:
    config = ({"elem_dtype": element} if element else {}) | ({"block_size": [1, block]} if block else {})
    size = block or 32
    for nbytes in (0, 8, 16, 24, 32, 40, 64, 96):
        for groups in range(8):
            tensors = {"weight_qdata": np.zeros((3, nbytes), np.uint8), "weight_scale": np.zeros((3, groups), np.uint8)}
            k = nbytes if "fp6" in element else 2 * nbytes
            if k % size or groups != k // size:
                six = not element and nbytes // size == groups != k // size
                with pytest.raises(LayoutError, match="has a code a byte: fp6" if six else "whole blocks of|_scale has shape"):
                    TORCHAO.describe(tensors, config, "m")
            else:
                name = f"mxfp6_{element[-4:]}" if "fp6" in element else "mxfp4"
                assert TORCHAO.describe(tensors, config, "m") == (format_named(name, size), (3, k))


@pytest.mark.parametrize("block", [16, 24, 32, 64, 128])
def test_groups_of_a_stated_size_are_whole(block: int) -> None:
    for k in (16, 32, 48, 64, 96):
        for groups in range(1, 7):
            tensors = {"weight_qdata": np.zeros((3, k), np.int8), "weight_scale": np.zeros((3, groups), np.float32)}
            if groups == 1 and block >= k:
                assert TORCHAO.describe(tensors, {"block_size": [1, block]}, "m").format.group_size == -1
            elif k % block or groups != k // block:
                with pytest.raises(LayoutError, match="wanted one a group along k"):
                    TORCHAO.describe(tensors, {"block_size": [1, block]}, "m")
            else:
                assert TORCHAO.describe(tensors, {"block_size": [1, block]}, "m").format.group_size == block
