"""Converted and quantized checkpoints in their own ecosystem's hands: what the producer's code
reads is what we meant.

`make test-ecosystem` runs each test in the environment of its reader: mlx and mlx-lm,
compressed-tensors with transformers, nvidia-modelopt. benchmarks/ecosystem.log keeps the last run.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import halfbyte
from halfbyte.conversion import convert
from support.conversion_models import write_llama


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("codec", ["affine4:g64", "int4:g64", "mxfp4", "affine3:g32", "int8:g32"])
def test_mlx_reads_every_weight_as_it_is(tmp_path, codec):
    import mlx.core as mx

    folder, packed, _ = write_llama(tmp_path / "in", codec)
    convert(folder, tmp_path / "out", to="mlx")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    with halfbyte.open(tmp_path / "out") as written:
        for name in packed:
            own = {**{k: v for k, v in config.items() if not isinstance(v, dict | bool)}, **(config.get(name) or {})}
            biases = arrays.get(f"{name}.biases")
            theirs = mx.dequantize(
                arrays[f"{name}.weight"], arrays[f"{name}.scales"], biases, own["group_size"], own["bits"], mode=own["mode"]
            )
            ours = written[name].dequantize("float32" if biases is None else written[name].parts["scales"].dtype, "producer")
            assert np.array_equal(np.array(theirs.astype(mx.float32)), ours.astype(np.float32))
            assert np.array_equal(written[name].dequantize("float64"), packed[name].dequantize("float64"))


@pytest.mark.ecosystem("modelopt")
@pytest.mark.parametrize("codec", ["nvfp4", "mxfp4"])
def test_modelopt_decodes_what_is_written(tmp_path, codec):
    import modelopt.torch.quantization.qtensor as qtensor
    from safetensors.torch import load_file

    import torch

    folder, packed, _ = write_llama(tmp_path / "in", codec)
    convert(folder, tmp_path / "out", to="modelopt")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, q in packed.items():
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        if codec == "nvfp4":
            held = qtensor.NVFP4QTensor(torch.Size(q.shape), torch.float32, weight)
            theirs = held.dequantize(
                dtype=torch.float32, scale=scale, double_scale=tensors[f"{name}.weight_scale_2"], block_sizes={-1: 16}, fast=False
            )
        else:
            held = qtensor.MXFP4QTensor(torch.Size(q.shape), torch.float32, weight)
            theirs = held.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
        with halfbyte.open(tmp_path / "out") as written:
            assert np.array_equal(theirs.numpy(), written[name].dequantize("float32", "producer"))
