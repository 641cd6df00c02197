"""Quark: what a config says of written weights, and weights that come back with it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from halfbyte.errors import LayoutError, UnsupportedError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS, quark
from halfbyte.layouts.quark import QuarkConfig
from halfbyte.numerics.bits import unpack
from halfbyte.tensor.qtensor import QTensor
from support.golden_case import same_tensors
from support.layout_tensors import integer_tensor
from support.random_tensors import finite_tensor, random_tensor

QUARK = LAYOUTS["quark"]
E4M3 = ml_dtypes.float8_e4m3fn


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


@pytest.mark.parametrize(
    ("fmt", "shape", "fits"),
    [
        (format_named("int4", 32), (16, 60), True),
        (format_named("int4", 32), (12, 64), False),
        (format_named("int4", -1), (12, 64), True),
        (format_named("int4", -1), (16, 60), False),
        (format_named("fp8_e4m3", -1), (12, 60), True),
        (format_named("fp8_e4m3", -1, rows=-1), (12, 60), True),
        (format_named("fp8_e4m3", -1, rows=2), (12, 60), False),
        (format_named("int8", -1), (12, 60), True),
    ],
    ids=str,
)
def test_words_run_along_the_outputs_in_groups_and_along_the_inputs_in_rows(fmt, shape, fits) -> None:
    assert (QUARK.misfit(fmt, shape) == "") == fits
    if fits:
        q = finite_tensor(fmt, shape, 3)
        config = QUARK.config(q)
        back = QUARK.unpack(QUARK.pack(q, config), config)
        assert (back.format, back.shape) == (fmt, shape)
        assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True)


@pytest.mark.parametrize(
    ("fmt", "rows", "shape"),
    [
        (format_named("fp8_e4m3", -1, rows=-1), 12, ()), (format_named("fp8_e4m3", -1, rows=-1), 1, ()),
        (format_named("fp8_e4m3", -1), 12, (12,)), (format_named("fp8_e4m3", -1), 1, (1,)), (format_named("int8", -1), 1, (1,)),
    ],
    ids=str,
)  # fmt: skip
def test_one_scale_of_a_matrix_is_a_scalar_and_one_a_row_a_vector(fmt, rows, shape) -> None:
    q = finite_tensor(fmt, (rows, 60), 3)
    assert QUARK.pack(q, QUARK.config(q))["weight_scale"].shape == shape


@pytest.mark.parametrize("word", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4", "fp8_e4m3:channel", "int8:channel"])
def test_a_second_level_of_scales_is_nvfp4s_and_a_zero_point_an_integers(word: str) -> None:
    q = random_tensor(format_named(word), (16, 64), 1)
    config = QUARK.config(q)
    tensors = QUARK.pack(q, config)
    assert ("weight_scale_2" in tensors) == (word == "nvfp4")
    back = QUARK.unpack(tensors, config)
    assert back.format == q.format
    assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True)
    if word != "nvfp4":
        with pytest.raises(LayoutError, match=r"weight_scale_2.* has one level of scales; wanted nvfp4"):
            QUARK.describe({**tensors, "weight_scale_2": np.array(1.0, np.float32)}, config)
    if not word.startswith("int8"):
        with pytest.raises(LayoutError, match=r"weight_zero_point.* has no zero point"):
            QUARK.describe({**tensors, "weight_zero_point": np.zeros((), np.int8)}, config)


@pytest.mark.parametrize(("dtype", "refused"), [("int4", True), ("uint4", True), ("int8", False), ("fp8_e4m3", False)])
def test_words_of_4_bits_have_zero_points_of_int32(dtype: str, refused: bool) -> None:
    def read(zero_point_type: str | None) -> object:
        weight = {"dtype": dtype, "qscheme": "per_channel", "symmetric": dtype != "uint4", "zero_point_type": zero_point_type}
        return QuarkConfig({"quant_method": "quark", "global_quant_config": {"weight": weight}}, "config.json")

    assert read(None) is not None
    assert read("int32") is not None
    if refused:
        with pytest.raises(UnsupportedError, match="zero_point_type is 'int8'"):
            read("int8")
    else:
        assert read("int8") is not None


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("shape", [(12,), (12, 1)])
def test_a_scale_a_row_may_have_an_axis_of_its_own(kind: str, shape: tuple[int, ...]) -> None:
    q = finite_tensor(format_named(kind, -1), (12, 60), 3)
    config = QUARK.config(q)
    tensors = QUARK.pack(q, config)
    back = QUARK.unpack({**tensors, "weight_scale": tensors["weight_scale"].reshape(shape)}, config)
    assert np.array_equal(back.dequantize(), q.dequantize(), equal_nan=True)
    with pytest.raises(LayoutError, match=r"weight_scale has shape \[1, 12\]; wanted one scale or \[12\]"):
        QUARK.unpack({**tensors, "weight_scale": tensors["weight_scale"].reshape(1, 12)}, config)


@pytest.mark.parametrize("n", [8, 12, 15])
def test_zero_points_of_outputs_that_fill_no_word(n: int) -> None:
    """The last word's unused nibbles are 0, or refused."""
    q = random_tensor(format_named("uint4", -1), (n, 64), 5)
    config = QUARK.config(q)
    tensors = QUARK.pack(q, config)
    assert QUARK.unpack(tensors, config) == q
    other = tensors["weight_zero_point"].copy().reshape(-1)
    if n % 8 == 0:
        return
    other.view(np.uint32)[-1] |= np.uint32(0xF0000000)
    with pytest.raises(LayoutError, match=f"weight_zero_point has values beyond its {n} outputs; wanted 0 there"):
        QUARK.unpack({**tensors, "weight_zero_point": other.reshape(tensors["weight_zero_point"].shape)}, config)


