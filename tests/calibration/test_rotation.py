"""Rotated models: the same logits before rounding, in the layouts' own readers too, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

import torch
from halfbyte.calibration.rotation import checked_rotation
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.conversion.rotated import Orthogonal, Rotated
from halfbyte.errors import UnsupportedError
from halfbyte.transformers import load_model
from support.calibration_models import drift, write_model


@pytest.mark.parametrize("width", [1, 12, 64, 96])
def test_rotations_are_orthogonal_and_differ_by_seed(width):
    q = Orthogonal.of(width, 0)(np.eye(width))
    assert np.allclose(q @ q.T, np.eye(width), atol=1e-12)
    x = np.random.default_rng(0).standard_normal((3, width))
    assert np.allclose(Orthogonal.of(width, 0)(x), x @ q, atol=1e-12)
    assert width == 1 or not np.array_equal(Orthogonal.of(width, 1)(x), x @ q)
    assert width != 64 or np.allclose(np.abs(q), 1 / 8, atol=1e-12)


KINDS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 96, "head_dim": 24}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}),
}  # fmt: skip


def model_in(folder, kind: str):
    name, more = KINDS[kind]
    model = write_model(folder, name, **more)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith("bias"):
                p.normal_()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_rotated_and_the_logits_stay(tmp_path, kind):
    dense = model_in(tmp_path / "in", kind)
    with open_checkpoint(tmp_path / "in") as checkpoint:
        view = checked_rotation(checkpoint, 3)
        changed = {key for key in view if key not in checkpoint or not np.array_equal(view[key], checkpoint[key])}
        same = {key.rpartition("layers.")[2].partition(".")[2] for key in set(view) - changed}
    assert same <= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"} | {
        f"{m}.bias" for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert "lm_head.weight" in view
    assert view.config["tie_word_embeddings"] is False
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "halfbyte:int8:g32", "--rotate"]) == 0
    assert drift(tmp_path / "out", dense) < 2e-3
    model, _ = load_model(tmp_path / "out")
    assert bool((model.model.norm.weight == 1).all())


@pytest.mark.parametrize("to", ["gptq:int4:g32", "mlx:affine4:g32"])
def test_layouts_hold_rotated_weights_and_outliers_cost_less(tmp_path, to):
    """A model whose weights have a few large columns: rotated, rounding moves its logits less."""
    model = write_model(tmp_path / "in", "llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for name, module in layer.named_modules():
                if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                    module.weight[:, 3::16] *= 8
    model.save_pretrained(tmp_path / "in")
    found = {}
    for name, more in (("plain", []), ("rotated", ["--rotate", "--seed", "1"])):
        out = tmp_path / name
        assert main(["quantize", str(tmp_path / "in"), str(out), "--to", to, *more]) == 0
        found[name] = drift(out, model)
    assert found["rotated"] < 0.8 * found["plain"]


def test_a_model_that_a_rotation_would_change_is_refused(tmp_path, monkeypatch):
    write_model(tmp_path / "gemma", "gemma3_text")
    refused = pytest.raises(UnsupportedError, match=r"--rotate for 'gemma3_text'; allowed: folders of llama, mistral")
    with open_checkpoint(tmp_path / "gemma") as checkpoint, refused:
        Rotated(checkpoint)
    write_model(tmp_path / "in", "llama")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "q8"), "--to", "mlx:affine8:g32"]) == 0
    with open_checkpoint(tmp_path / "q8") as checkpoint, pytest.raises(UnsupportedError, match="is packed"):
        Rotated(checkpoint)
    monkeypatch.setattr(Rotated, "_norm", lambda self, path: np.ones(64))
    refused = pytest.raises(UnsupportedError, match=r"--rotate would change what the model computes: logits by .* of the largest")
    with open_checkpoint(tmp_path / "in") as checkpoint, refused:
        checked_rotation(checkpoint)
