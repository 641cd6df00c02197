"""ggml types stored as raw blocks: their description, and ternary encoding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from halfbyte import QTensor, format_named, quantize
from halfbyte.errors import FormatError, ShapeError, UnsupportedError
from halfbyte.formats import FAMILIES, family_of
from halfbyte.formats.ggml.raw_blocks import dequantize_blocks

CODECS = FAMILIES["ggml_rare"].codecs


@pytest.mark.parametrize("codec", CODECS)
def test_bits_are_those_of_the_name(codec):
    fmt = format_named(codec)
    digit = next(c for c in codec if c.isdigit())
    assert (fmt.bits, fmt.group_size, fmt.opaque, fmt.float_scale) == (int(digit), 256, True, False)


@pytest.mark.parametrize("codec", ["tq1_0", "tq2_0"])
def test_ternary_values_are_kept(codec):
    x = np.random.default_rng(0).integers(-1, 2, (3, 512)).astype(np.float32) * np.float32(0.75)
    x[:, ::256] = 0.75
    np.testing.assert_array_equal(quantize(x, codec).dequantize(), x)


@pytest.mark.parametrize("codec", ["tq1_0", "tq2_0"])
def test_a_block_below_the_normal_numbers_is_zero(codec):
    x = np.full((1, 512), 2.0**-127, np.float32)
    x[:, 256:] = 2.0**-10
    np.testing.assert_array_equal(quantize(x, codec).dequantize(), np.where(x < 2.0**-100, 0, x))


def to_bfloat16(x: float) -> float:
    """x rounded once to 8 significant bits, half to even."""
    exponent = 8 - math.frexp(x)[1]
    return float(round(Fraction(x) * Fraction(2) ** exponent) / Fraction(2) ** exponent)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_a_tensor_without_rows_keeps_its_axes(codec, lead):
    fmt = format_named(codec)
    (spec,) = family_of(fmt).geometry(fmt, (*lead, 512)).values()
    assert dequantize_blocks(codec, np.empty(spec.shape, spec.dtype)).shape == (*lead, 512)


@pytest.mark.parametrize("factor", [1.0, 0.1, -3.0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_factor_multiplies_exactly(factor, dtype):
    q = quantize(np.resize(np.array([1, -1, 0], np.float32), (2, 256)) / 3, "tq2_0")
    scaled = QTensor(q.format.with_(global_op="multiply"), q.shape, {**q.parts, "global_scale": np.array(factor, np.float32)})
    exact = q.dequantize("float64") * np.float64(np.float32(factor))
    want = np.vectorize(to_bfloat16)(exact) if dtype == "bfloat16" else exact.astype(dtype)
    got = scaled.dequantize(dtype)
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(got.astype(want.dtype), want)


@pytest.mark.parametrize("codec", [c for c in CODECS if not c.startswith("tq")])
def test_codebook_types_are_not_encoded(codec):
    with pytest.raises(UnsupportedError, match=f"{codec} is decoded only"):
        quantize(np.ones((1, 256), np.float32), codec)


def test_geometry_and_refusals():
    fmt = format_named("iq2_xxs").with_(global_op="multiply")
    specs = family_of(fmt).geometry(fmt, (2, 3, 512))
    assert {name: (s.shape, s.dtype) for name, s in specs.items()} == {
        "blocks": ((2, 3, 132), np.dtype(np.uint8)),
        "global_scale": ((2,), np.dtype(np.float32)),
    }
    with pytest.raises(ShapeError, match="must be a multiple of 256"):
        family_of(fmt).geometry(fmt, (3, 300))
    with pytest.raises(FormatError, match=r"float16 scale or minimum of 7e\+04"):
        quantize(np.full((1, 256), 7e4, np.float32), "tq2_0")
