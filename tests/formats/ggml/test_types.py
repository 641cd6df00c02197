"""The ggml codecs: structure, geometry, and the errors of their options."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halfbyte.errors import FormatError, ShapeError
from halfbyte.formats import FAMILIES, family_of, format_named
from halfbyte.formats.ggml.types import GGML_BY_CODEC
from halfbyte.tensor.qtensor import QTensor

WORDS = [w for f in FAMILIES.values() if f.name.startswith("ggml") for w in f.codecs]

STRUCTURE = {
    # word: element, bits, group, scale, bias, minimum, super-group
    "q4_0": ("int", 4, 32, "float16", False, "", 0),
    "q4_1": ("uint", 4, 32, "float16", True, "", 0),
    "q5_0": ("int", 5, 32, "float16", False, "", 0),
    "q5_1": ("uint", 5, 32, "float16", True, "", 0),
    "q8_0": ("int", 8, 32, "float16", False, "", 0),
    "q2_K": ("uint", 2, 16, "u4", False, "u4", 256),
    "q3_K": ("int", 3, 16, "i6", False, "", 256),
    "q4_K": ("uint", 4, 32, "u6", False, "u6", 256),
    "q5_K": ("uint", 5, 32, "u6", False, "u6", 256),
    "q6_K": ("int", 6, 16, "i8", False, "", 256),
    "iq4_nl": ("iq4_nl", 4, 32, "float16", False, "", 0),
    "iq4_xs": ("iq4_nl", 4, 32, "i6", False, "", 256),
    "nvfp4_ue4m3": ("e2m1", 4, 16, "ue4m3", False, "", 0),
}


@pytest.mark.parametrize("word", STRUCTURE)
def test_structure_is_what_kernels_dispatch_on(word):
    f = format_named(word)
    assert (f.element, f.bits, f.group_size, f.scale, f.bias, f.minimum, f.super_size) == STRUCTURE[word]
    assert (f.name, f.zero, f.grouping, f.divisor, f.opaque) == (word, "none", "row", 1.0, False)


def test_every_codec_is_here_and_every_other_type_is_opaque():
    opaque = {w for w in WORDS if format_named(w).opaque}
    assert set(WORDS) == set(STRUCTURE) | opaque
    assert opaque == {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0"}
    assert set(GGML_BY_CODEC) == {*WORDS, "mxfp4"}


@pytest.mark.parametrize("word", WORDS)
def test_parts_hold_as_many_bits_as_the_block(word):
    """The canonical parts have the block's bits, but for small integers, which are a byte each."""
    kind = GGML_BY_CODEC[word]
    fmt = format_named(word).with_(global_op="")
    specs = family_of(fmt).geometry(fmt, (5, 2 * kind.block))
    bits = {"u4": 4, "u6": 6, "i6": 6}
    held = 0
    for part, spec in specs.items():
        per = bits.get(fmt.scale, 8) if part in ("scales", "mins") else 8
        held += math.prod(spec.shape) * spec.dtype.itemsize * per
    assert held == 5 * 2 * kind.nbytes * 8
    assert family_of(fmt).optional_parts(fmt, (5, 2 * kind.block)) == {}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (2, 0, 256), (0, 2, 256)])
def test_empty_weights(word, shape):
    fmt = format_named(word)
    parts = {p: np.ones(s.shape, s.dtype) for p, s in family_of(fmt).geometry(fmt, shape).items()}
    q = QTensor(fmt, shape, parts, origin="gguf")
    for arithmetic in ("exact", "producer"):
        assert q.dequantize("bfloat16", arithmetic).shape == shape


@pytest.mark.parametrize("word", WORDS)
def test_codecs_in_any_case_and_no_group_size_but_the_blocks(word):
    fmt = format_named(word)
    assert format_named(word.upper()) == format_named(word.lower()) == fmt
    assert format_named(f"{word}:g{fmt.group_size}") == fmt
    with pytest.raises(FormatError, match=rf"{word} with group size 128; allowed: {fmt.group_size}, as in every ggml block"):
        format_named(f"{word}:g128")
    with pytest.raises(FormatError, match=rf"{word} takes no option rows"):
        format_named(word, rows=2)


def test_nvfp4s_factor_is_an_option():
    assert format_named("nvfp4_ue4m3").global_op == "multiply"
    assert format_named("nvfp4_ue4m3", global_scale="none").global_op == ""
    with pytest.raises(FormatError, match="nvfp4_ue4m3 with global_scale 'divide'; allowed: multiply, none"):
        format_named("nvfp4_ue4m3", global_scale="divide")


@pytest.mark.parametrize("word", WORDS)
def test_rows_are_whole_blocks(word):
    fmt, block = format_named(word), GGML_BY_CODEC[word].block
    with pytest.raises(ShapeError, match=rf"{word} with rows of {block + 16} values; its blocks hold {block}"):
        family_of(fmt).geometry(fmt, (1, block + 16))
