"""Every code of element tables and scale bytes against ml_dtypes and rational arithmetic, and
rounding to codes.
"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte import QTensor, format_named
from halfbyte.errors import FormatError
from halfbyte.numerics.bits import pack
from halfbyte.numerics.minifloat import (
    MINIFLOATS,
    TABLES,
    TIES,
    add_table,
    e8m0_encode,
    element_table,
    round_to_element,
    scale_table,
    sign_zeros,
)
from support import fractions_reference as slow
from support.golden_case import GOLDEN, read_tensors

ML_DTYPES = {
    "e2m1": "float4_e2m1fn", "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "e3m4": "float8_e3m4", "e4m3_ieee": "float8_e4m3", "e4m3b11fnuz": "float8_e4m3b11fnuz", "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
}  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")
CASES = [
    *(f"ml_dtypes/{name}.safetensors" for name in ("decode_tables", "cast_e4m3_ties", "cast_grid", "cast_pow2")),
    "microxcaling/elemwise_sweep.safetensors",
]
"""Files this module covers, for the test that no golden case is left out."""


def values_of(element: str) -> np.ndarray:
    """Every code by ml_dtypes, float64."""
    bits = MINIFLOATS[element].bits
    return np.arange(1 << bits, dtype=np.uint8).view(getattr(ml_dtypes, ML_DTYPES[element])).astype(np.float64)


def bits_of(x) -> np.ndarray:
    return np.asarray(x, np.float64).view(np.uint64)


def test_every_minifloat_has_a_type_to_compare_with():
    assert set(ML_DTYPES) == set(MINIFLOATS)


@pytest.mark.parametrize("element", MINIFLOATS)
def test_every_code_of_every_minifloat(element):
    """Values and signs of zero; NaN where ml_dtypes has it."""
    ours, theirs = element_table(element, MINIFLOATS[element].bits), values_of(element)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[ours == 0]), np.signbit(theirs[theirs == 0]))
    assert not ours.flags.writeable


def test_every_e8m0_byte():
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(scale_table("e8m0"), theirs)
    np.testing.assert_array_equal(e8m0_encode(np.arange(-127, 128)), np.arange(255))
    np.testing.assert_array_equal(e8m0_encode(np.array([-500, 500])), [0, 254])


def test_every_ue4m3_byte():
    """E4M3 without its sign, but 0x7F is 0 and 0xFF is 480."""
    want = np.abs(values_of("e4m3"))
    want[0x7F], want[0xFF] = 0, 480
    np.testing.assert_array_equal(scale_table("ue4m3"), want)


@pytest.mark.parametrize("bits", range(1, 9))
def test_integer_tables(bits):
    for element in ("int", "uint", "mxint") if bits > 1 else ("int", "uint"):
        np.testing.assert_array_equal(element_table(element, bits), [float(v) for v in slow.table(element, bits)])


@pytest.mark.parametrize("element", ["nf4", "bnb_fp4", "nf4_modelopt", "iq4_nl"])
def test_table_elements(element):
    """The producers' own tables, float32 for float32, +0 in both of fp4's zeros."""
    np.testing.assert_array_equal(bits_of(element_table(element, 4)), bits_of([float(v) for v in slow.table(element, 4)]))


def test_unknown_names_are_refused():
    with pytest.raises(FormatError, match=r"'e9m9' is not an element table"):
        element_table("e9m9", 4)
    with pytest.raises(FormatError, match=r"'e9m0' is not an 8-bit scale kind"):
        scale_table("e9m0")
    with pytest.raises(FormatError, match=r"\[ties\] 'up'; allowed: even, away, zero, truncate"):
        round_to_element(np.zeros(1), "e2m1", "up")
    with pytest.raises(FormatError, match=r"\[zeros\] 'never'; allowed: keep, value, drop, negative"):
        sign_zeros(np.zeros(1, np.uint8), np.zeros(1), "e2m1", "never")


def test_tables_written_by_ml_dtypes():
    """The file of decode tables: each of its types is one of ours."""
    _, tensors = read_tensors(GOLDEN / "ml_dtypes" / "decode_tables.safetensors")
    by_type = {ml: ours for ours, ml in ML_DTYPES.items()}
    for name, reference in tensors.items():
        ml = name.removeprefix("ref::")
        table = scale_table("e8m0") if ml == "float8_e8m0fnu" else element_table(by_type.pop(ml), len(reference).bit_length() - 1)
        np.testing.assert_array_equal(table.astype(np.float32), reference)
    assert not by_type


# Rounding.


@pytest.mark.parametrize("file", ["cast_e4m3_ties", "cast_grid", "cast_pow2"])
@pytest.mark.parametrize("element", MINIFLOATS)
def test_casts_written_by_ml_dtypes(file, element):
    """Half to even within range; beyond it ml_dtypes gives infinity, NaN or the largest value, and
    we the largest value.
    """
    _, tensors = read_tensors(GOLDEN / "ml_dtypes" / f"{file}.safetensors")
    x, codes = tensors["orig::x"], tensors[f"codes.{ML_DTYPES[element]}"]
    table = element_table(element, MINIFLOATS[element].bits)
    largest = np.nanmax(table[np.isfinite(table)])
    with np.errstate(invalid="ignore"):
        in_range = np.isfinite(x) & np.isfinite(table[codes])
    ours = round_to_element(np.where(np.isnan(x), 0, x), element)
    assert in_range.any()
    np.testing.assert_array_equal(ours[in_range], codes[in_range])
    beyond = ~in_range & ~np.isnan(x)
    np.testing.assert_array_equal(table[ours[beyond]], np.copysign(largest, x[beyond]))


@pytest.mark.parametrize(("name", "ties"), [("nearest", "away"), ("even", "even")])
@pytest.mark.parametrize("file", ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2"])
def test_elements_rounded_by_microxcaling(file, name, ties):
    element = file[4:]
    _, tensors = read_tensors(GOLDEN / "microxcaling" / "elemwise_sweep.safetensors")
    x = tensors["orig::x"]
    values = element_table(element, MINIFLOATS[element].bits)[round_to_element(x, element, ties)]
    np.testing.assert_array_equal(values.astype(np.float32), tensors[f"ref::{file}.{name}"])


@pytest.mark.parametrize("name", ["nearest", "even"])
def test_int8_rounded_by_microxcaling(name):
    from halfbyte.formats.mx import round_integers

    _, tensors = read_tensors(GOLDEN / "microxcaling" / "elemwise_sweep.safetensors")
    whole = round_integers(tensors["orig::x"].astype(np.float64) * 64, "even" if name == "even" else "away")
    np.testing.assert_array_equal((np.clip(whole, -127, 127) / 64).astype(np.float32), tensors[f"ref::int8.{name}"])


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("element", MINIFLOATS)
def test_every_midpoint_and_its_neighbours(element, ties):
    """On a middle the rule decides, a hair beside it the nearer code wins, whatever the sign."""
    table = element_table(element, MINIFLOATS[element].bits)
    positive = table[: len(table) // 2]
    positive = positive[np.isfinite(positive)]
    lower = np.arange(len(positive) - 1)
    middle = (positive[:-1] + positive[1:]) / 2
    on = {"even": lower + (lower & 1), "away": lower + 1, "zero": lower, "truncate": lower}[ties]
    above = lower if ties == "truncate" else lower + 1
    sign = 0 if MINIFLOATS[element].specials == "fnuz" else len(table) // 2
    for s in (1.0, -1.0):
        for x, want in ((middle, on), (np.nextafter(middle, 0), lower), (np.nextafter(middle, np.inf), above)):
            codes = round_to_element(s * x, element, ties)
            np.testing.assert_array_equal(codes & ~np.uint8(len(table) // 2), want)
            np.testing.assert_array_equal(codes >= len(table) // 2, (s < 0) & ((want > 0) | bool(sign)))


@pytest.mark.parametrize("element", MINIFLOATS)
@given(x=st.floats(allow_nan=False))
def test_nothing_is_nearer(element, x):
    table = element_table(element, MINIFLOATS[element].bits)
    finite = table[np.isfinite(table)]
    code = int(round_to_element(np.array([x]), element)[0])
    if not np.isfinite(x):
        assert table[code] == np.copysign(finite.max(), x)
        return
    distance = [abs(Fraction(x) - Fraction(float(v))) for v in finite]
    assert abs(Fraction(x) - Fraction(float(table[code]))) == min(distance)


@pytest.mark.parametrize(
    ("zeros", "want"),
    [
        ("keep", [0, 8, 0, 8, 2, 10]),
        ("value", [0, 0, 0, 8, 2, 10]),
        ("drop", [0, 0, 0, 0, 2, 10]),
        ("negative", [8, 8, 0, 8, 2, 10]),
    ],
)
def test_signs_of_zero_by_rule(zeros, want):
    x = np.array([0.0, -0.0, 0.1, -0.1, 1.0, -1.0])
    np.testing.assert_array_equal(sign_zeros(round_to_element(x, "e2m1"), x, "e2m1", zeros), want)


# Every code under every scale byte.


def walked(word: str, **options) -> tuple[QTensor, np.ndarray, np.ndarray]:
    """A tensor with row s = scale byte s and all codes in it, the codes, and the bytes."""
    fmt = format_named(word, **options)
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    k = max(len(codes), fmt.group_size)
    codes = np.resize(codes, k)
    groups = fmt.groups(k)
    bytes_ = np.arange(256, dtype=np.uint8)
    parts = {"codes": pack(np.tile(codes, (256, 1)), fmt.bits), "scales": np.repeat(bytes_[:, None], groups, axis=1)}
    if fmt.global_op:
        parts["global_scale"] = np.float32(1).reshape(())
    return QTensor(fmt, (256, k), parts), codes, bytes_


def check_products(q: QTensor, elements, scales) -> None:
    """Row i, column j of q is scales[i] · elements[j] rounded once, in every dtype; equal products
    are rounded together.
    """
    seen: dict = {}
    want = {d: np.empty(q.shape) for d in DTYPES}
    for i, s in enumerate(scales):
        for j, e in enumerate(elements):
            product = slow.times(e, s)
            if product not in seen:
                finite = isinstance(product, Fraction)
                seen[product] = [slow.rounded(product, d) if finite else product for d in DTYPES]
            for d, value in zip(DTYPES, seen[product], strict=True):
                want[d][i, j] = value
    for d in DTYPES:
        np.testing.assert_array_equal(q.dequantize(d).astype(np.float64), want[d])


MX_WORDS = ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "mxint4", "mxint2"]


@pytest.mark.parametrize("word", MX_WORDS)
def test_every_code_under_every_e8m0_byte(word):
    q, codes, _ = walked(word)
    elements = [slow.table(q.format.element, q.format.bits)[c] for c in codes]
    check_products(q, elements, slow.table("e8m0", 8))


@pytest.mark.parametrize("level", ["multiply", "divide", "none"])
def test_every_code_under_every_e4m3_byte(level):
    q, codes, _ = walked("nvfp4", global_scale=level)
    elements = [slow.table("e2m1", 4)[c] for c in codes]
    check_products(q, elements, slow.table("e4m3", 8))


@pytest.mark.parametrize("word", ["nf4", "bnb_fp4"])
def test_every_code_under_every_nested_byte(word):
    fmt = format_named(f"{word}:g16", nested=True)
    from halfbyte.formats.nested import dynamic_map

    parts = {
        "codes": pack(np.tile(np.arange(16, dtype=np.uint8), (256, 1)), 4),
        "scales": np.arange(256, dtype=np.uint8)[:, None],
        "nested_map": dynamic_map(),
        "nested_absmax": np.array([0.71], np.float32),
        "nested_offset": np.array(0.0173, np.float32),
    }
    q = QTensor(fmt, (256, 16), parts)
    second, offset = Fraction(float(parts["nested_absmax"][0])), Fraction(float(parts["nested_offset"]))
    absmax = [Fraction(float(m)) * second + offset for m in dynamic_map()]
    check_products(q, slow.table(word, 4), absmax)


def one_block(word: str, element: float, byte: int) -> np.ndarray:
    """A block of one element's code under one scale byte, decoded to float32."""
    fmt = format_named(word)
    table = element_table(fmt.element, fmt.bits)
    (code, *_) = np.flatnonzero((table == element) & (np.signbit(table) == np.signbit(element)))
    k = fmt.group_size
    parts = {"codes": pack(np.full((1, k), code), fmt.bits), "scales": np.full((1, 1), byte, np.uint8)}
    return QTensor(fmt, (1, k), parts).dequantize()


