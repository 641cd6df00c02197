"""Files written by compressed-tensors 0.9 to 0.20: its own decompressed weights, bit for bit, and
the same bytes written back.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.fractions_reference import dequantized
from support.golden_case import GOLDEN, files, label, read_case, read_tensors, same_numbers, same_tensors
from support.layout_tensors import headers

LAYOUT = LAYOUTS["compressed-tensors"]
FILES = files("compressed-tensors", "compressed-tensors-old")
CHECKPOINTS = [GOLDEN / "compressed-tensors" / name for name in ("ckpt_w4a16", "ckpt_nvfp4a16")]
CASES = [str(p.relative_to(GOLDEN)) for p in (*FILES, *(f for folder in CHECKPOINTS for f in folder.iterdir()))]
"""What this file covers, for the test that no golden case is left out."""


def unpacked(path: Path) -> tuple[QTensor, dict[str, np.ndarray], dict, dict[str, np.ndarray]]:
    case = read_case(path)
    assert LAYOUT.matches(case.tensors)
    tensors = {s: case.tensors[s] for s in LAYOUT.claims(case.tensors)}
    assert tensors.keys() == case.tensors.keys()
    return LAYOUT.unpack(tensors, case.config, "down_proj"), tensors, case.config, case.references


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_producers_decoder_is_reproduced_bit_for_bit(path: Path) -> None:
    q, _, _, references = unpacked(path)
    assert references.keys() == {""}
    got = q.dequantize("float32", "producer")
    if label(path) == "compressed-tensors-old/0.12.2_int4_g32_asym":
        # That version cannot decode packed zero points; the reference is its fake quantizer's,
        # which may give −0.
        assert np.array_equal(got, references[""])
    else:
        assert same_numbers(got, references[""])


@pytest.mark.parametrize("path", FILES, ids=label)
def test_written_back_the_file_has_the_same_bytes(path: Path) -> None:
    q, tensors, config, _ = unpacked(path)
    assert same_tensors(LAYOUT.pack(q, config), tensors)
    assert LAYOUT.unpack(LAYOUT.pack(q, config), config) == q
    if q.details.get("packing") != "padded":
        assert same_tensors(LAYOUT.pack(q, LAYOUT.config(q)), tensors)
        own = QTensor(q.format, q.shape, q.parts)
        written = LAYOUT.pack(own, LAYOUT.config(own))
        if q.details.get("format") == "int-quantized":
            # A weight of no writer goes to packed words, not to int8 numbers: the same codes in
            # another order.
            assert {"weight_packed", "weight_shape"} == set(written) - set(tensors)
            again = LAYOUT.unpack(written, LAYOUT.config(own))
            assert again.parts.keys() == q.parts.keys()
            assert all(np.array_equal(again.parts[part], array) for part, array in q.parts.items())
        else:
            assert same_tensors(written, tensors)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_headers_alone_give_format_and_shape(path: Path) -> None:
    q, tensors, config, _ = unpacked(path)
    assert LAYOUT.describe(headers(tensors, LAYOUT.peek), config) == (q.format, q.shape)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_exact_value_rounded_once_equals_fractions(path: Path) -> None:
    q, *_ = unpacked(path)
    start = 126 if "decode_all" in path.stem else 5
    rows = q[start : start + 2]
    for dtype in ("float32", "float16", "bfloat16"):
        expected = dequantized(rows.format, rows.shape, rows.parts, dtype)  # a Fraction has no −0, so by value
        assert np.array_equal(rows.dequantize(dtype), expected, equal_nan=True)


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda p: p.name)
def test_modules_of_a_whole_checkpoint(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    _, tensors = read_tensors(folder / "model.safetensors")
    _, references = read_tensors(folder / "reference.safetensors")
    modules = sorted({name.removesuffix("weight_packed") for name in tensors if name.endswith(".weight_packed")})
    assert len(modules) == 7
    for module in modules:
        own = {name.removeprefix(module): t for name, t in tensors.items() if name.startswith(module)}
        q = LAYOUT.unpack(own, config, module[:-1])
        assert same_numbers(q.dequantize("bfloat16", "producer"), references[f"ref::{module}weight"])
        assert same_tensors(LAYOUT.pack(q, config), own)


def test_both_packings_and_every_kind_are_among_the_files() -> None:
    tensors = [unpacked(path)[0] for path in FILES]
    assert {q.details.get("packing") for q in tensors} == {"dense", "padded", None}
    assert {q.format.family for q in tensors} == {"integer", "fp8", "mx", "nvfp4"}
    assert {"group_index" in q.parts for q in tensors} == {True, False}
