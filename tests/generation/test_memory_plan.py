"""What a model needs, against arithmetic done by hand; against what a run of it used:
test_single.py.
"""

from __future__ import annotations

import json

import pytest

import torch
from halfbyte.cli.app import main
from halfbyte.errors import CheckpointError
from halfbyte.formats import format_named, packed_nbytes
from halfbyte.generation.memory_plan import Planner
from halfbyte.transformers import load_model, model_size
from support.tiny_models import write_tiny

GPT_OSS_20B = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
    "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip


@pytest.fixture
def gpt_oss(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    return tmp_path


@pytest.mark.parametrize(
    ("arch", "producer"), [("llama", "mlx"), ("mixtral", "gptq"), ("gpt_oss", "gpt-oss"), ("gemma3_text", "mlx")]
)
def test_weights_are_those_of_the_loaded_model(tmp_path, arch, producer):
    write_tiny(tmp_path, arch, producer)
    made = Planner(tmp_path).plan(16)
    held = model_size(load_model(tmp_path)[0]).nbytes
    assert made.weights == pytest.approx(held, rel=0.05)


def test_gpt_oss_20b_in_24_and_in_16_gb(gpt_oss):
    """10.2 GB of experts, 3.6 GB of bfloat16 beside them; caches of local layers hold their window
    only. Attention keeps its scores: a prompt goes through in pieces, whose scores are three copies
    of 64 heads · 2²¹.
    """
    planner = Planner(gpt_oss, device="cuda")
    made = planner.plan(8192, device_memory=24 * 10**9)
    expert = 32 * (2 * 2880 * 2880 + 2880 * 2880)
    assert made.packed == 24 * expert * 17 // 32
    assert made.cache == 2 * 8 * 64 * 2 * 12 * (128 + 8192)
    assert 3 * 64 * 2**21 * 2 < made.activations < 1.1 * 3 * 64 * 2**21 * 2
    assert made.fits
    assert planner.remedies(made) == []
    assert planner.plan(8192, device_memory=16 * 10**9).fits
    long = planner.plan(131072, device_memory=16 * 10**9)
    assert not long.fits
    context, *others = planner.remedies(long)
    tokens = int(context.split()[3].replace(",", ""))
    assert planner.plan(tokens, device_memory=16 * 10**9).fits
    assert not planner.plan(tokens + 1, device_memory=16 * 10**9).fits
    assert others[-1].endswith("such devices")
    codec = others[0].split()[3]
    assert others[0].startswith("its matrices in ")
    assert planner.plan(131072, device_memory=16 * 10**9, codec=codec).fits


def test_cache_and_activations_grow_as_they_should(gpt_oss):
    planner = Planner(gpt_oss, device="cuda")
    one, two = planner.plan(1024), planner.plan(2048)
    assert planner.plan(1024, batch=2).cache == 2 * one.cache
    assert two.cache < 2 * one.cache
    assert two.weights == one.weights
    assert Planner(gpt_oss, device="cuda", dtype="float32").plan(1024).cache == 2 * one.cache


def test_bytes_of_a_codec():
    assert packed_nbytes(format_named("mxfp4"), (100, 64)) == 100 * (32 + 2)
    assert packed_nbytes(format_named("mxfp4"), (100, 64), 16) == 112 * (32 + 2)
    assert packed_nbytes(format_named("int4:g128"), (4, 8, 256)) == 4 * 8 * (128 + 2 * 2)


def test_the_command(gpt_oss, capsys):
    assert main(["plan", str(gpt_oss), "--context", "8192", "--device-memory", "24GB", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["record"] == "plan"
    assert record["fits"] is True
    assert record["total"] == record["overhead"] + record["packed"] + record["dense"] + record["cache"] + record["activations"]
    assert main(["plan", str(gpt_oss), "--context", "8192", "--device-memory", "12GB"]) == 1
    out = capsys.readouterr().out
    assert "does not fit 12 GB" in out
    assert "would fit: 2 such devices" in out


@pytest.mark.parametrize(("tokens", "held"), [(128, 577.7), (512, 727.5), (2048, 1036.9), (8192, 628.5)])
def test_a_layer_on_a_gpu_within_1_percent_of_what_was_measured(tmp_path, tokens, held):
    """benchmarks/models.md: MB that torch held at most for a prompt on an H200, and 651 for the
    context.
    """
    layer = {**GPT_OSS_20B, "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(layer))
    planned = Planner(tmp_path, device="cuda").plan(tokens).total / 1e6
    assert abs(planned - (held + 651)) < 0.01 * (held + 651)


def test_what_the_command_says_of_odd_wishes(gpt_oss, capsys):
    assert main(["plan", str(gpt_oss), "--device-memory", "lots"]) == 2
    assert "[plan] --device-memory 'lots'; allowed: a number with" in capsys.readouterr().err
    assert main(["plan", str(gpt_oss), "--context", "1000000", "--device", "cuda"]) == 0
    assert "the model was made for texts of up to 131,072 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("there", [False, True])
def test_a_device_that_is_not_here_is_said(gpt_oss, capsys, monkeypatch, there):
    """--device-memory alone plans for CUDA, wherever it is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    said = "planned for a CUDA device, which this machine has not; --device cpu plans for the processor"
    assert main(["plan", str(gpt_oss), "--device-memory", "24GB"]) == 0
    assert (said in capsys.readouterr().out) != there
    assert main(["plan", str(gpt_oss), "--device-memory", "24GB", "--device", "cuda"]) == 0
    assert said not in capsys.readouterr().out


def test_what_cannot_be_planned(gpt_oss, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(CheckpointError, match=r"neither tensors nor a config.json"):
        Planner(empty)
    with pytest.raises(CheckpointError, match="context 0, batch 1; 1 or more"):
        Planner(gpt_oss, device="cuda").plan(0)
    with pytest.raises(CheckpointError, match="dtype 'int8'; allowed"):
        Planner(gpt_oss, dtype="int8")
    with pytest.raises(CheckpointError, match=r"\[plan\] device 'tpu'; allowed: cpu, cuda"):
        Planner(gpt_oss, device="tpu")
    (empty / "config.json").write_text(
        json.dumps({**GPT_OSS_20B, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}})
    )
    with pytest.raises(CheckpointError, match=r"says gptq and has no tensors; give --codec"):
        Planner(empty)
