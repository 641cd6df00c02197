"""Encoders at the limits: zero, tiny, huge and constant groups, and the nearest code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte import QTensor, format_named
from halfbyte.formats import FAMILIES, family_of
from halfbyte.numerics.bits import pack
from halfbyte.tensor.quantize import quantize
from support.encoded_words import BF16, ENCODED, OWN, codes_of, gaussian, no_nan_scale, step, wide

# Zero, tiny, huge, constant.


@pytest.mark.parametrize("word", ENCODED)
def test_zeros_stay_zeros(word):
    for zero in (0.0, -0.0):
        q = quantize(np.full((3, 256), zero, np.float32), word)
        assert no_nan_scale(q)
        assert (q.dequantize() == 0).all()


@pytest.mark.parametrize("word", ENCODED)
def test_a_zero_group_among_others_stays_zero(word):
    x = gaussian((2, 512))
    x[0, :256] = 0
    q = quantize(x, word)
    assert no_nan_scale(q)
    assert (q.dequantize()[0, :256] == 0).all()


POLICIES = [(w, p) for w in OWN for p in (None, *family_of(format_named(w)).policies_of(w))]


@pytest.mark.parametrize(("word", "policy"), POLICIES)
def test_case_08_no_policy_writes_a_nan_scale_for_zeros(word, policy):
    zeros = np.zeros((2, 256), np.float32)
    q = quantize(zeros, word, policy)
    assert no_nan_scale(q)
    assert (q.dequantize() == 0).all()
    mixed = np.where(np.arange(512).reshape(2, 256) % 256 < 128, 0, gaussian((2, 256)))
    assert no_nan_scale(quantize(mixed, word, policy))


def test_case_08_nvfp4_zero_block_beside_a_small_one():
    x = np.concatenate([np.zeros(16), np.linspace(-0.01, 0.01, 16)]).astype(np.float32)[None]
    for policy in (None, *FAMILIES["nvfp4"].policies):
        q = quantize(x, "nvfp4", policy)
        assert not np.isin(q.parts["scales"], (0x7F, 0xFF)).any()
        assert (q.dequantize()[0, :16] == 0).all()


@pytest.mark.parametrize("word", ENCODED)
@pytest.mark.parametrize("value", [1e-30, 1e-40, -1e-30])
def test_case_13_tiny_groups_are_finite(word, value):
    q = quantize(np.full((2, 256), value, np.float32), word)
    assert no_nan_scale(q)
    decoded = q.dequantize()
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded) <= 1.3e-30).all()


@pytest.mark.parametrize("word", [w for w in OWN if wide(w) or format_named(w).scale in ("e8m0", "e4m3")])
def test_case_13_what_a_wide_scale_holds_is_kept(word):
    """1e-30 is lost only where the scale underflows: float32 and E8M0 scales hold it."""
    decoded = quantize(np.full((2, 256), 1e-30, np.float32), word, **wide(word)).dequantize()
    assert (np.abs(decoded - np.float32(1e-30)) <= step(word) * 2e-30).all()


def test_case_13_values_by_name():
    tiny = np.full((1, 64), 1e-30, np.float32)
    assert (quantize(tiny, "mxfp4").dequantize() == np.float32(1.1832914e-30)).all()
    assert (quantize(tiny, "nf4").dequantize() == np.float32(1e-30)).all()


@pytest.mark.parametrize("word", ENCODED)
@pytest.mark.parametrize("value", [9.0, -9.0, 0.37, 1000.0])
def test_case_14_constant_groups_are_within_a_step(word, value):
    q = quantize(np.full((2, 256), value, np.float32), word)
    assert no_nan_scale(q)
    np.testing.assert_allclose(q.dequantize(), value, rtol=step(word))


def test_case_14_two_constant_groups_of_8_bit_affine():
    x = np.repeat(np.array([[9.0, -9.0]], np.float32), 32, axis=1)
    for policy in (None, "mlx"):
        q = quantize(x, "affine8:g32", policy)
        np.testing.assert_array_equal(q.dequantize(), x)


@pytest.mark.parametrize("word", OWN)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16])
def test_huge_values_are_finite(word, dtype):
    x = (np.linspace(-1, 1, 512).reshape(2, 256) * 3e38).astype(dtype)
    q = quantize(x, word, **wide(word))
    assert no_nan_scale(q)
    decoded = q.dequantize("float64")
    assert np.isfinite(decoded).all()
    assert np.abs(decoded - x.astype(np.float64)).max() <= 3e38 * max(2 * step(word), 0.35)


@pytest.mark.parametrize("word", ["mxfp4", "mxfp8_e4m3", "nvfp4", "nf4", "affine4"])
@given(seed=st.integers(0, 2**32 - 1))
def test_no_bit_pattern_makes_a_nan_scale(word, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**32, (2, 64), dtype=np.uint32).view(np.float32)
    x = np.where(np.isfinite(x), x, 0) * np.float32(rng.choice([0, 2.0**-149, 1.0]))
    q = quantize(x, word, **wide(word))
    assert no_nan_scale(q)
    assert np.isfinite(q.dequantize("float64")).all()


# Nearest codes.


@pytest.mark.parametrize("word", [w for w in OWN if format_named(w).bits <= 4])
def test_no_other_code_under_the_stored_scale_is_nearer(word):
    """Default policies find codes with what is stored: no code of the group decodes to anything
    closer.
    """
    x = gaussian((4, 256), seed=3)
    q = quantize(x, word)
    error = np.abs(q.dequantize("float64") - x.astype(np.float64))
    for code in range(1 << q.format.bits):
        parts = dict(q.parts) | {"codes": pack(np.full(q.shape, code), q.format.bits)}
        other = QTensor(q.format, q.shape, parts).dequantize("float64")
        assert (error <= np.abs(other - x) * (1 + 1e-12) + 1e-300).all(), code


@pytest.mark.parametrize("word", OWN)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float64])
def test_defaults_depend_on_the_values_only(word, dtype):
    """Not on the dtype that holds them."""
    x = gaussian((3, 256), dtype=dtype)
    assert quantize(x, word) == quantize(x.astype(np.float32), word)


def test_case_10_high_codes_of_an_asymmetric_group_stay_distinct():
    x = (np.arange(16, dtype=np.float32) - 10)[None]
    q = quantize(x, "uint4:g16")
    assert codes_of(q)[0].tolist() == list(range(16))
    assert q.parts["zeros"].tolist() == [[10]]
    np.testing.assert_array_equal(q.dequantize(), x)


@pytest.mark.parametrize(
    ("amax", "rule", "byte", "value"),
    [
        # 8.4 = 1.05 · 2^3: every rule of the family takes 2^1; a rule that rounds to 2^0 would clip
        # it to 6.
        (8.4, "floor", 128, 8.0),
        (8.4, "even", 128, 8.0),
        (8.4, "ceil", 128, 8.0),
        # 7.5 = 1.875 · 2^2: floor keeps 2^0 and clips.
        (7.5, "floor", 127, 6.0),
        (7.5, "even", 128, 8.0),
        (7.5, "ceil", 128, 8.0),
        # 6.5 = 1.625 · 2^2 rounds to 1.5 · 2^2 but is more than 6.
        (6.5, "floor", 127, 6.0),
        (6.5, "even", 127, 6.0),
        (6.5, "ceil", 128, 6.0),
        # 6 itself and 4: nothing to round.
        (6.0, "ceil", 127, 6.0),
        (4.0, "ceil", 127, 4.0),
        (4.0, "ceil_log2", 127, 4.0),
        (4.1, "ceil_log2", 128, 4.0),
    ],
)
def test_case_12_the_scale_rule_decides_the_byte(amax, rule, byte, value):
    q = quantize(np.full((1, 32), amax, np.float32), "mxfp4", scale=rule)
    assert q.parts["scales"].tolist() == [[byte]]
    assert (q.dequantize() == value).all()


@pytest.mark.parametrize(("bits", "amax"), [(4, 7.8e7), (8, 1.4e9)])
def test_codes_under_a_subnormal_scale_that_divides_stay_in_range(bits, amax):
    """(2^(bits−1) − 1) / amax is 1.5 steps of float16's subnormals, stored as 2: a third too much."""
    top = (1 << (bits - 1)) - 1
    q = quantize(np.array([[amax, -amax, 0.0, 0.0]], np.float32), format_named(f"int{bits}", 4, inverse=True))
    assert q.parts["scales"].tolist() == [[2.0**-23]]
    assert codes_of(q).tolist() == [[2 * top + 1, 0, top + 1, top + 1]]


@pytest.mark.parametrize("last", [0.25, 0.0])
def test_a_short_last_block_has_its_own_absmax(last):
    """bitsandbytes multiplies by a reciprocal, so its last block has at least 1e-38."""
    x = np.full((1, 138), 2.0, np.float32)
    x[0, 64:128], x[0, 128:] = 3.0, last
    q = quantize(x, "nf4:g64", policy="bitsandbytes")
    assert q.parts["scales"].tolist() == [2.0, 3.0, max(last, float(np.float32(1e-38)))]
