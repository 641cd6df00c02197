"""The options with which commands open a checkpoint: another config, and what may be passed over."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.cli import main
from halfbyte.cli.app import COMMANDS
from halfbyte.errors import CheckpointError
from support.gguf_writer import GGUF, f32
from support.safetensors_bytes import MLX, A, mlx_weight, under, write

OPENING = (
    "inspect",
    "dequantize",
    "convert",
    "quantize",
    "sample",
    "imatrix",
    "verify",
    "generate",
    "chat",
    "serve",
    "eval",
    "plan",
)


@pytest.mark.parametrize("command", OPENING)
def test_every_command_that_opens_a_checkpoint_takes_another_config(command):
    assert command in COMMANDS
    parameters = inspect.signature(getattr(importlib.import_module(f"halfbyte.cli.{command}"), command)).parameters
    assert {"config", "allow_unknown"} <= set(parameters)


def test_the_other_checkpoint_of_a_comparison_has_its_own_options():
    parameters = inspect.signature(importlib.import_module("halfbyte.cli.eval").eval).parameters
    assert {"baseline_config", "baseline_allow_unknown"} <= set(parameters)
    assert "other_config" in inspect.signature(importlib.import_module("halfbyte.cli.verify").verify).parameters


ADAPTERS = {
    "peft": (
        {"peft_type": "LORA", "base_model_name_or_path": "org/base"},
        "base_model.model.layers.0.up_proj.lora_A.weight",
    ),
    "mlx-lm": ({"fine_tune_type": "lora", "model": "org/base"}, "model.layers.0.mlp.up_proj.lora_a"),
}
USE = {
    "peft": "load the model that it was trained on with halfbyte.load_model and put it on with "
    "peft.PeftModel.from_pretrained(model, 'PATH')",
    "mlx-lm": "mlx-lm runs it beside its model with --adapter-path PATH",
    "gguf": "llama.cpp runs it beside its model with --lora PATH",
}
"""What is said of each kind."""
ARGUMENTS = {
    "convert": ["OUT", "--to", "mlx"], "quantize": ["OUT", "--to", "mlx:affine4"], "dequantize": ["OUT"], "sample": ["OUT.txt"],
    "imatrix": ["OUT.gguf", "--text", "TEXT"], "generate": ["-p", "x"], "eval": ["--text", "TEXT"],
}  # fmt: skip
"""What a command needs besides the model."""


@pytest.mark.parametrize("kind", [*ADAPTERS, "gguf"])
@pytest.mark.parametrize("command", [c for c in OPENING if c not in ("inspect", "verify")])
def test_an_adapter_is_no_model(tmp_path, capsys, command, kind):
    """Each command that needs a model says what it was given and what to do; nothing is written."""
    path, text = tmp_path / "adapter", tmp_path / "text"
    path.mkdir()
    text.write_text("some words")
    if kind == "gguf":
        path = path / "a.gguf"
        pairs = [(f"general.{k}", "string", v) for k, v in (("architecture", "llama"), ("type", "adapter"))]
        path.write_bytes(GGUF(pairs=pairs, tensors=[f32("blk.0.attn_q.weight.lora_a", np.ones((8, 32)))]).bytes())
    else:
        settings, name = ADAPTERS[kind]
        (path / "adapter_config.json").write_text(json.dumps(settings))
        write(path / "adapters.safetensors", {name: np.ones((8, 32), np.float32)})
    rest = [a.replace("OUT", str(tmp_path / "out")).replace("TEXT", str(text)) for a in ARGUMENTS.get(command, [])]
    assert main([command, str(path), *rest]) == 2
    said = capsys.readouterr().err
    assert f"{path} is a LoRA adapter" in said
    assert f"not a model: {USE[kind].replace('PATH', str(path))}; for one packed file merge it into the dense model" in said
    assert ("of org/base" in said) == (kind != "gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "text"]
    assert main(["inspect", str(path)]) == 0
    assert "note [adapter]" in capsys.readouterr().out
    assert main(["verify", str(path), str(path)]) == 0


def test_a_model_that_holds_an_adapter_is_a_model(tmp_path):
    """Phi-4 Multimodal keeps adapters for sound and images beside its layers."""
    names = ("base_layer", "lora_A.vision", "lora_B.vision")
    write(tmp_path / "model.safetensors", {f"model.layers.0.o_proj.{n}.weight": np.ones((8, 8), np.float32) for n in names})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4_multimodal"}))
    with hb.open(tmp_path) as checkpoint:
        assert checkpoint.adapter == ""


@pytest.fixture
def unread(tmp_path: Path) -> Path:
    """MLX's tensors under a producer's name that nobody knows."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "model.safetensors", under(A, mlx_weight()))
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "new-thing", "bits": 4}}))
    return folder