@pytest.mark.parametrize("word", MX_WORDS)
def test_zero_at_scale_one(word):
    assert (one_block(word, 0.0, 127) == 0).all()


@pytest.mark.parametrize("word", MX_WORDS)
def test_one_at_scale_one(word):
    assert (one_block(word, 1.0, 127) == 1).all()


@pytest.mark.parametrize("word", MX_WORDS)
def test_minus_one_at_scale_one(word):
    assert (one_block(word, -1.0, 127) == -1).all()


@pytest.mark.parametrize("word", MX_WORDS)
def test_one_at_scale_two(word):
    assert (one_block(word, 1.0, 128) == 2).all()


def test_minus_zero_is_kept():
    assert np.signbit(one_block("mxfp4", -0.0, 127)).all()


@pytest.mark.parametrize("word", MX_WORDS)
def test_case_06_e8m0_byte_0_is_a_subnormal_and_byte_255_nan(word):
    assert (one_block(word, 1.0, 0) == np.float32(5.877471754111438e-39)).all()
    assert np.isnan(one_block(word, 1.0, 255)).all()
    assert np.isnan(one_block(word, 0.0, 255)).all()


def test_case_07_a_scale_byte_is_an_exponent_not_a_number():
    """122 is 2^-5, whether the bytes come as uint8 or as a view of float8_e8m0fnu."""
    assert (one_block("mxfp4", 1.0, 122) == 0.03125).all()
    assert scale_table("e8m0")[np.array([2.0**-5]).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)] == 0.03125


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_table_of_every_width_can_be_added(bits):
    add_table("probe", np.arange(1 << bits))
    try:
        assert element_table("probe", bits).tolist() == list(range(1 << bits))
    finally:
        del TABLES["probe"]
