"""Folders that the native core computes without torch: logits, tokens and text are those of
the same folder in transformers; what config.json does not state is left to transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
import torch
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.errors import CheckpointError, ShapeError
from halfbyte.generation.chat import Chat
from halfbyte.generation.native_model import DenseTable, native_model, native_reader
from halfbyte.generation.native_tokenizer import NativeTokenizer, templated_tokenizer, tokenizer_of_folder
from halfbyte.generation.single import end_tokens
from halfbyte.transformers import load_model
from halfbyte.transformers.decode.session import DecodeSession
from support.cpu_weights import needs_native
from support.gguf_models import LLAMA3, dense_model, write
from support.gguf_writer import Q8_0
from support.tiny_models import agree, write_tiny
from support.without_torch import check_same_text

pytestmark = needs_native
FEEDS = ([5, 7, 11], [8], [9], [10, 3], *([t] for t in range(20, 32)), [6, 6, 6, 12, 13, 14, 15, 16, 17], [12])
TURNS = "{% for m in messages %}<bos>{{ m.content }}{% endfor %}"


def of_gguf(folder: Path, name: str) -> Path:
    """A GGUF model written as a folder, its tokenizer and settings too."""
    path = write(folder / f"{name}.gguf", name, dense_model(name), packed=True, kinds=(Q8_0,))
    hb.convert(path, folder / name, to="halfbyte")
    return folder / name


def equal_logits(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        session = native_model(checkpoint).session()
    wanted = DecodeSession(load_model(path)[0])
    for feed in FEEDS:
        assert agree(torch.from_numpy(session(feed).copy()), wanted(feed).float()), feed


def rewrite(path: Path, **changes: Any) -> None:
    """config.json with other values; None removes a key."""
    config = json.loads((path / "config.json").read_text("utf-8")) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")


@pytest.mark.parametrize("name", ["llama", "llama-tied-bias", "llama-3", "qwen2", "qwen2-yarn", "qwen3", "gemma3"])
def test_logits_of_a_converted_gguf_are_those_of_transformers(name, tmp_path):
    equal_logits(of_gguf(tmp_path, name))


@pytest.mark.parametrize(
    ("arch", "producer", "changes"),
    [
        ("llama", "gptq", {"rope_parameters": LLAMA3}),
        ("llama", "awq", {"tie_word_embeddings": True}),
        ("mistral", "mlx", {"sliding_window": 4}),
        ("qwen2", "ct-int4", {}),
        ("qwen3", "fp8", {"attention_bias": True}),
        ("gemma3_text", "ct-mxfp4", {}),
    ],
)
def test_logits_with_dense_tables_are_those_of_transformers(arch, producer, changes, tmp_path):
    """As quantizers write folders: embedding and head are kept (MLX packs them)."""
    path = write_tiny(tmp_path / "m", arch, producer, **changes).folder
    with open_checkpoint(path) as checkpoint:
        model = native_model(checkpoint)
    assert isinstance(model.embedding, DenseTable) == (producer != "mlx")
    assert (model.head is model.embedding) == (arch == "gemma3_text" or "tie_word_embeddings" in changes)
    equal_logits(path)


def test_older_names_of_the_rotations_are_read(tmp_path):
    path = of_gguf(tmp_path, "gemma3")
    with open_checkpoint(path) as checkpoint:
        ours = native_model(checkpoint).session()([5, 7, 11, 9, 3])
        rope = checkpoint.config["rope_parameters"]
    older = {k: v for k, v in rope["full_attention"].items() if k not in ("rope_type", "rope_theta")}
    rewrite(
        path,
        rope_parameters=None,
        rope_theta=rope["full_attention"]["rope_theta"],
        sliding_window_pattern=6,
        layer_types=None,
        rope_local_base_freq=rope["sliding_attention"]["rope_theta"],
        rope_scaling=older | {"type": rope["full_attention"]["rope_type"]},
    )
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(native_model(checkpoint).session()([5, 7, 11, 9, 3]), ours)


def test_a_stored_bias_of_zeros_is_left_out_and_another_is_transformers(tmp_path):
    key = "model.layers.0.self_attn.q_proj.bias"
    for value in (0, 1):
        tiny = write_tiny(
            tmp_path / str(value), "llama", "gptq", edit=lambda t, v=value: t.update({key: np.full(64, v, np.float32)})
        )
        with open_checkpoint(tiny.folder) as checkpoint:
            found = native_reader(checkpoint)
        assert isinstance(found, str) == bool(value)
        assert not value or key in str(found)


def test_a_bias_that_config_json_states_and_no_file_has_is_an_error(tmp_path):
    tiny = write_tiny(
        tmp_path / "m", "qwen3", "gptq", attention_bias=True, edit=lambda t: t.pop("model.layers.1.self_attn.o_proj.bias")
    )
    with open_checkpoint(tiny.folder) as checkpoint, pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.bias"):
        native_model(checkpoint)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "phi3"}, "phi3 is computed by transformers"),
        ({"head_dim": None}, "states head_dim as None"),
        ({"rms_norm_eps": "small"}, "states rms_norm_eps as 'small'"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_act": "relu"}, "the gate relu"),
        ({"use_sliding_window": True}, "the windows of qwen3"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "the rotation 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0}}, "the rotation 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "the rotation 'default'"),
        ({"rope_parameters": None, "rope_theta": None}, "states rope_theta as None"),
        ({"rope_parameters": [], "rope_scaling": [1]}, "no object"),
        ({"tie_word_embeddings": True}, "lm_head"),
    ],
)
def test_what_config_json_does_not_state_is_left_to_transformers(changes, said, tmp_path):
    path = write_tiny(tmp_path / "m", "qwen3", "halfbyte").folder
    rewrite(path, **changes)
    with open_checkpoint(path) as checkpoint:
        why = native_reader(checkpoint)
    assert isinstance(why, str)
    assert said in why


def test_sizes_that_no_tensor_has_are_errors(tmp_path):
    path = write_tiny(tmp_path / "m", "qwen3", "gptq").folder
    rewrite(path, num_hidden_layers=10**9)
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match="num_hidden_layers = 1,000,000,000"):
        native_reader(checkpoint)
    rewrite(path, num_hidden_layers=2, vocab_size=95)
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=r"make it \[95, 64\]"):
        native_reader(checkpoint)
    rewrite(path, vocab_size=96)
    with open_checkpoint(path) as checkpoint, pytest.raises(ShapeError, match="rows 0 to 95"):
        native_model(checkpoint).session()([96])


# ------------------------------------------------------------------------------------------------
# text


@pytest.mark.parametrize("add", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_added_to_a_text_is_what_transformers_adds(add, kept, tmp_path):
    """What tokenizer.json adds, whatever tokenizer_config.json says."""
    path = of_gguf(tmp_path, "llama")
    file = json.loads((path / "tokenizer.json").read_text("utf-8"))
    file |= {"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}
    file["post_processor"] = file["post_processor"] if kept else None
    (path / "tokenizer.json").write_text(json.dumps(file), "utf-8")
    settings = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    settings = {k: v for k, v in settings.items() if not k.startswith("add_")} | add
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    with open_checkpoint(path) as checkpoint:
        ours, theirs, model = NativeTokenizer(checkpoint), tokenizer_of_folder(checkpoint), native_model(checkpoint)
    ids = ours("abc")["input_ids"]
    assert ids == theirs("abc")["input_ids"]
    assert (ids[0] == 1) == kept
    assert ours.eos_token_id == theirs.eos_token_id == 2
    assert end_tokens(model, ours) == end_tokens(load_model(path)[0], theirs)


def test_a_conversation_is_that_of_transformers(tmp_path):
    path = of_gguf(tmp_path, "qwen3")
    with open_checkpoint(path) as checkpoint:
        tokenizer, ends = templated_tokenizer(checkpoint)
        model = native_model(checkpoint)
    ours = Chat(model, tokenizer, template=TURNS, max_tokens=6, stop_ids=ends)
    theirs = Chat(*load_model(path), template=TURNS, max_tokens=6)
    assert list(ours.say("abc")) == list(theirs.say("abc"))
    assert ours.last is not None
    assert theirs.last is not None
    assert ours.last.tokens == theirs.last.tokens
    assert ours.last.stop_ids == theirs.last.stop_ids


def test_the_ends_of_generation_config_end_a_text(tmp_path):
    path = of_gguf(tmp_path, "qwen3")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}), "utf-8")
    with open_checkpoint(path) as checkpoint:
        assert end_tokens(native_model(checkpoint), NativeTokenizer(checkpoint)) == {2, 7, 9}
        assert templated_tokenizer(checkpoint)[1] == {2, 7, 9}


def test_the_command_needs_no_torch(tmp_path):
    check_same_text(of_gguf(tmp_path, "qwen2"))


def test_a_tokenizer_that_cannot_be_read_here(tmp_path, capsys):
    path = of_gguf(tmp_path, "llama")
    command = ["generate", str(path), "-p", "abc", "-n", "2", "--engine", "native"]
    (path / "tokenizer.json").write_text('{"model": {}}', "utf-8")
    assert main(command) == 2
    assert "its tokenizer cannot be read" in capsys.readouterr().err
    (path / "tokenizer.json").unlink()
    assert main(command) == 2
    assert "without a tokenizer.json the tokenizer is read by transformers" in capsys.readouterr().err
