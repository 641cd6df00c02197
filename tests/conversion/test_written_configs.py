"""The configs of written checkpoints, tied and untied: what their own ecosystem's loader needs to
know is in them.
"""

from __future__ import annotations

import json

import pytest

import halfbyte as hb
import torch
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from support.many_architectures import random_model
from transformers import AutoModelForCausalLM

TARGETS = ["compressed-tensors:int4:g32", "gptq:int4:g32", "awq-gemm:uint4:g32", "modelopt:nvfp4", "mlx:affine4:g32"]


def write(folder, target, tied):
    """A llama with a tied or an untied head, its linear layers packed."""
    model = random_model("llama", tie_word_embeddings=tied).to(torch.bfloat16)
    model.save_pretrained(folder / "in")
    with hb.open(folder / "in") as checkpoint:
        assert ("lm_head.weight" in checkpoint) is not tied
        quantize_checkpoint(checkpoint, folder / "out", recipe_of(target, []), "rtn")
    return folder / "out"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_a_dense_head_is_named(tmp_path, target, tied):
    """A tied head has no tensor; readers that replace every Linear by class must still be told to
    leave it.
    """
    config = json.loads((write(tmp_path, target, tied) / "config.json").read_text())
    quantization = config.get("quantization") or config["quantization_config"]
    kept = {
        "compressed-tensors": quantization.get("ignore"),
        "gptq": [] if quantization.get("lm_head") else ["lm_head"],  # its readers leave the head dense unless told
        "awq-gemm": quantization.get("modules_to_not_convert"), "modelopt": quantization.get("ignore"),
        "mlx": [k for k, v in quantization.items() if v is False],
    }[target.partition(":")[0]]  # fmt: skip
    assert [k.replace("\\", "").strip("^$") for k in kept] == ["lm_head"]


@pytest.mark.ecosystem("compressed-tensors")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("codec", ["int4:g32", "nvfp4", "mxfp4"])
def test_compressed_tensors_opens_it(tmp_path, codec, tied):
    from transformers import CompressedTensorsConfig

    folder = write(tmp_path, f"compressed-tensors:{codec}", tied)
    config = CompressedTensorsConfig(run_compressed=False)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, output_loading_info=True
    )
    assert not info["missing_keys"]
    with hb.open(folder) as checkpoint:
        for name in (k for k in checkpoint if checkpoint.info(k).quantized):
            theirs = model.get_submodule(name).weight.detach().float().numpy()
            assert (theirs == checkpoint[name].dequantize("bfloat16", "producer").astype("float32")).all(), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
