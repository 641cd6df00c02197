"""A folder becomes a complete GGUF: names, row orders, key-values, tokenizer and template; and a
GGUF that became a folder comes back with the same values and tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import halfbyte
import torch
from halfbyte.checkpoints.gguf.runnable import READ
from halfbyte.cli import main
from halfbyte.gguf_models.pretokenizers import PRE_TOKENIZERS
from halfbyte.gguf_models.variants import WRITTEN_AS
from halfbyte.tensor.qtensor import QTensor
from support.gguf_families import FAMILIES, IDS, family_model, logits, write_family
from support.gguf_models import BASE, MODELS, dense_model, write
from support.llama_cpp_logits import llama_cpp_logits
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def written(tmp_path: Path, name: str) -> Path:
    if name in MODELS:
        return write(tmp_path / "model.gguf", name, dense_model(name), True)
    return write_family(tmp_path / "model.gguf", name, family_model(name))


OTHER_ROWS = ("codeshell", "deepseek2:whole", "exaone", "maincoder", "mistral3:plain", "paddleocr", "pangu-embedded", "qwen")
"""They come back as another architecture, whose tensors are others or have other rows: the same
logits.
"""
UNUSED = {"gemma3n": ("blk.20.attn_", "blk.21.attn_")}
"""Tensors that no layer reads, which come back as zeros."""


@pytest.mark.parametrize("name", [*MODELS, *FAMILIES])
def test_there_and_back(tmp_path, name):
    """GGUF, folder, GGUF: every value, every token, the same logits."""
    source, folder, back = written(tmp_path, name), tmp_path / "folder", tmp_path / "back.gguf"
    assert main(["convert", str(source), str(folder), "--to", "halfbyte"]) == 0
    assert main(["convert", str(folder), str(back), "--to", "gguf"]) == 0
    with halfbyte.open(source) as a, halfbyte.open(back) as b:
        other = WRITTEN_AS | {"deepseek2:temperature": "mistral4", "mistral3:plain": "llama"}
        assert b.metadata["general.architecture"] == other.get(name, a.metadata["general.architecture"])
        assert name in OTHER_ROWS or set(a) == set(b)
        for key in a if name not in OTHER_ROWS else ():
            if key.startswith(UNUSED.get(name, ("-",))):
                continue
            if key == "rope_freqs.weight":
                np.testing.assert_allclose(a[key], b[key], rtol=1e-5)
                continue
            want, have = a[key], b[key]
            assert isinstance(want, QTensor) == isinstance(have, QTensor)
            if isinstance(want, QTensor):
                assert want == have, key
            else:
                np.testing.assert_allclose(have.astype(np.float32), want.astype(np.float32), rtol=0, atol=1e-6, err_msg=key)
        types = [list(c.metadata["tokenizer.ggml.token_type"])[1:] for c in (a, b)]  # 0 is unknown
        assert types[0] == types[1]
        for key in ("tokens", "bos_token_id", "eos_token_id", "add_bos_token"):
            key = f"tokenizer.ggml.{key}"
            if key in a.metadata:
                assert list(np.atleast_1d(a.metadata[key])) == list(np.atleast_1d(b.metadata[key])), key
    ours, theirs = halfbyte.load_model(source), halfbyte.load_model(back)
    assert torch.allclose(logits(ours[0]), logits(theirs[0]), rtol=2e-5, atol=2e-5)
    assert ours[1]("abcz")["input_ids"] == theirs[1]("abcz")["input_ids"]


def test_every_architecture_that_is_read_has_a_case():
    assert {MODELS[n][0] for n in MODELS} | {case.partition(":")[0] for case in FAMILIES} | {"qwen3vlmoe"} <= READ | {
        "qwen3vlmoe"
    }


SPECIAL = ["<bos>", "<eos>", "<pad>", "<|im_end|>"]


def folder_of(path: Path, name: str, kind: str) -> Any:
    """A model's folder with a tokenizer of its own: BPE on bytes as LLaMA 3's, or on characters
    with byte tokens as LLaMA 2's; and a chat template.
    """
    text = ["Hello world, it is 12 o'clock. 日本語 naïve café\n\n  def f(x):\n    return x"] * 4
    if kind == "bytes":
        backend = Tokenizer(models.BPE(ignore_merges=True))
        split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["llama-bpe"].splits[0]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(text, trainer)
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        special = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
        backend.train_from_iterator(text, trainer)
        raw = json.loads(backend.to_str())
        raw["added_tokens"] = [t for t in raw["added_tokens"] if not t["content"].startswith("<0x")]
        backend = Tokenizer.from_str(json.dumps(raw))
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    _, model_type, changes, _ = MODELS[name]
    config = BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}} | changes
    config |= {"vocab_size": 448, "bos_token_id": bos, "eos_token_id": backend.token_to_id("<eos>")}
    config |= {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.08) + (0.5 if "norm" in key else 0))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_a_dense_folder_becomes_a_gguf_with_its_tokenizer(tmp_path, kind):
    model = folder_of(tmp_path / "folder", "llama", kind)
    out = tmp_path / "model.gguf"
    assert main(["convert", str(tmp_path / "folder"), str(out), "--to", "gguf"]) == 0
    read, tokenizer = halfbyte.load_model(out)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "folder")
    for text in ("Hello world", "  日本 it's\n\n12345 x", "return <|im_end|> naïve"):
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"], text
    assert tokenizer.chat_template == theirs.chat_template
    assert torch.allclose(logits(read), logits(model), rtol=1e-5, atol=1e-5)
    with halfbyte.open(out) as file:
        assert file.metadata["tokenizer.ggml.model"] == {"bytes": "gpt2", "characters": "llama"}[kind]
        assert file.metadata["general.name"] == "folder"
    assert main(["verify", str(tmp_path / "folder"), str(out)]) == 0


def test_a_packed_folder_becomes_a_gguf(tmp_path):
    folder_of(tmp_path / "folder", "llama", "bytes")
    to = ["--to", "compressed-tensors:int4:g32", "--method", "rtn"]
    assert main(["quantize", str(tmp_path / "folder"), str(tmp_path / "int4"), *to]) == 0
    assert main(["convert", str(tmp_path / "int4"), str(tmp_path / "out.gguf"), "--to", "gguf"]) == 0
    with halfbyte.open(tmp_path / "out.gguf") as file:
        assert {file.info(k).dtype for k in file if file.info(k).quantized} == {"Q4_0"}
    assert torch.allclose(*(logits(halfbyte.load_model(tmp_path / n)[0]) for n in ("int4", "out.gguf")), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "persimmon"}, "model_type 'persimmon' has no table of a GGUF here; there are"),
        ({"head_dim": 16}, "allow-unknown"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters is"),
    ],
)
def test_what_a_gguf_cannot_state_is_refused_before_anything_is_written(tmp_path, capsys, change, said):
    folder_of(tmp_path / "folder", "llama", "bytes")
    path = tmp_path / "folder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, capsys):
    folder_of(tmp_path / "folder", "llama", "bytes")
    (tmp_path / "folder" / "tokenizer.json").unlink()
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 2
    assert "there is no tokenizer.json here" in capsys.readouterr().err


def test_phi3_without_factors_has_no_original_length_to_state(tmp_path):
    """transformers' configuration says 4096 whatever the model."""
    folder_of(tmp_path / "folder", "phi3", "bytes")
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["original_max_position_embeddings"] == 4096
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "m.gguf"), "--to", "gguf"]) == 0
    assert main(["verify", str(tmp_path / "folder"), str(tmp_path / "m.gguf")]) == 0


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mpt", {"attn_config": {"softmax_scale": 0.5}}, "attn_config is .* says .*'softmax_scale': None"),
        ("phi3:long", {"rope_scaling": {"factor": 3.0}}, "'factor': 3.0.*, a GGUF of phi3 says"),
    ],
)
def test_a_number_that_no_key_states_is_refused(tmp_path, capsys, name, change, said):
    assert main(["convert", str(written(tmp_path, name)), str(tmp_path / "folder"), "--to", "halfbyte"]) == 0
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    for field, value in change.items():
        config[field] = config[field] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "back.gguf").exists()


