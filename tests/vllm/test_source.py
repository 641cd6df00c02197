"""What the plug-in hands vLLM's models besides packed weights, of files that their producers wrote:
the tensors of a dense checkpoint of the same model, under its names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.vllm.source import Source

KEPT = sorted(path.parent for path in (Path(__file__).parents[1] / "data" / "models").glob("*/*/config.json"))
SCALED = "modelopt/mistral-int4-awq"
"""Its inputs are scaled, which the plug-in refuses."""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", [path for path in KEPT if name_of(path) != SCALED], ids=name_of)
def test_the_rest_is_that_of_a_dense_checkpoint(path, tmp_path):
    """Scales of activations and caches are not handed over; gpt-oss's biases of gate and up, one
    by one, are joined as transformers has them. GPTQ writes biases of zeros, which vLLM's models
    pass over.
    """
    source = Source(path)
    packed = [*source.matrices.values(), *(key for keys in source.experts.values() for key in keys.values())]
    with hb.open(path) as checkpoint:
        dequantize_checkpoint(checkpoint, tmp_path / "dense", dtype="float32")
    with hb.open(tmp_path / "dense") as dense:
        handed = {name: value.float().numpy() for name, value in source.dense(packed)}
        used = {name for name, value in handed.items() if not (name.endswith(".bias") and not value.any())}
        assert used <= set(dense)
        assert {name for name in dense if name.endswith(("norm.weight", "_bias", "sinks"))} <= used
        for name in used:
            assert np.array_equal(handed[name], np.asarray(dense[name]).astype(np.float32)), name


def test_inputs_that_are_scaled_are_refused():
    (path,) = (path for path in KEPT if name_of(path) == SCALED)
    with pytest.raises(UnsupportedError, match="pre_quant_scale multiplies the inputs"):
        Source(path)


def test_a_bias_that_is_missing_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    (path,) = (path for path in KEPT if name_of(path) == "mlx/gpt_oss-nvfp4")
    for file in path.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.up_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.up_proj\.bias: missing"):
        Source(tmp_path)
