"""mlx-lm runs the folders that a GGUF of every architecture becomes, dense and in MLX's layout: its
logits are ours. Which model types it knows is asked of it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte.cli import main
from support.gguf_families import FAMILIES, IDS, architecture, family_model, logits, write_family

OWN = {
    "bailingmoe3": ("dense mlx", "missing 5 required positional arguments"),
    "bitnet": ("dense mlx", "parameters"),
    "dbrx": ("mlx", "switch_mlp"),
    "deepseek2:v2": ("dense mlx", "'NoneType' object has no attribute 'get'"),
    "deepseek2:whole": ("mlx", "needs to be divisible by the quantization group size"),
    "falcon-h1": ("mlx", "quantized_matmul"),
    "gemma4": ("mlx", "switch_mlp"),
    "glm-dsa": ("dense mlx", "indexer"),
    "gpt2": ("dense mlx", "c_fc|number of bits"),
    "gptneox": ("dense mlx", "lm_head|group size"),
    "granitemoe": ("dense mlx", "router"),
    "granitehybrid": ("dense mlx", "Unknown layer type: linear_attention"),
    "kimi-linear": ("dense mlx", "head_dim"),
    "laguna:element": ("dense mlx", "g_proj"),
    "lfm2moe": ("mlx", "feed_forward"),
    "llama4": ("dense mlx", "feed_forward"),
    "mamba2": ("dense mlx", "missing 4 required positional arguments"),
    "minicpm3": ("dense mlx", "'NoneType' object has no attribute 'get'"),
    "nemotron_h": ("dense mlx", "mixer"),
    "nemotron_h_moe": ("dense mlx", "mixer"),
    "nemotron_h_moe:latent": ("dense mlx", "mixer"),
    "olmo": ("dense mlx", "^1$"),
    "qwen3next": ("mlx", "conv1d"),
}
"""Cases of model types that mlx-lm knows whose folders it does not load, in which of the two forms,
and its words. Its BitNet is packed ternary, its OLMo ends the program without another package, its
GPT-2 has layers four times as wide as the model, DeepSeek 2 and MiniCPM3 have a stretched rotation,
GLM 5 an indexer in every layer, Laguna a gate a head; the others are published under names of
layers or fields that transformers does not have, and the folders neither.
"""
DIFFERENT = ("chatglm", "ernie4_5-moe", "falcon-h1", "jamba", "phi3:long", "phi3:short")
"""Cases that mlx-lm loads and computes otherwise: it rotates whole heads of GLM 4, chooses ERNIE's
experts without the router's bias. The folders are right by transformers (test_gguf_to_folder.py).
"""
BOUND = 1e-6
"""Normalized mean squared error: GELU by another formula makes 2e-8."""


def mlx_lm_logits(folder: Path) -> np.ndarray:
    import mlx.core as mx
    import mlx_lm.utils

    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(np.array([IDS]))).astype(mx.float32))


def known(model_type: str) -> bool:
    """Whether mlx-lm has a class of this model type."""
    import mlx_lm.utils

    name = mlx_lm.utils.MODEL_REMAPPING.get(model_type, model_type)
    return find_spec(f"mlx_lm.models.{name}") is not None


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("name", [name for name in FAMILIES if architecture(name).task == "text"])
def test_mlx_lm_runs_what_a_file_becomes(tmp_path, name):
    gguf = write_family(tmp_path / "model.gguf", name, family_model(name))
    packed = tmp_path / "packed.gguf"
    assert main(["quantize", str(gguf), str(packed), "--to", "gguf:q8_0"]) == 0
    assert main(["dequantize", str(packed), str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    assert main(["convert", str(packed), str(tmp_path / "mlx"), "--to", "mlx"]) == 0
    ours = logits(halfbyte.load_model(packed)[0]).numpy()
    for kind in ("dense", "mlx"):
        if not known(architecture(name).model_type):
            with pytest.raises(ValueError, match="not supported"):
                mlx_lm_logits(tmp_path / kind)
        elif kind in OWN.get(name, ("", ""))[0].split():
            with pytest.raises((ValueError, TypeError, AttributeError, SystemExit), match=OWN[name][1]):
                mlx_lm_logits(tmp_path / kind)
        else:
            theirs = mlx_lm_logits(tmp_path / kind)
            error = np.square(theirs - ours).mean() / np.square(ours).mean()
            assert (error < BOUND) != (name in DIFFERENT), error
