"""Files written by ModelOpt: its QTensor.dequantize bit for bit, the same bytes back."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.golden_case import same_numbers
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

MODELOPT = LAYOUTS["modelopt"]
CASES = cases_of("modelopt")
NO_DECODER = "modelopt/int4_awq_export_g128_bf16.safetensors"


def unpacked(file: str) -> tuple[QTensor, dict[str, np.ndarray], dict, object]:
    case = case_of(file)
    config = dict(case.config.get("quantization", {}))
    if "nf4" in file:  # its codes are flat and the file has no shape
        config["shape"] = list(case.references[""].shape)
    return MODELOPT.unpack(case.tensors, config, "m"), case.tensors, config, case


@pytest.mark.parametrize("file", [f for f in single(CASES) if f != NO_DECODER], ids=ids)
def test_its_decoder_is_reproduced_bit_for_bit(file: str) -> None:
    q, _, _, case = unpacked(file)
    assert q.origin == "modelopt"
    assert case.references
    for dtype, reference in variants(case):
        check_reference(q, reference, dtype)


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_bytes_and_headers(file: str) -> None:
    q, tensors, config, _ = unpacked(file)
    check_bytes(MODELOPT, tensors, config, q)
    check_exact(q)


def test_the_int4_export_holds_the_weights_it_was_made_from() -> None:
    # No decoder reads this file but kernels: its codes are round(w / s), clamped, of the original
    # beside it.
    q, _, _, case = unpacked(NO_DECODER)
    scales = np.repeat(q.parts["scales"].astype(np.float32), 128, axis=1)
    weight = case.originals[""].astype(np.float32)
    codes = np.clip(np.rint((weight / scales).astype(case.originals[""].dtype).astype(np.float32)), -8, 7)
    assert same_numbers(q.dequantize("float32", "producer"), (codes * scales).astype(np.float32) + np.float32(0))


@pytest.mark.parametrize("folder", checkpoints(CASES))
def test_checkpoints(folder: str) -> None:
    assert check_checkpoint(folder, MODELOPT, config_of(folder)) == 7
