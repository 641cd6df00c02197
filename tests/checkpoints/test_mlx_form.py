"""Convolutions, norms and multipliers of folders that mlx-lm wrote, in transformers' form and back."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.checkpoints.views.mlx_form import from_mlx, to_mlx

QWEN, FALCON = "qwen3_next", "falcon_h1"
PLAIN = {"model_type": "lfm2"}
MULTIPLIED = {"model_type": FALCON, "embedding_multiplier": 2.0, "ssm_multipliers": [1.0, 3.0], "key_multiplier": None}


def folder(path, config, tensors):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def tensors():
    """A recurrent layer in transformers' form."""
    rng = np.random.default_rng(0)
    at = "model.layers.0"
    norms = {f"{at}.{name}.weight": (8,) for name in ("input_layernorm", "self_attn.q_norm", "linear_attn.norm")}
    shapes = {
        f"{at}.linear_attn.conv1d.weight": (8, 1, 4),
        "model.norm.weight": (8,),
        **norms,
        f"{at}.mlp.up_proj.weight": (8, 1),
    }
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}


@pytest.mark.parametrize("kind", [QWEN, "qwen3_5_text", "lfm2", "mamba2"])
@pytest.mark.parametrize("nested", [False, True])
def test_from_mlx_is_the_inverse_of_to_mlx(tmp_path, kind, nested):
    config = {"model_type": "outer", "text_config": {"model_type": kind}} if nested else {"model_type": kind}
    given = tensors()
    theirs = {key: to_mlx(config, key, array) for key, array in given.items()}
    changed = {key for key in given if theirs[key].shape != given[key].shape or not np.array_equal(theirs[key], given[key])}
    norms = {"model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight"}
    assert changed == {"model.layers.0.linear_attn.conv1d.weight"} | (norms if kind.startswith("qwen") else set())
    with hb.open(folder(tmp_path / "mlx", config, theirs)) as checkpoint:
        seen = from_mlx(checkpoint)
        for key, array in given.items():
            want = array if key not in norms & changed else theirs[key] - np.float32(1)
            assert np.array_equal(seen[key], want), key
            info = seen.info(key)
            assert (info.shape, info.dtype, info.nbytes) == (array.shape, "float32", array.nbytes)


def test_a_folder_in_transformers_form_is_itself(tmp_path):
    with hb.open(folder(tmp_path / "hf", {"model_type": QWEN}, tensors())) as checkpoint:
        assert from_mlx(checkpoint) is checkpoint


@pytest.mark.parametrize("kind", ["llama", "conv_bert"])
def test_other_model_types_keep_their_tensors(tmp_path, kind):
    array = np.ones((8, 4, 1), np.float32)
    with hb.open(folder(tmp_path / "a", {"model_type": kind}, {"a.conv1d.weight": array})) as checkpoint:
        assert from_mlx(checkpoint) is checkpoint
    assert to_mlx({"model_type": kind}, "a.conv1d.weight", array.reshape(8, 1, 4)).shape == (8, 1, 4)


def test_a_norm_in_bfloat16_loses_nothing(tmp_path):
    """1 + w is stored; w is its exact difference to 1."""
    stored = np.array([0.5, 1.0, 1.0078125, 3.0, -2.0], ml_dtypes.bfloat16)
    given = {"model.norm.weight": stored, "model.layers.0.linear_attn.conv1d.weight": np.ones((8, 4, 1), ml_dtypes.bfloat16)}
    with hb.open(folder(tmp_path / "a", {"model_type": QWEN}, given)) as checkpoint:
        seen = from_mlx(checkpoint)
        assert np.array_equal(seen["model.norm.weight"], stored.astype(np.float64) - 1)
        assert seen["model.layers.0.linear_attn.conv1d.weight"].dtype == ml_dtypes.bfloat16


def test_the_multipliers_are_within_mlxs_weights(tmp_path):
    key, array = "model.layers.0.mamba.conv1d.weight", np.ones((8, 4, 1), np.float32)
    with hb.open(folder(tmp_path / "mlx", MULTIPLIED, {key: array})) as checkpoint:
        assert dict(from_mlx(checkpoint).config) == MULTIPLIED | {"embedding_multiplier": 1.0, "ssm_multipliers": [1.0, 1.0]}
    assert to_mlx(MULTIPLIED, key, array.reshape(8, 1, 4)).shape == (8, 1, 4)
    ones = MULTIPLIED | {"embedding_multiplier": 1.0, "ssm_multipliers": [1.0, 1.0]}
    assert to_mlx(ones, key, array.reshape(8, 1, 4)).shape == (8, 4, 1)


def test_a_tensor_is_there_under_mlxs_name_and_under_the_usual_one(tmp_path):
    mlx, usual = (f"model.layers.0.feed_forward.{word}.weight" for word in ("gate_proj", "w1"))
    given = {"model.layers.0.conv.conv.weight": np.ones((8, 3, 1), np.float32), mlx: np.ones((8, 8), np.float32)}
    with hb.open(folder(tmp_path / "mlx", {"model_type": "lfm2_moe"}, given)) as checkpoint:
        seen = from_mlx(checkpoint)
        assert usual in seen.keys()  # noqa: SIM118 a checkpoint's keys, not `in` itself
        assert [key in seen for key in (mlx, usual, "model.layers.1.feed_forward.w1.weight")] == [True, True, False]
        assert np.array_equal(seen[mlx], seen[usual])
