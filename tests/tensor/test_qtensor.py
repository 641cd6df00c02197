"""QTensor: checks, slicing as views, equality, bounded decoding."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from halfbyte import QTensor, format_named, quantize
from halfbyte.errors import FormatError, ShapeError
from halfbyte.numerics.exact import DTYPES

RNG = np.random.default_rng(7)


def mxfp4(n=6, k=64, lead=()):
    fmt = format_named("mxfp4")
    return QTensor(
        fmt,
        (*lead, n, k),
        {
            "codes": RNG.integers(0, 256, (*lead, n, k // 2), dtype=np.uint8),
            "scales": RNG.integers(100, 140, (*lead, n, k // 32), dtype=np.uint8),
        },
    )


def test_sizes_are_those_of_the_parts():
    q = mxfp4()
    assert q.nbytes == 6 * 34
    assert q.bits_per_weight == 4.25
    assert "mxfp4:g32" in repr(q)
    assert "(6, 64)" in repr(q)


@pytest.mark.parametrize("bounds", [(0, 6), (2, 5), (5, 6), (3, 3), (6, 6)])
def test_row_slices_are_views_of_the_same_values(bounds):
    q = mxfp4()
    part = q[bounds[0] : bounds[1]]
    assert part.shape == (bounds[1] - bounds[0], 64)
    assert all(np.shares_memory(a, q.parts[p]) for p, a in part.parts.items() if a.size)
    np.testing.assert_array_equal(part.dequantize(), q.dequantize()[bounds[0] : bounds[1]])


def test_experts_are_views_of_the_same_values():
    q = mxfp4(lead=(3,))
    dense = q.dequantize()
    for e in (0, 2, -1):
        assert q[e].shape == (6, 64)
        assert np.shares_memory(q[e].parts["codes"], q.parts["codes"])
        np.testing.assert_array_equal(q[e].dequantize(), dense[e])
    np.testing.assert_array_equal(q[1:3].dequantize(), dense[1:3])
    np.testing.assert_array_equal(q.rows(2, 5).dequantize(), dense[:, 2:5])


def test_case_22_sliced_expert_halves_equal_contiguous_copies():
    q = mxfp4(n=128, k=256, lead=(8,))
    for half in (q.rows(0, 64), q.rows(64, 128)):
        copied = QTensor(half.format, half.shape, {p: a.copy() for p, a in half.parts.items()})
        np.testing.assert_array_equal(half.dequantize(), copied.dequantize())


@pytest.mark.parametrize(
    ("index", "message"),
    [(0, "w\\[i:i\\+1\\]"), (slice(0, 4, 2), "step 2")],
)
def test_slices_that_are_not_views_are_refused(index, message):
    with pytest.raises(ShapeError, match=message):
        mxfp4()[index]


def test_expert_out_of_range():
    with pytest.raises(IndexError, match="expert 3 of 3"):
        mxfp4(lead=(3,))[3]


def test_missing_and_unknown_parts_are_named():
    q = mxfp4()
    with pytest.raises(FormatError, match=r"missing \['scales'\], unknown \['scale'\]"):
        QTensor(q.format, q.shape, {"codes": q.parts["codes"], "scale": q.parts["scales"]})


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_wrong_part_shape_or_dtype_names_both(change):
    q = mxfp4()
    scales = q.parts["scales"][:, :1] if change == "shape" else q.parts["scales"].astype(np.float32)
    with pytest.raises(ShapeError, match=r"layer\.x: part 'scales' is .*; mxfp4:g32 of shape \(6, 64\) wants uint8 \[6, 2\]"):
        QTensor(q.format, q.shape, {"codes": q.parts["codes"], "scales": scales}, name="layer.x")


def test_equality_is_of_bytes_and_format():
    q = mxfp4()
    same = QTensor(q.format, q.shape, {p: a.copy() for p, a in q.parts.items()}, origin="mlx")
    assert q == same
    changed = {p: a.copy() for p, a in q.parts.items()}
    changed["codes"][3, 5] ^= 1
    assert q != QTensor(q.format, q.shape, changed)
    assert q != mxfp4(n=5)
    assert q != "a string"


def test_dequantize_into_writes_every_element_and_nothing_else():
    q = mxfp4()
    guarded = np.full((10, 64), np.nan, np.float32)
    q.dequantize_into(guarded[2:8])
    assert np.isfinite(guarded[2:8]).all()
    assert np.isnan(guarded[:2]).all()
    assert np.isnan(guarded[8:]).all()


@pytest.mark.parametrize("n", [0, 1, 5])
def test_zero_rows_and_blocks_smaller_than_the_tensor(n, monkeypatch):
    monkeypatch.setattr("halfbyte.tensor.qtensor.BLOCK_ELEMENTS", 64)
    q = mxfp4(n=n)
    assert q.dequantize().shape == (n, 64)
    whole = np.concatenate([q[i : i + 1].dequantize() for i in range(n)]) if n else np.empty((0, 64))
    np.testing.assert_array_equal(q.dequantize(), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "float64, float32, float16, bfloat16"),
        ({"arithmetic": "fast"}, "exact, producer"),
        ({"arithmetic": "producer"}, "without a producer"),
    ],
)
def test_unknown_names_list_what_is_allowed(arguments, message):
    with pytest.raises(FormatError, match=message):
        mxfp4().dequantize(**arguments)


def test_unknown_codec_suggests_the_nearest():
    with pytest.raises(FormatError, match="mxfp4"):
        format_named("mxpf4")
    with pytest.raises(FormatError, match=r"codec\[:gN\]"):
        format_named("mxfp4:32")


def test_pickle_keeps_everything():
    q = mxfp4()
    again = pickle.loads(pickle.dumps(q))
    assert again == q
    assert again.shape == q.shape


@pytest.mark.parametrize("codec", ["mxfp4", "int4:g32", "uint3:g16", "affine4:g64", "nvfp4", "nf4", "q4_K"])
def test_asarray_gives_the_exact_float32_values(codec):
    q = quantize(RNG.standard_normal((4, 256)).astype(np.float32), codec)
    array = np.asarray(q)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, q.dequantize("float32"))


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_asarray_in_another_dtype_is_rounded_once(dtype):
    q = quantize(RNG.standard_normal((4, 64)).astype(np.float32) / 3, "affine4:g64", scale_dtype="float32")
    array = np.asarray(q, dtype=DTYPES[dtype])
    assert array.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(array, q.dequantize(dtype))


def test_asarray_of_a_stack_and_of_an_empty_weight():
    assert np.asarray(mxfp4(lead=(3,))).shape == (3, 6, 64)
    assert np.asarray(mxfp4(n=0)).shape == (0, 64)


def test_asarray_refuses_other_dtypes_and_a_view():
    with pytest.raises(FormatError, match=r"\[dtype\]"):
        np.asarray(mxfp4(), dtype=np.int32)
    with pytest.raises(ValueError, match="an array without a copy"):
        mxfp4().__array__(copy=False)


def test_arithmetic_with_an_array_makes_no_dense_copy():
    q = mxfp4()
    x = np.ones((6, 64), np.float32)
    for operation in (lambda: x + q, lambda: q * x, lambda: x @ q):
        with pytest.raises(TypeError):
            operation()
    assert (q == x) is False


@pytest.mark.parametrize(("part", "value", "message"), [
    ("scales", 64, "scales run from 0 to 64; u6 holds 0 to 63"), ("mins", 65, "mins run from 0 to 65; u6 holds 0 to 63"),
    ("scales", 63, None), ("mins", 0, None),
])  # fmt: skip
def test_small_integer_scales_are_validated(part, value, message):
    q = quantize(np.zeros((1, 256), np.float32), "q4_K")
    values = np.zeros_like(q.parts[part])
    values[0, 3] = value
    q = QTensor(q.format, q.shape, {**q.parts, part: values})
    if message is None:
        q.validate("w")
    else:
        with pytest.raises(FormatError, match=message):
            q.validate("w")


@pytest.mark.parametrize(("value", "allowed"), [(-33, False), (-32, True), (31, True), (32, False)])
def test_signed_small_scales_are_validated(value, allowed):
    q = quantize(np.zeros((1, 256), np.float32), "q3_K")
    values = q.parts["scales"].copy()
    values[0, 0] = value
    q = QTensor(q.format, q.shape, {**q.parts, "scales": values})
    if allowed:
        q.validate("w")
    else:
        with pytest.raises(FormatError, match=r"i6 holds -32 to 31"):
            q.validate("w")


@pytest.mark.parametrize("elements", [1, 64, 65, 200, 10_000])
def test_blocks_of_any_size_decode_the_same(elements, monkeypatch):
    q = mxfp4(n=7)
    want = q.dequantize()
    monkeypatch.setattr("halfbyte.tensor.qtensor.BLOCK_ELEMENTS", elements)
    np.testing.assert_array_equal(q.dequantize(), want)
