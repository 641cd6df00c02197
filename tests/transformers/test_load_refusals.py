"""Checkpoints that no model can be made of, and devices that are not here: the sentence each is
refused with.
"""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import torch
from halfbyte.errors import BackendError, CheckpointError, UnsupportedError
from halfbyte.generation.single import Generation
from halfbyte.generation.templates import token_ids
from halfbyte.transformers import load_model
from support.tiny_models import write_tiny


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        ({"model.layers.0.mlp.down_proj.pre_quant_scale": 64}, CheckpointError,
         r"'model.layers.0.mlp.down_proj.pre_quant_scale' is \[64\]; model.layers.0.mlp.down_proj has 128 inputs"),
        ({"lm_head.pre_quant_scale": 64}, CheckpointError, r"multiplies the inputs of lm_head, whose weight is dense"),
        ({"model.layers.7.mlp.down_proj.pre_quant_scale": 64}, UnsupportedError, r"what is no linear layer here"),
    ],
)  # fmt: skip
def test_scales_that_fit_nothing(tmp_path, edit, error, message):
    write_tiny(tmp_path, "llama", "modelopt", edit=lambda t: t.update({n: np.ones(k, np.float32) for n, k in edit.items()}))
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), CheckpointError, r"model.norm: missing \(config.json requires it\)"),
        (lambda t: t.update({"model.layers.0.mlp.extra.weight": np.ones(3, np.float32)}), UnsupportedError,
         r"model.layers.0.mlp.extra.weight have no counterpart in LlamaForCausalLM"),
        (lambda t: t.update({"model.norm.weight": np.ones(3, np.float32)}), CheckpointError,
         r"model.norm: shape \(\[3\]; config.json makes it \[64\]\)"),
        (lambda t: t.update({"language_model.model.norm.weight": np.ones(64, np.float32)}), CheckpointError,
         r"both belong to model.norm.weight"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(tmp_path, edit, error, message):
    write_tiny(tmp_path, "llama", "ct-int4", edit=edit)
    with pytest.raises(error, match=message):
        load_model(tmp_path)


def test_experts_that_do_not_fit_are_said(tmp_path):
    write_tiny(
        tmp_path, "mixtral", "gptq", edit=lambda t: [t.pop(n) for n in list(t) if ".1.block_sparse_moe.experts.3.w1." in n]
    )
    with pytest.raises(CheckpointError, match=r"model.layers.1.block_sparse_moe.experts.3.w1: missing"):
        load_model(tmp_path)


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 128)], ids=str)
def test_biases_of_experts_without_elements_are_named(tmp_path, shape):
    def edit(tensors):
        for name in [n for n in tensors if "experts" in n and "bias" in n]:
            tensors[name] = np.zeros(shape, np.float32)

    write_tiny(tmp_path, "gpt_oss", "gpt-oss", edit=edit)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.(gate_up|down)_proj_bias"):
        load_model(tmp_path)


def test_a_folder_without_a_config(tmp_path):
    write_tiny(tmp_path, "llama", "halfbyte")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json with a model_type"):
        load_model(tmp_path)


def test_an_unknown_model_type(tmp_path):
    write_tiny(tmp_path, "llama", "halfbyte", change_config=lambda c: c.update(model_type="no_such"))
    with pytest.raises(UnsupportedError, match=r"model_type 'no_such' is not one that transformers 5.* builds"):
        load_model(tmp_path)


def break_file(name):
    return lambda folder: (folder / name).write_text("{")


@pytest.mark.parametrize(
    ("config", "spoil", "error", "message"),
    [
        ({"hidden_size": "big"}, None, CheckpointError, r"its config.json describes no llama: .*hidden_size"),
        ({"num_attention_heads": 0, "head_dim": None}, None, CheckpointError, r"describes no llama: ZeroDivisionError"),
        ({"hidden_act": "no_such"}, None, UnsupportedError,
         r"makes no causal language model of this llama configuration \(KeyError: .*no_such"),
        ({"model_type": "clip"}, None, UnsupportedError, r"makes no causal language model of this clip configuration"),
        ({}, break_file("tokenizer.json"), CheckpointError, r"its tokenizer cannot be read: "),
        ({}, break_file("generation_config.json"), CheckpointError, r"its generation_config.json cannot be read: OSError"),
    ],
)  # fmt: skip
def test_what_beside_the_tensors_makes_no_sense(tmp_path, config, spoil, error, message):
    write_tiny(tmp_path, "llama", "ct-int4", change_config=lambda c: c.update(config))
    if spoil is not None:
        spoil(tmp_path)
    with pytest.raises(error, match=message):
        load_model(tmp_path)


