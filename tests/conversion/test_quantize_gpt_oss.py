"""A dense gpt-oss, as transformers saves it, to MXFP4: its stacks are turned, and both loaders read
the result.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte import quantize
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.cli import main
from halfbyte.conversion.transposed_experts import TransposedExperts
from halfbyte.quantizers import mse
from support.calibration_models import drift, write_model, write_text

GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
STACKS = [f"model.layers.{i}.mlp.experts.{p}" for i in range(2) for p in ("gate_up_proj", "down_proj")]


@pytest.mark.parametrize(
    ("to", "method"),
    [*(("gpt-oss", m) for m in ("rtn", "mse", "gptq", "awq")), ("halfbyte:mxfp4", "rtn"), ("halfbyte:mxfp4", "awq")],
)
def test_experts_are_rounded_along_their_inputs(tmp_path, to, method):
    dense = write_model(tmp_path / "in", "gpt_oss", **GPT_OSS)
    rules = ["--rule", "self_attn=keep"] if to != "gpt-oss" else []
    common = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", to, "--method", method, *rules]
    text = str(write_text(tmp_path / "text.txt", 1500))
    found = ["--calibration", text, "--context", "64", "--sequences", "12"] if method in ("gptq", "awq") else []
    assert main([*common, *found]) == 0
    with halfbyte.open(tmp_path / "out") as written, halfbyte.open(tmp_path / "in") as source:
        assert sorted(k for k in written if written.info(k).quantized) == sorted(STACKS)
        for key in STACKS:
            x = np.ascontiguousarray(source[key].swapaxes(1, 2))
            assert written[key].shape == x.shape
            if method in ("rtn", "mse"):
                want = (quantize if method == "rtn" else mse)(x, "mxfp4")
                assert np.array_equal(written[key].dequantize(), want.dequantize())
            assert np.array_equal(written[f"{key}_bias"], source[f"{key}_bias"])
    assert drift(tmp_path / "out", dense) < 0.1


def test_transformers_reads_it(tmp_path):
    """Its own MXFP4 decoder gives the model whose experts are ours, rounded."""
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "in", "gpt_oss", **GPT_OSS)
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "gpt-oss"]) == 0
    settings = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=settings, dtype=torch.float32)
    with halfbyte.open(tmp_path / "out") as written:
        for key in STACKS:
            want = written[key].dequantize("float32").swapaxes(1, 2)
            assert np.array_equal(model.get_parameter(key).detach().float().numpy(), want)


def test_stacks_of_other_models_stay_dense_and_are_said(tmp_path, capsys):
    config = {"model_type": "another_moe"}
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with SafetensorsWriter(folder / "model.safetensors") as out:
        out.add(STACKS[0], np.ones((2, 64, 32), np.float32))
        out.add("model.layers.0.self_attn.q_proj.weight", np.ones((32, 64), np.float32))
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--to", "halfbyte:mxfp4"]) == 0
    said = "kept dense: 1 stack of experts (model.layers.0.mlp.experts.gate_up_proj): which of their axes are inputs"
    assert said in capsys.readouterr().err


def test_what_has_no_place_stays_dense_and_is_said(tmp_path, capsys):
    write_model(tmp_path / "in", "gpt_oss", **GPT_OSS)
    common = ["quantize", str(tmp_path / "in")]
    assert main([*common, str(tmp_path / "out"), "--to", "compressed-tensors:mxfp4"]) == 0
    said = capsys.readouterr().err
    assert "kept dense: 4 stacks of experts (model.layers.0.mlp.experts." in said
    assert "compressed-tensors stores no stacks of gpt-oss; gpt-oss and halfbyte do" in said
    rules = ["--rule", r"layers\.0.*experts=keep"]
    assert main([*common, str(tmp_path / "kept"), "--to", "gpt-oss", *rules]) == 0
    with halfbyte.open(tmp_path / "in") as a, halfbyte.open(tmp_path / "kept") as b:
        assert np.array_equal(a[STACKS[0]], b[STACKS[0]])
        assert b.info(STACKS[2]).quantized
        it = TransposedExperts(a, [STACKS[0]])
        assert set(it) == {*a, f"{STACKS[0]}.weight"} - {STACKS[0]}
        assert STACKS[0] not in it
        assert it.info(f"{STACKS[0]}.weight").shape == it[f"{STACKS[0]}.weight"].shape == (4, 256, 64)
