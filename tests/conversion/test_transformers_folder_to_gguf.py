"""A folder that transformers saved becomes the GGUF that llama.cpp's converter would write: the
same tensors and key-values, and a model with the same logits. For every architecture that is read.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.cli import main
from halfbyte.gguf_models.model_files import model_files
from halfbyte.gguf_models.variants import WRITTEN_AS
from support.gguf_families import FAMILIES, IDS, architecture, family_model, write_family
from support.llama_cpp_logits import FLASH, llama_cpp_logits, recorded
from transformers import AutoConfig

ALIASES = WRITTEN_AS | {"deepseek2:temperature": "mistral4", "deepseek2:whole": "deepseek2", "mistral3:plain": "llama"}
"""Cases whose model is another architecture's, or has another form in newer files."""
STATED = {"bailingmoe3": {"head_dim": 16}, "gemma-embedding": {"sliding_window": 6}}
"""Numbers that transformers' configurations compute others from when they are read, and save
those.
"""
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
UNUSED = {"gemma3n": ("blk.20.attn_", "blk.21.attn_")}
"""Tensors that no layer reads."""


def logits(model: Any) -> np.ndarray:
    ids = torch.tensor([IDS])
    with torch.no_grad():
        out = model(input_ids=ids, decoder_input_ids=ids) if model.config.is_encoder_decoder else model(input_ids=ids)
    rows: np.ndarray = (out.logits if "logits" in out else out.last_hidden_state)[0].numpy()
    return rows


def saved(path: Path, case: str, model: Any, source: Path) -> Path:
    """transformers' own folder of a model, with the tokenizer of a GGUF file."""
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | STATED.get(case, {})
    with halfbyte.open(source) as file:
        files, _ = model_files(file)
    for name, content in {**files, "config.json": config}.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def converted(tmp_path: Path, case: str, model: Any) -> tuple[Path, Path]:
    """(the GGUF that the tests write, the GGUF of the folder)."""
    source, back = write_family(tmp_path / "m.gguf", case, model), tmp_path / "back.gguf"
    assert main(["convert", str(saved(tmp_path / "folder", case, model, source)), str(back), "--to", "gguf"]) == 0
    return source, back


def of_another_norm(case: str, key: str) -> bool:
    """Keys that the tests' files have of every norm, and heads of models without any."""
    return (key.endswith("rms_epsilon") and architecture(case).eps[0] not in key) or (
        case.startswith("mamba") and key.endswith("head_count_kv")
    )


@pytest.mark.parametrize("case", FAMILIES)
def test_transformers_folder_becomes_the_file(tmp_path, case):
    model = family_model(case)
    source, back = converted(tmp_path, case, model)
    with halfbyte.open(source) as a, halfbyte.open(back) as b:
        arch = b.metadata["general.architecture"]
        assert arch == ALIASES.get(case, a.metadata["general.architecture"])
        if case not in ALIASES:
            assert set(a) == set(b)
            for key in a:
                want, have = np.asarray(a[key]), np.asarray(b[key])
                assert (want.shape, want.dtype) == (have.shape, have.dtype), key
                if not key.startswith(UNUSED.get(case, ("-",))):
                    np.testing.assert_array_equal(have, want, err_msg=key)
            for key in a.metadata:
                if not (key.startswith("tokenizer.") or of_another_norm(case, key)):
                    want, have = np.asarray(a.metadata[key]), np.asarray(b.metadata[key])
                    np.testing.assert_array_equal(have, want, err_msg=key)
    np.testing.assert_array_equal(logits(halfbyte.load_model(back)[0]), logits(model))


@pytest.mark.parametrize("case", ["jamba", "deepseek2", "qwen35", "gemma4", "kimi-linear", "dbrx", "bert"])
def test_verify_compares_the_folder_with_the_file(tmp_path, case):
    """`halfbyte verify IN OUT`, which convert names, also without transformers' names."""
    _, back = converted(tmp_path, case, family_model(case))
    assert main(["verify", str(tmp_path / "folder"), str(back)]) == 0
    config = tmp_path / "folder" / "model.safetensors"
    data = bytearray(config.read_bytes())
    data[-3] ^= 0x40  # an exponent of the last number
    config.write_bytes(bytes(data))
    assert main(["verify", str(tmp_path / "folder"), str(back)]) == 1


