"""Every gguf golden file: its bytes survive the layout, and decode to the producer's answer and to
the exact value.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import halfbyte
from halfbyte.errors import UnsupportedError
from halfbyte.formats import family_of
from halfbyte.layouts.gguf.layout import GGUF, dense
from halfbyte.numerics.exact import round_once
from halfbyte.tensor.qtensor import QTensor
from halfbyte.tensor.quantize import quantize
from support.fractions_reference import dequantized, rounded
from support.golden_case import GOLDEN, label, read_tensors, same_numbers

FILES = sorted(p for p in (GOLDEN / "gguf").glob("*.safetensors") if not p.stem.endswith("_gguf_ref"))
PLAIN = [p for p in FILES if p.stem.startswith("bf16")]
BLOCKS = [p for p in FILES if p not in PLAIN]
WHOLE = sorted((GOLDEN / "gguf").glob("*.gguf"))
CASES = [str(p.relative_to(GOLDEN)) for p in (*FILES, *WHOLE, *(p.with_name(f"{p.stem}_gguf_ref.safetensors") for p in WHOLE))]
"""What this file covers, for the test that no golden case is left out."""


def case(path: Path):
    """(ggml type, block bytes, reference, original or None) of a file, checked to be one tensor."""
    metadata, tensors = read_tensors(path)
    (name,) = (n for n in tensors if "::" not in n)
    return metadata["ggml_type"], tensors[name], tensors[f"ref::{name}"], tensors.get(f"orig::{name}")


def unpacked(path: Path):
    kind, raw, reference, _ = case(path)
    return GGUF().unpack({"weight": raw}, {"type": kind}, path.stem), reference


def test_all_files_are_there():
    types = {case(p)[0] for p in FILES}
    listed = json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))["cases"]
    named = {Path(c["file"]).name for c in listed if c["producer"] == "gguf" and "ggml_type" in c}
    assert {p.name for p in FILES} == named
    assert types == {
        "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
        "MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
    }  # fmt: skip


@pytest.mark.parametrize("path", BLOCKS, ids=label)
def test_bytes_survive_the_layout(path):
    kind, raw, _, _ = case(path)
    q, _ = unpacked(path)
    q.validate()
    assert np.array_equal(GGUF().pack(q, {"type": kind})["weight"], raw)


@pytest.mark.parametrize("path", BLOCKS, ids=label)
def test_producer_arithmetic_is_the_producers_answer(path):
    q, reference = unpacked(path)
    assert same_numbers(q.dequantize("float32", "producer"), reference)


@pytest.mark.parametrize("path", BLOCKS, ids=label)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_producer_arithmetic_in_a_narrow_dtype_is_that_answer_cast(path, dtype):
    q, reference = unpacked(path)
    to = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    with np.errstate(over="ignore"):
        assert same_numbers(q.dequantize(dtype, "producer"), reference.astype(to))


@pytest.mark.parametrize("path", BLOCKS, ids=label)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exact_arithmetic_is_the_rational_value_rounded_once(path, dtype):
    """The first rows by Python fractions, compared by value: a fraction has no −0. Byte 255 of E8M0
    is NaN here.
    """
    q, reference = unpacked(path)
    if q.format.opaque:  # gguf.quants' float32 is exact for these (formats/ggml/raw_blocks.py): round its value as a fraction
        wanted = [[rounded(Fraction(float(v)), dtype) for v in row] for row in reference[:4]]
        assert np.array_equal(q.rows(0, 4).dequantize(dtype).astype(np.float64), np.array(wanted))
        return
    sample = q.rows(0, min(q.shape[0], 2048 // q.shape[1]))
    assert np.array_equal(sample.dequantize(dtype), dequantized(sample.format, sample.shape, sample.parts, dtype), equal_nan=True)


def test_every_scale_byte_decodes_exactly():
    """MXFP4 and NVFP4 with bytes 0 to 255: one row a byte."""
    for kind in ("mxfp4", "nvfp4"):
        q, _ = unpacked(GOLDEN / "gguf" / f"{kind}_decode_all_scales.safetensors")
        assert sorted(set(q.parts["scales"][:, 0].tolist())) == list(range(256))
        assert np.array_equal(q.dequantize("float32"), dequantized(q.format, q.shape, q.parts, "float32"), equal_nan=True)


def test_case_06_scale_byte_255_is_nan_exactly_and_two_to_the_128_for_gguf():
    """Row 6 of the list of known failures: producer arithmetic gives what that producer's decoder
    gives.
    """
    q, _ = unpacked(GOLDEN / "gguf" / "mxfp4_decode_all_scales.safetensors")
    row = int(np.flatnonzero(q.parts["scales"][:, 0] == 255)[0])
    assert np.isnan(q.dequantize("float32")[row]).all()
    producer = q.dequantize("float32", "producer")[row]
    half = np.float32(2.0**127)
    assert set(np.abs(producer).tolist()) <= {0.0, float(half), np.inf}
    assert half in np.abs(producer)
    smallest = int(np.flatnonzero(q.parts["scales"][:, 0] == 0)[0])
    ones = q.dequantize("float32")[smallest]
    assert np.float32(5.877471754111438e-39) in np.abs(ones)


def test_ue4m3_scale_bytes_ignore_the_sign_but_for_one():
    """One row a byte, every code 2 (1.0)."""
    raw = np.full((256, 36), 0x22, np.uint8)
    raw[:, :4] = np.arange(256)[:, None]
    q = GGUF().unpack({"weight": raw}, {"type": "NVFP4"})
    for arithmetic in ("exact", "producer"):
        value = q.dequantize("float32", arithmetic)
        assert (value == value[:, :1]).all()
        named = {0x00: 0, 0x01: 2**-9, 0x38: 1, 0x40: 2, 0x7E: 448, 0x7F: 0, 0x80: 0, 0x81: 2**-9, 0xB8: 1, 0xFE: 448, 0xFF: 480}
        assert {b: value[b, 0] for b in named} == named
        assert np.array_equal(value[1:127], value[129:255])


@pytest.mark.parametrize("path", [p for p in BLOCKS if case(p)[3] is not None], ids=label)
def test_gguf_policy_writes_the_producers_bytes(path):
    kind, raw, _, original = case(path)
    q = quantize(original, kind.lower(), policy="gguf")
    assert q.origin == "gguf"
    assert np.array_equal(GGUF().pack(q, {"type": kind})["weight"], raw)


@pytest.mark.parametrize("path", WHOLE, ids=label)
def test_whole_files_decode_to_their_references(path):
    _, references = read_tensors(path.with_name(f"{path.stem}_gguf_ref.safetensors"))
    with halfbyte.open(path) as ckpt:
        assert len(ckpt) == len(references) > 0
        for key in ckpt:
            weight = ckpt[key]
            packed = isinstance(weight, QTensor)
            dense = weight.dequantize("float32", "producer") if packed else weight.astype(np.float32)
            assert same_numbers(dense, references[f"ref::{key}.weight" if packed else f"ref::{key}"]), key


@pytest.mark.parametrize("path", PLAIN, ids=label)
def test_plain_types_are_views_and_round_once(path):
    kind, raw, reference, original = case(path)
    values = dense(raw, kind)
    assert values.base is not None
    assert same_numbers(values.astype(np.float32), reference)
    assert round_once(original, values.dtype.name).tobytes() == raw.tobytes()


def test_codebook_types_have_no_encoder_and_say_what_has():
    for path in BLOCKS:
        q, reference = unpacked(path)
        if q.format.opaque and not q.format.name.startswith("tq"):
            with pytest.raises(UnsupportedError, match=rf"\[quantize\] {q.format.name} is decoded only.*use q2_K"):
                family_of(q.format).encode(reference, q.format)
