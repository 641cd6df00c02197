"""Activations rounded to 8 bits, against their definition in exact arithmetic and ml_dtypes."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from halfbyte.formats import codec_names, format_named
from halfbyte.numerics import activations as by
from halfbyte.numerics.minifloat import element_table

RNG = np.random.default_rng(0)


def drawn(m: int, k: int) -> np.ndarray:
    """Rows of every magnitude, one of zeros, and numbers around the largest of each row."""
    x = RNG.standard_normal((m, k)).astype(np.float32) * np.exp2(RNG.integers(-60, 60, (m, 1))).astype(np.float32)
    x[1], x[2, 0], x[3] = 0, 0, np.float32(448) * np.where(RNG.random(k) < 0.5, -1, 1)
    return x


def test_bytes_of_e4m3_are_the_nearest_under_the_least_power_of_two():
    x = drawn(40, 96)
    x[4], x[5] = x[4] / np.abs(x[4]).max() * np.float32(448.0), 1e-40  # no subnormal scales
    x[6, 0] = np.nextafter(np.float32(448), np.float32(1000))
    codes, scales = by.round_e4m3(x)
    for row, scale, found in zip(x, scales, codes, strict=True):
        powers = [e for e in range(-126, 128) if np.abs(row).max() <= Fraction(448) * Fraction(2) ** e]
        assert scale == 2.0 ** min(powers)
        wanted = (row / scale).astype(ml_dtypes.float8_e4m3fn)  # exact: a quotient by a power of two
        assert np.array_equal(found, wanted.view(np.uint8))


def test_every_value_between_two_bytes_of_e4m3_is_rounded_to_the_nearest_and_ties_to_even():
    numbers = np.unique(np.abs(element_table("e4m3", 8)[np.isfinite(element_table("e4m3", 8))])).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = np.concatenate([numbers, middles, np.nextafter(middles, 0), np.nextafter(middles, 500)]).astype(np.float32)
    x = np.stack([around, -around])
    codes, scales = by.round_e4m3(x)
    assert scales.tolist() == [1.0, 1.0]
    assert np.array_equal(codes, x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_a_scale_that_is_no_number(bad):
    x = np.ones((3, 64), np.float32)
    x[1, 40] = bad
    assert np.isnan(by.round_e4m3(x)[1]).tolist() == [False, True, False]
    assert np.isnan(by.round_int8(x, 32)[1]).tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize("span", [8, 32, 40, 128])
def test_codes_of_int8_are_the_nearest_multiples_of_a_127th_of_the_largest(span):
    x = drawn(30, 96)
    x[4], x[5] = 1e-38, np.linspace(-1e-40, 1e-40, 96)
    x[6], x[7] = np.float32(3.4e38) * np.linspace(-1, 1, 96), np.float32(1e-36)  # the largest numbers, and where they are lifted
    codes, scales = by.round_int8(x, span)
    assert scales.shape == (30, -(-96 // span))
    for row, found, scale in zip(x, codes, scales, strict=True):
        for i in range(scales.shape[1]):
            part, q = row[i * span : (i + 1) * span], found[i * span : (i + 1) * span]
            peak = np.abs(part).max()
            assert scale[i] == peak / np.float32(127)
            if not peak:
                assert not q.any()
                continue
            exact = [Fraction(float(v)) * 127 / Fraction(float(peak)) for v in part]
            assert np.abs(q).max() == 127
            # Two roundings of float32 lie before `rint`, so that a tie may go either way.
            assert all(abs(int(c) - e) <= Fraction(1, 2) + Fraction(1, 1 << 15) for c, e in zip(q, exact, strict=True))


@pytest.mark.parametrize(
    ("longest", "segment"),
    [(1, 8), (8, 8), (9, 16), (32, 32), (40, 40), (64, 64), (127, 128), (128, 128), (129, 32), (160, 32), (192, 64), (256, 128),
     (320, 64), (384, 128), (1000, 128)],
)  # fmt: skip
def test_a_segment_is_a_group_or_a_divisor_of_one(longest, segment):
    assert by.segment_length(longest) == segment
    assert segment % 8 == 0


@pytest.mark.parametrize("word", [w for w in codec_names() if not format_named(w).opaque])
def test_what_serves_which_activations(word):
    """By the values of the elements alone."""
    fmt = format_named(word)
    if fmt.element in ("int", "uint"):
        values = np.arange(2.0**fmt.bits) - (2.0 ** (fmt.bits - 1) if fmt.element == "int" else 0)
    else:
        values = element_table(fmt.element, fmt.bits)
    values = values[np.isfinite(values)].astype(np.float64)
    unit = np.min(np.abs(values[values != 0]), initial=1.0)
    whole = bool((values / unit % 1 == 0).all() and np.abs(values / unit).max() <= 255)
    assert not by.is_integral(fmt) or whole
    held = bool((values.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) == values).all())
    assert by.exact_in_e4m3(fmt.element, fmt.bits) == (held and fmt.element != "mxint")
    along = fmt.grouping in ("row", "block")
    assert (by.refusal(fmt, "int8") is None) == (along and by.is_integral(fmt))
    assert (by.refusal(fmt, "fp8") is None) == (along and by.exact_in_e4m3(fmt.element, fmt.bits))


@pytest.mark.parametrize("word", [w for w in codec_names() if not format_named(w).opaque and by.is_integral(format_named(w))])
@pytest.mark.parametrize("segment", [8, 16, 32, 48, 64, 128])
def test_a_span_is_whole_segments_whose_sums_are_exact(word, segment):
    fmt = format_named(word)
    span = by.activation_span(fmt, segment)
    assert span % segment == 0
    assert span in (segment, segment * max(1, 128 // segment))
    if span > segment:
        assert fmt.bits <= 4
        assert by.product_bits(fmt) + 7 <= 24
        assert not any((fmt.super_size, fmt.bias, fmt.minimum))


@pytest.mark.parametrize(
    ("word", "bits"), [("int4:g32", 4 + 11), ("uint4:g32", 5 + 11), ("mxfp4", 2 + 1), ("int8:g32", 8 + 11), ("uint8:g32", 9 + 11)]
)
def test_bits_of_an_element_times_its_scale(word, bits):
    """A zero point is one bit more; of E2M1 two bits are significant, of float16 eleven."""
    assert by.product_bits(format_named(word)) == bits


@pytest.mark.parametrize("order", [None, "permuted", "uneven"])
def test_what_a_product_sees_is_each_group_rounded_by_itself(order):
    fmt, k = format_named("int4", 24), 96
    index = {None: None, "permuted": RNG.permutation(np.arange(k) // 24), "uneven": np.sort(RNG.integers(0, 4, k))}[order]
    x = drawn(6, k)
    got = by.rounded(x, fmt, "int8", index)
    groups = np.arange(k) // 24 if index is None else index
    size = 24 if index is None else int(np.bincount(index).max())
    segment = by.segment_length(size)
    span = by.activation_span(fmt, segment)
    for row, values in zip(x, got, strict=True):
        # The inputs of a group in order, padded to whole segments; spans may hold several.
        slots = np.zeros(4 * -(-size // segment) * segment, np.float32)
        at = np.zeros(k, np.int64)
        for g in range(4):
            inside = np.flatnonzero(groups == g)
            at[inside] = g * (len(slots) // 4) + np.arange(len(inside))
        slots[at] = row
        codes, scales = by.round_int8(slots[None], span)
        whole = np.concatenate([codes[0, i * span : (i + 1) * span] * s for i, s in enumerate(scales[0])])
        assert np.array_equal(values, whole[at])


def test_fp8_activations_are_their_bytes_under_the_rows_scale():
    x = drawn(5, 64)
    codes, scales = by.round_e4m3(x)
    assert np.array_equal(by.rounded(x, format_named("mxfp4"), "fp8"), element_table("e4m3", 8)[codes] * scales[:, None])


@pytest.mark.parametrize("k", [1, 8, 100, 129, 300])
@pytest.mark.parametrize("word", ["int8:channel", "int4:channel", "uint3:channel"])
def test_a_row_under_one_scale_takes_activations_under_one(word, k):
    x = drawn(8, k)
    codes, scales = by.round_int8(x, k)
    assert np.array_equal(by.rounded(x, format_named(word), "int8_token"), codes * scales)


@pytest.mark.parametrize("word", ["int4:g32", "int8:g64", "mxfp4", "q4_K"])
def test_weights_of_several_groups_a_row_take_int8s_scales(word):
    x, fmt = drawn(8, 512), format_named(word)
    assert np.array_equal(by.rounded(x, fmt, "int8_token"), by.rounded(x, fmt, "int8"))


def test_a_row_whose_sums_may_not_fit_in_32_bits_takes_int8s_scales():
    fmt = format_named("int8:channel")
    for k, alike in ((by.LONGEST_TOKEN_ROW, False), (by.LONGEST_TOKEN_ROW + 1, True)):
        x = np.ones((1, k), np.float32)
        x[0, 0], x[0, 1] = 300, -77
        assert np.array_equal(by.rounded(x, fmt, "int8_token"), by.rounded(x, fmt, "int8")) == alike
    for mode in ("int8", "int8_token"):
        assert by.refusal(format_named("nf4:g64"), mode) is not None
