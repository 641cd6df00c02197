"""What the library says it reads is what it builds: the tables of checkpoints, of gguf_models
and of the page agree.
"""

from __future__ import annotations

import json
import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoints.gguf import runnable
from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.checkpoints.gguf.runnable import READ, UNREAD, UNREAD_VOCABULARIES, VOCABULARIES, refusal
from halfbyte.errors import UnsupportedError
from halfbyte.gguf_models.architectures import ARCHITECTURES
from halfbyte.gguf_models.config import settings_of
from halfbyte.gguf_models.pairs import Header, metadata_of, pair
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
            [("general.architecture", "string", "plamo")],
            "architecture 'plamo': transformers has no such model",
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


NAMES = json.loads((ROOT / "tests" / "data" / "llama_cpp_names.json").read_text("utf-8"))
"""llama.cpp's own names (llama-cpp-python 0.3.36)."""


def test_every_name_of_llama_cpp_is_read_or_has_a_reason():
    """In the library's tables, and so on the page, which lists them all."""
    assert set(NAMES["architectures"]) == READ | set(UNREAD)
    assert set(NAMES["pre_tokenizers"]) <= set(PRE_TOKENIZERS)
    assert set(NAMES["vocabularies"]) <= set(VOCABULARIES) | set(UNREAD_VOCABULARIES)
    page = (ROOT / "docs" / "gguf-models.md").read_text("utf-8")
    assert [name for kind in NAMES.values() for name in kind if f"`{name}`" not in page] == []


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.skipif("HALFBYTE_LLAMA_CPP" not in os.environ, reason="HALFBYTE_LLAMA_CPP names no llama.cpp source folder")
def test_the_names_are_those_of_llama_cpps_source():
    source = Path(os.environ["HALFBYTE_LLAMA_CPP"]) / "src"
    vocabulary = (source / "llama-vocab.cpp").read_text("utf-8")
    found = {
        "architectures": set(re.findall(r'\{ LLM_ARCH_\w+,\s*"([^"]+)"', (source / "llama-arch.cpp").read_text("utf-8"))),
        "pre_tokenizers": set(re.findall(r'tokenizer_pre == "([^"]+)"', vocabulary)),
        "vocabularies": set(re.findall(r'tokenizer_model == "([^"]+)"', vocabulary)),
    }
    assert {kind: sorted(names - {"(unknown)", "test"}) for kind, names in found.items()} == NAMES


def settings(arch: str, *stated: tuple[str, str, object], **more: int) -> dict:
    """The configuration that a header of six layers describes."""
    sizes = {
        "context_length": 64, "embedding_length": 32, "block_count": 6, "feed_forward_length": 32, "attention.head_count": 2,
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16, **more,
    }  # fmt: skip
    pairs = [pair("general.architecture", "string", arch), pair(f"{arch}.attention.layer_norm_rms_epsilon", "float32", 1e-5)]
    pairs += [pair(f"{arch}.{key}", "uint32", size) for key, size in sizes.items()]
    pairs += [pair(f"{arch}.{key}", kind, value) for key, kind, value in stated]
    shapes = {"token_embd.weight": (8, 32), **{f"blk.{i}.attn_q.weight": (32, 32) for i in range(6)}}
    return settings_of(Header(Path("m.gguf"), metadata_of(pairs, Path("m.gguf")), shapes, {}))


def test_local_layers_and_their_rotation():
    """A pattern is a period where it is one number, four where it is none; Mellum's last layer of a
    period is global, SmallThinker's first. Local layers have a base of their own.
    """
    local = {"attention.sliding_window": 8}
    for period, given in ((4, local), (3, local | {"attention.sliding_window_pattern": 3})):
        for arch, last in (("mellum", True), ("smallthinker", False)):
            want = [i % period != (period - 1 if last else 0) for i in range(6)]
            have = settings(arch, **given)["layer_types"]
            assert [kind == "sliding_attention" for kind in have] == want, (arch, period)
        assert set(settings("mellum", **given | {"attention.sliding_window": 0})["layer_types"]) == {"full_attention"}
    base, own = ("rope.freq_base", "float32", 5e4), ("rope.freq_base_swa", "float32", 1e4)
    thetas = [
        {kind: rope["rope_theta"] for kind, rope in settings("mellum", *stated, **local)["rope_parameters"].items()}
        for stated in ([base], [base, own])
    ]
    assert thetas == [{"full_attention": 5e4, "sliding_attention": 5e4}, {"full_attention": 5e4, "sliding_attention": 1e4}]


def test_what_scores_smallthinkers_experts():
    scores = [settings("smallthinker", **({} if n is None else {"expert_gating_func": n}))["router_scores"] for n in (None, 1, 2)]
    assert scores == ["softmax", "softmax", "sigmoid"]
    with pytest.raises(UnsupportedError, match="scores experts by function 3; 1 "):
        settings("smallthinker", expert_gating_func=3)
