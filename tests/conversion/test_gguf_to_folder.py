"""A GGUF becomes a folder that transformers, halfbyte and others run as it is: names, row orders,
configuration and tokenizer of the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

import halfbyte
import torch
import transformers
from halfbyte.cli import main
from halfbyte.errors import CheckpointError
from halfbyte.gguf_models.architectures import ARCHITECTURES, MIXTRAL
from halfbyte.gguf_models.names import class_name
from support.gguf_families import FAMILIES, architecture, family_model, logits, write_family
from support.gguf_models import MODELS, dense_model, write
from support.gguf_writer import GGUF, Tensor, f32
from support.quiet import quiet
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def same(have: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(have, want, rtol=2e-5, atol=2e-5)


def written(tmp_path: Path, name: str, packed: bool = False) -> tuple[Any, Path]:
    """The transformers model and a GGUF of it."""
    if name in MODELS:
        model = dense_model(name)
        return model, write(tmp_path / "model.gguf", name, model, packed)
    model = family_model(name)
    return model, write_family(tmp_path / "model.gguf", name, model)


EXPECTED = (
    "The explicitly set RoPE scaling factor .* does not match the ratio",  # these files are of short contexts
    "CUDA-fused xIELU not available",
    "Unrecognized keys in .rope_parameters. .*: {'(short|long)_mscale', '(short|long)_mscale'}",  # read by vLLM alone
    "(?s)LOAD REPORT.*pooler",  # vectors are of all tokens: the file has no pooler
    r"specifies to tie shared\.weight to lm_head\.weight, but both are present",  # T5's first version scales so
)
"""What transformers warns of, and why a folder does not change it."""


OTHER_CLASSES = {"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Class of a published config.json -> transformers', where they differ."""


