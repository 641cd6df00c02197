"""ggml encoders: the reference's bytes, the least error, and groups that are known to break
quantizers.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats import FAMILIES, format_named
from halfbyte.formats.ggml.fp4 import _ggml_cast
from halfbyte.formats.ggml.types import GGML_BY_CODEC, GGML_TYPES
from halfbyte.layouts.gguf.layout import GGUF
from halfbyte.tensor.quantize import quantize
from support.golden_case import GOLDEN, read_tensors

CODEBOOK = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"}
WORDS = [w for f in FAMILIES.values() if f.name.startswith("ggml") for w in f.codecs if w not in CODEBOOK]
RULES = {"ggml_legacy": ("extreme", "search"), "ggml_k": ("extreme", "search"), "ggml_iq4": ("extreme", "search"),
         "ggml_fp4": ("nearest", "ggml"), "ggml_rare": (None,)}  # fmt: skip
CASES = [(w, r) for w in WORDS for r in RULES[format_named(w).family]]
MXFP4 = [("mxfp4", None)]

HEADROOM = {"q2_K": 0.4, "q3_K": 0.27}
"""Largest error of a group of ±v, or of one v beside zeros, over v: the positive end of a table is
a step short. Others 0.13.
"""


def encoded(x, word, rule):
    return quantize(x, word) if rule is None else quantize(x, word, scale=rule)


def weights(shape, seed=0):
    """Small normal weights with one in 500 twenty times as large, as trained weights have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 0.02
    x[rng.random(shape) < 0.002] *= 20
    return x.astype(np.float32)


def relative_error(q, x) -> float:
    x = x.astype(np.float64)
    return float(((q.dequantize("float64") - x) ** 2).sum() / (x**2).sum())


GOLDEN_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("name", GOLDEN_TYPES)
def test_policy_gguf_equals_the_packages_encoder(name, dtype):
    """On other weights than the golden files': random, around powers of two, and of few bits, where
    ties are frequent.
    """
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(7)
    near = np.exp2(rng.integers(-12, 12, (40, 1))) * (1 - 2.0**-24 * rng.integers(0, 4, (40, 256)))
    for x in (weights((40, 256)), near, rng.integers(-16, 17, (40, 256)) / 8, rng.integers(0, 9, (40, 256)) / 4):
        x = x.astype(dtype)
        q = quantize(x, GGML_TYPES[name].codec, policy="gguf")
        want = gguf.quants.quantize(x.astype(np.float32), gguf.GGMLQuantizationType[name])
        assert np.array_equal(GGUF().pack(q, {})["weight"], want)


def test_ggmls_cast_to_ue4m3_is_reproduced():
    gguf = pytest.importorskip("gguf")
    values = np.array([0, 7.5 / 512, 8 / 512, 247.9, 248, 255.9, 256, 300, 448, 500, 1e-30], np.float32)
    x = np.concatenate([np.exp2(np.linspace(-14, 10, 20001)).astype(np.float32), values])
    assert np.array_equal(_ggml_cast(x), gguf.quants.NVFP4.fp32_to_ue4m3(x))


@pytest.mark.parametrize("word", [w for w in WORDS if len(RULES[format_named(w).family]) == 2])
def test_the_default_has_the_least_error_of_its_rules(word):
    x = weights((64, 1024))
    family = format_named(word).family
    errors = {rule: relative_error(quantize(x, word, scale=rule), x) for rule in RULES[family]}
    assert relative_error(quantize(x, word), x) == min(errors.values())
    assert len(set(errors.values())) == 2