def write_bpe(folder, **model):
    """A tokenizer.json of two letters."""
    bpe = {"type": "BPE", "vocab": {"h": 0, "e": 1, "he": 2}, "merges": [["h", "e"]], **model}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": bpe}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def test_a_panic_of_the_tokenizers_library_is_a_refusal(tmp_path):
    """A prefix that is longer than the token it precedes panics: no Exception, a BaseException."""
    write_tiny(tmp_path, "llama", "ct-int4")
    write_bpe(tmp_path, continuing_subword_prefix="longer than a token")
    with pytest.raises(CheckpointError, match=r"its tokenizer cannot be read: PanicException: range"):
        load_model(tmp_path)


@pytest.mark.parametrize("length", ["512", [512], {}, True, None])
def test_a_model_max_length_that_is_no_number(tmp_path, length):
    write_tiny(tmp_path, "llama", "ct-int4")
    write_bpe(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": length}))
    if length is None:  # transformers' own very large number
        assert load_model(tmp_path)[1].model_max_length > 10**20
        return
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json has model_max_length .*; a number is allowed"):
        load_model(tmp_path)


@pytest.mark.parametrize("length", [0, -5, 2**63, 10**30, 1e308, float("inf"), float("nan")])
def test_an_absurd_model_max_length_changes_no_ids(tmp_path, length):
    write_tiny(tmp_path, "llama", "ct-int4")
    write_bpe(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": length}))
    assert token_ids(load_model(tmp_path)[1], "hehe", "generate") == [2, 2]


def test_a_text_that_a_tokenizer_cannot_encode(tmp_path):
    """Its unknown token is not in its vocabulary; the tokenizers library finds it when it needs it."""
    write_tiny(tmp_path, "llama", "ct-int4")
    write_bpe(tmp_path, unk_token="<unk>")
    model, tokenizer = load_model(tmp_path)
    assert token_ids(tokenizer, "he", "generate") == [2]
    with pytest.raises(UnsupportedError, match=r"\[generate\] the tokenizer cannot encode this text .*Unk token `<unk>`"):
        Generation(model, tokenizer, "x")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("foo", r"device='foo'; allowed: cpu, cuda, mps, cuda:N"),
        ("xla", r"device='xla'; allowed: cpu, cuda, mps, cuda:N"),
        ("mps", r"torch sees no Apple GPU here; use device='cpu'"),
        ("cuda", r"device='cuda': torch .* sees no NVIDIA GPU here; use device='cpu', or see `halfbyte backends`"),
        ("cuda:7", r"device='cuda:7'; allowed: cuda:0 to cuda:1"),
    ],
)
def test_devices_that_are_not_here(tmp_path, monkeypatch, device, message):
    write_tiny(tmp_path, "llama", "ct-int4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda:7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BackendError, match=message):
        load_model(tmp_path, device=device)


def test_a_token_whose_id_is_out_of_proportion(tmp_path):
    write_tiny(tmp_path, "llama", "ct-int4")
    write_bpe(tmp_path, vocab={"h": 0, "e": 2**31, "he": 2})
    with pytest.raises(CheckpointError, match=r"tokenizer.json: token 'e' has id 2147483648; ids up to 9,999,999 are allowed"):
        load_model(tmp_path)


READ_BY_TRANSFORMERS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.txt",
    "generation_config.json", "additional_chat_templates/a.jinja",
)  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are Unix's")
@pytest.mark.parametrize("kind", ["pipe", "large"])
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_what_transformers_must_not_open_beside_the_tensors(tmp_path, name, kind):
    """A pipe would block it for ever, a sparse file of a terabyte take all memory."""
    write_tiny(tmp_path, "llama", "ct-int4")
    write_bpe(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    said = "it is a pipe, a device or a socket" if kind == "pipe" else "1,099,511,627,776 bytes; .* are read up to"
    with pytest.raises(CheckpointError, match=rf"{name}: .*{said}"):
        load_model(tmp_path)


@pytest.mark.parametrize("factor", [2**53, 1e300, -1, 0, "8", None, [1]])
def test_a_rotary_factor_of_any_kind_is_a_model_or_a_refusal(tmp_path, factor):
    write_tiny(
        tmp_path, "llama", "ct-int4", change_config=lambda c: c.update(rope_parameters={"rope_type": "linear", "factor": factor})
    )
    if isinstance(factor, int | float):
        assert load_model(tmp_path)[0].config.rope_parameters["factor"] == factor
    else:
        with pytest.raises(UnsupportedError, match="makes no causal language model of this llama configuration"):
            load_model(tmp_path)
