"""Tensor subclasses written by torchao: their dequantize bit for bit, the same bytes back."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.golden_layouts import case_of, cases_of, check_bytes, check_exact, check_reference, ids, single, variants

TORCHAO = LAYOUTS["torchao"]
CASES = cases_of("torchao")


def unpacked(file: str) -> tuple[QTensor, dict[str, np.ndarray], dict, object]:
    case = case_of(file)
    config: dict = {}
    if "int" in file:
        config["bits"] = int(case.metadata["bits"])
    if "fp6" in file:
        config["elem_dtype"] = "fp6_e2m3" if "e2m3" in file else "fp6_e3m2"
    return TORCHAO.unpack(case.tensors, config, "m"), case.tensors, config, case


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_dequantize_is_reproduced_bit_for_bit(file: str) -> None:
    q, _, _, case = unpacked(file)
    assert q.origin == "torchao"
    for dtype, reference in variants(case):
        check_reference(q, reference, dtype)


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_bytes_and_headers(file: str) -> None:
    q, tensors, config, _ = unpacked(file)
    check_bytes(TORCHAO, tensors, config, q)
    check_exact(q)
