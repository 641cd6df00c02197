"""Models of which mlx-lm has other names or forms of tensors than transformers: a folder in MLX's
layout runs, and becomes a dense folder that transformers loads.
"""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from halfbyte.cli import main
from support.gguf_families import family_model, logits, write_family
from support.quiet import quiet
from transformers import AutoModelForCausalLM

NAMES = {
    "falcon-h1": "", "gemma4": "experts.switch_glu.up_proj", "kimi-linear": "mlp.switch_mlp.up_proj", "lfm2": "",
    "lfm2moe": "feed_forward.gate_proj", "nemotron_h_moe": "mixer.switch_mlp.fc1", "qwen35": "", "qwen3next": "",
}  # fmt: skip
"""Cases, and a name of mlx-lm's."""


@pytest.mark.parametrize("name", NAMES)
def test_mlxs_names_and_forms_there_and_back(tmp_path, name):
    gguf = write_family(tmp_path / "model.gguf", name, family_model(name))
    packed, mlx, dense = (tmp_path / n for n in ("packed.gguf", "mlx", "dense"))
    assert main(["quantize", str(gguf), str(packed), "--to", "gguf:q8_0"]) == 0
    assert main(["convert", str(packed), str(mlx), "--to", "mlx"]) == 0
    with halfbyte.open(mlx) as checkpoint:
        assert any(NAMES[name] in key for key in checkpoint)
        convolutions = [i for i in checkpoint.infos() if i.key.endswith(("conv.weight", "conv1d.weight")) and len(i.shape) == 3]
    assert name in ("gemma4", "kimi-linear") or (convolutions and all(i.shape[2] == 1 < i.shape[1] for i in convolutions))
    assert main(["dequantize", str(mlx), str(dense), "--dtype", "float32"]) == 0
    ours = logits(halfbyte.load_model(packed)[0]).numpy()
    with quiet():
        loaded = AutoModelForCausalLM.from_pretrained(dense)
    # Packed and dense products are summed in other orders, and 1 + w of a shifted norm is rounded.
    for model in (halfbyte.load_model(mlx)[0], loaded):
        assert np.square(logits(model).numpy() - ours).mean() / np.square(ours).mean() < 1e-9
