"""ModelOpt's stacks of experts: a bijection with the canonical order, refusals, and a checkpoint
that has one.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import LayoutError, UnsupportedError
from halfbyte.layouts import LAYOUTS
from support.safetensors_bytes import folder

LAYOUT = LAYOUTS["modelopt-stack"]


def stack(e: int, n: int, blocks: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 0x7F, (e, blocks, n), dtype=np.uint8)
    return {
        "": rng.integers(0, 256, (e, 8 * blocks, n), dtype=np.uint8), "weight_scale": scales.view(ml_dtypes.float8_e4m3fn),
        "weight_scale_2": np.float32(0.25).reshape(()),
    }  # fmt: skip


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_there_and_back(e, n, blocks):
    tensors = stack(e, n, blocks, seed=n)
    q = LAYOUT.unpack(tensors, {}, "m")
    q.validate()
    assert q.shape == (e, n, 16 * blocks)
    again = LAYOUT.pack(q, {})
    assert {s: (a.dtype, a.shape, a.tobytes()) for s, a in again.items()} == {
        s: (a.dtype, a.shape, a.tobytes()) for s, a in tensors.items()
    }
    assert LAYOUT.describe(again, {}, "m") == (q.format, q.shape)


def test_one_value_by_hand():
    """Code 5 (3.0) at input 3 of output 1, scale 2, factor 1/4: 1.5."""
    tensors = stack(1, 2, 1)
    tensors[""][:] = 0
    tensors[""][0, 1, 1] = 0x50
    tensors["weight_scale"] = np.full((1, 1, 2), 2, ml_dtypes.float8_e4m3fn)
    want = np.zeros((1, 2, 16))
    want[0, 1, 3] = 1.5
    assert np.array_equal(LAYOUT.unpack(tensors, {}, "m").dequantize("float64"), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("weight_scale_2"), r"m_weight_scale_2 is missing; NVFP4 stacks have one factor"),
        (lambda t: t.pop("weight_scale"), r"wanted the stack, its _weight_scale and its _weight_scale_2"),
        (lambda t: t.update({"": t[""][0]}), r"wanted uint8 \[e, k/2, n\]"),
        (lambda t: t.update({"": t[""][:, :-1]}), r"wanted scales \[2, 1, 3\] and one factor"),
        (lambda t: t.update(weight_scale=t["weight_scale"].view(np.uint8)), r"E4M3 \[e, k/16, n\]"),
        (lambda t: t.update(weight_scale_2=np.ones(2, np.float32)), r"one factor"),
    ],
)
def test_tensors_that_do_not_fit(change, message):
    tensors = stack(2, 3, 2)
    change(tensors)
    with pytest.raises(LayoutError, match=message):
        LAYOUT.unpack(tensors, {}, "m")


def test_what_it_cannot_hold():
    weight = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)
    with pytest.raises(LayoutError, match=r"stacks \(e, n, k\) in nvfp4:g16"):
        LAYOUT.pack(hb.quantize(weight, "mxfp4"), {})
    with pytest.raises(LayoutError, match=r"one factor for the stack, and these experts have several"):
        LAYOUT.pack(hb.quantize(weight * np.array([1, 100, 1])[:2, None, None].astype(np.float32), "nvfp4"), {})


def test_a_checkpoint_with_a_stack_and_a_plain_parameter_of_such_a_name(tmp_path):
    tensors = stack(2, 4, 2)
    with SafetensorsWriter(tmp_path / "model.safetensors") as out:
        for suffix, array in tensors.items():
            out.add("experts.down_proj" + (f"_{suffix}" if suffix else ""), array)
        out.add("experts.down_proj_bias", np.ones((2, 4), np.float32))
        out.add("experts.down_proj_input_scale", np.float32(1).reshape(()))
        out.add("experts.up_proj", np.ones((2, 4, 8), np.float32))
    with hb.open(tmp_path / "model.safetensors") as ckpt:
        kinds = {key: ckpt.info(key).quantized for key in ckpt}
        q = ckpt["experts.down_proj"]
    assert kinds == {
        "experts.down_proj": True,
        "experts.down_proj_bias": False,
        "experts.down_proj_input_scale": False,
        "experts.up_proj": False,
    }
    assert np.array_equal(q.dequantize(), LAYOUT.unpack(tensors, {}).dequantize())


@pytest.mark.parametrize(
    ("kind", "codes", "scales"),
    [
        ("FP8", np.zeros((2, 32, 48), ml_dtypes.float8_e4m3fn), np.zeros((), np.float32)),
        ("MXFP8", np.zeros((2, 32, 64), ml_dtypes.float8_e4m3fn), np.zeros((2, 32, 2), np.uint8)),
        ("MXFP4", np.zeros((2, 32, 32), np.uint8), np.zeros((2, 32, 2), np.uint8)),
    ],
)
def test_stacks_of_other_formats_are_refused_by_name(kind: str, codes: np.ndarray, scales: np.ndarray, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": kind, "producer": {"name": "modelopt"}}}
    path = folder(tmp_path, {"model.safetensors": {name: codes, f"{name}_weight_scale": scales}}, config)
    with hb.open(path) as ckpt, pytest.raises(UnsupportedError, match=f"{name}: .* is ModelOpt's {kind} stack of experts"):
        dequantize_checkpoint(ckpt, tmp_path / "out")


def test_nvfp4_in_blocks_of_32_is_refused_by_name() -> None:
    tensors = {
        "weight": np.zeros((4, 64), np.uint8), "weight_scale": np.zeros((4, 4), ml_dtypes.float8_e4m3fn),
        "weight_scale_2": np.ones((), np.float32),
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"m.weight_scale has 4 scales for 128 inputs: NVFP4 in blocks of 32"):
        LAYOUTS["modelopt"].describe(tensors, {}, "m")


def test_a_stack_of_no_experts_has_the_factor_1():
    q = LAYOUT.unpack(stack(2, 3, 1), {}, "m")
    parts = {name: part[:0] for name, part in q.parts.items()}
    factor = LAYOUT.pack(hb.QTensor(q.format, (0, *q.shape[1:]), parts), {})["weight_scale_2"]
    assert (factor.dtype, factor.shape, float(factor)) == (np.float32, (), 1.0)
