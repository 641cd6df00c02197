"""Perplexity by its two protocols, and what a comparison says: against plain torch, and on models
that were spoilt on purpose.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import torch
from halfbyte.cli.app import main
from halfbyte.errors import HalfbyteError
from halfbyte.evaluation import (
    EvaluationError,
    LayerDrift,
    Thresholds,
    Window,
    compare,
    llama_cpp,
    perplexity,
    sliding,
    windows_of,
)
from halfbyte.evaluation.compare import cosine_of, paired
from halfbyte.evaluation.requantize import requantized
from halfbyte.evaluation.texts import read_text, tokens_of
from halfbyte.evaluation.thresholds import fraction
from halfbyte.torch import packed_modules
from halfbyte.transformers import load_model
from support.tiny_models import VOCAB, dense_model, write_tiny
from support.tiny_tokenizer import write_tokenizer

IDS = [1, *np.random.default_rng(0).integers(6, VOCAB, 99).tolist()]
DOCUMENT = "<tok15> <tok7> <tok9> <tok15> <tok11>"


@pytest.fixture(scope="module")
def model():
    return dense_model("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A packed checkpoint with a tokenizer of one token a word, bos added."""
    where = tmp_path_factory.mktemp("packed")
    write_tiny(where, "llama", "halfbyte")
    write_tokenizer(where)
    (where / "text.txt").write_bytes((" ".join(f"<tok{i}>" for i in IDS[1:]) + "\n").encode())
    return where


def by_hand(model, windows) -> tuple[float, int]:
    """exp of the mean cross entropy, a window at a time."""
    losses = []
    for w in windows:
        tokens = torch.tensor([w.tokens])
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits[0].double()
        losses.append(functional.cross_entropy(logits[w.first - 1 : -1], tokens[0, w.first :], reduction="none"))
    every = torch.cat(losses)
    return math.exp(float(every.mean())), len(every)


def test_llama_cpp_protocol_scores_255_of_512():
    ids = list(range(1000, 1000 + 1500))
    windows = llama_cpp(ids, 512, bos=7)
    assert len(windows) == 2
    assert all(w.tokens[0] == 7 and len(w.tokens) == 512 and w.first == 257 and w.scored == 255 for w in windows)
    assert windows[1].tokens[1:] == tuple(range(1000 + 513, 1000 + 1024))
    assert llama_cpp(ids, 512)[0].tokens[0] == 1000
    assert len(llama_cpp(ids, 512, chunks=1)) == 1
    assert 40 * windows[0].scored == 10_200


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_sliding_windows_score_every_token_but_the_first_once(count, context, data):
    stride = data.draw(st.integers(1, context))
    ids = list(range(count))
    windows = sliding(ids, context, stride)
    scored = [t for w in windows for t in w.tokens[w.first :]]
    alone = range(0, count, context) if stride == context else [0]
    assert scored == [t for t in ids if t not in alone]
    assert all(len(w.tokens) <= context and w.first >= 1 for w in windows)
    assert all(len(w.tokens) == context for w in windows[:-1])


@pytest.mark.parametrize(
    "windows", [llama_cpp(IDS, 16, 1), llama_cpp(IDS, 32), sliding(IDS, 32, 8), sliding(IDS, 64), [Window(tuple(IDS[:5]), 4)]]
)
def test_perplexity_equals_cross_entropy(model, windows):
    measured = perplexity(model, windows)
    want, tokens = by_hand(model, windows)
    assert measured.tokens == tokens == sum(w.scored for w in windows)
    assert measured.value == pytest.approx(want, rel=1e-6)


def test_the_error_is_the_standard_error_of_the_mean(model):
    windows = llama_cpp(IDS, 16, 1)
    losses = torch.cat(
        [
            functional.cross_entropy(
                model(input_ids=torch.tensor([w.tokens])).logits[0, w.first - 1 : -1].double().detach(),
                torch.tensor(w.tokens[w.first :]),
                reduction="none",
            )
            for w in windows
        ]
    )
    measured = perplexity(model, windows)
    want = measured.value * float(losses.std(correction=0)) / math.sqrt(len(losses) - 1)
    assert measured.error == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "other"}, "protocol 'other'; allowed: llama.cpp, sliding"),
        ({"context": 200}, r"100 tokens; llama.cpp's protocol wants 200"),
        ({"context": 2}, "context 2; 4 tokens or more"), ({"stride": 4}, "whose chunks do not overlap"),
        ({"chunks": 0}, "0 chunks; 1 or more"),
        ({"protocol": "sliding", "context": 8, "stride": 9}, "stride 9"),
    ],
)  # fmt: skip
def test_protocols_that_cannot_be_used(options, message):
    with pytest.raises(EvaluationError, match=message):
        windows_of(IDS, **options)


