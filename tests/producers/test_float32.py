"""The steps that producers' decoders share, one at a time."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from halfbyte import QTensor, format_named, quantize
from halfbyte.errors import FormatError
from halfbyte.producers import DECODERS, decode_as
from halfbyte.producers import float32 as steps
from halfbyte.producers.gptq_awq import decode_autogptq, decode_gptqmodel
from halfbyte.tensor.quantize import ORIGINS

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("top", [math.nan, math.inf])
def test_e8m0_bytes(top):
    table = steps.e8m0_table(top)
    assert table.dtype == np.float32
    assert [float(v) for v in table[:255]] == [2.0 ** (b - 127) for b in range(255)]
    np.testing.assert_array_equal(table[255], np.float32(top))


def test_e4m3_bytes_are_those_of_ml_dtypes():
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(steps.e4m3_table(), want)


@pytest.mark.parametrize(("negative_zero", "sign"), [(True, True), (False, False)])
def test_the_code_of_minus_zero(negative_zero, sign):
    q = QTensor(
        format_named("mxfp4"), (1, 32), {"codes": np.full((1, 16), 0x98, np.uint8), "scales": np.full((1, 1), 127, np.uint8)}
    )
    values = steps.elements(q, negative_zero=negative_zero)
    assert values[0].tolist() == [0.0, -0.5] * 16
    assert np.signbit(values[0, 0]) == sign


@pytest.mark.parametrize(("a", "b", "want"), [
    (np.float16, np.float16, np.float16), (BF16, BF16, BF16), (np.float16, BF16, np.float32), (BF16, np.float32, np.float32),
    (np.float32, np.float16, np.float32),
])  # fmt: skip
def test_dtypes_promote_as_torch_has_it(a, b, want):
    assert steps.promote(a, b) == np.dtype(want)


def test_an_intermediate_is_rounded_to_its_dtype():
    x = np.array([1 + 2.0**-9, 1 + 2.0**-12], np.float32)
    np.testing.assert_array_equal(steps.round_to(x, BF16), [1, 1])
    np.testing.assert_array_equal(steps.round_to(x, np.float16), [1 + 2.0**-9, 1])
    assert steps.round_to(x, np.float16).dtype == np.float32


@pytest.mark.parametrize(("first", "stop"), [(0, 40), (30, 36), (32, 40)])
def test_nested_scales_of_a_slice(first, stop):
    n, k = 40, 256
    rng = np.random.default_rng(2)
    scales = rng.integers(0, 256, (n, 8), dtype=np.uint8)
    q = QTensor(format_named("nf4:g32", nested=True), (n, k), {
        "codes": np.zeros((n, k // 2), np.uint8), "scales": scales, "nested_map": np.arange(256, dtype=np.float32),
        "nested_absmax": np.array([2, 3], np.float32), "nested_offset": np.array(0, np.float32),
    })  # fmt: skip
    mapped, absmax = steps.nested_scales(q[first:stop])
    np.testing.assert_array_equal(mapped, scales[first:stop])
    np.testing.assert_array_equal(absmax, np.where(np.arange(n) < 32, 2, 3)[first:stop, None].repeat(8, axis=1))


def integer(zeros: int, variant: str = "") -> QTensor:
    q = quantize(np.linspace(-1, 1, 32, dtype=np.float32)[None], "uint4:g32")
    parts = {**q.parts, "zeros": np.full_like(q.parts["zeros"], zeros)}
    return QTensor(q.format, q.shape, parts, origin="autogptq", details={"variant": variant} if variant else {})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("variant", "zero"), [("", 16), ("cuda_old", 0)])
def test_autogptqs_kernels_differ_in_a_zero_point_of_16(variant, zero, dtype):
    q = integer(16, variant)
    want = decode_gptqmodel(integer(zero), dtype)
    np.testing.assert_array_equal(decode_autogptq(q, dtype), want)
    assert want.dtype.name == dtype


def test_every_origin_of_a_policy_has_a_decoder():
    assert set(ORIGINS) <= set(DECODERS)


def test_an_unknown_origin_is_refused():
    q = integer(8)
    q = QTensor(q.format, q.shape, q.parts, origin="nobody")
    with pytest.raises(FormatError, match=r"no producer arithmetic for 'nobody'; known: autoawq, autogptq, "):
        decode_as(q, "float32")


def test_a_stack_is_decoded_matrix_by_matrix():
    stack = quantize(np.random.default_rng(3).standard_normal((3, 2, 64)).astype(np.float32), "uint4:g32")
    each = [QTensor(stack.format, (2, 64), {name: part[i] for name, part in stack.parts.items()}) for i in range(3)]
    np.testing.assert_array_equal(decode_gptqmodel(stack, "float16"), [decode_gptqmodel(one, "float16") for one in each])