def test_a_producer_that_is_not_read_is_named_with_the_override_that_may_read_it(unread):
    with pytest.raises(
        CheckpointError, match=r"quant_method 'new-thing' is not read; read: .*gptq.* give its config instead: --config"
    ):
        hb.open(unread)


@pytest.mark.parametrize("given", ["json", "file"])
def test_the_override_reads_it_in_each_command(unread, given, tmp_path):
    text = json.dumps(MLX["quantization"])
    if given == "file":
        (tmp_path / "c.json").write_text(text)
        text = str(tmp_path / "c.json")
    path, plain = str(unread), tmp_path / "plain.safetensors"
    write(plain, under(A, mlx_weight()))
    assert main(["inspect", path]) == 2
    assert main(["inspect", path, "--config", text]) == 0
    assert main(["dequantize", path, str(tmp_path / "d.safetensors"), "--dtype", "float32", "--config", text]) == 0
    assert main(["convert", path, str(tmp_path / "o.safetensors"), "--to", "halfbyte", "--config", text]) == 0
    assert main(["verify", path, str(tmp_path / "o.safetensors"), "--config", text]) == 0
    assert main(["verify", str(tmp_path / "o.safetensors"), path, "--other-config", text]) == 0
    with hb.open(plain, MLX["quantization"]) as right, hb.open(tmp_path / "d.safetensors") as dense:
        assert np.array_equal(dense[f"{A}.weight"], right[A].dequantize("float32"))


def test_load_model_takes_another_config(tmp_path):
    pytest.importorskip("transformers")
    from support.tiny_models import agree, ids, logits, write_tiny

    tiny = write_tiny(tmp_path / "m", "llama", "gptq", num_hidden_layers=1)
    config = json.loads((tiny.folder / "config.json").read_text())
    right = config["quantization_config"]
    (tiny.folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "new-thing"}}))
    with pytest.raises(CheckpointError, match=r"quant_method 'new-thing' is not read.*--config"):
        hb.load_model(tiny.folder)
    assert agree(logits(hb.load_model(tiny.folder, config=right)[0], ids()), logits(tiny.dense, ids()))


def test_save_refuses_what_the_ledger_does_not_account_for(tmp_path):
    tensors = under(A, mlx_weight()) | {"model.layers.0.mlp.up_proj.codes": np.zeros((4, 4), np.uint8)}
    write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(MLX))
    with hb.open(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"\[save\] .*up_proj\.codes: unknown"):
        hb.save(tmp_path / "out.safetensors", checkpoint)
    assert not (tmp_path / "out.safetensors").exists()
    with hb.open(tmp_path, allow_unknown=["*up_proj.codes"]) as checkpoint, pytest.warns(UserWarning, match="up_proj.codes"):
        hb.save(tmp_path / "out.safetensors", checkpoint)


def test_plan_refuses_what_the_ledger_does_not_account_for(tmp_path, capsys):
    pytest.importorskip("transformers")
    from support.tiny_models import write_tiny

    folder = write_tiny(tmp_path / "m", "llama", "gptq", num_hidden_layers=1).folder
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["new_word"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(folder), "--context", "64"]) == 2
    assert "new_word" in capsys.readouterr().err
    assert main(["plan", str(folder), "--context", "64", "--allow-unknown", "new_word"]) == 0
