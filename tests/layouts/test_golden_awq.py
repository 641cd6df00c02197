"""Files written by AutoAWQ and by llm-awq's packing functions: their own weights, bit for bit, and
the same bytes when written back.

gemv, gemv_fast and marlin have no decoder outside CUDA; their reference is the weight that was
packed, and it is met for equality too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import QTensor
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.layouts import LAYOUTS, Layout
from halfbyte.layouts.awq.gemm import AWQConfig
from support.fractions_reference import dequantized
from support.golden_case import files, label, read_case, same_numbers, same_tensors
from support.layout_tensors import headers

FILES = files("autoawq", "llm-awq")
CASES = [f"{p.parent.name}/{p.name}" for p in FILES]
"""What this file covers, for the test that no golden case is left out."""


def unpacked(path: Path) -> tuple[Layout, QTensor, dict[str, np.ndarray], dict, dict[str, np.ndarray]]:
    case = read_case(path)
    (layout,) = (la for la in map(LAYOUTS.get, AWQConfig(case.config, "here").layouts) if la is not None)
    assert layout.matches(case.tensors)
    tensors = {s: case.tensors[s] for s in layout.claims(case.tensors)}
    return layout, layout.unpack(tensors, case.config, "down_proj"), tensors, case.config, case.references


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_producers_weight_is_reproduced_bit_for_bit(path: Path) -> None:
    _, q, _, _, references = unpacked(path)
    dtype = q.parts["scales"].dtype.name
    got = q.dequantize(dtype, "producer").astype(np.float32)
    if path.stem.startswith("gemm"):
        assert same_numbers(got, references[""])
        assert same_numbers(q.dequantize("float32", "producer"), references["f32"])
    else:
        # The weight before packing may hold −0, for which an integer code has no sign.
        assert np.array_equal(got, references[""])


@pytest.mark.parametrize("path", FILES, ids=label)
def test_written_back_the_file_has_the_same_bytes(path: Path) -> None:
    layout, q, tensors, config, _ = unpacked(path)
    assert same_tensors(layout.pack(q, config), tensors)
    plain = layout.pack(QTensor(q.format, q.shape, q.parts), layout.config(q))
    assert same_tensors(plain, {"qzeros" if s == "scaled_zeros" else s: t for s, t in tensors.items()})  # nothing was remembered
    assert layout.unpack(layout.pack(q, config), config) == q


@pytest.mark.parametrize("path", FILES, ids=label)
def test_headers_alone_give_format_and_shape(path: Path) -> None:
    layout, q, tensors, config, _ = unpacked(path)
    assert layout.describe(headers(tensors), config) == (q.format, q.shape)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_exact_value_rounded_once_equals_fractions(path: Path) -> None:
    q = unpacked(path)[1]
    rows = q[5:7]
    for dtype in ("float32", "float16", "bfloat16"):
        expected = dequantized(rows.format, rows.shape, rows.parts, dtype)  # a Fraction has no −0, so by value
        assert np.array_equal(rows.dequantize(dtype), expected, equal_nan=True)


def test_every_version_is_among_the_files() -> None:
    assert {unpacked(p)[0].name for p in FILES} == {"awq-gemm", "awq-gemv", "awq-gemv_fast", "awq-marlin"}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "llm-awq"], ids=label)
def test_a_file_of_llm_awq_opens_and_is_converted_exactly(path: Path, tmp_path: Path) -> None:
    """As a user has it: the module's tensors in one file beside the config."""
    case = read_case(path)
    with SafetensorsWriter(tmp_path / "in.safetensors") as file:
        for suffix, tensor in case.tensors.items():
            file.add(f"model.layers.0.mlp.down_proj.{suffix}", tensor)
    hb.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="gptq", config=case.config)
    for file, config in (("in.safetensors", case.config), ("out.safetensors", None)):
        with hb.open(tmp_path / file, config=config) as checkpoint:
            assert [f for f in checkpoint.findings() if f.severity == "error"] == []
            weight = checkpoint["model.layers.0.mlp.down_proj"]
            assert np.array_equal(
                weight.dequantize(weight.parts["scales"].dtype.name, "producer").astype(np.float32), case.references[""]
            )