def test_another_kind_of_gelu_is_noted(tmp_path, capsys):
    model = family_model("gpt2")
    folder = saved(tmp_path / "folder", "gpt2", model, write_family(tmp_path / "m.gguf", "gpt2", model))
    config = json.loads((folder / "config.json").read_text()) | {"activation_function": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(folder), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 0
    assert "activation_function is 'gelu'; a GGUF has one GELU for all kinds" in capsys.readouterr().err


PACKED = (
    "granitehybrid", "nemotron_h_moe", "lfm2moe", "qwen3next", "deepseek2", "deepseek2:v2", "mistral4", "minimax-m3", "falcon",
    "bailingmoe2", "mimo2", "phimoe", "deepseek4", "gemma4", "smallthinker", "apertus", "mistral3", "mamba2", "falcon-h1",
)  # fmt: skip
"""A case of each kind of step between a file's tensors and a model's."""


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("case", PACKED)
def test_a_packed_folder_keeps_its_codes(tmp_path, case, layout, capsys):
    """The logits of the packed folder, and every packed weight of the file decodes to the folder's
    values; or the weight is refused by name, and nothing is written.
    """
    model = family_model(case)
    saved(tmp_path / "folder", case, model, write_family(tmp_path / "m.gguf", case, model))
    to = ["--to", f"{layout}:int4:g32", "--method", "rtn"]
    assert main(["quantize", str(tmp_path / "folder"), str(tmp_path / "packed"), *to]) == 0
    code = main(["convert", str(tmp_path / "packed"), str(tmp_path / "back.gguf"), "--to", "gguf"])
    err = capsys.readouterr().err
    assert code == 0, err
    with halfbyte.open(tmp_path / "back.gguf") as file:
        assert any(file.info(key).quantized for key in file)
    ours, theirs = (logits(halfbyte.load_model(tmp_path / name)[0]) for name in ("packed", "back.gguf"))
    np.testing.assert_allclose(theirs, ours, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("qwen35moe", "linear_attn.out_proj is packed, and has its inputs in another order in blk.0.ssm_out.weight"),
        ("glm-dsa", "self_attn.kv_b_proj is packed, and is divided, its rows becoming columns, in blk.0.attn_k_b.weight"),
        ("dots3note", "self_attn.kv_b_proj is packed, and is divided, its rows becoming columns, in blk.0.attn_k_b.weight"),
    ],
)
def test_a_packed_weight_whose_values_are_needed_is_refused(tmp_path, capsys, case, said):
    model = family_model(case)
    saved(tmp_path / "folder", case, model, write_family(tmp_path / "m.gguf", case, model))
    to = ["--to", "compressed-tensors:int4:g32", "--method", "rtn"]
    assert main(["quantize", str(tmp_path / "folder"), str(tmp_path / "packed"), *to]) == 0
    assert main(["convert", str(tmp_path / "packed"), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "back.gguf").exists()


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("qwen35", {"hidden_act": "relu"}, "hidden_act is 'relu', a GGUF of qwen35 says 'silu'"),
        ("jamba", {"expert_layer_period": 3}, "expert_layer_period is 3, a GGUF of jamba says 2"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, "no_rope_layers is [0, 1, 1, 1], a GGUF of smollm3 says "),
        ("falcon", {"activation": "relu"}, "activation is 'relu', a GGUF of falcon says 'gelu'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False, a GGUF of gpt2 says True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, a GGUF of gpt2 says False"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True"),
        ("t5", {"relative_attention_max_distance": 64}, "relative_attention_max_distance is 64, a GGUF of t5 says 128"),
        ("deepseek2", {"rope_parameters": STRETCHED | {"mscale_all_dim": 0.7}}, "'mscale_all_dim': 0.7"),
        ("deepseek2", {"rope_interleave": False}, "rope_interleave is False, a GGUF of deepseek2 says True"),
        ("llama4", {"moe_layers": [0]}, "moe_layers is [0], a GGUF of llama4 says "),
    ],
)
def test_what_no_key_states_is_refused(tmp_path, capsys, case, change, said):
    model = family_model(case)
    folder = saved(tmp_path / "folder", case, model, write_family(tmp_path / "m.gguf", case, model))
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(folder), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "back.gguf").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"beta_fast": 8.0, "beta_slow": 2.0}, ""),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, "'attention_factor': 1.0"),
        ({"mscale": 0.7, "mscale_all_dim": 0.3}, "'mscale_all_dim': 0.3"),
        ({"attention_factor": 1.7}, "'attention_factor': 1.7"),
        ({"truncate": False}, "'truncate': False"),
    ],
)
def test_yarn_is_stated_whole_or_refused(tmp_path, capsys, change, said):
    """Every number of the rotation reaches the file, or is named; none is passed over."""
    model = family_model("qwen3:yarn")
    source = write_family(tmp_path / "m.gguf", "qwen3:yarn", model)
    model.config.rope_parameters |= change
    model = type(model).from_pretrained(saved(tmp_path / "folder", "qwen3:yarn", model, source)).eval()
    code = main(["convert", str(tmp_path / "folder"), str(tmp_path / "back.gguf"), "--to", "gguf"])
    assert (code, (tmp_path / "back.gguf").exists()) == ((2, False) if said else (0, True))
    assert said in capsys.readouterr().err
    if not said:
        np.testing.assert_array_equal(logits(halfbyte.load_model(tmp_path / "back.gguf")[0]), logits(model))


