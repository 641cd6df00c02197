"""Files written by bitsandbytes: dequantize_4bit and int8_vectorwise_dequant bit for bit, the same
bytes back, the JSON state included.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.golden_layouts import (
    case_of,
    cases_of,
    check_bytes,
    check_checkpoint,
    check_exact,
    check_reference,
    checkpoints,
    config_of,
    ids,
    single,
    variants,
)

BNB = LAYOUTS["bitsandbytes"]
CASES = cases_of("bitsandbytes")


def unpacked(file: str) -> tuple[QTensor, dict[str, np.ndarray], dict, object]:
    case = case_of(file)
    config = dict(case.config)
    if "codes" in file:  # decoded from its parts: there is no state in the file
        config = {
            "shape": [16, 32],
            "quant_type": "nf4" if "nf4" in file else "fp4",
            "blocksize": int(case.metadata["group_size"]),
        }
    return BNB.unpack(case.tensors, config, "m"), case.tensors, config, case


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_its_decoder_is_reproduced_bit_for_bit(file: str) -> None:
    q, _, _, case = unpacked(file)
    assert q.origin == "bitsandbytes"
    for dtype, reference in variants(case):
        check_reference(q, reference, dtype)


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_bytes_and_headers(file: str) -> None:
    q, tensors, config, _ = unpacked(file)
    check_bytes(BNB, tensors, config, q)
    check_exact(q)


@pytest.mark.parametrize("folder", checkpoints(CASES))
def test_checkpoints(folder: str) -> None:
    assert check_checkpoint(folder, BNB, config_of(folder)) == 7
