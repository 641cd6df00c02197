"""Every pre-tokenizer that is read gives llama.cpp's tokens: a small vocabulary each, and
llama.cpp's corpus where it is.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.gguf_models.pretokenizers import PRE_TOKENIZERS
from halfbyte.gguf_models.tokenizer import backend_of
from support import gguf_pretokenizers as cases

RECORDED = cases.recorded()
IDS = {pre: case["ids"] for case in RECORDED["cases"] for pre in case["pre"]}
OWN_NAMES = {"gpt2": "gpt-2"}
"""A name that converters wrote and llama.cpp does not know, and whose tokens it has."""
_MARKS = {pre: {4} for pre in ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "kimi-k2")}
DIFFERENT: dict[str, set[int]] = _MARKS | {"deepseek-llm": {6}, "deepseek-coder": {4, 6}}
"""Texts where llama.cpp departs from the model's own expression: its words end at a combining mark,
and it does not take DeepSeek's spaces of U+2000 to U+3000 as the characters of the CJK class that
they are.
"""


def encode(tmp_path: Path, pre: str) -> list[list[int]]:
    kind = RECORDED["characters" if pre in cases.CHARACTERS else "bytes"]
    path = tmp_path / "v.gguf"
    path.write_bytes(cases.header(pre, kind["tokens"], kind["merges"]))
    with GGUFCheckpoint(path) as checkpoint:
        backend = backend_of(checkpoint.metadata)
    return [backend.encode(text, add_special_tokens=False).ids for text in cases.TEXTS]


OTHER_MODELS = {"whitespace"}
"""Names of vocabularies that are not BPE's; tests/gguf_models/test_tokenizer.py has them."""


@pytest.mark.parametrize("pre", [p for p in PRE_TOKENIZERS if p not in OTHER_MODELS])
def test_tokens_are_llama_cpps(tmp_path, pre):
    have, want = encode(tmp_path, pre), IDS[OWN_NAMES.get(pre, pre)]
    differ = {i for i in range(len(cases.TEXTS)) if have[i] != want[i]}
    assert differ == DIFFERENT.get(pre, set())


def test_the_cases_distinguish_the_pre_tokenizers():
    """At least 25 groups of names have tokens of their own, so an expression taken from another
    name is seen.
    """
    assert len(RECORDED["cases"]) >= 25


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("tekken", "HTTPServer's हिन्दी 12", ["HTTPServer", "'s", " हिन्दी", " ", "1", "2"]),
        ("gpt-4o", "camelCase's हिन्दी 1234", ["camel", "Case's", " हिन्दी", " ", "123", "4"]),
        ("kimi-k2", "漢字Ab 12", ["漢字", "Ab", " ", "12"]),
        ("deepseek-llm", "a\u2003b1", ["a", "\u2003", "b", "1"]),
        ("superbpe", "x1234567", ["x", "1", "234", "567"]),
        ("afmoe", "x1234567", ["x", "1", "234", "567"]),
        ("qwen35", "नि 12", ["नि", " ", "1", "2"]),
    ],
)
def test_splits_follow_the_models_own_expressions(pre, text, pieces):
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(e), behavior="isolated") for e in PRE_TOKENIZERS[pre].splits])
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.skipif("HALFBYTE_LLAMA_CPP" not in os.environ, reason="HALFBYTE_LLAMA_CPP names no llama.cpp source folder")
def test_the_vocabularies_of_llama_cpp_are_whole():
    """llama.cpp's own vocabularies and expected tokens: every string of every file."""
    models = Path(os.environ["HALFBYTE_LLAMA_CPP"]) / "models"
    files = sorted(models.glob("ggml-vocab-*.gguf.inp"))
    assert len(files) >= 15
    for file in files:
        texts = file.read_text("utf-8").split("\n__ggml_vocab_test__\n")
        lines = file.with_suffix(".out").read_text().split("\n")
        with GGUFCheckpoint(file.with_suffix("")) as checkpoint:
            backend = backend_of(checkpoint.metadata)
        for text, line in zip(texts, lines, strict=False):
            assert backend.encode(text, add_special_tokens=False).ids == [int(i) for i in line.split()], (file.name, text)