@pytest.mark.parametrize("length", [38, 39])
def test_a_level_of_scales_that_is_no_object_is_shown_up_to_40_characters(length: int) -> None:
    weight = ["x" * length, {"dtype": "fp8_e4m3"}]
    with pytest.raises(UnsupportedError) as refused:
        QuarkConfig({"quant_method": "quark", "global_quant_config": {"weight": weight}}, "config.json")
    shown = "'" + "x" * length + ("'" if length == 38 else "")
    assert f" quantizes weights to {shown}, then fp8_e4m3, which is recognised" in str(refused.value)


def two_levels(**changes: object) -> dict:
    """The config of an NVFP4 model, `changes` to keys of its two levels: 0 for the first."""
    levels = [{"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
              {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True}]  # fmt: skip
    for key, value in changes.items():
        levels[int(key[-1])][key[:-1]] = value
    return {"quant_method": "quark", "global_quant_config": {"weight": levels}}


def test_two_levels_with_every_key_that_is_known_are_nvfp4() -> None:
    known = dict.fromkeys((*quark._DECIDE, *quark._SEARCH))
    raw = two_levels()
    raw["global_quant_config"]["weight"] = [known | level for level in raw["global_quant_config"]["weight"]]
    wanted = {"dtype": "nvfp4", "qscheme": "per_group", "group_size": 16}
    assert QuarkConfig(raw, "config.json").parameters("m") == wanted
    assert QuarkConfig(two_levels(), "config.json").parameters("m") == wanted


@pytest.mark.parametrize("changes", [
    {"dtype0": "fp8_e4m3"}, {"dtype1": "fp4"}, {"dtype1": "fp8_e5m2"}, {"group_size0": 32}, {"group_size0": None},
    {"is_scale_quant1": False}, {"qscheme0": "per_channel"}, {"qscheme1": "per_channel"}, {"other0": 1}, {"other1": 1},
])  # fmt: skip
def test_two_levels_of_another_kind_are_refused(changes: dict) -> None:
    with pytest.raises(UnsupportedError, match=r"quantizes weights to .*, which is recognised and not read"):
        QuarkConfig(two_levels(**changes), "config.json")


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "float8_e4m3fn", "float32", "int16"])
def test_a_second_level_of_scales_is_of_bytes(dtype: str, second: bool) -> None:
    tensors = {
        "weight": np.zeros((2, 16), E4M3 if dtype == "float8_e4m3fn" else dtype),
        "weight_scale": np.ones((2, 1), np.float32),
    }
    tensors |= {"weight_scale_2": np.ones((), np.float32)} if second else {}
    assert QUARK.accepts(tensors) == (dtype == "uint8" or (dtype in ("int8", "int32", "float8_e4m3fn") and not second))