@pytest.mark.parametrize("alike", [True, False])
def test_a_number_for_each_layer_is_one_where_all_are_alike(tmp_path, capsys, alike):
    """Hunyuan-A13B's configuration has lists of its experts' numbers."""
    source, folder = written(tmp_path, "hunyuan-moe"), tmp_path / "folder"
    assert main(["convert", str(source), str(folder), "--to", "halfbyte"]) == 0
    config = json.loads((folder / "config.json").read_text())
    config |= {"moe_topk": [2, 2 if alike else 1], "num_shared_expert": [1, 1], "moe_intermediate_size": [96, 96]}
    config.pop("num_experts_per_tok", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(folder), str(tmp_path / "back.gguf"), "--to", "gguf"]) == (0 if alike else 2)
    if alike:
        with halfbyte.open(source) as a, halfbyte.open(tmp_path / "back.gguf") as b:
            for key in ("expert_used_count", "expert_shared_feed_forward_length", "expert_feed_forward_length"):
                assert a.metadata[f"hunyuan-moe.{key}"] == b.metadata[f"hunyuan-moe.{key}"]
    else:
        assert "is [2, 1], a GGUF of hunyuan-moe says 2" in capsys.readouterr().err


def test_a_stretched_rotation_without_a_factor_gets_the_computed_one(tmp_path):
    """√(1 + ln s / ln L), s = 1024 / 8 the stretch of a context of L = 8 tokens."""
    assert main(["convert", str(written(tmp_path, "phi3:long")), str(tmp_path / "folder"), "--to", "halfbyte"]) == 0
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    for rope in (config["rope_parameters"], config["rope_scaling"]):
        del rope["attention_factor"]
    path.write_text(json.dumps(config))
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "back.gguf"), "--to", "gguf"]) == 0
    with halfbyte.open(tmp_path / "back.gguf") as file:
        assert file.metadata["phi3.rope.scaling.attn_factor"] == pytest.approx((1 + np.log(128) / np.log(8)) ** 0.5)
        assert file.metadata["phi3.rope.scaling.original_context_length"] == 8