def of_transformers(folder: Path) -> Any:
    """The model that transformers' class of a config.json loads, with every parameter that the file
    has and no other.
    """
    config = AutoConfig.from_pretrained(folder)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    loader = getattr(transformers, name, AutoModelForCausalLM)  # SmallThinker is registered by its reader
    with quiet(*EXPECTED):
        read, info = loader.from_pretrained(folder, output_loading_info=True, dtype="float32")
    assert {key for key in info["missing_keys"] if not key.startswith("pooler.")} == set()
    assert set(info["unexpected_keys"]) == set()
    assert type(read).__name__ == OTHER_CLASSES.get(name, name)
    assert read.config.model_type == config.model_type
    return read.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dense_file_becomes_the_folder_of_its_model(tmp_path, name):
    """Of every architecture: transformers computes from it what load_model computes from the file,
    to the last bit.
    """
    _, gguf = written(tmp_path, name)
    assert main(["dequantize", str(gguf), str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    assert main(["verify", str(gguf), str(tmp_path / "dense")]) == 0
    want = logits(halfbyte.load_model(gguf)[0])
    assert torch.equal(logits(of_transformers(tmp_path / "dense")), want)
    assert torch.equal(logits(halfbyte.load_model(tmp_path / "dense")[0]), want)


def test_matrices_that_are_published_as_one(tmp_path):
    """HRM-Text: gate, q, k and v. Of one format they are one packed matrix; of two they stay apart
    where they stay packed, and are one where they are dense.
    """
    _, dense = written(tmp_path, "hrm_text")
    for rules, joined in (((), {"halfbyte", "dense"}), (("--rule", "attn_v=q4_0"), {"dense"})):
        gguf = tmp_path / f"{len(rules)}.gguf"
        assert main(["quantize", str(dense), str(gguf), "--to", "gguf:q8_0", *rules]) == 0
        want = logits(halfbyte.load_model(gguf)[0])
        for out, command in (("halfbyte", ["convert", "--to", "halfbyte"]), ("dense", ["dequantize", "--dtype", "float32"])):
            path = tmp_path / f"{out}{len(rules)}"
            assert main([command[0], str(gguf), str(path), *command[1:]]) == 0
            with halfbyte.open(path) as folder:
                names = {key.removesuffix(".weight") for key in folder if ".layers.0." in key}
            whole = {"attn.gqkv_proj"} if out in joined else {f"self_attn.{n}_proj" for n in ("gate", "q", "k", "v")}
            assert names == {
                f"model.{stack}_module.layers.0.{name}"
                for stack in "HL"
                for name in (*whole, "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
            }
            assert same(logits(halfbyte.load_model(path)[0]), want)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_file_becomes_folders_of_its_model(tmp_path, name):
    """Of every architecture: packed in halfbyte's and MLX's layouts, and dense. Sums in another
    order, of inputs that the file has in another order or of MLX's products, differ in the last
    bits.
    """
    _, dense = written(tmp_path, name)
    gguf = tmp_path / "q8_0.gguf"
    assert main(["quantize", str(dense), str(gguf), "--to", "gguf:q8_0"]) == 0
    want = logits(halfbyte.load_model(gguf)[0])
    for to in ("halfbyte", "mlx"):
        assert main(["convert", str(gguf), str(tmp_path / to), "--to", to]) == 0
        assert main(["verify", str(gguf), str(tmp_path / to)]) == 0
        have = logits(halfbyte.load_model(tmp_path / to)[0])
        assert torch.equal(have, want) if to == "halfbyte" and not architecture(name).columns else same(have, want)
    assert main(["dequantize", str(gguf), str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    assert main(["verify", str(gguf), str(tmp_path / "dense")]) == 0
    assert same(logits(of_transformers(tmp_path / "dense")), want)


@pytest.mark.parametrize(
    ("name", "rule", "key"),
    [
        ("qwen35", "ssm_out=q4_K", "model.layers.0.linear_attn.out_proj.weight"),
        ("minimax-m3", "ffn_gate=q4_0", "model.layers.0.mlp.gate_up_proj.weight"),
    ],
)
def test_what_cannot_stay_packed_is_dense_and_named(tmp_path, capsys, name, rule, key):
    """Inputs that are moved by less than a block of one scale, rows of two formats in one matrix."""
    model = family_model(name, 256)
    dense, gguf, out = write_family(tmp_path / "m.gguf", name, model), tmp_path / "q.gguf", tmp_path / "out"
    assert main(["quantize", str(dense), str(gguf), "--to", "gguf:q8_0", "--rule", rule]) == 0
    capsys.readouterr()
    assert main(["convert", str(gguf), str(out), "--to", "halfbyte"]) == 0
    assert re.search(rf"written dense: .*{re.escape(key)}", capsys.readouterr().err)
    with halfbyte.open(out) as read:
        assert not read.info(key).quantized
        assert read.info("model.layers.1.self_attn.o_proj").quantized
    assert same(logits(halfbyte.load_model(out)[0]), logits(halfbyte.load_model(gguf)[0]))


@pytest.mark.parametrize("name", MODELS)
def test_a_dequantized_gguf_is_loaded_by_transformers(tmp_path, name):
    model, gguf = written(tmp_path, name, packed=True)
    out = tmp_path / "dense"
    assert main(["dequantize", str(gguf), str(out), "--dtype", "float32"]) == 0
    read, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="float32")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(logits(read.eval()), logits(model))
    assert type(read).__name__ == json.loads((out / "config.json").read_text())["architectures"][0]
    if model.config.model_type != "qwen2":  # transformers gives these its own splits, whatever tokenizer.json says
        assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"] == halfbyte.load_model(gguf)[1]("abc")["input_ids"]
    assert read.generation_config.eos_token_id == 2


def test_a_scalar_under_the_name_of_a_norm_is_refused_and_no_part_of_the_model(tmp_path, capsys):
    numbers = {
        "block_count": 1,
        "context_length": 8,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 2,
    }
    pairs: list[tuple[str, str, Any]] = [("general.architecture", "string", "llama")]
    pairs += [(f"llama.{key}", "uint32", value) for key, value in numbers.items()]
    pairs.append(("llama.attention.layer_norm_rms_epsilon", "float32", 1e-5))
    tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(29))]
    pairs += [("tokenizer.ggml.model", "string", "llama"), ("tokenizer.ggml.tokens", "array[string]", tokens)]
    pairs += [("tokenizer.ggml.scores", "array[float32]", [0.0] * 32), ("tokenizer.ggml.token_type", "array[int32]", [1] * 32)]
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    names = ["token_embd", *(f"blk.0.{m}" for m in matrices)]
    tensors = [f32(f"{name}.weight", np.full((32, 32), i, np.float32)) for i, name in enumerate(names)]
    tensors += [f32(f"{name}.weight", np.ones(32, np.float32)) for name in ("output_norm", "blk.0.attn_norm")]
    scalar = Tensor("blk.0.ffn_norm.weight", (), 0, np.float32(7).tobytes())
    (tmp_path / "model.gguf").write_bytes(GGUF(pairs, [*tensors, scalar]).bytes())
    command = ["dequantize", str(tmp_path / "model.gguf"), str(tmp_path / "out")]
    assert main(command) == 2
    assert "blk.0.ffn_norm: shape ([]; the header makes it [32])" in capsys.readouterr().err
    assert main([*command, "--allow-unknown", "blk.0.ffn_norm"]) == 0
    with halfbyte.open(tmp_path / "out") as read:
        assert read["blk.0.ffn_norm.weight"] == 7
        assert (read["blk.0.ffn_down.weight"] == 7).all()
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_norm: shape"):
        halfbyte.load_model(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.ffn_norm\.weight' is a scalar"):
        halfbyte.load_model(tmp_path / "model.gguf", allow_unknown=["blk.0.ffn_norm"])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("to", ["mlx", "compressed-tensors", "halfbyte"])
def test_a_packed_gguf_becomes_a_folder_that_runs(tmp_path, name, to):
    _, gguf = written(tmp_path, name, packed=True)
    assert main(["convert", str(gguf), str(tmp_path / to), "--to", to]) == 0
    assert main(["verify", str(gguf), str(tmp_path / to)]) == 0
    model, tokenizer = halfbyte.load_model(tmp_path / to)
    ours, named = halfbyte.load_model(gguf)
    assert same(logits(model), logits(ours))
    if model.config.model_type != "qwen2":
        assert tokenizer("abc")["input_ids"] == named("abc")["input_ids"]


@pytest.mark.parametrize("rule", ["ffn_down=keep", "down_proj$=keep"])
def test_rules_may_use_names_of_the_file_or_of_the_model(tmp_path, rule):
    _, gguf = written(tmp_path, "gemma3")
    out = tmp_path / "int4"
    assert main(["quantize", str(gguf), str(out), "--to", "compressed-tensors:int4:g32", "--rule", rule]) == 0
    with halfbyte.open(out) as read:
        kinds = {key: read.info(key).quantized for key in read if "layers.1.mlp" in key}
    assert kinds == {f"model.layers.1.mlp.{n}_proj{'.weight' * (n == 'down')}": n != "down" for n in ("down", "gate", "up")}
    assert logits(halfbyte.load_model(out)[0]).isfinite().all()


@pytest.mark.parametrize(("name", "method"), [("llama", "gptq"), ("gemma3", "awq")])
def test_a_calibrated_gguf_becomes_a_folder_in_the_models_row_order(tmp_path, monkeypatch, name, method):
    model = dense_model(name)
    gguf = write(tmp_path / "in.gguf", name, model, False)
    ids = np.random.default_rng(0).integers(3, 48, (16, 32)).tolist()
    monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: ids)
    (tmp_path / "text.txt").write_text("")
    out, again = tmp_path / "out", tmp_path / "again.gguf"
    found = ["--method", method, "--calibration", str(tmp_path / "text.txt")]
    assert main(["quantize", str(gguf), str(again), "--to", "gguf:q8_0", *found]) == 0
    assert main(["quantize", str(gguf), str(out), "--to", "mlx:affine8:g32", *found]) == 0
    want, folder, file = logits(model), logits(halfbyte.load_model(out)[0]), logits(halfbyte.load_model(again)[0])
    scale = want.square().mean()
    assert (folder - want).square().mean() / scale < 2e-3
    assert (file - want).square().mean() / scale < 2e-3


def test_the_classes_are_those_of_transformers():
    """An encoder's class is the base model; T5's encoder has one of its own."""
    answers = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    names = {
        # SmallThinker's class is halfbyte's own; transformers lists Mistral 4's for images with
        # text.
        "text": MODEL_FOR_PRETRAINING_MAPPING_NAMES
        | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        | {"smallthinker": "SmallThinkerForCausalLM"},
        "encoder": MODEL_MAPPING_NAMES | {"t5": "T5EncoderModel"},
        "encoder-decoder": answers,
    }
    for table in [*ARCHITECTURES.values(), MIXTRAL]:
        assert class_name(table.model_type, table.task) == names[table.task][table.model_type]


@pytest.mark.parametrize("command", [["convert", "--to", "mlx"], ["dequantize"], ["quantize", "--to", "mlx:affine4:g32"]])
def test_without_tokenizers_the_command_says_what_it_cannot_write(tmp_path, capsys, monkeypatch, command):
    _, gguf = written(tmp_path, "llama", packed=command[0] != "quantize")
    monkeypatch.setattr("halfbyte.gguf_models.model_files.find_spec", lambda name: None)
    out = tmp_path / "out"
    assert main([command[0], str(gguf), str(out), *command[1:]]) == 0
    said = capsys.readouterr().err
    assert said.index("no tokenizer will be written: tokenizers is not installed") < said.index("no tokenizer is written")
    assert "pip install 'halfbyte[transformers]'" in said
    assert (out / "config.json").is_file()
    assert not (out / "tokenizer.json").exists()


@pytest.mark.parametrize("to", ["", "compressed-tensors:int8:channel"], ids=["dense", "packed"])
@pytest.mark.parametrize(("name", "bias"), [("mixtral", ""), ("phimoe", ""), ("minimax-m2", "e_score_correction_bias")])
def test_mixtures_have_the_names_of_their_published_checkpoints(tmp_path, name, bias, to):
    """Engines that read a folder by name know no others."""
    _, gguf = written(tmp_path, name)
    command = ["dequantize", str(gguf), str(tmp_path / "out")]
    assert main(["quantize", str(gguf), str(tmp_path / "out"), "--to", to] if to else command) == 0
    with halfbyte.open(tmp_path / "out") as folder:
        names = {key.removesuffix(".weight") for key in folder if ".layers.0." in key}
    assert not [key for key in names if ".mlp." in key]
    at = "model.layers.0.block_sparse_moe"
    wanted = {f"{at}.experts.0.w1", f"{at}.experts.1.w2", f"{at}.experts.1.w3", f"{at}.gate"}
    assert names >= wanted | ({f"{at}.{bias}"} if bias else set())
