"""MatMulNBits initializers written by onnxruntime: its CPU session on the identity matrix bit for
bit, the same bytes back.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.golden_layouts import case_of, cases_of, check_bytes, check_exact, check_reference, ids, single, variants

ONNX = LAYOUTS["onnx"]
CASES = cases_of("onnxruntime")


def unpacked(file: str) -> tuple[QTensor, dict[str, np.ndarray], dict, object]:
    case = case_of(file)
    config = json.loads(case.metadata["node_attributes"])
    return ONNX.unpack(case.tensors, config, "m"), case.tensors, config, case


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_its_session_is_reproduced_bit_for_bit(file: str) -> None:
    q, _, _, case = unpacked(file)
    assert q.origin == "onnxruntime"
    for dtype, reference in variants(case):
        check_reference(q, reference, dtype)


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_bytes_and_headers(file: str) -> None:
    q, tensors, config, _ = unpacked(file)
    check_bytes(ONNX, tensors, config, q)
    check_exact(q)


def test_a_partial_last_block_and_both_kinds_of_zero_are_among_the_files() -> None:
    tensors = [unpacked(f)[0] for f in single(CASES)]
    assert {q.shape[1] % q.format.group_size == 0 for q in tensors} == {True, False}
    assert {q.format.zero for q in tensors} == {"none", "int"}
    assert {q.format.bits for q in tensors} == {2, 4, 8}
