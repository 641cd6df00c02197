"""Numbers of a weight that its config gives wrongly: found from the shapes and the model's width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import CheckpointError
from support.safetensors_bytes import folder, gptq_weight, mlx_weight, under

K, N = 2048, 32
MODULE = "model.layers.0.self_attn.q_proj"
MODEL = {"model_type": "llama", "hidden_size": K, "num_attention_heads": 1, "head_dim": N, "num_key_value_heads": 1}


def opened(path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], **model: Any) -> hb.Checkpoint:
    checkpoint = folder(path / "m", {"model.safetensors": under(MODULE, tensors)})
    (checkpoint / "config.json").write_text(json.dumps({**MODEL, **model, **config}))
    return hb.open(checkpoint)


def packed(method: str, group: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors of 4 bits in groups of `group`, and a config of groups of 48, which 2,048 inputs do
    not have.
    """
    groups = K // group
    if method == "gptq":
        return gptq_weight(N, K, 4, group, 1), {"quant_method": "gptq", "bits": 4, "group_size": 48}
    if method == "awq":
        tensors = {"qweight": np.zeros((K, N // 8), np.int32), "qzeros": np.zeros((groups, N // 8), np.int32)}
        return tensors | {"scales": np.ones((groups, N), np.float16)}, {"quant_method": "awq", "bits": 4, "group_size": 48}
    tensors = {"weight_packed": np.zeros((N, K // 8), np.int32), "weight_scale": np.ones((N, groups), np.float16)}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 48, "symmetric": True}
    scheme = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    return tensors | {"weight_shape": np.array([N, K])}, {"quant_method": "compressed-tensors", **scheme}


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512, 1024, 2048])
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_every_group_size_is_found_from_the_shapes(method, group, tmp_path):
    tensors, config = packed(method, group)
    checkpoint = opened(tmp_path, tensors, {"quantization_config": config})
    info = checkpoint.info(MODULE)
    assert info.shape == (N, K)
    assert (info.format.bits, info.format.groups(K)) == (4, K // group)
    (found,) = [f for f in checkpoint.findings() if f.code == "numbers-inferred"]
    assert found.severity == "warning"
    assert found.message == (
        f"the config's numbers do not fit; its shapes and k = {K} leave {info.format} only, which it is read as"
    )


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_every_width_and_group_of_mlx_is_found_from_the_shapes(bits, group, tmp_path):
    checkpoint = opened(tmp_path, mlx_weight(N, K, bits, group), {"quantization": {"bits": 4, "group_size": 48}})
    info = checkpoint.info(MODULE)
    assert (info.format.name, info.format.group_size, info.shape) == (f"affine{bits}", group, (N, K))
    assert [f.code for f in checkpoint.findings()] == ["numbers-inferred"]


@pytest.mark.parametrize(("mode", "bits", "size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_every_mode_of_mlx_is_found_from_the_shapes(mode, bits, size, tmp_path):
    tensors = {"weight": np.zeros((N, K * bits // 32), np.uint32), "scales": np.full((N, K // size), 0x38, np.uint8)}
    checkpoint = opened(tmp_path, tensors, {"quantization": {"bits": 3, "group_size": 48}})
    info = checkpoint.info(MODULE)
    assert (info.format.name.removesuffix("_e4m3"), info.format.group_size, info.shape) == (mode, size, (N, K))


def test_without_the_models_width_several_readings_are_refused_and_listed(tmp_path):
    checkpoint = opened(tmp_path, mlx_weight(N, K, 4, 64), {"quantization": {"bits": 4, "group_size": 48}}, hidden_size=None)
    with pytest.raises(CheckpointError) as caught:
        checkpoint[MODULE]
    text = str(caught.value)
    assert f"affine4:g64 (k = {K}), affine8:g32 (k = {K // 2}); which one, nothing in the checkpoint says" in text
    assert "affine2:g128 (k = 4096)" in text
    assert text.endswith("Pass config= with bits and group_size")


def test_a_width_that_no_reading_has_is_named(tmp_path):
    checkpoint = opened(tmp_path, mlx_weight(N, K, 4, 64), {"quantization": {"bits": 4, "group_size": 48}}, hidden_size=1536)
    with pytest.raises(CheckpointError, match=r"; the model's config makes k 1536\. Pass config= with bits and group_size"):
        checkpoint[MODULE]