def test_nvfp4_has_a_scale_for_each_16_inputs() -> None:
    for width in (*range(1, 40), 64, 136):
        groups = -(-2 * width // 16)
        for count in (groups - 1, groups, groups + 1):
            tensors = {
                "weight": np.zeros((3, width), np.uint8), "weight_scale": np.zeros((3, count), E4M3),
                "weight_scale_2": np.ones((), np.float32),
            }  # fmt: skip
            if count == groups:
                assert QUARK.describe(tensors, {"dtype": "nvfp4"}, "m") == (format_named("nvfp4", 16), (3, 2 * width))
            else:
                with pytest.raises(LayoutError, match=rf"weight_scale .*\[3, {groups}\]"):
                    QUARK.describe(tensors, {"dtype": "nvfp4"}, "m")


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("scheme", [None, "per_tensor", "per_channel"])
def test_one_scale_is_of_the_matrix_or_of_its_one_row(kind: str, n: int, scheme: str | None) -> None:
    weight = np.zeros((n, 8), np.int8 if kind == "int8" else E4M3)
    for shape in ((), (1,), (1, 1), (2,), (2, 1), (1, 2)):
        tensors = {"weight": weight, "weight_scale": np.ones(shape, np.float32)}
        one = np.prod(shape) == 1 and (scheme == "per_tensor" or len(shape) < 2)
        if one or shape in ((n,), (n, 1)):
            fmt = format_named(kind, -1, scale_dtype="float32", **({"rows": -1} if one else {}))
            assert QUARK.describe(tensors, {"qscheme": scheme}, "m") == (fmt, (n, 8))
        else:
            with pytest.raises(LayoutError, match=rf"wanted one scale or \[{n}\]"):
                QUARK.describe(tensors, {"qscheme": scheme}, "m")


@pytest.mark.parametrize("where", [0, 3, 11, None])
def test_zero_points_of_int8_are_all_0(where: int | None) -> None:
    q = finite_tensor(format_named("int8", -1), (12, 60), 3)
    config = QUARK.config(q)
    zeros = np.zeros(12, np.int8)
    if where is not None:
        zeros[where] = 1
    tensors = {**QUARK.pack(q, config), "weight_zero_point": zeros}
    if where is None:
        assert QUARK.unpack(tensors, config).details["zero_point"] is True
    else:
        with pytest.raises(LayoutError, match="weight_zero_point is not 0; int8 weights are symmetric"):
            QUARK.unpack(tensors, config)


@pytest.mark.parametrize("word", ["int4:g32", "int4:channel", "int8:channel"])
def test_zero_points_of_symmetric_weights_come_back_where_they_were(word: str) -> None:
    q = finite_tensor(format_named(word), (12 if "channel" in word else 16, 64), 3)
    config = QUARK.config(q)
    tensors = QUARK.pack(q, config)
    assert "weight_zero_point" not in tensors
    shape = tensors["weight_scale"].shape
    words = np.zeros((*shape[:-1], -(-q.shape[0] // 8)), np.int32)
    tensors["weight_zero_point"] = np.zeros(shape, np.int8) if word.startswith("int8") else words
    assert same_tensors(QUARK.pack(QUARK.unpack(tensors, config), config), tensors)


@pytest.mark.parametrize(("zero", "fits"), [(-1, False), (0, True), (15, True), (16, False)])
@pytest.mark.parametrize("group", [32, -1])
def test_zero_points_take_4_bits(zero: int, fits: bool, group: int) -> None:
    q = integer_tensor(4, (16, 64), group, zeros=(3, 3))
    q.parts["zeros"][5, -1] = zero
    if fits:
        config = QUARK.config(q)
        assert np.array_equal(QUARK.unpack(QUARK.pack(q, config), config).parts["zeros"], q.parts["zeros"])
    else:
        with pytest.raises(LayoutError, match="its zero points take more than 4 bits"):
            QUARK.pack(q, QUARK.config(q))


@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize("word", ["int4", "uint4"])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(8, 8, 4), (16, 5, 4), (24, 64, 32), (1, 8, -1), (5, 24, -1), (8, 0, 4), (0, 8, -1)]
)
def test_each_nibble_is_a_code_of_its_place(order: str, word: str, n: int, k: int, group: int) -> None:
    """In groups a word holds eight outputs of an input, else eight inputs of an output; int4 is in
    two's complement.
    """
    q = finite_tensor(format_named(word, group), (n, k), 7)
    codes = unpack(q.parts["codes"], 4, k) ^ (8 if word == "int4" else 0)
    lines = codes.T if group != -1 else codes
    place = (0, 2, 4, 6, 1, 3, 5, 7) if order == "reorder" else range(8)
    words = np.zeros((len(lines), lines.shape[1] // 8), np.uint32)
    for row, column in np.ndindex(words.shape):
        words[row, column] = sum(int(lines[row, 8 * column + place[i]]) << 4 * i for i in range(8))
    config = QUARK.config(q) | {"pack_method": order}
    tensors = {**QUARK.pack(q, config), "weight": words.view(np.int32)}
    if word == "uint4":
        zeros = np.arange(n, dtype=np.uint8)[:, None] * np.ones(q.parts["zeros"].shape, np.uint8) % 16
        q = QTensor(q.format, q.shape, q.parts | {"zeros": zeros.astype(np.int16)})
        lines = np.zeros((zeros.shape[1], -(-n // 8), 8), np.uint32)
        lines.reshape(len(lines), 8 * lines.shape[1])[:, :n] = zeros.T
        stored = sum(lines[..., place[i]] << np.uint32(4 * i) for i in range(8)).astype(np.uint32).view(np.int32)
        tensors["weight_zero_point"] = stored if group != -1 else stored.reshape(-1)
    back = QUARK.unpack(tensors, config)
    assert all(np.array_equal(back.parts[p], q.parts[p]) for p in q.parts)
    assert same_tensors(QUARK.pack(back, config), tensors)
