"""`arithmetic="exact"` is the real value rounded once: every registered format against rational
arithmetic.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte import QTensor, format_named
from halfbyte.errors import FormatError
from halfbyte.formats import FAMILIES, codec_names, family_of
from halfbyte.numerics.exact import (
    Exact,
    distil,
    dtype_named,
    round_once,
    round_quotient,
    round_sum,
    to_odd,
    two_product,
    two_sum,
)
from support import fractions_reference as slow

DTYPES = ("float32", "float16", "bfloat16")
BF16 = np.dtype(ml_dtypes.bfloat16)


def variants() -> list[tuple[str, dict]]:
    """Every codec word, small groups where it has a choice, and each of its family's options."""
    out: list[tuple[str, dict]] = [(w, {}) for w in codec_names()]
    out += [("nvfp4", {"global_scale": level}) for level in ("divide", "amax", "none")]
    for dtype in ("float16", "bfloat16", "float32"):
        floats = ("fp4", "int4", "uint3", "uint8", "affine4", "affine8", "hqq4", "fp8_e5m2")
        out += [(f"{w}:g8", {"scale_dtype": dtype}) for w in floats]
        out += [("int4:g8", {"inverse": True, "scale_dtype": dtype})]
    for rows in (2, -1):
        out += [(w, {"rows": rows}) for w in ("int8:g4", "uint4:g8", "fp8_e4m3:g16", "fp8_e4m3:channel")]
        out += [("int4:g8", {"inverse": True, "rows": rows}), ("fp8_e4m3:g16", {"rows": rows, "scale_dtype": "bfloat16"})]
    for grouping in ("row", "flat"):
        out += [(f"{w}:g8", {"grouping": grouping}) for w in ("nf4", "bnb_fp4", "nf4_modelopt", "hqq3")]
        out += [(f"{w}:g1", {"grouping": grouping, "nested": True}) for w in ("nf4", "bnb_fp4", "nf4_modelopt")]
    out += [("hqq4:g4", {"axis": 0}), ("hqq2:g2", {"axis": 0, "scale_dtype": "float32"})]
    return [v for v in out if not format_named(v[0], **v[1]).opaque]


def label(variant: tuple[str, dict]) -> str:
    return "-".join([variant[0], *(f"{k}={v}" for k, v in variant[1].items())])


def draw_part(rng: np.random.Generator, fmt, name: str, spec) -> np.ndarray:
    """Bytes of a part: ordinary, extreme and random bit patterns mixed."""
    small = {"u4": (0, 16), "u6": (0, 64), "i6": (-32, 32), "i8": (-128, 128)}
    if name == "scales" and fmt.scale in small:
        return rng.integers(*small[fmt.scale], spec.shape).astype(spec.dtype)
    if name == "mins":
        return rng.integers(*small[fmt.minimum], spec.shape).astype(spec.dtype)
    if spec.dtype == np.uint8:
        return rng.integers(0, 256, spec.shape, dtype=np.uint8)
    if name == "zeros" and spec.dtype == np.int16:
        near, far = rng.integers(-1, (1 << fmt.bits) + 1, spec.shape), rng.integers(-32768, 32768, spec.shape)
        return np.where(rng.random(spec.shape) < 0.8, near, far).astype(np.int16)
    unsigned = np.dtype(f"u{spec.dtype.itemsize}")
    patterns = rng.integers(0, 1 << (8 * spec.dtype.itemsize), spec.shape, dtype=np.uint64).astype(unsigned).view(spec.dtype)
    largest = float(ml_dtypes.finfo(spec.dtype).max)
    smallest = float(ml_dtypes.finfo(spec.dtype).smallest_subnormal)
    extreme = rng.choice([0.0, -0.0, 1.0, -1.0, smallest, -smallest, largest, -largest, np.inf, np.nan, 3.0, 65504.0], spec.shape)
    plain = rng.standard_normal(spec.shape) * 10.0 ** rng.integers(-6, 6, spec.shape)
    with np.errstate(over="ignore"):
        pool = [patterns, extreme.astype(spec.dtype), plain.astype(spec.dtype)]
    drawn = np.choose(rng.integers(0, 3, spec.shape), [p.view(unsigned) for p in pool]).astype(unsigned).view(spec.dtype)
    # A rational number has no -0.0 to divide by.
    return np.where(drawn == 0, np.zeros_like(drawn), drawn) if fmt.inverse or fmt.global_op == "divide" else drawn


