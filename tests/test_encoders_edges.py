"""Encoders at the edges: what is refused, and what zero, tiny, huge, constant, short, odd, empty and strided weights become."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte import QTensor, format_named
from halfbyte.bits import pack, unpack
from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats import FAMILIES, family_of, words
from halfbyte.formats.affine import one_dtype
from halfbyte.formats.encode import quantize
from halfbyte.minifloat import scale_table

BF16 = np.dtype(ml_dtypes.bfloat16)
DECODED_ONLY = ("iq1", "iq2", "iq3")
ENCODED = [w for w in words() if not w.startswith(DECODED_ONLY)]
OWN = [w for w in ENCODED if not family_of(format_named(w)).name.startswith("ggml")]
WIDE = {"scale_dtype": "float32"}


def wide(word: str) -> dict[str, str]:
    """Options that give float scales the range of float32."""
    return WIDE if "scale_dtype" in family_of(format_named(word)).format_options and word != "bnb_int8" else {}


def gaussian(shape, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.02).astype(np.float32).astype(dtype)


def codes_of(q) -> np.ndarray:
    return unpack(q.parts["codes"], q.format.bits, q.shape[-1])


def step(word: str) -> float:
    """Largest relative error of a value at the end of its group's range, with room for a rounded scale."""
    bits = format_named(word).bits
    if word == "mxint2":
        return 0.5
    return {1: 1.01, 2: 0.4, 3: 0.2}.get(bits, 0.13)


# What is refused.


@pytest.mark.parametrize("word", ENCODED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused_with_their_place(word, bad):
    x = gaussian((3, 256))
    x[1, 77] = x[2, 3] = bad
    with pytest.raises(FormatError, match=r"\[quantize\] 2 values are NaN or infinite, the first at \(1, 77\): (nan|inf|-inf)"):
        quantize(x, word)


@pytest.mark.parametrize("word", OWN)
def test_float64_beyond_float32_is_refused_with_its_place(word):
    x = gaussian((2, 256), dtype=np.float64)
    x[0, 5] = -1e39
    with pytest.raises(FormatError, match=r"1 values are NaN, infinite or beyond float32, the first at \(0, 5\): -1e\+39"):
        quantize(x, word)


@pytest.mark.parametrize("word", ENCODED)
def test_arrays_that_are_no_weights_are_refused(word):
    with pytest.raises(ShapeError, match=r"\[quantize\] shape \(256,\); a weight is \(n, k\) or \(experts, n, k\)"):
        quantize(np.zeros(256, np.float32), word)
    with pytest.raises(ShapeError, match=r"\[quantize\] dtype int32; allowed: float64, float32, float16, bfloat16"):
        quantize(np.zeros((2, 256), np.int32), word)


@pytest.mark.parametrize("word", OWN)
def test_unknown_options_policies_and_values_name_what_there_is(word):
    x = gaussian((2, 64))
    with pytest.raises(FormatError, match=rf"\[quantize\] {word} with option colour; allowed: \w+"):
        quantize(x, word, colour="red")
    known = ", ".join(family_of(format_named(word)).policies_of(word)) or "none"
    with pytest.raises(FormatError, match=rf"\[quantize\] policy 'nobody' for {word}; allowed: {known}$"):
        quantize(x, word, "nobody")


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("mxfp4", {"scale": "best"}, r"scale='best'; allowed: 'floor', 'even', 'ceil', 'ceil_log2'"),
        ("mxfp4", {"ties": "up"}, r"ties='up'; allowed: 'even', 'away', 'zero', 'truncate'"),
        ("mxfp4", {"zeros": "odd"}, r"zeros='odd'; allowed: 'keep', 'value', 'drop', 'negative'"),
        ("nvfp4", {"order": "any"}, r"order='any'; allowed: 'joint', 'reciprocal', 'inverse', 'stepwise'"),
        ("int4", {"scale": "best"}, r"scale='best'; allowed: 'max', 'half', 'edge', 'no_clip'"),
        ("int1", {"scale": "max"}, r"int1 has no positive code, so scale='max' has no steps; allowed: 'edge', 'half'"),
        ("affine4", {"scale": "best"}, r"scale='best'; allowed: 'minmax', 'edge'"),
        ("nf4", {"nested": True, "scale_dtype": "float16"}, r"nested scales are bytes, give one"),
        ("nvfp4", {"global_scale": "add"}, r"global_scale 'add'; allowed: multiply, divide, amax, none"),
        ("int4", {"scale_dtype": "float8"}, r"scale_dtype 'float8'; allowed: float16, bfloat16, float32"),
        ("int4", {"rows": 0}, r"rows 0; allowed: 1 or more, or -1 for all rows"),
        ("hqq4", {"axis": 2}, r"axis 2; allowed: 0, 1"),
        ("mxfp4:g48", {}, r"mxfp4 with group size 48; allowed: 16, 32, 64"),
        ("nvfp4:g32", {}, r"nvfp4 with group size 32; allowed: 16"),
        ("nf4:channel", {}, r"nf4 with group size -1; blocks run over the flattened tensor"),
        ("bnb_int8:g64", {}, r"bnb_int8 with group size 64; allowed: -1"),
        ("int9", {}, r"'int9' is not a codec; nearest: "),
    ],
)
def test_wrong_words_say_what_is_allowed(word, options, message):
    with pytest.raises(FormatError, match=message):
        quantize(gaussian((2, 64)), word, **options)


