"""Several texts at once are what each would be alone."""

from __future__ import annotations

import json

import pytest

from halfbyte.cli.app import main
from halfbyte.generation.batch import BatchGeneration
from halfbyte.generation.single import Generation, GenerationError, Sampling
from halfbyte.transformers import load_model
from support.tiny_models import write_tiny
from support.tiny_tokenizer import write_tokenizer

PROMPTS = ["<tok7>", "<tok9> <tok10> <tok11> <tok12>", "<tok20> <tok21>"]


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "mixtral"])
def loaded(request, tmp_path_factory):
    where = tmp_path_factory.mktemp(request.param)
    write_tiny(where, request.param, "mlx")
    write_tokenizer(where)
    return where, *load_model(where)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=20, seed=3)])
def test_each_text_is_what_it_is_alone(loaded, sampling):
    """Past gemma's sliding window of 8 tokens, too."""
    _, model, tokenizer = loaded
    batch = BatchGeneration(model, tokenizer, PROMPTS, max_tokens=12, sampling=sampling)
    pieces: list[list[str]] = [[] for _ in PROMPTS]
    for index, piece in batch:
        pieces[index].append(piece.text)
    for prompt, text, parts in zip(PROMPTS, batch.texts, pieces, strict=True):
        alone = Generation(model, tokenizer, prompt, max_tokens=12, sampling=sampling)
        list(alone)
        assert (text.tokens, text.text, text.stopped) == (alone.tokens, alone.text, alone.stopped)
        assert "".join(parts) == text.text


def test_a_text_that_ends_first_does_not_disturb_the_others(loaded):
    _, model, tokenizer = loaded
    free = Generation(model, tokenizer, PROMPTS[1], max_tokens=6)
    list(free)
    batch = BatchGeneration(model, tokenizer, PROMPTS, max_tokens=6)
    first = Generation(model, tokenizer, PROMPTS[0], max_tokens=6)
    list(first)
    batch.texts[0].stop_ids = {first.tokens[1]}
    list(batch)
    assert batch.texts[0].stopped == "eos"
    assert len(batch.texts[0].tokens) <= 2
    assert batch.texts[1].tokens == free.tokens


def test_a_stop_text_ends_each_text_as_it_does_alone(loaded):
    _, model, tokenizer = loaded
    free = Generation(model, tokenizer, PROMPTS[1], max_tokens=6)
    list(free)
    for stop in ([free.text[3:6]], [free.text[-2:], "no such text"], ["no such text"]):
        batch = BatchGeneration(model, tokenizer, PROMPTS, max_tokens=6, stop=stop)
        list(batch)
        for prompt, text in zip(PROMPTS, batch.texts, strict=True):
            alone = Generation(model, tokenizer, prompt, max_tokens=6, stop=stop)
            list(alone)
            assert (text.text, text.stopped, text.tokens) == (alone.text, alone.stopped, alone.tokens)
        assert (batch.texts[1].stopped == "stop") == (stop != ["no such text"])


def test_the_longest_text_the_model_takes(loaded):
    _, model, tokenizer = loaded
    batch = BatchGeneration(model, tokenizer, [[1] * 62, [1, 7]], max_tokens=5)
    list(batch)
    assert [t.stopped for t in batch.texts] == ["context", "length"]
    assert len(batch.texts[0].tokens) == 3


def test_no_prompt_is_refused(loaded):
    with pytest.raises(GenerationError, match="no prompts"):
        BatchGeneration(*loaded[1:], [])


def test_the_command(loaded, capsys):
    folder, model, tokenizer = loaded
    flags = [f for p in PROMPTS for f in ("-p", p)]
    assert main(["generate", str(folder), *flags, "-n", "3", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    summaries = [r for r in records if r["record"] == "summary"]
    for index, (prompt, record) in enumerate(zip(PROMPTS, summaries, strict=True)):
        alone = Generation(model, tokenizer, prompt, max_tokens=3)
        list(alone)
        assert (record["prompt"], record["text"], record["tokens"]) == (index, alone.text, len(alone.tokens))
        assert "".join(r["text"] for r in records if r["record"] == "piece" and r["prompt"] == index) == alone.text
    assert main(["generate", str(folder), *flags, "-n", "3"]) == 0
    assert [line for line in capsys.readouterr().out.split("\n\n") if line] == [
        p + s["text"] for p, s in zip(PROMPTS, summaries, strict=True)
    ]


def test_a_prompt_in_pieces_gives_the_text_of_one_pass(tmp_path, monkeypatch):
    """gpt-oss keeps its attention scores: a long prompt goes through in pieces, alone and beside
    others, past its window of 8.
    """
    from halfbyte.generation import batch as batched
    from halfbyte.generation import single as generation

    write_tiny(tmp_path, "gpt_oss", "gpt-oss")
    write_tokenizer(tmp_path)
    model, tokenizer = load_model(tmp_path)
    prompts = [" ".join(f"<tok{6 + (7 * i) % 80}>" for i in range(n)) for n in (40, 3, 25)]
    passes: list[int] = []
    model.register_forward_pre_hook(lambda m, a, k: passes.append(k["input_ids"].shape[1]), with_kwargs=True)

    def texts() -> list[list[int]]:
        alone = Generation(model, tokenizer, prompts[0], max_tokens=6)
        list(alone)
        together = BatchGeneration(model, tokenizer, prompts, max_tokens=6)
        list(together)
        return [alone.tokens, *(t.tokens for t in together.texts)]

    whole = texts()
    assert max(passes) == 41
    passes.clear()
    assert generation.prompt_chunk(10**6, True) == generation.LEAST_CHUNK
    assert generation.prompt_chunk(10**6, False) == 10**6
    for module in (generation, batched):
        monkeypatch.setattr(module, "prompt_chunk", lambda length, kept: 9 if kept else length)
    assert texts() == whole
    assert max(passes) == 9
    assert passes.count(9) == 8
    assert passes.count(5) == 2


@pytest.mark.ecosystem("applications")
def test_lm_evaluation_harness_gives_the_models_likelihoods(loaded):
    """Through the harness's own class; needs lm_eval."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import halfbyte.evaluation.lm_harness  # noqa: F401  registers the model
    from halfbyte.evaluation import Window, perplexity

    folder, model, _ = loaded
    lm = get_model("halfbyte").create_from_arg_string(f"path={folder}", {"batch_size": 1})
    request = Instance(request_type="loglikelihood", doc={}, arguments=("<tok7> <tok8>", " <tok9> <tok10>"), idx=0)
    [(likelihood, _)] = lm.loglikelihood([request])
    start = [1, 7, 8] if lm.tok_encode("<tok7>")[0] == 1 else [7, 8]
    window = Window((*start, 9, 10), len(start))
    assert likelihood == pytest.approx(-perplexity(model, [window]).total, rel=1e-4)
