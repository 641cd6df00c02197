"""Modules of architectures beyond the table, compared with transformers' own model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from safetensors.torch import save_file

import halfbyte as hb
import torch
from halfbyte.checkpoints import meta_model
from halfbyte.checkpoints.architecture import in_table
from halfbyte.errors import CheckpointError
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 32, "tie_word_embeddings": False, "n_embd": 32, "n_layer": 2, "n_head": 2,
}  # fmt: skip


def folder(path: Path, kind: str, drop: str = "", **changes: object) -> Path:
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    tensors = {n: p.detach().clone() for n, p in model.named_parameters() if not drop or drop not in n}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"model_type": kind}, default=str))
    return path


@pytest.mark.parametrize("kind", ["olmo2", "stablelm", "gpt2", "starcoder2"])
def test_a_whole_checkpoint_of_another_architecture_has_no_problem(kind, tmp_path):
    with hb.open(folder(tmp_path, kind)) as checkpoint:
        assert not in_table(checkpoint.config)
        assert checkpoint.ledger().problems == ()
        assert checkpoint.ledger().modules == ""


@pytest.mark.parametrize(
    ("kind", "drop", "missing"),
    [
        ("olmo2", "layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        ("olmo2", "layers.0.self_attn.q_norm", "model.layers.0.self_attn.q_norm"),
        ("gpt2", "h.1.attn.c_proj.bias", "transformer.h.1.attn.c_proj.bias"),
    ],
)
def test_a_module_that_one_layer_lacks_is_missing_by_name(kind, drop, missing, tmp_path):
    with hb.open(folder(tmp_path, kind, drop)) as checkpoint, pytest.raises(CheckpointError, match=f"{missing}: missing"):
        checkpoint.check("convert")


def test_what_the_file_has_under_no_such_name_is_reported_as_not_compared(tmp_path):
    with hb.open(folder(tmp_path, "olmo2", "up_proj")) as checkpoint:
        assert checkpoint.ledger().modules == (
            "model.layers.*.mlp.up_proj, which the file has under no such name; the others are compared"
        )
        assert checkpoint.ledger().problems == ()


def test_without_transformers_the_ledger_says_what_was_not_compared(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(meta_model.importlib.util, "find_spec", lambda n, *a: None if n == "transformers" else found(n, *a))
    with hb.open(folder(tmp_path, "olmo2")) as checkpoint:
        assert "'olmo2' is not in the table, and transformers is not installed" in checkpoint.ledger().modules


@pytest.mark.parametrize("word", ["no-such-model", "clip"])
def test_what_transformers_cannot_build_is_no_error(word, tmp_path):
    path = folder(tmp_path, "olmo2")
    (path / "config.json").write_text(json.dumps({"model_type": word, "hidden_size": 7}))
    with hb.open(path) as checkpoint:
        assert f"model_type '{word}' is not in the table, and transformers" in checkpoint.ledger().modules
        assert checkpoint.ledger().problems == ()


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_hidden_layers", 1_000_000, "num_hidden_layers = 1,000,000; its 25 tensors allow at most as many"),
        ("num_attention_heads", 1 << 31, "num_attention_heads = 2,147,483,648; the longest axis of its tensors is"),
        ("intermediate_size", -5, "intermediate_size = -5; 0 or more is allowed"),
    ],
)
def test_numbers_that_no_tensor_can_have_build_no_model(key, value, why, tmp_path, monkeypatch):
    def build(*_: object) -> None:
        raise AssertionError("a model is built")

    path = folder(tmp_path, "olmo2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    monkeypatch.setattr(meta_model, "_parameters", build)
    with hb.open(path) as checkpoint:
        assert checkpoint.ledger().modules.startswith(f"model_type 'olmo2' is not in the table, and config.json has {why}")


def test_a_model_of_more_modules_than_the_file_can_fill_is_not_built(tmp_path, monkeypatch):
    monkeypatch.setattr(meta_model, "MODULES", 5)
    monkeypatch.setattr(meta_model, "MODULES_PER_TENSOR", 0)
    with hb.open(folder(tmp_path, "olmo2")) as checkpoint:
        assert "transformers builds more than 5 modules of its config.json" in checkpoint.ledger().modules
        assert checkpoint.ledger().problems == ()


def test_a_configuration_that_fails_its_own_checks_is_no_foreign_error(tmp_path, monkeypatch):
    """transformers' configurations raise errors of kinds of their own, for architectures that are
    no
    list of names for one.
    """

    class StrictError(Exception):
        pass

    def refuse(kind, **settings):
        raise StrictError("Field 'architectures' with value [4]")

    made = folder(tmp_path, "olmo2", hidden_size=64)
    monkeypatch.setattr(AutoConfig, "for_model", refuse)
    with hb.open(made) as checkpoint:
        assert "does not know it: Field 'architectures'" in checkpoint.ledger().modules


def test_a_model_may_have_16384_modules_and_16_more_for_each_tensor():
    assert [meta_model.most_modules(tensors) for tensors in (0, 1, 1000)] == [16_384, 16_400, 32_384]
