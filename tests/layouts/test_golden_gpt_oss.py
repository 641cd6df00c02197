"""gpt-oss blocks decoded by transformers' own loader: the same numbers (it transposes them), the
same bytes back.
"""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte import QTensor
from halfbyte.layouts import LAYOUTS
from support.golden_case import same_numbers
from support.golden_layouts import case_of, cases_of, check_bytes, check_exact, ids, single

GPT_OSS = LAYOUTS["gpt-oss"]
CASES = cases_of("transformers-mxfp4")


def unpacked(file: str) -> tuple[QTensor, dict[str, np.ndarray], np.ndarray]:
    """The tensor, the file's tensors, and the loader's answer in (experts, rows, k)."""
    case = case_of(file, "model.layers.0.mlp.experts.")
    tensors = {name.rpartition("_")[2]: t for name, t in case.tensors.items()}
    return GPT_OSS.unpack(tensors, {}, "experts.down_proj"), tensors, case.references[""].transpose(0, 2, 1)


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_the_loader_is_reproduced_bit_for_bit(file: str) -> None:
    q, _, reference = unpacked(file)
    assert q.origin == "transformers"
    for dtype in ("bfloat16", "float32"):  # every bfloat16 value of it is exact
        assert same_numbers(q.dequantize(dtype, "producer").astype(np.float32), np.ascontiguousarray(reference))


@pytest.mark.parametrize("file", single(CASES), ids=ids)
def test_bytes_and_headers(file: str) -> None:
    q, tensors, _ = unpacked(file)
    check_bytes(GPT_OSS, tensors, {}, q)
    check_exact(q)


def test_exact_and_loader_differ_in_byte_255_alone() -> None:
    q, _, _ = unpacked("transformers-mxfp4/gptoss_all_codes_all_exponents.safetensors")
    exact, loader = q.dequantize("float32"), q.dequantize("float32", "producer")
    top = np.repeat(q.parts["scales"] == 255, 32, axis=-1)
    assert np.isnan(exact[top]).all()
    assert not np.isnan(loader[top]).any()
    assert np.array_equal(exact[~top], loader[~top])
