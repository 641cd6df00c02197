"""Fine-grained FP8: tiles of float8 under one float each, read from a folder as DeepSeek and Qwen3
write it.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.errors import LayoutError
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS

E4M3 = ml_dtypes.float8_e4m3fn
FP8 = LAYOUTS["fp8"]


def tensors(n, k, tile, seed=0, scale=np.float32):
    rng = np.random.default_rng(seed)
    grid = (-(-n // tile[0]), -(-k // tile[1]))
    return {
        "weight": rng.integers(0, 256, (n, k), dtype=np.uint8).view(E4M3),
        "weight_scale_inv": (rng.standard_normal(grid) * 1e-3).astype(scale),
    }


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([(16, 16), (8, 32), (128, 128)]), st.booleans())
def test_a_bijection_on_random_bytes(n, k, tile, half):
    t = tensors(n, k, tile, scale=ml_dtypes.bfloat16 if half else np.float32)
    q = FP8.unpack(t, {"weight_block_size": list(tile)})
    back = FP8.pack(q, {})
    assert all(np.array_equal(back[s].view(np.uint8), t[s].view(np.uint8)) for s in t)
    config = FP8.config(q)
    assert config["weight_block_size"] == list(tile)
    assert FP8.unpack(back, config) == q


def test_each_value_is_its_code_times_its_tile():
    t = tensors(40, 70, (16, 32))
    w = FP8.unpack(t, {"weight_block_size": [16, 32]}).dequantize("float32")
    codes, scales = t["weight"].astype(np.float64), t["weight_scale_inv"].astype(np.float64)
    for i, j in ((0, 0), (15, 31), (16, 32), (39, 69), (20, 64)):
        want = np.float32(codes[i, j] * scales[i // 16, j // 32])
        np.testing.assert_equal(w[i, j], want)


def test_a_folder_opens_with_its_skipped_modules_dense(tmp_path):
    t = tensors(256, 384, (128, 128), 3)
    t["weight"] = np.where(np.isnan(t["weight"].astype(np.float32)), 1, t["weight"].astype(np.float32)).astype(E4M3)
    raw = {"model.layers.0.mlp.gate_proj." + s: a for s, a in t.items()}
    raw["model.layers.0.mlp.gate.weight"] = np.ones((4, 384), np.float32)
    save_file(raw, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.0.mlp.gate"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with hb.open(tmp_path) as ckpt:
        assert ckpt.format == "fp8"
        w = ckpt["model.layers.0.mlp.gate_proj"]
        assert str(w.format) == "fp8_e4m3:g128"
        assert isinstance(ckpt["model.layers.0.mlp.gate.weight"], np.ndarray)
        want = np.repeat(np.repeat(t["weight_scale_inv"], 128, 0), 128, 1) * t["weight"].astype(np.float32)
        np.testing.assert_array_equal(w.dequantize("float32"), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale_inv": np.ones((3, 1), np.float32)}, r"wanted \[2, 3\] for tiles of 128 x 128 of \[256, 384\]"),
        ({"weight": np.ones((256, 384), np.int8)}, "weight is int8; allowed: float8_e4m3fn"),
        ({"weight_scale_inv": np.ones((2, 3), np.float16)}, "allowed: float32, bfloat16"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    with pytest.raises(LayoutError, match=message):
        FP8.unpack({**tensors(256, 384, (128, 128)), **change}, {}, "m")


def test_a_tile_size_that_is_none_is_refused():
    with pytest.raises(LayoutError, match="weight_block_size is 128; two whole numbers"):
        FP8.unpack(tensors(4, 4, (128, 128)), {"weight_block_size": 128}, "m")


@pytest.mark.parametrize("tile", [(1, 4), (4, 1), (1, 1)])
def test_a_tile_may_be_one_row_or_one_column(tile):
    w = FP8.unpack(tensors(4, 8, tile), {"weight_block_size": list(tile)}, "m")
    assert (w.format.group_rows, w.format.group_size) == tile


@pytest.mark.parametrize("size", [[0, 4], [4, -1], [4.0, 4], [True, 4], ["4", 4], [4], [4, 4, 4]])
def test_a_tile_is_two_whole_numbers_above_0(size):
    with pytest.raises(LayoutError, match="two whole numbers above 0"):
        FP8.unpack(tensors(4, 4, (4, 4)), {"weight_block_size": size}, "m")


def test_one_scale_a_tensor_has_no_tile_in_the_config():
    q = FP8.unpack({"weight": tensors(4, 8, (4, 8))["weight"], "weight_scale": np.ones((), np.float32)}, {}, "m")
    assert (q.format.group_rows, q.format.group_size) == (-1, -1)
    assert FP8.config(q)["weight_block_size"] is None


@pytest.mark.parametrize(("group", "rows", "fits"), [(32, 32, True), (-1, -1, True), (-1, 32, False), (32, -1, False)])
def test_tiles_have_rows_and_columns(group, rows, fits):
    why = FP8.misfit(format_named("fp8_e4m3", group, rows=rows, scale_dtype="float32"), (64, 64))
    assert why == ("" if fits else "tiles have a number of rows and of columns")


def test_one_scale_a_row_and_an_even_number_of_fp4_codes():
    row, groups = (format_named("fp8_e4m3", size, scale_dtype="float32") for size in (-1, 32))
    assert FP8.misfit(row, (64, 64)) == ""
    assert "in tiles, rows or one piece" in FP8.misfit(groups, (64, 64))
    assert FP8.misfit(format_named("mxfp4"), (33, 64)) == ""
    assert "k = 33 is odd" in FP8.misfit(format_named("mxfp4"), (64, 33))


def test_int4_pairs_have_groups_of_inputs():
    tensors = {"weight": np.zeros((8, 32), np.int8), "weight_scale_inv": np.ones((8, 1), np.float32)}
    for size in (-1, -128):
        with pytest.raises(LayoutError, match=f"group_size is {size}; int4 pairs have groups"):
            FP8.describe(tensors, {"group_size": size}, "m")
    assert FP8.describe(tensors, {"group_size": 64}, "m") == (format_named("int4", 64, scale_dtype="float32"), (8, 64))
    assert "int4 in groups" in FP8.misfit(format_named("int4", -1, scale_dtype="float32"), (8, 64))


@pytest.mark.parametrize(
    ("shape", "scale", "groups"),
    [
        ((0, 8), (1,), None), ((8, 0), (), None), ((0, 0), (1, 1), None), ((0, 8), (0,), (1, -1)), ((0, 8), (0, 1), (1, -1)),
        ((8, 0), (8, 1), (1, -1)), ((1, 0), (1, 1), (1, -1)), ((1, 1), (1, 1), (-1, -1)), ((2, 1), (), (-1, -1)),
    ],
)  # fmt: skip
def test_a_weight_without_elements_has_a_scale_a_row_or_a_tile_and_none_of_its_own(shape, scale, groups):
    t = {"weight": np.zeros(shape, E4M3), "weight_scale": np.ones(scale, np.float32)}
    if groups is None:
        with pytest.raises(LayoutError, match=r"m\.weight_scale has shape .* for tiles of 128 x 128"):
            FP8.describe(t, {}, "m")
    else:
        fmt, found = FP8.describe(t, {}, "m")
        rows = {"rows": -1} if groups == (-1, -1) else {}
        assert (fmt, found) == (format_named("fp8_e4m3", -1, scale_dtype="float32", **rows), shape)


@pytest.mark.parametrize(
    "fmt", [format_named("mxfp4"), format_named("int4", 32, scale_dtype="float32"), format_named("fp8_e4m3", -1)]
)
@pytest.mark.parametrize("shape", [(64,), (33,), (2, 3, 64), (3, 33, 64), (2, 64, 33)])
def test_a_weight_is_a_matrix(fmt, shape):
    assert FP8.misfit(fmt, shape) == "the layout holds whole (n, k) matrices"
