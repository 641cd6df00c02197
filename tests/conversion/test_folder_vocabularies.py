"""WordPiece and Unigram tokenizers of a folder become vocabularies of a GGUF with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import halfbyte
import torch
from halfbyte.cli import main
from support.gguf_families import logits
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and isn't it unhappy? 12345 naïve café",
    "def f(x): return x ** 2  # größer  als\n日本語 漢字 한국어 Ελληνικά русский",
] * 4
TEXTS = [*CORPUS[:2], "  Hello,\tworld!  two  spaces [MASK] <extra_id_0> ½ \u0301x 🙂", "UNHAPPY fox 漢", ""]


def wordpiece(lower: bool) -> tuple[Tokenizer, dict[str, str]]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=None)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    ends = [(t, backend.token_to_id(t)) for t in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return backend, {
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    }


def spaces() -> normalizers.Normalizer:
    """A compiled table that makes a space of a tab and of the ends of a line: a double array of
    1024 units, whose node of a byte is at 256 ^ byte and its value, where the text begins, at
    768 ^ byte.
    """
    units = np.zeros(1024, "<u4")
    units[0] = 256 << 10
    for byte in b"\t\n\r":
        units[256 ^ byte] = byte | 1 << 8 | 512 << 10
    return normalizers.Precompiled(np.uint32(units.nbytes).tobytes() + units.tobytes() + b" \0")


def unigram(normalizer: Any = None) -> tuple[Tokenizer, dict[str, str]]:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizer or spaces()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def folder(path: Path, kind: str, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a small encoder or T5 that was saved."""
    backend, words = wordpiece(**options) if kind == "bert" else unigram(**options)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    if kind == "bert":
        model = BertModel(BertConfig(**sizes, pad_token_id=0), add_pooling_layer=False).eval()
    else:
        t5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 320}
        model = T5ForConditionalGeneration(T5Config(**t5, feed_forward_proj="gated-gelu", decoder_start_token_id=0)).eval()
    model.save_pretrained(path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **words)
    tokenizer.save_pretrained(path)
    return model, tokenizer


CASES = [("bert", {"lower": True}), ("bert", {"lower": False}), ("t5", {})]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_file_has_the_tokens_of_the_folder(tmp_path, kind, options):
    model, theirs = folder(tmp_path / "folder", kind, **options)
    out = tmp_path / "model.gguf"
    assert main(["convert", str(tmp_path / "folder"), str(out), "--to", "gguf"]) == 0
    read, ours = halfbyte.load_model(out)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours.pad_token_id == theirs.pad_token_id
    assert torch.allclose(logits(read), logits(model), rtol=1e-5, atol=1e-5)
    with halfbyte.open(out) as file:
        assert file.metadata["tokenizer.ggml.model"] == kind


def test_characters_that_the_file_cannot_change_so_are_refused(tmp_path, capsys):
    folder(tmp_path / "folder", "t5", normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()]))
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 2
    assert "as a GGUF vocabulary gives other tokens" in capsys.readouterr().err


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize(("kind", "options"), [CASES[0], CASES[2]])
def test_llama_cpp_reads_the_same_tokens(tmp_path, kind, options):
    llama_cpp = pytest.importorskip("llama_cpp")
    _, theirs = folder(tmp_path / "folder", kind, **options)
    out = tmp_path / "model.gguf"
    assert main(["convert", str(tmp_path / "folder"), str(out), "--to", "gguf"]) == 0
    model = llama_cpp.Llama(str(out), vocab_only=True, verbose=False)
    for text in TEXTS[:2] + TEXTS[3:4]:
        text = text.replace("한국어 ", "")  # BERT's own decomposes Hangul, llama.cpp does not
        assert model.tokenize(text.encode(), add_bos=True, special=True) == theirs(text)["input_ids"], text
