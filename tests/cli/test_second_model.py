"""A published model that is no Gemma: the header of SmolLM2-135M-Instruct (its keys, pre-tokenizer,
end-of-turn tokens and chat template), tensors of its types, small and random.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

import torch
from halfbyte.bench.model import race, run_one
from halfbyte.cli import main
from support.second_model import write_smollm2


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "SmolLM2-tiny.Q4_1.gguf")


def records(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_case_85_a_second_model_generates_chats_is_evaluated_and_timed(smollm2, tmp_path, capsys, monkeypatch):
    assert main(["inspect", str(smollm2), "--json"]) == 0
    assert not [r for r in records(capsys) if r.get("code") == "cannot-run"]

    assert main(["generate", str(smollm2), "-p", "The quick", "-n", "4", "--json"]) == 0
    summary = records(capsys)[-1]
    assert 0 < summary["tokens"] <= 4

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(smollm2), "-n", "3", "--json"]) == 0
    (reply,) = records(capsys)
    assert reply["stopped"] in ("eos", "length")
    assert reply["prompt_tokens"] > 8  # both turns with their markers

    (tmp_path / "text.txt").write_text("The quick Brown FOX; it's 1234567 o'clock, " * 12)
    assert main(["eval", str(smollm2), "--text", str(tmp_path / "text.txt"), "--context", "64", "--chunks", "2", "--json"]) == 0
    evaluated = records(capsys)[0]
    assert evaluated["chunks"] == 2
    assert 1 < evaluated["perplexity"] < 1e6

    def in_this_process(what: str, path: Path, *options: object) -> dict:
        threads = torch.get_num_threads()
        run_one.main(what, str(path), *options)
        torch.set_num_threads(threads)
        return records(capsys)[-1]

    monkeypatch.setattr(race, "run_one", in_this_process)
    options = ["--threads", "1", "--rounds", "1", "--peers", "", "--activations", "exact", "--json"]
    assert main(["bench", "--model", str(smollm2), *options]) == 0
    measured = records(capsys)
    assert measured
    assert all(r["decode_tokens_per_s"] > 0 for r in measured)


def test_its_decoding_steps_are_native(smollm2):
    from halfbyte.transformers import load_model
    from halfbyte.transformers.decode.native_step import supports

    assert supports(load_model(smollm2)[0])