@pytest.mark.parametrize("case", ["falcon", "lfm2moe", "minimax-m2", "qwen35", "starcoder2"])
def test_llama3_rotation_of_any_model(tmp_path, case):
    """Its factors find the one rotation of the model, whatever its name, and of part of each head."""
    model = family_model(case)
    source = write_family(tmp_path / "m.gguf", case, model)
    plain = logits(model)
    model.config.rope_parameters |= STRETCHED
    model = type(model).from_pretrained(saved(tmp_path / "folder", case, model, source)).eval()
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 0
    have, want = logits(halfbyte.load_model(tmp_path / "back.gguf")[0]), logits(model)
    assert np.abs(want - plain).max() > 1e-3
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("case", FAMILIES)
def test_llama_cpp_reads_transformers_folder(tmp_path, case):
    """llama.cpp's logits of the written file are those that it gave of the tests' own file."""
    pytest.importorskip("llama_cpp")
    _, back = converted(tmp_path, case, family_model(case))
    have, want = llama_cpp_logits(back, architecture(case).task, case in FLASH)[-1], np.array(recorded()[case])
    error = float(((have - want) ** 2).mean() / (want**2).mean())
    print(f"| {case} | {error:.1e} |")
    assert error <= 1e-6


def multiplied(tmp_path: Path, **changes: Any) -> tuple[Any, Path]:
    """A Falcon-H1 with multipliers, and its folder."""
    base = family_model("falcon-h1").config.to_dict()
    config = AutoConfig.for_model(**{**base, **MULTIPLIERS, **changes})
    torch.manual_seed(0)
    model = type(family_model("falcon-h1"))._from_config(config, dtype=torch.float32).eval()
    source = write_family(tmp_path / "m.gguf", "falcon-h1", family_model("falcon-h1"))
    return model, saved(tmp_path / "folder", "falcon-h1", model, source)


MULTIPLIERS = {
    "embedding_multiplier": 5.5, "lm_head_multiplier": 0.04, "mlp_multipliers": [0.9, 0.3], "key_multiplier": 0.4,
    "attention_in_multiplier": 0.7, "attention_out_multiplier": 0.9, "ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.3],
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24,
}  # fmt: skip


def test_multipliers_are_in_the_weights_of_a_file(tmp_path):
    model, folder = multiplied(tmp_path)
    assert main(["convert", str(folder), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 0
    have, want = logits(halfbyte.load_model(tmp_path / "back.gguf")[0]), logits(model)
    np.testing.assert_allclose(have, want, rtol=0, atol=2e-6 * np.abs(want).max())
    assert main(["verify", str(folder), str(tmp_path / "back.gguf")]) == 0


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"attention_bias": True}, {"projectors_bias": True}])
def test_multipliers_that_weights_do_not_have_are_refused(tmp_path, capsys, changes):
    _, folder = multiplied(tmp_path, **changes)
    assert main(["convert", str(folder), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 2
    assert re.search(r"_multipliers? is .*, a GGUF of falcon-h1 says 1|have no name in a GGUF", capsys.readouterr().err)


@pytest.mark.parametrize("case", ["qwen35moe", "deepseek2", "kimi-linear"])
def test_shards_of_bfloat16_become_the_file_of_one(tmp_path, case):
    model, files = family_model(case).to(torch.bfloat16), []
    for size in ("50KB", "5GB"):
        source = write_family(tmp_path / "m.gguf", case, family_model(case))
        folder = saved(tmp_path / size / "folder", case, model, source)
        if size == "50KB":
            (folder / "model.safetensors").unlink()
            model.save_pretrained(folder, max_shard_size=size)
            assert len(list(folder.glob("*.safetensors"))) > 2
        files.append(tmp_path / size / "back.gguf")
        assert main(["convert", str(folder), str(files[-1]), "--to", "gguf"]) == 0
    with halfbyte.open(files[0]) as a, halfbyte.open(files[1]) as b:
        assert set(a) == set(b)
        for key in a:
            np.testing.assert_array_equal(np.asarray(a[key], np.float32), np.asarray(b[key], np.float32), err_msg=key)
        assert {a.info(key).dtype for key in a} == {"bfloat16", "float32"}


@pytest.mark.parametrize(("case", "said"), [("phimoe", "rules for such names, which need torch"), ("qwen35moe", "")])
def test_names_that_transformers_renames_need_its_rules(tmp_path, capsys, monkeypatch, case, said):
    folder = saved(tmp_path / "folder", case, (model := family_model(case)), write_family(tmp_path / "m.gguf", case, model))
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert main(["convert", str(folder), str(tmp_path / "back.gguf"), "--to", "gguf"]) == (2 if said else 0)
    assert said in capsys.readouterr().err
