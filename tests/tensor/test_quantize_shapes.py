"""Encoders on short, odd, empty, strided, stacked and tiled weights."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import format_named
from halfbyte.errors import FormatError
from halfbyte.formats import family_of
from halfbyte.formats.affine import one_dtype
from halfbyte.tensor.quantize import quantize
from support.encoded_words import BF16, ENCODED, OWN, gaussian


@pytest.mark.parametrize("word", OWN)
@pytest.mark.parametrize("k", [1, 3, 17, 100, 130])
def test_case_09_odd_rows_and_short_last_groups(word, k):
    """Rows keep to themselves: a row quantized alone has the same values, and the true shape is
    kept.
    """
    x = gaussian((5, k), seed=k)
    q = quantize(x, word)
    assert q.shape == (5, k)
    q.validate()
    if q.format.grouping == "row" and not q.format.global_op:
        for i in range(5):
            assert quantize(x[i : i + 1], word).parts["codes"].tobytes() == q.parts["codes"][i : i + 1].tobytes()
    g = q.format.group_size
    if q.format.grouping == "row" and 0 < g < k and not q.format.global_op:
        tail = k // g * g
        np.testing.assert_array_equal(quantize(x[:, tail:], word).dequantize(), q.dequantize()[:, tail:])


def test_case_09_three_fp4_columns_take_two_bytes_a_row():
    q = quantize(gaussian((5, 3)), "mxfp4")
    assert q.parts["codes"].shape == (5, 2)
    assert (q.parts["codes"][:, 1] >> 4 == 0).all()


def test_case_03_three_bit_rows_are_dense():
    """128 codes of 3 bits take 48 bytes, 12 words, not 13."""
    q = quantize(gaussian((64, 128)), "uint3:g128")
    assert q.parts["codes"].shape == (64, 48)
    assert format_named("uint3").row_bytes(64) == 24


@pytest.mark.parametrize("word", ENCODED)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0), (0, 3, 256), (2, 0, 256)])
def test_empty_weights_have_empty_parts(word, shape):
    q = quantize(np.zeros(shape, np.float32), word)
    assert q.shape == shape
    assert q.parts["codes" if "codes" in q.parts else "blocks"].size == 0
    assert q.dequantize().shape == shape


def test_case_15_nf4_of_100_elements_in_blocks_of_64():
    x = gaussian((4, 25))
    for policy in (None, "bitsandbytes"):
        q = quantize(x, "nf4", policy)
        assert q.format.grouping == "flat"
        assert q.parts["scales"].shape == (2,)
        assert q.parts["scales"][1] == np.abs(x.reshape(-1)[64:]).max()


def test_case_15_nine_blocks():
    x = gaussian((3, 192))
    q = quantize(x, "nf4", "bitsandbytes", nested=True)
    assert q.parts["scales"].shape == (3, 3)
    assert q.parts["nested_absmax"].shape == (1,)


def test_case_16_error_rises_smoothly_with_the_block():
    x = gaussian((16, 4096), seed=9)
    previous = 0.0
    for block in (64, 128, 256, 512, 1024, 2048, 4096):
        for nested in (False, True):
            q = quantize(x, f"nf4:g{block}", nested=nested)
            error = float(np.abs(q.dequantize("float64") - x).mean())
            assert error > 0
            assert previous == 0 or previous * 0.98 < error < previous * 1.15, block
        previous = error


@pytest.mark.parametrize("block", [1024, 4096])
def test_case_16_sixteen_elements_in_a_large_block(block):
    x = gaussian((2, 8))
    q = quantize(x, f"nf4:g{block}", "bitsandbytes")
    assert q.parts["scales"].tolist() == [np.abs(x).max()]
    assert np.abs(q.dequantize() - x).max() <= 0.16 * np.abs(x).max()


@pytest.mark.parametrize("word", ENCODED)
def test_case_23_strided_input_is_read_by_its_strides(word):
    big = gaussian((4, 512, 6), seed=2)
    for view in (big[:, ::2, 0], big[:, :256, 1], big.transpose(2, 0, 1)[:, ::2, ::2], big[0].T[::-1, 256:], big[::2, :256, 5]):
        assert quantize(view, word) == quantize(np.ascontiguousarray(view), word)


@pytest.mark.parametrize("word", [w for w in OWN if w not in ("nf4", "bnb_fp4", "nf4_modelopt")])
def test_experts_are_quantized_one_by_one(word):
    x = gaussian((3, 4, 256), seed=4) * np.array([1, 10, 0.1], np.float32)[:, None, None]
    q = quantize(x, word)
    for e in range(3):
        assert q[e] == quantize(x[e], word)


@pytest.mark.parametrize("word", ["int4:g32", "uint4:g32", "fp8_e4m3:g32"])
def test_tiles_share_a_scale(word):
    """rows=2: a tile's scale is that of its elements laid out as one group."""
    x = gaussian((5, 100), seed=5)
    q = quantize(x, word, rows=2)
    assert q.parts["scales"].shape == (3, 4)
    tile = x[2:4, 32:64].reshape(1, 64)
    alone = quantize(tile, word.partition(":")[0] + ":g64")
    assert q.parts["scales"][1, 1] == alone.parts["scales"][0, 0]
    np.testing.assert_array_equal(q.dequantize()[2:4, 32:64].reshape(1, 64), alone.dequantize())
    whole = quantize(x, word.partition(":")[0] + ":channel", rows=-1)
    assert whole.parts["scales"].shape == (1, 1)


