"""mlx-lm runs the folders that a GGUF of every architecture becomes, dense and in MLX's layout: its
logits are ours. Which model types it knows is asked of it.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.checkpoints.engines import predictions
from halfbyte.cli import main
from halfbyte.gguf_models.view import with_older_names
from support.gguf_families import FAMILIES, IDS, architecture, family_model, logits, write_family
from transformers import AutoModelForCausalLM

REFUSED = {
    "bitnet": ("dense mlx", "parameters"),
    "dbrx": ("mlx", "switch_mlp"),
    "deepseek2:v2": ("dense mlx", "'NoneType' object has no attribute 'get'"),
    "deepseek2:whole": ("mlx", "needs to be divisible by the quantization group size"),
    "glm-dsa": ("dense mlx", "indexer"),
    "gpt2": ("dense mlx", "c_fc|number of bits"),
    "gptneox": ("dense mlx", "dense_h_to_4h|group size"),
    "laguna:element": ("dense mlx", "g_proj"),
    "llama4": ("dense mlx", "feed_forward"),
    "minicpm3": ("dense mlx", "'NoneType' object has no attribute 'get'"),
    "olmo": ("dense mlx", "^1$"),
}
"""Cases of model types that mlx-lm knows whose folders it does not load, in which of the two forms,
and its words. It loads the published folders of such models no more: dense BitNets and OLMos,
rotations that are not stretched, feed-forward layers of another width, indexers that layers share.
"""
BOUND = 1e-6
"""Normalized mean squared error: GELU by another formula makes 2e-8."""


def mlx_lm_logits(folder: Path) -> np.ndarray:
    import mlx.core as mx
    import mlx_lm.utils

    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(np.array([IDS]))).astype(mx.float32))


def verdict(folder: Path) -> str:
    """What `inspect --for mlx` predicts."""
    with halfbyte.open(folder) as checkpoint:
        return predictions(checkpoint, "mlx==0.32.2")[0].verdict


YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64}
CAUSES: dict[str, dict[str, Any]] = {
    "chatglm": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 1.0}},
    "falcon-h1": {"mamba_n_groups": 1},
    "deepseek2:v2": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "glm-dsa": {"indexer_types": ["full"] * 3},
    "gptneox": {"intermediate_size": 256},
    "granitehybrid": {"mamba_n_groups": 1},
    "jamba": {"num_experts_per_tok": 4},
    "mamba2": {"n_groups": 1},
    "phi3:long": {"rope_parameters": {"attention_factor": (1 + log(1024 / 8) / log(8)) ** 0.5, "short_factor": "long_factor"}},
}
"""What makes mlx-lm's logits others or none, undone: they are the same."""


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("name", CAUSES)
def test_without_its_cause_the_difference_is_gone(tmp_path, name):
    config = family_model(name).config
    for key, value in CAUSES[name].items():
        if isinstance(value, dict):
            value = {k: config.rope_parameters.get(v, v) if isinstance(v, str) else v for k, v in value.items()}
            value = {**config.rope_parameters, **value}
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(with_older_names(stated)))
    theirs, ours = mlx_lm_logits(tmp_path), logits(model).numpy()
    assert np.square(theirs - ours).mean() / np.square(ours).mean() < BOUND
    assert verdict(tmp_path) == "fine"


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
            assert verdict(tmp_path / kind) == "refused"
            with pytest.raises(ValueError, match="not supported"):
                mlx_lm_logits(tmp_path / kind)
        elif kind in REFUSED.get(name, ("", ""))[0].split():
            assert verdict(tmp_path / kind) == "refused"
            with pytest.raises((ValueError, TypeError, AttributeError, SystemExit), match=REFUSED[name][1]):
                mlx_lm_logits(tmp_path / kind)
        else:
            theirs = mlx_lm_logits(tmp_path / kind)
            error = np.square(theirs - ours).mean() / np.square(ours).mean()
            assert ("fine" if error < BOUND else "wrong") == verdict(tmp_path / kind), error
