"""Files written by HQQ: Quantizer.dequantize bit for bit, the same bytes back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.golden_layouts import case_of, cases_of, check_bytes, check_exact, check_reference, ids, single, variants

HQQ = LAYOUTS["hqq"]
CASES = cases_of("hqq")


def unpacked(file: str) -> tuple[QTensor, dict[str, np.ndarray], dict, object]:
    case = case_of(file)
    config = {**case.config["quant_config"]["weight_quant_params"], "shape": json.loads(case.metadata["shape"])}
    return HQQ.unpack(case.tensors, config, "m"), case.tensors, config, case


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_its_decoder_is_reproduced_bit_for_bit(file: str) -> None:
    q, _, _, case = unpacked(file)
    assert q.origin == "hqq"
    for dtype, reference in variants(case):
        check_reference(q, reference, dtype)
        check_reference(q, reference, "float32")  # it computes in the dtype of its scales, whatever is asked


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_bytes_and_headers(file: str) -> None:
    q, tensors, config, _ = unpacked(file)
    check_bytes(HQQ, tensors, config, q)
    check_exact(q)


def test_every_packing_and_both_axes_are_among_the_files() -> None:
    tensors = [unpacked(f)[0] for f in single(CASES)]
    assert {q.details["packing"] for q in tensors} == {"8bit_u8", "4bit_u8", "3bit_32", "2bit_u8"}
    assert {q.format.grouping for q in tensors} == {"row", "strided"}


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_the_state_of_a_weight_of_another_producer_is_hqqs(file: str) -> None:
    """What HQQ's own module would save of the same numbers: flags, widths and names."""
    q, _, _, case = unpacked(file)
    written = HQQ.pack(QTensor(q.format, q.shape, q.parts), {})
    own = case.config["quant_config"]["weight_quant_params"]
    flags = {name: int(written[name]) for name in ("nbits", "group_size", "axis", "channel_wise")}
    assert flags == {name: int(own[name]) for name in flags}
    assert bytes(written["packing"]).decode() == q.details["packing"]
    assert written["shape"].tolist() == list(q.shape)
