"""What encoders refuse, and the text of the error."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import format_named
from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats import family_of
from halfbyte.tensor.quantize import quantize
from support.encoded_words import ENCODED, OWN, gaussian


@pytest.mark.parametrize("word", ENCODED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused_with_their_position(word, bad):
    x = gaussian((3, 256))
    x[1, 77] = x[2, 3] = bad
    with pytest.raises(FormatError, match=r"\[quantize\] 2 values are NaN or infinite, the first at \(1, 77\): (nan|inf|-inf)"):
        quantize(x, word)


@pytest.mark.parametrize("word", OWN)
def test_float64_beyond_float32_is_refused_with_its_position(word):
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
        ("int4", {"rows": 0}, r"rows 0; allowed: 1 to 2\^31 - 1, or -1 for all rows"),
        ("int4", {"rows": 10**30}, r"rows 1000000000000000000000000000000; allowed: 1 to 2\^31 - 1"),
        ("hqq4", {"axis": 2}, r"axis 2; allowed: 0, 1"),
        ("mxfp4:g48", {}, r"mxfp4 with group size 48; allowed: 16, 32, 64"),
        ("nvfp4:g32", {}, r"nvfp4 with group size 32; allowed: 16"),
        ("nf4:channel", {}, r"nf4 with group size -1; blocks run over the flattened tensor"),
        ("bnb_int8:g64", {}, r"bnb_int8 with group size 64; allowed: -1"),
        ("int9", {}, r"'int9' is not a codec; nearest: int[1-8], "),
        ("zzqq", {}, r"'zzqq' is not a codec; there are mxfp4, .*, tq2_0$"),
    ],
)
def test_wrong_options_name_what_is_allowed(word, options, message):
    with pytest.raises(FormatError, match=message):
        quantize(gaussian((2, 64)), word, **options)


@pytest.mark.parametrize(
    ("codec", "options", "message"),
    [
        (4, {}, r"\[format\] 4; a codec is a name such as 'mxfp4' or 'int4:g128', or a Format"),
        (None, {}, r"\[format\] None; a codec"),
        ("int4:g32", {"group_size": 64}, r"'int4:g32' with group_size=64; give one of the two"),
        ("int4", {"group_size": "32"}, r"int4 with group size '32'; a whole number is allowed"),
        ("int4", {"group_size": 32.0}, r"int4 with group size 32\.0; a whole number is allowed"),
        ("int4", {"group_size": True}, r"int4 with group size True; a whole number is allowed"),
        ("int4:g99999999999999999999", {}, r"group size 99999999999999999999; allowed: 1 to 2\^31 - 1"),
        (format_named("int4:g32"), {"group_size": 64}, r"int4:g32 with group_size=64 is another format"),
    ],
)
def test_codecs_and_group_sizes_of_the_wrong_type(codec, options, message):
    with pytest.raises(FormatError, match=message):
        quantize(gaussian((2, 64)), codec, **options)


def test_a_group_size_is_an_option_too():
    x = gaussian((2, 64))
    assert quantize(x, "int4", group_size=32) == quantize(x, "int4:g32") == quantize(x, "int4:g32", group_size=np.int64(32))
    assert quantize(x, "int4", group_size=-1) == quantize(x, "int4:channel")
    assert quantize(x, "int4", group_size=None).format.group_size == 128


def test_a_format_that_its_options_contradict_is_refused():
    fmt = format_named("nvfp4")
    with pytest.raises(FormatError, match=r"nvfp4:g16 with global_scale='divide' is another format; give the codec's name"):
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


def test_an_error_in_a_later_block_of_rows_gives_its_first_row(monkeypatch):
    monkeypatch.setattr("halfbyte.tensor.quantize.BLOCK_ELEMENTS", 512)
    x = gaussian((8, 256))
    x[5] *= 1e9
    with pytest.raises(FormatError, match=r"the scale of group \(1, 0\) is .* \(rows counted from 4\)"):
        quantize(x, "int4")
    with pytest.raises(FormatError, match=r"the scale of group \(1, 0\) is .* \(rows counted from 4\) \(in expert 1\)"):
        quantize(np.stack([gaussian((8, 256)), x]), "int4")