def test_one_scale_for_axis_0_groups():
    x = gaussian((4, 6), seed=6)
    q = quantize(x, "hqq4:g4", axis=0)
    assert q.format.grouping == "strided"
    columns = quantize(np.ascontiguousarray(x.reshape(4, 6).T), "hqq4:g4")
    np.testing.assert_array_equal(q.dequantize(), columns.dequantize().T)


def test_case_30_scales_and_biases_of_two_dtypes_are_widened_without_loss():
    scales, biases = np.array([0.1, 3.0], np.float32), np.array([1.5, -65504.0], np.float16)
    s, b = one_dtype(scales, biases)
    assert s.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(s, scales)
    np.testing.assert_array_equal(b, biases.astype(np.float32))
    assert one_dtype(scales.astype(BF16), scales.astype(BF16))[0].dtype == BF16
    assert one_dtype(scales.astype(BF16), biases)[0].dtype == np.float32
    with pytest.raises(FormatError, match=r"\[affine\] biases are int32; allowed: float16, bfloat16, float32"):
        one_dtype(scales, biases.astype(np.int32))


@pytest.mark.parametrize("word", ENCODED)
def test_parts_fit_their_geometry_and_have_zero_padding(word):
    q = quantize(gaussian((3, 256)), word)
    q.validate()
    geometry = family_of(q.format).geometry(q.format, q.shape)
    assert {n: (a.shape, a.dtype) for n, a in q.parts.items()} == {n: (s.shape, s.dtype) for n, s in geometry.items()}


@pytest.mark.parametrize("word", OWN)
@pytest.mark.parametrize("rows", [None, 3])
def test_blocks_of_rows_do_not_show(word, rows, monkeypatch):
    """A large weight is taken some rows at a time; small blocks here give the same bytes as one."""
    options = {} if rows is None else {"rows": rows}
    if rows is not None and "rows" not in family_of(format_named(word)).format_options:
        return
    x = gaussian((40, 256), seed=8)
    whole = quantize(x, word, **({} if word == "bnb_int8" else options))
    monkeypatch.setattr("halfbyte.tensor.quantize.BLOCK_ELEMENTS", 2000)
    monkeypatch.setattr("halfbyte.formats.rounding.grouping.BLOCK_ELEMENTS", 2000)
    assert quantize(x, word, **({} if word == "bnb_int8" else options)) == whole


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_torch_tensors_are_accepted(dtype):
    torch = pytest.importorskip("torch")
    t = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)).T[::2].requires_grad_()
    x = t.detach().to(torch.float64).numpy()
    q = quantize(t, "mxfp4", "mlx" if dtype != "float64" else None)
    expected = x.astype(BF16 if dtype == "bfloat16" else dtype)
    assert q == quantize(expected, "mxfp4", "mlx" if dtype != "float64" else None)
