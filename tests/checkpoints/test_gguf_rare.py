"""ggml types decoded through the gguf package: it is imported late, and its absence is a sentence."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from halfbyte.errors import UnsupportedError
from halfbyte.formats import FAMILIES, format_named
from halfbyte.formats.ggml.types import GGML_BY_CODEC
from halfbyte.layouts.gguf.layout import GGUF
from halfbyte.tensor.quantize import quantize

WORDS = FAMILIES["ggml_rare"].codecs


def weight(word: str):
    kind = GGML_BY_CODEC[word]
    raw = np.random.default_rng(kind.id).integers(0, 256, (3, 2 * kind.nbytes), dtype=np.uint8)
    return GGUF().unpack({"weight": raw}, {"type": kind.name}), raw


@pytest.mark.parametrize("word", WORDS)
def test_blocks_are_kept_without_a_copy_and_need_no_package(word, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # import gguf raises ImportError
    q, raw = weight(word)
    assert q.format.opaque
    assert q.shape == (3, 512)
    assert np.shares_memory(q.parts["blocks"], raw)
    assert np.array_equal(GGUF().pack(q.rows(1, 2), {})["weight"], raw[1:2])


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("arithmetic", ["exact", "producer"])
def test_without_the_package_decoding_says_what_to_install(word, arithmetic, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    q, _ = weight(word)
    name = GGML_BY_CODEC[word].name
    with pytest.raises(UnsupportedError, match=rf"\[dequantize\] {name} is decoded by the gguf package, .* pip install gguf$"):
        q.dequantize("float32", arithmetic)


@pytest.mark.parametrize("word", ["tq1_0", "tq2_0"])
def test_without_the_package_encoding_says_so_too(word, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match="pip install gguf"):
        quantize(np.ones((1, 256), np.float32), word)


def test_a_package_too_old_for_a_type_says_so(monkeypatch):
    old = SimpleNamespace(GGMLQuantizationType={"IQ1_S": 19}, quants=None)
    monkeypatch.setitem(sys.modules, "gguf", old)
    q, _ = weight("tq2_0")
    with pytest.raises(UnsupportedError, match="this gguf package does not know TQ2_0; pip install -U gguf"):
        q.dequantize("float32")


@pytest.mark.parametrize("word", WORDS)
def test_slices_decode_as_parts_of_the_whole(word):
    q, _ = weight(word)
    whole = q.dequantize("float32")
    assert np.array_equal(q.rows(1, 3).dequantize("float32"), whole[1:], equal_nan=True)
    assert np.array_equal(whole, q.dequantize("float32", "producer"), equal_nan=True)
    assert np.array_equal(q.dequantize("float64"), whole.astype(np.float64), equal_nan=True)


def test_importing_halfbyte_does_not_import_gguf():
    """Reading a Q4_K model must not pay for it; a fresh interpreter, since this one may have it."""
    code = (
        "import sys, numpy as np; from halfbyte.layouts.gguf.layout import GGUF; "
        "GGUF().unpack({'weight': np.zeros((1, 144), np.uint8)}, {'type': 'Q4_K'}).dequantize('float32', 'producer'); "
        "sys.exit('gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_formats_have_no_codes_to_look_at():
    for word in WORDS:
        fmt = format_named(word)
        assert fmt.scale == "none"
        assert set(FAMILIES["ggml_rare"].geometry(fmt, (2, 256))) == {"blocks"}
