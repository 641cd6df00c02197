"""Files written by AutoGPTQ and GPTQModel: their own dequantized weights, bit for bit, and the same
bytes when written back.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.fractions_reference import dequantized
from support.golden_case import files, label, read_case, same_numbers, same_tensors
from support.layout_tensors import headers

GPTQ = LAYOUTS["gptq"]
FILES = files("autogptq", "gptqmodel")
CASES = [f"{p.parent.name}/{p.name}" for p in FILES]
"""What this file covers, for the test that no golden case is left out."""


def unpacked(path: Path) -> tuple[QTensor, dict[str, np.ndarray], dict, dict[str, np.ndarray]]:
    case = read_case(path)
    claimed = GPTQ.claims(case.tensors)
    tensors = {s: case.tensors[s] for s in claimed}
    return GPTQ.unpack(tensors, case.config, "down_proj"), tensors, case.config, case.references


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_producers_decoder_is_reproduced_bit_for_bit(path: Path) -> None:
    q, _, _, references = unpacked(path)
    assert {"", "f32"} <= references.keys()
    assert same_numbers(q.dequantize("float16", "producer").astype(np.float32), references[""])
    assert same_numbers(q.dequantize("float32", "producer"), references["f32"])
    if "cuda_old" in references:
        old = QTensor(q.format, q.shape, q.parts, origin=q.origin, details={**q.details, "variant": "cuda_old"})
        assert same_numbers(old.dequantize("float16", "producer").astype(np.float32), references["cuda_old"])
        assert not same_numbers(references["cuda_old"], references[""])


@pytest.mark.parametrize("path", FILES, ids=label)
def test_written_back_the_file_has_the_same_bytes(path: Path) -> None:
    q, tensors, config, _ = unpacked(path)
    assert same_tensors(GPTQ.pack(q, config), tensors)
    assert GPTQ.unpack(GPTQ.pack(q, config), config) == q


@pytest.mark.parametrize("path", FILES, ids=label)
def test_headers_alone_give_format_and_shape(path: Path) -> None:
    q, tensors, config, _ = unpacked(path)
    described = GPTQ.describe(headers(tensors), config)
    assert described.format == q.format
    assert described.shape == q.shape
    assert q.origin == ("gptqmodel" if "meta" in config else "autogptq")


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_exact_value_rounded_once_equals_fractions(path: Path) -> None:
    q, *_ = unpacked(path)
    rows = q[3:5]
    for dtype in ("float32", "float16", "bfloat16"):
        expected = dequantized(rows.format, rows.shape, rows.parts, dtype)  # a Fraction has no −0, so by value
        assert np.array_equal(rows.dequantize(dtype), expected, equal_nan=True)


def test_both_orders_of_groups_are_among_the_files() -> None:
    assert {"group_index" in unpacked(path)[0].parts for path in FILES} == {True, False}


def test_case_02_zero_points_out_of_range_are_read_as_each_writers_own_reader_does() -> None:
    auto = unpacked(next(p for p in FILES if label(p) == "autogptq/b4_g32_asym_zero_points"))[0].parts["zeros"]
    assert auto.max() == 16  # a stored 15 plus 1, not masked
    assert auto.min() >= 1
    model = unpacked(next(p for p in FILES if label(p) == "gptqmodel/v1_b4_g32_asym_zero_points"))[0].parts["zeros"]
    other = unpacked(next(p for p in FILES if label(p) == "gptqmodel/v2_b4_g32_asym_zero_points"))[0].parts["zeros"]
    assert (model == 0).sum() == 63  # as many as the producer had, every borrow undone
    assert np.array_equal(model, other)
