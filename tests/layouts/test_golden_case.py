"""The comparisons the golden tests rely on fail where they must."""

from __future__ import annotations

import numpy as np

from support.golden_case import files, label, read_case, same_numbers, same_tensors


def test_same_numbers_sees_one_bit_a_sign_of_zero_a_dtype_and_a_shape() -> None:
    a = np.array([[1.0, 0.0, np.nan]], np.float32)
    assert same_numbers(a, a.copy())
    assert not same_numbers(a, np.nextafter(a, np.float32(9)))
    assert not same_numbers(a, np.array([[1.0, -0.0, np.nan]], np.float32))
    assert not same_numbers(a, np.array([[1.0, 0.0, 0.0]], np.float32))
    assert not same_numbers(a, a.astype(np.float16))
    assert not same_numbers(a, a.T)


def test_same_tensors_sees_a_name_a_byte_and_a_nan_payload() -> None:
    a = {"x": np.array([np.nan], np.float32)}
    assert same_tensors(a, {"x": a["x"].copy()})
    assert not same_tensors(a, {"y": a["x"]})
    assert not same_tensors(a, {"x": (a["x"].view(np.uint32) ^ np.uint32(1)).view(np.float32)})
    assert not same_tensors(a, {"x": a["x"].astype(np.float64)})


def test_a_case_has_its_tensors_apart_from_its_answers() -> None:
    path = files("autogptq")[0]
    case = read_case(path)
    assert label(path) == "autogptq/b2_g64_asym"
    assert case.tensors.keys() == {"qweight", "qzeros", "scales", "g_idx", "bias"}
    assert case.references.keys() == {"", "f32", "cuda_old"}
    assert case.originals.keys() == {""}
    assert case.config["bits"] == 2
