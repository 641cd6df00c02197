"""`eval --against llama.cpp`: with a stand-in for llama-cpp-python whose answers are known, and
with the package itself (`make test-ecosystem`).
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import torch
from halfbyte.cli import main
from halfbyte.evaluation.llama_cpp import greedy_agreement
from support.gguf_families import family_model, write_family
from support.gguf_writer import GGUF

TEXT = "abcdefghij klmnop qrst uvwxyzabc def" * 4


class Stand:
    """llama-cpp-python's class, answering with a transformers model's logits plus `shift` for token
    7.
    """

    model: object
    shift = 0.0
    tokens_off = 0

    def __init__(self, path: str, **options: object) -> None:
        self.options, self.ids = options, []

    def reset(self) -> None:
        self.ids = []

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    def eval(self, ids: list[int]) -> None:
        self.ids += ids
        with torch.no_grad():
            logits = Stand.model(input_ids=torch.tensor([self.ids])).logits[0].float().numpy()
        logits[:, 7] += Stand.shift
        self.scores = logits

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
        from halfbyte.gguf_models.tokenizer import tokenizer_of

        with GGUFCheckpoint(Stand.path) as checkpoint:
            ids = list(tokenizer_of(checkpoint)(text.decode())["input_ids"])
        return ids[: len(ids) - Stand.tokens_off]

    def token_eos(self) -> int:
        return 2


@pytest.fixture
def model_file(tmp_path):
    model = family_model("xverse")
    (tmp_path / "text.txt").write_text(TEXT)
    return write_family(tmp_path / "m.gguf", "xverse", model), model


def evaluated(path, capsys, *options: str) -> dict:
    text = str(path.parent / "text.txt")
    assert main(["eval", str(path), "--text", text, "--context", "32", "--against", "llama.cpp", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[0])


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_the_figures_are_those_of_the_other_logits(model_file, capsys, monkeypatch, shift):
    path, model = model_file
    monkeypatch.setattr(Stand, "model", model, raising=False)
    monkeypatch.setattr(Stand, "path", path, raising=False)
    monkeypatch.setattr(Stand, "shift", shift)
    monkeypatch.setattr(Stand, "tokens_off", int(shift > 0))
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Stand))
    record = evaluated(path, capsys)
    if shift == 0:
        assert record["llama_cpp_perplexity"] == record["perplexity"]
        assert (record["tokens_differ_at"], record["agreement"], record["kl_mean"]) == (None, 1.0, 0.0)
        assert record["greedy_equal"] == record["greedy_tokens"] == 32
        assert (record["greedy_ties"], record["gap_error"]) == (0, None)
    else:  # llama.cpp is certain of token 7: KL = −ln q(7)
        assert record["tokens_differ_at"] > 30
        assert record["kl_mean"] > 1
        assert record["agreement"] < 0.5
        assert record["greedy_equal"] < 32
        # Its weights are dense: nothing is rounded, so no gap is small enough to be a tie.
        assert (record["greedy_ties"], record["gap_error"]) == (0, 0.0)
        assert record["llama_cpp_perplexity"] > 1e6


def test_a_gap_that_rounding_closes_is_a_tie():
    """Rounded activations change the gap of the two likeliest by 0.2 at every place: a token that
    lies 0.5 below ours is a tie, one that lies 2 below is not.
    """

    def model(second: float) -> Any:
        def forward(input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int = 0, **_: object) -> Any:
            rows = torch.zeros(1, input_ids.shape[1], 6)
            rows[..., 1], rows[..., 2], rows[..., 3] = 2.0, second, 1.5
            return SimpleNamespace(logits=rows[:, -logits_to_keep:], past_key_values=None)

        forward.get_input_embeddings = lambda: SimpleNamespace(weight=torch.zeros(1))  # type: ignore[attr-defined]
        return forward

    class Llama:
        def __init__(self, best: list[int]) -> None:
            self.best = best

        def reset(self) -> None: ...

        def eval(self, ids: list[int]) -> None:
            self.scores = np.eye(6, dtype=np.float32)[[0] * (len(ids) - 32) + self.best]

    equal = [1] * 32
    for best, want in ((equal, (32, 0)), ([3, *equal[1:]], (31, 1)), ([3, 4, 3, *equal[3:]], (29, 2))):
        found = greedy_agreement(model(1.75), Llama(best), [0, 0, 0], lambda: model(1.95))
        assert found[:2] == want
        assert found[2] == (None if best == equal else pytest.approx(3 * 0.2))
    assert greedy_agreement(model(1.75), Llama([3, *equal[1:]]), [0, 0, 0], None) == (31, 0, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "vllm"], "--against vllm; allowed: llama.cpp"),
        (["--against", "llama.cpp", "--requantize", "q8_0"], "is a comparison of its own"),
        (["--against", "llama.cpp"], "pip install llama-cpp-python"),
    ],
)
def test_what_cannot_be_compared_is_a_message(model_file, capsys, monkeypatch, options, message):
    path, _ = model_file
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert main(["eval", str(path), "--text", str(path.parent / "text.txt"), "--context", "32", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_has_no_gguf_to_read(tmp_path, capsys, model_file):
    path, _ = model_file
    assert main(["convert", str(path), str(tmp_path / "folder"), "--to", "halfbyte"]) == 0
    assert main(["eval", str(tmp_path / "folder"), "--text", str(path.parent / "text.txt"), "--against", "llama.cpp"]) == 2
    assert "reads the same file, a .gguf" in capsys.readouterr().err


@pytest.mark.ecosystem("llama-cpp-python")
def test_llama_cpp_itself(tmp_path, capsys, monkeypatch):
    pytest.importorskip("llama_cpp")
    whole = GGUF.bytes

    def without_prefix(file: GGUF) -> bytes:
        """llama.cpp ends the process at a space that the vocabulary cannot spell."""
        file.pairs.append(("tokenizer.ggml.add_space_prefix", "bool", 0))
        return whole(file)

    monkeypatch.setattr(GGUF, "bytes", without_prefix)
    (tmp_path / "text.txt").write_text(TEXT.replace(" ", ""))
    record = evaluated(write_family(tmp_path / "m.gguf", "xverse", family_model("xverse", 256)), capsys)
    assert record["tokens_differ_at"] is None
    assert record["greedy_equal"] == 32
    assert record["agreement"] == 1.0
    assert record["kl_mean"] < 1e-9
    np.testing.assert_allclose(record["llama_cpp_perplexity"], record["perplexity"], rtol=1e-6)