def test_a_window_longer_than_the_model(model):
    with pytest.raises(EvaluationError, match="a window of 100 tokens; the model takes up to 64"):
        perplexity(model, llama_cpp(IDS, 100))


def test_a_model_beside_itself(model):
    same = compare(model, model, llama_cpp(IDS, 16, 1))
    assert same.agreement == 1
    assert same.kl_mean == same.kl_p99 == 0
    assert same.perplexity_increase == 0
    assert same.least_cosine == pytest.approx(1, abs=1e-12)
    assert all(d.relative_rms == 0 for d in (same.embedding, *same.layers))
    assert len(same.layers) == 2
    assert len(same.kl) == same.model.tokens


def test_divergence_is_the_sum_over_the_vocabulary():
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.standard_normal((70, 50))) for _ in range(2))
    b[:, 3] = a[:, 3] = -math.inf
    targets = torch.from_numpy(rng.integers(4, 50, 70))
    kl, theirs, ours, same = paired(a, b, targets)
    assert np.allclose(theirs, functional.cross_entropy(a, targets, reduction="none"), rtol=1e-12)
    assert np.allclose(ours, functional.cross_entropy(b, targets, reduction="none"), rtol=1e-12)
    p, q = a.softmax(-1), b.softmax(-1)
    want = [sum(float(x * (x / y).log()) for x, y in zip(pr, qr, strict=True) if x > 0) for pr, qr in zip(p, q, strict=True)]
    assert np.allclose(kl.numpy(), want, rtol=1e-10)
    assert same == int((a.argmax(-1) == b.argmax(-1)).sum())


def spoilt(model, layer: int = 1):
    import copy

    other = copy.deepcopy(model)
    weight = other.model.layers[layer].mlp.down_proj.weight
    weight.data = weight.data[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))]
    return other


def test_case_57_shuffled_weights_fail_the_checker(model):
    """One matrix with its rows in another order: every limit is missed, and the layer is the worst."""
    windows = llama_cpp(IDS, 16, 1)
    result = compare(spoilt(model), model, windows)
    verdicts = Thresholds(0.01, 0.95, 0.99).verdicts(result)
    assert not any(v.kept for v in verdicts if v.name != "max_ppl_increase")
    assert result.worst()[0].layer == 1
    assert result.layers[0].cosine == pytest.approx(1)
    assert result.kl_p99 >= result.kl_median > 1e-3


def test_case_57_measures_do_not_depend_on_size():
    """Vectors near 1e-6 (and 1e-200) that have nothing in common have a cosine near 0."""
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.standard_normal((4, 4096))) for _ in range(2))
    for scale in (1.0, 1e-6, 1e-200):
        assert cosine_of(a * scale, b * scale).abs().max() < 0.1
        assert cosine_of(a * scale, a * scale).min() > 1 - 1e-12
    assert cosine_of(torch.zeros(1, 3), torch.zeros(1, 3)).item() == 1
    assert cosine_of(torch.zeros(1, 3), torch.ones(1, 3)).item() == 0


def test_nan_keeps_no_limit(model):
    result = compare(model, model, llama_cpp(IDS, 16, 1))
    object.__setattr__(result, "layers", (LayerDrift(0, math.nan, math.nan, math.nan), *result.layers[1:]))
    assert math.isnan(result.least_cosine)
    assert [v.kept for v in Thresholds(min_cosine=0.5).verdicts(result)] == [False]
    assert result.worst()[0].layer == 0
    broken = dense_model("llama")
    broken.model.norm.weight.data[0] = math.nan
    with pytest.raises(EvaluationError, match="the model returned NaN"):
        perplexity(broken, llama_cpp(IDS, 16, 1))


def test_models_that_cannot_be_compared(model):
    with pytest.raises(EvaluationError, match="2 layers, the baseline 96 and 3"):
        compare(model, dense_model("llama", num_hidden_layers=3), llama_cpp(IDS, 16, 1))


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("95%", 0.95), ("0.99", 0.99), ("-2%", -0.02)])
def test_fractions(text, value):
    assert fraction(text, "x") == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("text", ["", "%", "one", "nan", "inf", "1%%"])
def test_fractions_that_are_none(text):
    with pytest.raises(EvaluationError, match="a fraction"):
        fraction(text, "--min-cosine")


def test_requantized_is_what_quantize_gives(folder):
    model, _ = load_model(folder)
    other = requantized(model, "mxfp4", keep=lambda name: name == "lm_head")
    formats = {n: m.weight.format.name for n, m in packed_modules(other).items()}
    assert formats.pop("lm_head") == "int6"
    assert set(formats.values()) == {"mxfp4"}
    assert {m.weight.format.name for m in packed_modules(model).values()} == {"int6"}
    assert other.model.norm.weight is model.model.norm.weight
    again = requantized(other, "int6:g32", policy=None)
    assert not np.array_equal(again.lm_head.weight.canonical().dequantize(), np.zeros((VOCAB, 64)))
    with pytest.raises(EvaluationError, match=r"cannot be stored as q4_K: "):
        requantized(model, "q4_K")