COMMON = ("llama", "llama-3", "qwen2", "qwen3", "qwen3moe", "mixtral", "gemma2", "gemma3", "phi3", "gpt-oss")


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("name", COMMON)
def test_llama_cpp_runs_the_file(tmp_path, name):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = folder_of(tmp_path / "folder", name, "bytes")
    out = tmp_path / "model.gguf"
    assert main(["convert", str(tmp_path / "folder"), str(out), "--to", "gguf"]) == 0
    theirs = llama_cpp.Llama(str(out), logits_all=True, n_ctx=64, n_threads=1, verbose=False, type_k=0, type_v=0)
    text = "Hello world, it's 12345 日本"
    want_ids = PreTrainedTokenizerFast.from_pretrained(tmp_path / "folder")(text)["input_ids"]
    assert theirs.tokenize(text.encode(), special=True) == want_ids
    ids = IDS
    theirs.eval(ids)
    have, want = np.array(theirs.scores[: len(ids)], np.float64), logits(model)[0].double().numpy()
    bound = 2e-5 if name == "gpt-oss" else 1e-6  # llama.cpp rounds the borders of YaRN's ramp, transformers does not
    assert ((have - want) ** 2).mean() <= bound * (want**2).mean()


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize(
    "name",
    [
        "afmoe",
        "cohere2moe",
        "cohere2moe:rms",
        "ernie4_5-moe",
        "exaone-moe",
        "granite_swa",
        "hrm_text",
        "hy_v3",
        "laguna",
        "laguna:element",
        "minicpm3",
        "mpt",
        "phi3:long",
        "phi3:short",
    ],
)
def test_llama_cpp_runs_a_file_that_came_back(tmp_path, name):
    pytest.importorskip("llama_cpp")
    model = family_model(name, 256)
    source, folder, back = write_family(tmp_path / "m.gguf", name, model), tmp_path / "folder", tmp_path / "back.gguf"
    assert main(["convert", str(source), str(folder), "--to", "halfbyte"]) == 0
    assert main(["convert", str(folder), str(back), "--to", "gguf"]) == 0
    have, want = llama_cpp_logits(back), logits(model)[0].double().numpy()
    assert ((have - want) ** 2).mean() <= 1e-6 * (want**2).mean()