def draw_tensor(fmt, shape: tuple[int, ...], seed: int) -> QTensor:
    rng = np.random.default_rng(seed)
    family = family_of(fmt)
    parts = {name: draw_part(rng, fmt, name, spec) for name, spec in family.geometry(fmt, shape).items()}
    if "group_index" in family.optional_parts(fmt, shape) and shape[-1] and rng.random() < 0.3:
        parts["group_index"] = rng.integers(0, fmt.groups(shape[-1]), shape[-1]).astype(np.int32)
    return QTensor(fmt, shape, parts)


def shapes(fmt) -> list[tuple[int, ...]]:
    if fmt.super_size:
        return [(1, fmt.super_size)]
    unit = max(fmt.group_size, 8)
    if family_of(fmt).name.startswith("ggml"):
        unit = 64
    if fmt.grouping == "strided":
        return [(4, 6), (2, 4, 5)]
    tail = 0 if family_of(fmt).name.startswith("ggml") else 3
    return [(3, unit + tail), (2, 2, unit), (1, 2 * unit)]


@pytest.mark.parametrize("variant", variants(), ids=label)
def test_every_format_decodes_to_the_rational_value_rounded_once(variant):
    fmt = format_named(variant[0], **variant[1])
    for seed, shape in enumerate(shapes(fmt)):
        q = draw_tensor(fmt, shape, seed + sum(map(ord, label(variant))))
        for dtype in DTYPES:
            expected = slow.dequantized(fmt, shape, q.parts, dtype)
            np.testing.assert_array_equal(q.dequantize(dtype).astype(np.float64), expected.astype(np.float64), err_msg=dtype)


@pytest.mark.parametrize("variant", variants(), ids=label)
def test_slices_of_every_format_decode_to_slices_of_the_values(variant):
    fmt = format_named(variant[0], **variant[1])
    for shape in shapes(fmt):
        q = draw_tensor(fmt, shape, 5)
        whole = q.dequantize("float32")
        for start, stop in ((0, 1), (shape[0] - 1, shape[0]), (0, 0)):
            np.testing.assert_array_equal(q[start:stop].dequantize("float32"), whole[start:stop])
        if len(shape) == 3:
            np.testing.assert_array_equal(q[1][1:2].dequantize("float32"), whole[1, 1:2])
            np.testing.assert_array_equal(q[1:][0].dequantize("float32"), whole[1])


@pytest.mark.parametrize("variant", variants(), ids=label)
@pytest.mark.parametrize("shape", [(0, 256), (2, 0), (0, 0), (0, 3, 256), (2, 0, 256)])
def test_empty_tensors_of_every_format_decode_to_empty_arrays(variant, shape):
    fmt = format_named(variant[0], **variant[1])
    q = draw_tensor(fmt, shape, 1)
    for dtype in DTYPES:
        out = q.dequantize(dtype)
        assert out.shape == shape
        assert out.dtype == dtype_named(dtype)


def test_nested_blocks_keep_their_position_across_slices():
    """Block 256 begins the second entry of nested_absmax, wherever rows or experts are cut."""
    fmt = format_named("nf4:g1", nested=True)
    q = draw_tensor(fmt, (3, 4, 50), 3)
    assert q.parts["nested_absmax"].shape == (3,)
    whole = q.dequantize("float32")
    np.testing.assert_array_equal(q[2][1:3].dequantize("float32"), whole[2, 1:3])
    np.testing.assert_array_equal(whole.astype(np.float64), slow.dequantized(fmt, q.shape, q.parts, "float32").astype(np.float64))


def test_an_infinite_scale_is_not_cancelled_by_what_a_rounding_left():
    """3 − 2^-149 takes two float64 terms; times infinity they are infinities of opposite signs."""
    fmt = format_named("hqq4:g8", scale_dtype="float32")
    parts = {
        "codes": np.full((1, 4), 0x33, np.uint8),
        "scales": np.array([[np.inf]], np.float32),
        "zeros": np.array([[2.0**-149]], np.float32),
    }
    assert np.isposinf(QTensor(fmt, (1, 8), parts).dequantize()).all()


