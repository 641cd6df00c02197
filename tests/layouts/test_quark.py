"""Quark: what a config says of written weights, and weights that come back with it."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.errors import LayoutError, UnsupportedError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.quark import QuarkConfig
from support.random_tensors import finite_tensor, random_tensor

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
