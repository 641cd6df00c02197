"""Text that a model writes by itself, from its first token and its own probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.generation.native_model import native_model
from halfbyte.generation.native_tokenizer import NativeTokenizer
from halfbyte.generation.own_text import own_text, start_tokens
from halfbyte.generation.single import GenerationError, Sampling, choose, end_tokens
from support.cpu_weights import needs_native
from support.gguf_models import dense_model, write
from support.gguf_writer import Q8_0

pytestmark = needs_native
SEQUENCES, TOKENS = 3, 20


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("own") / "m.gguf", "llama", dense_model("llama"), packed=True, kinds=(Q8_0,))


@pytest.fixture(scope="module")
def loaded(path):
    with open_checkpoint(path) as checkpoint:
        return native_model(checkpoint), NativeTokenizer(checkpoint)


def drawn(model, tokenizer, seed: int, index: int) -> str:
    """One sequence by the model's logits and `choose` alone: after an end token, another text."""
    start, ends, parts, left, attempt = start_tokens(model, tokenizer), end_tokens(model, tokenizer), [], TOKENS - 1, 0
    while left:
        random, session, ids = np.random.default_rng((seed << 64) + index * TOKENS + attempt), model.session(), []
        logits = session(start)
        while left:
            ids.append(choose(logits, Sampling(temperature=1.0), random))
            left -= 1
            if ids[-1] in ends:
                break
            logits = session([ids[-1]])
        parts.append(tokenizer.decode(ids, skip_special_tokens=True))
        attempt += 1
    return "\n\n".join(p for p in parts if p.strip())


def test_each_sequence_is_drawn_at_temperature_1_with_its_own_seed(loaded):
    texts = list(own_text(*loaded, sequences=SEQUENCES, tokens=TOKENS, seed=5))
    assert texts == [drawn(*loaded, 5, i) for i in range(SEQUENCES)]
    others = list(own_text(*loaded, sequences=SEQUENCES, tokens=TOKENS, seed=6))
    assert len({*texts, *others}) == 2 * SEQUENCES


def with_logits(path, factor: float):
    """The file's model in transformers, its logits multiplied, and its tokenizer."""
    pytest.importorskip("torch")
    from halfbyte.transformers import load_model

    model, tokenizer = load_model(path)
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits * factor)
    return model, tokenizer


def test_sequences_drawn_at_once_are_those_of_a_model_that_is_certain(path):
    certain = with_logits(path, 1e6)
    alone = list(own_text(*certain, sequences=SEQUENCES + 2, tokens=TOKENS))
    assert list(own_text(*certain, sequences=SEQUENCES + 2, tokens=TOKENS, at_once=SEQUENCES)) == alone


def test_sequences_drawn_at_once_are_full_and_of_all_tokens(path, monkeypatch):
    """Of a model to which all tokens are nearly alike every token comes; an end is followed by
    another text. Equal seeds give equal texts, and the program's own draws go on as they would.
    """
    import torch

    model, tokenizer = with_logits(path, 1e-3)
    ends, pieces = end_tokens(model, tokenizer), []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: pieces.append(ids) or str(ids))
    before = torch.random.get_rng_state()
    texts = {}
    for run, seed in enumerate((1, 1, 2)):
        pieces.clear()
        texts[run] = list(own_text(model, tokenizer, sequences=40, tokens=60, seed=seed, at_once=32))
        drawn = [token for piece in pieces for token in piece]
        assert (len(texts[run]), len(drawn)) == (40, 40 * 59)
        assert set(drawn) == set(range(model.config.vocab_size))
        assert not any(token in ends for piece in pieces for token in piece[:-1])
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_each_pass_draws_as_many_texts_as_are_wanted_at_once(path, monkeypatch):
    """Where texts end early, sequences further on are begun in place of those that are full."""
    model, tokenizer = with_logits(path, 1e-3)
    sizes, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda ids, **options: sizes.append(len(ids)) or generate(ids, **options))
    assert len(list(own_text(model, tokenizer, sequences=24, tokens=60, at_once=8))) == 24
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) > 24
    assert sizes[:3] == [8, 8, 8]


def test_a_text_begins_with_the_vocabularys_first_token_or_after_its_last(loaded):
    model, tokenizer = loaded

    class Plain:
        eos_token_id: int | None = 2

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": []}

    assert start_tokens(model, tokenizer) == tokenizer("")["input_ids"][:1]
    assert start_tokens(model, Plain()) == [2]
    Plain.eos_token_id = None
    with pytest.raises(GenerationError, match="no token that begins or ends a text"):
        start_tokens(model, Plain())


def test_a_sequence_fits_the_context(loaded):
    most = loaded[0].context
    for tokens in (1, most + 1):
        with pytest.raises(GenerationError, match=f"sequences of {tokens} tokens; 2 to {most} are allowed"):
            next(own_text(*loaded, sequences=1, tokens=tokens))


def test_the_command_writes_a_text_that_calibrates(loaded, path, tmp_path, capsys):
    out = tmp_path / "own.txt"
    command = ["sample", str(path), str(out), "--sequences", str(SEQUENCES), "--tokens", str(TOKENS), "--seed", "5"]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["engine"], record["sequences"], record["tokens"], record["seed"]) == ("native", SEQUENCES, TOKENS, 5)
    assert out.read_text("utf-8") == "\n\n".join(own_text(*loaded, sequences=SEQUENCES, tokens=TOKENS, seed=5)) + "\n"
    assert main([*command, "--batch", "2", "--engine", "native", "--force"]) == 2
    assert main([*command, "--batch", "2", "--json", "--force"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["engine"], record["batch"]) == ("transformers", 2)
    rounded = ["quantize", str(path), str(tmp_path / "q"), "--to", "halfbyte:int4:g32", "--from-packed", "--method", "gptq"]
    assert main([*rounded, "--calibration", str(out), "--context", "16", "--sequences", "2"]) == 0


def test_an_output_is_a_text_file_that_is_not_there(path, tmp_path, capsys):
    assert main(["sample", str(path), str(tmp_path / "own.gguf")]) == 2
    assert "a text is one file named *.txt" in capsys.readouterr().err
    (tmp_path / "own.txt").write_text("mine")
    assert main(["sample", str(path), str(tmp_path / "own.txt")]) == 2
    assert "--force to replace it" in capsys.readouterr().err
    assert (tmp_path / "own.txt").read_text() == "mine"