def test_an_infinite_second_scale_that_divides_leaves_the_offset():
    fmt = format_named("nf4_modelopt:g8", nested=True)
    parts = {
        "codes": np.full((1, 4), 0xFF, np.uint8),  # the entry 1
        "scales": np.array([[200]], np.uint8),
        "nested_map": np.arange(-128, 128).astype(np.float32),
        "nested_absmax": np.array([np.inf], np.float32),
        "nested_offset": np.array(0.375, np.float32),
    }
    assert (QTensor(fmt, (1, 8), parts).dequantize() == 0.375).all()


# The arithmetic itself.

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
awkward = st.one_of(finite, st.sampled_from([0.0, -0.0, 1.0, 2.0**-149, 2.0**127, 1 + 2.0**-23, 0.1, 2.0**60, -(2.0**60)]))


def one(x: float) -> np.ndarray:
    return np.array([x], np.float64)


def as_float(a: np.ndarray) -> float:
    return float(a[0])


@given(st.lists(awkward, min_size=1, max_size=5), st.sampled_from(DTYPES))
def test_sums_round_once(values, dtype):
    exact = sum(map(Fraction, values))
    assert as_float(round_sum([one(v) for v in values], dtype)) == slow.rounded(exact, dtype)


@given(st.lists(st.tuples(awkward, awkward), min_size=1, max_size=3), st.sampled_from(DTYPES))
def test_sums_of_products_round_once(pairs, dtype):
    terms = [t for a, b in pairs for t in two_product(one(a), one(b))]
    exact = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
    assert as_float(Exact(terms).round(dtype)) == slow.rounded(exact, dtype)


@given(st.lists(awkward, min_size=1, max_size=4), awkward.filter(bool), st.sampled_from(DTYPES))
def test_quotients_round_once(values, divisor, dtype):
    exact = sum(map(Fraction, values)) / Fraction(divisor)
    assert as_float(round_quotient([one(v) for v in values], one(divisor), dtype)) == slow.rounded(exact, dtype)


@given(awkward, st.integers(-60, 60), st.sampled_from(DTYPES))
def test_halfway_sums_and_their_neighbours_round_once(value, shift, dtype):
    """A value, half an ulp of it in each narrower type, and a term far below: what double rounding
    gets wrong.
    """
    base = slow.rounded(Fraction(value), dtype)
    if not math.isfinite(base):
        return
    for bits in (8, 11, 24):
        half = base * 2.0**-bits
        for tail in (0.0, 2.0 ** (shift - 80), -(2.0 ** (shift - 80))):
            exact = Fraction(base) + Fraction(half) + Fraction(tail)
            assert as_float(round_sum([one(base), one(half), one(tail)], dtype)) == slow.rounded(exact, dtype)


def test_double_rounding_is_avoided_where_plain_casts_commit_it():
    """1 + 2^-8 + 2^-40 lies above the middle of 1 and 1 + 2^-7, its bfloat16 neighbours; by way of
    float32 it is the middle.
    """
    x = np.array([1 + 2.0**-8 + 2.0**-40])
    assert float(x.astype(np.float32).astype(ml_dtypes.bfloat16)[0]) == 1.0
    assert float(round_once(x, "bfloat16")[0]) == 1 + 2.0**-7
    assert slow.rounded(Fraction(float(x[0])), "bfloat16") == 1 + 2.0**-7


@given(awkward, awkward)
def test_error_free_transformations_lose_nothing(a, b):
    s, e = two_sum(one(a), one(b))
    assert Fraction(as_float(s)) + Fraction(as_float(e)) == Fraction(a) + Fraction(b)
    p, e = two_product(one(a), one(b))
    assert Fraction(as_float(p)) + Fraction(as_float(e)) == Fraction(a) * Fraction(b)


@given(st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=6))
def test_distilled_sums_do_not_overlap(values):
    parts = [as_float(p) for p in distil([one(v) for v in values])]
    assert sum(map(Fraction, parts)) == sum(map(Fraction, values))
    for a, b in pairwise(parts):
        assert b == 0 or (a != 0 and abs(b) <= math.ulp(a) / 2)