BOUNDS = {
    # relative squared error of normal weights, measured, with 3 % to spare
    "q4_0": 0.00675, "q4_1": 0.005, "q5_0": 0.00166, "q5_1": 0.00118, "q8_0": 2.53e-5, "q2_K": 0.0746, "q3_K": 0.021,
    "q4_K": 0.0052, "q5_K": 0.00132, "q6_K": 3.09e-4, "iq4_nl": 0.00566, "iq4_xs": 0.00578, "nvfp4_ue4m3": 0.0094,
    "tq1_0": 0.672, "tq2_0": 0.672,
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_error_of_normal_weights(word):
    x = (np.random.default_rng(5).standard_normal((64, 1024)) * 0.02).astype(np.float32)
    error = relative_error(quantize(x, word), x)
    assert error <= BOUNDS[word]
    assert error >= BOUNDS[word] * 0.9


@pytest.mark.parametrize(("word", "rule"), CASES + MXFP4)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-38, 1e-30, 1e-20, 1e-10, 6e-8, 1e-7, 1e-5, 1.0, 9.0, 6e4])
def test_case_13_and_14_constant_and_tiny_groups(word, rule, value):
    """Rows 13 and 14: constant, alternating and single-valued blocks of any magnitude have finite
    headers and finite values.
    """
    v = np.float32(value)
    constant = np.full((1, 256), v, np.float32)
    signs = np.where(np.arange(256) % 2, v, -v)[None]
    alone = np.where(np.arange(256) == 77, -v, np.float32(0))[None]
    x = np.concatenate([constant, -constant, signs, alone, alone * 0, constant * (np.arange(256) < 32)])
    q = encoded(x, word, rule)
    q.validate()
    for part, array in q.parts.items():
        if array.dtype.kind == "f":
            assert np.isfinite(array).all(), part
    got = q.dequantize("float32").astype(np.float64)
    assert np.isfinite(got).all()
    assert (got[4] == 0).all()
    if word in ("nvfp4_ue4m3", "mxfp4"):
        assert np.abs(got).max() <= 1.34 * abs(float(v))
        return
    error = np.abs(got - x).max()
    if abs(float(v)) > 1e-4:
        assert error <= HEADROOM.get(word, 0.13) * abs(float(v))
    elif rule == "extreme" and word in ("q4_1", "q5_1"):
        assert error <= 2 * abs(float(v)) + 2.0**-24  # ggml's bytes: a scale that is zero in float16 leaves the minimum alone
    else:
        # A float16 scale has steps of 2^−24 near zero; never worse than zeros, but for the table
        # that has none.
        assert error <= abs(float(v)) * 1.0001 + (2.0**-24 if word == "iq4_nl" else 0)


@pytest.mark.parametrize("word", ["q2_K", "q4_K", "q5_K"])
def test_values_that_are_not_below_0_have_no_minimum(word):
    """Nor have those of groups so small beside the largest that their scale is 0."""
    x = np.full((1, 256), 1e-3, np.float32)
    x[0, :32] = np.linspace(0, 100, 32)
    q = quantize(x, word, scale="extreme")
    assert not q.parts["scales"][0, -1]
    assert not q.parts["mins"].any()
    assert not q.parts["super_mins"].any()


def test_case_13_mxfp4_keeps_a_tiny_block():
    q = quantize(np.full((1, 32), 1e-30, np.float32), "mxfp4", policy="gguf")
    assert np.allclose(q.dequantize("float64"), 1.18e-30, rtol=0.01)


@pytest.mark.parametrize(("word", "rule"), [c for c in CASES if not c[0].startswith("nvfp4")])
def test_a_scale_beyond_float16_is_refused(word, rule):
    x = np.full((1, 256), 3e38, np.float32)
    x[0, ::2] = -3e38
    with pytest.raises(FormatError, match=rf"{word}: a group needs a float16 scale or minimum of .*; float16 ends at 65504"):
        encoded(x, word, rule)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nvfp4_of_nothing_and_of_zeros_has_the_factor_1(shape):
    for x in (np.zeros(shape, np.float32), np.zeros((2, 64), np.float32)):
        assert quantize(x, "nvfp4_ue4m3").parts["global_scale"] == 1


def test_nvfp4_with_a_factor_reaches_any_magnitude_and_without_one_saturates():
    for factor in (1e-30, 1e30):
        x = weights((4, 256)) * np.float32(factor)
        assert relative_error(quantize(x, "nvfp4_ue4m3"), x) < 0.012
    q = quantize(np.full((1, 64), 1e6, np.float32), "nvfp4_ue4m3", global_scale="none")
    assert (q.dequantize("float32") == 2688).all()
    assert quantize(np.zeros((2, 3, 64), np.float32), "nvfp4_ue4m3").parts["global_scale"].tolist() == [1, 1]