def test_a_format_that_its_options_contradict_is_refused():
    fmt = format_named("nvfp4")
    with pytest.raises(FormatError, match=r"nvfp4:g16 with global_scale='divide' is another format; give the codec word"):
        quantize(gaussian((2, 64)), fmt, "compressed-tensors")
    assert quantize(gaussian((2, 64)), fmt, "modelopt").format == fmt


@pytest.mark.parametrize("word", ["int4", "fp4", "affine4", "hqq4"])
def test_scales_beyond_their_dtype_are_refused_with_the_group(word):
    x = gaussian((2, 256))
    x[1, 128:] = np.linspace(-3e6, 3e6, 128)
    with pytest.raises(
        FormatError, match=rf"{word}:g\d+: the (scale|bias) of group \(1, \d\) is .*beyond float16; give scale_dtype='bfloat16'"
    ):
        quantize(x, word)
    assert np.isfinite(quantize(x, word, scale_dtype="bfloat16").dequantize()).all()


# Zero, tiny, huge, constant.


def no_nan_scale(q) -> bool:
    """Whether every stored scale is a finite number."""
    if q.format.scale in ("e8m0", "e4m3", "ue4m3"):
        return bool(np.isfinite(scale_table(q.format.scale)[q.parts["scales"]]).all())
    floats = [a for a in q.parts.values() if a.dtype.kind == "f" or a.dtype == BF16]
    return all(bool(np.isfinite(a.astype(np.float64)).all()) for a in floats)


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
    """Default policies find codes with what is stored: no code of the group decodes to anything closer."""
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


def test_case_10_high_codes_of_an_asymmetric_group_stay_apart():
    x = (np.arange(16, dtype=np.float32) - 10)[None]
    q = quantize(x, "uint4:g16")
    assert codes_of(q)[0].tolist() == list(range(16))
    assert q.parts["zeros"].tolist() == [[10]]
    np.testing.assert_array_equal(q.dequantize(), x)


@pytest.mark.parametrize(
    ("amax", "rule", "byte", "value"),
    [
        # 8.4 = 1.05 · 2^3: every rule of the family takes 2^1; a rule that rounds to 2^0 would clip it to 6.
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


# Shapes.


@pytest.mark.parametrize("word", OWN)
@pytest.mark.parametrize("k", [1, 3, 17, 100, 130])
def test_case_09_odd_rows_and_short_last_groups(word, k):
    """Rows keep to themselves: a row quantized alone has the same values, and the true shape is kept."""
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
    monkeypatch.setattr("halfbyte.formats.encode.BLOCK_ELEMENTS", 2000)
    monkeypatch.setattr("halfbyte.formats.grouping.BLOCK_ELEMENTS", 2000)
    assert quantize(x, word, **({} if word == "bnb_int8" else options)) == whole


def test_a_refusal_in_a_later_block_of_rows_says_where_it_counts_from(monkeypatch):
    monkeypatch.setattr("halfbyte.formats.encode.BLOCK_ELEMENTS", 512)
    x = gaussian((8, 256))
    x[5] *= 1e9
    with pytest.raises(FormatError, match=r"the scale of group \(1, 0\) is .* \(rows counted from 4\)"):
        quantize(x, "int4")
    with pytest.raises(FormatError, match=r"the scale of group \(1, 0\) is .* \(rows counted from 4\) \(in expert 1\)"):
        quantize(np.stack([gaussian((8, 256)), x]), "int4")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_torch_tensors_are_taken_as_they_are(dtype):
    torch = pytest.importorskip("torch")
    t = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)).T[::2].requires_grad_()
    x = t.detach().to(torch.float64).numpy()
    q = quantize(t, "mxfp4", "mlx" if dtype != "float64" else None)
    expected = x.astype(BF16 if dtype == "bfloat16" else dtype)
    assert q == quantize(expected, "mxfp4", "mlx" if dtype != "float64" else None)