def test_texts(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\nx\n".encode())
    assert read_text(tmp_path / "a.txt") == "é\r\nx\n"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert read_text(tmp_path / "a.jsonl") == "one\n\ntwo"
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"no": 1}\n')
    with pytest.raises(EvaluationError, match=r"b.jsonl line 2 has no `text`"):
        read_text(tmp_path / "b.jsonl")
    (tmp_path / "c.txt").write_bytes(b"ab\xff")
    with pytest.raises(EvaluationError, match="not UTF-8: byte 2 is 0xff"):
        read_text(tmp_path / "c.txt")


def test_tokens_and_their_bos(folder):
    _, tokenizer = load_model(folder)
    assert tokens_of(tokenizer, DOCUMENT) == ([1, 15, 7, 9, 15, 11], 1)
    tokenizer.bos_token = "<tok90>"
    assert tokens_of(tokenizer, DOCUMENT)[1] is None


def records(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_the_command(folder, capsys):
    assert main(["eval", str(folder), "--text", str(folder / "text.txt"), "--context", "16", "--chunks", "3", "--json"]) == 0
    [record] = records(capsys.readouterr().out)
    model, _ = load_model(folder)
    want, tokens = by_hand(model, llama_cpp(IDS, 16, 1, 3))
    assert record["record"] == "evaluation"
    assert record["perplexity"] == pytest.approx(want, rel=1e-6)
    assert (record["tokens"], record["chunks"], record["context"], record["protocol"]) == (tokens, 3, 16, "llama.cpp")
    assert record["bytes"] > 0


def test_the_command_beside_a_baseline(folder, tmp_path, capsys):
    text = ["--text", str(folder / "text.txt"), "--context", "16"]
    page = tmp_path / "page.html"
    limits = ["--max-ppl-increase", "1%", "--min-agreement", "95%", "--min-cosine", "0.99"]
    arguments = ["eval", str(folder), *text, "--baseline", str(folder), *limits]
    assert main([*arguments, "--json"]) == 0
    first, *rest = records(capsys.readouterr().out)
    assert first["agreement"] == 1
    assert first["perplexity"] == first["baseline_perplexity"]
    assert [r["name"] for r in rest if r["record"] == "limit"] == ["max_ppl_increase", "min_agreement", "min_cosine"]
    assert {r["layer"] for r in rest if r["record"] == "layer"} == {-1, 0, 1}
    assert main([*arguments, "--requantize", "int2:g64", "--report", str(page)]) == 1
    out = capsys.readouterr().out
    assert "% (≥ 95 % wanted): missed" in out
    assert "KL divergence, nats: mean" in out
    html = page.read_text("utf-8")
    assert html.count("<svg") == 4, "two plots in two sizes"
    assert "missed</b>" in html
    assert "int2:g64" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-cosine", "0.99"], "a limit needs something to compare with"), (["--text", "x", "--dataset", "y"], "one of them"),
        (["--min-cosine", "much", "--baseline", "."], "--min-cosine 'much'"), (["--protocol", "mine"], "protocol 'mine'"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong(folder, capsys, arguments, message, monkeypatch):
    monkeypatch.chdir(folder)
    text = [] if "--text" in arguments else ["--text", str(folder / "text.txt")]
    assert main(["eval", str(folder), *text, "--context", "16", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.ecosystem("applications")
def test_a_data_set_is_the_text_of_its_column(folder, tmp_path, capsys):
    """`--dataset` through the datasets package, here a local folder of it."""
    words = (folder / "text.txt").read_text("utf-8").split()
    texts = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
    for name, column in (("right", "text"), ("other", "question")):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({column: text}) + "\n" for text in texts)
        (tmp_path / name / "test.jsonl").write_text(lines, "utf-8")
    (tmp_path / "joined.txt").write_text("\n\n".join(texts), "utf-8")
    found = []
    right = str(tmp_path / "right")
    for source in (["--dataset", right], ["--dataset", f"{right}:test"], ["--text", str(tmp_path / "joined.txt")]):
        assert main(["eval", str(folder), *source, "--context", "16", "--json"]) == 0
        [record] = records(capsys.readouterr().out)
        found.append((record["perplexity"], record["tokens"]))
    assert found[0] == found[1] == found[2]
    assert main(["eval", str(folder), "--dataset", str(tmp_path / "other"), "--context", "16"]) == 2
    assert "has columns question; one named text is wanted" in capsys.readouterr().err


def test_errors_are_the_librarys():
    assert issubclass(EvaluationError, HalfbyteError)