def test_rounding_to_odd_keeps_exact_values_and_marks_the_others():
    assert to_odd(np.array([1.0]), np.array([0.0])) == 1.0
    assert to_odd(np.array([1.0]), np.array([1e-30])) == 1 + 2.0**-52
    assert to_odd(np.array([1.0]), np.array([-1e-30])) == 1 - 2.0**-53
    assert to_odd(np.array([1 + 2.0**-52]), np.array([1e-30])) == 1 + 2.0**-52


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_value_that_becomes_infinite(dtype):
    """float16: 65520 and above; the like for the other two."""
    mantissa, exponent = slow.MANTISSA_BITS[dtype], slow.LARGEST_EXPONENT[dtype]
    edge = 2.0 ** (exponent + 1) - 2.0 ** (exponent - mantissa - 1)
    below = np.nextafter(np.array([edge]), 0)
    assert np.isinf(round_once(np.array([edge]), dtype).astype(np.float64)).all()
    assert float(round_once(below, dtype)[0]) == 2.0 ** (exponent + 1) - 2.0 ** (exponent - mantissa)
    if dtype == "float16":
        assert edge == 65520


def test_non_finite_terms_follow_ordinary_arithmetic():
    inf, nan = one(np.inf), one(np.nan)
    assert np.isposinf(round_sum([inf, one(1)], "float32"))
    assert np.isnan(round_sum([inf, -inf, one(1)], "float32"))
    assert np.isnan(round_sum([nan, one(1), one(2)], "bfloat16"))
    assert np.isposinf(round_quotient([one(1)], one(0), "float32"))
    assert np.isnan(round_quotient([one(0)], one(0), "float32"))
    assert as_float(round_quotient([one(1), one(2)], inf, "float32")) == 0


def test_dtype_names_and_objects_are_understood_and_others_refused():
    assert dtype_named("torch.bfloat16") == BF16
    assert dtype_named(np.float16) == np.float16
    with pytest.raises(FormatError, match=r"'int8' is not a dtype to decode to; allowed: float64, float32, float16, bfloat16"):
        dtype_named("int8")


def test_codec_names_are_unique_across_families():
    assert len({w.casefold() for w in codec_names()}) == sum(len(f.codecs) for f in FAMILIES.values())


@pytest.mark.parametrize("dtype", [None, object, "float8_e4m3fn", ""])
def test_what_is_no_output_dtype_is_refused(dtype):
    with pytest.raises(FormatError, match="is not a dtype to decode to"):
        dtype_named(dtype)


MIDDLE, ABOVE, BELOW = 1 + 2.0**-24, np.float32(1 + 2.0**-23), np.float32(1)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("terms", [(2.0**-51, -(2.0**-120)), (2.0**-80, -(2.0**-81), 2.0**-200), (2.0**-52,)])
def test_a_quotient_beside_a_midpoint_is_decided_by_the_whole_sum(terms, sign):
    """(3 m + t) / 3 with m between two float32 numbers is above m where the sum t is above 0."""
    parts = [np.array([3 * MIDDLE]), *(np.array([sign * t]) for t in terms)]
    for order in (parts, parts[::-1], [-p for p in parts]):
        want = (ABOVE if sign > 0 else BELOW) * np.sign(sum(order))
        assert round_quotient(order, np.array([3.0]), "float32") == want


def test_a_rest_of_the_division_outweighs_a_smaller_term_of_the_other_sign():
    """n is the float64 nearest to d m, r what it is off by: n − r / 2 over d is on n's side of m."""
    tried = 0
    for d in (1 + np.random.default_rng(8).random(50)).tolist():
        n = d * MIDDLE
        r = Fraction(n) - Fraction(d) * Fraction(MIDDLE)
        if r:
            got = round_quotient([np.array([n]), np.array([float(-r / 2)])], np.array([d]), "float32")
            assert got == (ABOVE if r > 0 else BELOW), d
            tried += 1
    assert tried > 40


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("more", [(), (0.0,), (0.0, 0.0)])
def test_a_term_below_a_midpoint_decides_the_rounding(sign, more):
    """1 + 2^-24 is between two float32 numbers: 2^-60 more or less is the next or 1."""
    terms = [np.array([1 + 2.0**-24]), np.array([sign * 2.0**-60]), *(np.array([t]) for t in more)]
    assert round_sum(terms, np.float32)[0] == (np.float32(1 + 2.0**-23) if sign > 0 else 1)