def test_nvfp4_gives_each_expert_its_own_factor():
    x = weights((3, 4, 128)) * np.array([1, 1e-6, 1e6], np.float32)[:, None, None]
    q = quantize(x, "nvfp4_ue4m3")
    for e in range(3):
        assert q[e] == quantize(x[e], "nvfp4_ue4m3")


@pytest.mark.parametrize(("word", "rule"), CASES)
def test_rows_do_not_depend_on_their_neighbours(word, rule):
    """Stacks, slices, strides and more rows than one chunk give the same bytes."""
    x = weights((2, 9, 512))
    q = encoded(x, word, rule)
    for e in range(2):
        assert q[e] == encoded(x[e], word, rule)
    turned = np.asfortranarray(x[0])
    assert encoded(turned, word, rule) == q[0]
    wide = np.repeat(x[0], 2, axis=1)[:, ::2]
    assert encoded(wide, word, rule) == q[0]
    tall = np.tile(x[0], (60, 1))
    many = encoded(tall, word, rule)
    assert many.rows(531, 540) == q[0]


@pytest.mark.parametrize("word", WORDS)
def test_dtypes_and_bad_input(word):
    x = weights((2, 256))
    assert quantize(x.astype(np.float64), word) == quantize(x, word)
    half = x.astype(np.float16)
    assert quantize(half, word) == quantize(half.astype(np.float32), word)
    x[1, 3] = np.nan
    with pytest.raises(FormatError, match=rf"1 values are NaN or infinite, the first at \(1, 3\).*{word} holds finite"):
        quantize(x, word)
    for shape in ((0, 256), (2, 0), (2, 0, 256)):
        assert quantize(np.zeros(shape, np.float32), word).shape == shape


@pytest.mark.parametrize("word", [w for w in WORDS if GGML_BY_CODEC[w].block > 32])
def test_case_39_rows_that_are_not_whole_blocks(word):
    """Row 39: a K-quant of rows of 32 is refused with what to use; nothing is written."""
    block = GGML_BY_CODEC[word].block
    with pytest.raises(ShapeError, match=rf"{word} with rows of 32 values.*hold {block}.*use a type with blocks of 32 \(q8_0"):
        quantize(np.zeros((4, 32), np.float32), word)
    with pytest.raises(ShapeError, match=rf"{word} with rows of 40 values.*hold {block}, so k must be a multiple of {block}$"):
        quantize(np.zeros((4, 40), np.float32), word)


def test_options_that_do_not_exist():
    x = np.zeros((1, 256), np.float32)
    with pytest.raises(FormatError, match="q4_K with option ties; allowed: scale"):
        quantize(x, "q4_K", ties="even")
    with pytest.raises(FormatError, match="scale='even'; allowed: 'extreme', 'search'"):
        quantize(x, "q4_K", scale="even")
    with pytest.raises(FormatError, match="policy 'gguf' for q4_K; allowed: none"):
        quantize(x, "q4_K", policy="gguf")
    with pytest.raises(FormatError, match="scale='extreme'; allowed: 'nearest', 'ggml'"):
        quantize(x, "nvfp4_ue4m3", scale="extreme")


def test_encoding_what_was_decoded_keeps_the_real_files_values():
    """Quantizing the values of llama.cpp's own blocks again loses less than the first quantization
    did by far.
    """
    for name in ("q4_k_blk_0_attn_output", "q5_0_blk_0_attn_k", "q6_k_blk_0_ffn_down", "q8_0_token_embd"):
        metadata, tensors = read_tensors(GOLDEN / "gguf" / f"gemma_{name}_weight.safetensors")
        (x,) = (a for n, a in tensors.items() if n.startswith("ref::"))
        assert relative_error(quantize(x, metadata["ggml_type"]), x) < 0.002
