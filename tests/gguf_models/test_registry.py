"""What the library says it reads is what it builds: the tables of checkpoints, of gguf_models
and of the page agree.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoints.gguf import runnable
from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.checkpoints.gguf.runnable import READ, UNREAD, UNREAD_VOCABULARIES, VOCABULARIES, refusal
from halfbyte.gguf_models.architectures import ARCHITECTURES
from halfbyte.gguf_models.pretokenizers import PRE_TOKENIZERS
from halfbyte.gguf_models.tokenizer import KINDS
from support.gguf_writer import GGUF, f32

ROOT = Path(__file__).parents[2]


def test_the_tables_agree():
    assert set(ARCHITECTURES) == READ
    assert not READ & set(UNREAD)
    assert KINDS == VOCABULARIES
    assert set(PRE_TOKENIZERS) == runnable.PRE_TOKENIZERS
    assert not set(KINDS) & set(UNREAD_VOCABULARIES)


def test_the_page_is_what_the_tables_say():
    module = runpy.run_path(str(ROOT / "tools" / "gguf_models_page.py"))
    assert module["PAGE"].read_text("utf-8") == module["page"](), "run tools/gguf_models_page.py"


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([("general.architecture", "string", "llama")], None),
        (
            [("general.architecture", "string", "kimi-linear")],
            "architecture 'kimi-linear': its recurrent or convolutional layers",
        ),
        ([("general.architecture", "string", "moon")], "architecture 'moon': llama.cpp does not know it either"),
        (
            [("general.architecture", "string", "llama"), ("tokenizer.ggml.model", "string", "hybriddna")],
            "vocabulary 'hybriddna': its DNA markers switch",
        ),
        (
            [
                ("general.architecture", "string", "llama"),
                ("tokenizer.ggml.model", "string", "gpt2"),
                ("tokenizer.ggml.pre", "string", "moon"),
            ],
            "pre-tokenizer 'moon': llama.cpp does not know it either",
        ),
    ],
)
def test_inspect_says_what_cannot_run(tmp_path, pairs, why):
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF(pairs=pairs, tensors=[f32("w", np.ones(1))]).bytes())
    with GGUFCheckpoint(path) as checkpoint:
        found = [f for f in checkpoint.header_findings() if f.code == "cannot-run"]
        reason = refusal(checkpoint.metadata)
        (tmp_path / "tokenizer.json").write_text("{}")
        beside = [f for f in checkpoint.header_findings() if f.code == "cannot-run"]
    assert bool(beside) == (why is not None and why.startswith("architecture"))
    if why is None:
        assert (found, reason) == ([], None)
    else:
        assert reason is not None
        assert reason.startswith(why)
        assert [str(f) for f in found] == [
            f"note [cannot-run] cannot be run here, because {reason}; its weights can be read, verified and converted"
        ]


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.skipif("HALFBYTE_LLAMA_CPP" not in os.environ, reason="HALFBYTE_LLAMA_CPP names no llama.cpp source folder")
def test_every_name_of_llama_cpp_is_read_or_has_a_reason():
    source = Path(os.environ["HALFBYTE_LLAMA_CPP"]) / "src"
    architectures = set(re.findall(r'\{ LLM_ARCH_\w+,\s*"([^"]+)"', (source / "llama-arch.cpp").read_text()))
    assert len(architectures) > 140
    assert architectures - {"(unknown)"} == READ | set(UNREAD)
    vocabulary = (source / "llama-vocab.cpp").read_text()
    pre = set(re.findall(r'tokenizer_pre == "([^"]+)"', vocabulary))
    assert pre <= set(PRE_TOKENIZERS)
    kinds = set(re.findall(r'tokenizer_model == "([^"]+)"', vocabulary)) - {"test"}
    assert kinds == set(VOCABULARIES) | set(UNREAD_VOCABULARIES)
