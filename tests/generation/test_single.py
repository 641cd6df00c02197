"""Text from a real packed model: equal to transformers' own, within memory and time, with nothing
ever dense.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutputWithPast

import torch
from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.cli import main
from halfbyte.cli.demo import model_path
from halfbyte.generation.single import Generation, GenerationError, Sampling, choose, generate
from halfbyte.transformers import import_model_code, load_model, model_size
from support.cpu_time import cpu_time
from support.golden_case import GOLDEN

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "gemma3_270m_greedy.json").read_text("utf-8"))
TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token counts."""
MIB = 1 << 20
LIMIT = 16 * MIB


SECONDS: list[float] = []
"""Processor time of the load: what it takes in seconds where nothing else runs."""


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, Any]:
    import_model_code(model_path())
    with cpu_time() as spent:
        loaded = load_model(model_path())
    SECONDS.append(spent.seconds)
    return loaded


def test_ready_in_under_8_seconds_after_imports(gemma):
    """Issue 2; transformers' own loader takes 63 s for this file."""
    assert SECONDS[-1] < 8


def agrees(token: int, want: int, best: list[int], logits: list[float]) -> bool:
    return token == want or (logits[0] - logits[1] < TIE and token in best[:2])


def test_the_tie_rule():
    assert agrees(3, 3, [3, 4], [1.0, 0.5])
    assert not agrees(4, 3, [3, 4], [1.0, 0.5])
    assert agrees(4, 3, [3, 4], [1.0, 1.0 - 9e-5])
    assert not agrees(5, 3, [3, 4], [1.0, 1.0])


@pytest.mark.parametrize("case", REFERENCE["generations"], ids=lambda c: c["prompt"][:12])
def test_greedy_text_equals_transformers_over_64_tokens(gemma, case):
    """Each token given the reference's tokens before it, all 64 in one pass; the logits agree
    within the tie's width.
    """
    model, tokenizer = gemma
    assert tokenizer(case["prompt"])["input_ids"] == case["prompt_ids"]
    ids = [*case["prompt_ids"], *case["tokens"][:-1]]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), logits_to_keep=64).logits[0]
    tokens = logits.argmax(-1).tolist()
    assert len(tokens) == len(case["tokens"]) == 64
    for i, token in enumerate(tokens):
        assert agrees(token, case["tokens"][i], case["best"][i], case["logits"][i]), i
    have = logits.gather(1, torch.tensor(case["best"])).double()
    assert (have - torch.tensor(case["logits"], dtype=torch.float64)).abs().max() < TIE
    total = torch.logsumexp(logits.double(), dim=-1)
    assert (total - torch.tensor(case["logsumexp"], dtype=torch.float64)).abs().max() < TIE
    assert tokenizer.decode(case["tokens"]) == case["text"]


def test_text_longer_than_the_sliding_window(gemma):
    """Local layers see 512 tokens and rotate with base 10000, global layers see all and rotate with
    base a million.
    """
    model, tokenizer = gemma
    long = REFERENCE["long"]
    ids = tokenizer(long["text"])["input_ids"]
    assert len(ids) == long["tokens"] > 512 + 256
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), logits_to_keep=torch.tensor(long["at"])).logits[0].double()
    want = torch.tensor(long["logits"], dtype=torch.float64)
    assert logits.topk(5).indices.tolist() == long["best"]
    assert (logits.topk(5).values - want).abs().max() < TIE


def test_token_by_token(gemma):
    """The loop itself: its cache, its stream of pieces, its bookkeeping."""
    case = REFERENCE["generations"][0]
    generation = Generation(*gemma, case["prompt"], max_tokens=5)
    pieces = list(generation)
    assert [p.token for p in pieces] == generation.tokens == case["tokens"][:5]
    assert "".join(p.text for p in pieces) == generation.text == gemma[1].decode(case["tokens"][:5])
    assert generation.stopped == "length"
    assert generation.prompt_seconds > 0
    assert generation.tokens_per_s > 0


class NoLargeFloats(TorchDispatchMode):
    """Records every floating tensor above the limit that a torch operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.is_floating_point() and not t.is_meta and t.numel() * t.element_size() > LIMIT:
                self.seen.append(f"{func} returned {t.dtype} {list(t.shape)}")
        return out


@contextmanager
def large_numpy_allocations() -> Iterator[list[tuple[str, int]]]:
    """(file, bytes) of each step between two calls in which NumPy or Python newly held more than
    the limit.
    """
    seen: list[tuple[str, int]] = []
    held = 0

    def step(frame: Any, event: str, arg: Any) -> None:
        nonlocal held
        current, peak = tracemalloc.get_traced_memory()
        if peak - held > LIMIT:
            seen.append((Path(frame.f_code.co_filename).name, peak - held))
        tracemalloc.reset_peak()
        held = current

    tracemalloc.start()
    sys.setprofile(step)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        tracemalloc.stop()


def test_the_hooks_see_a_large_array():
    with large_numpy_allocations() as seen:
        small = np.zeros(LIMIT // 8, np.float32)
        large = np.ones(LIMIT // 4 + 1, np.float32)
        small += large[: small.size]
    ((_, size),) = seen
    assert LIMIT <= size <= LIMIT + 4096
    with NoLargeFloats() as hook:
        torch.ones(LIMIT // 4)
        torch.ones(LIMIT + 1, dtype=torch.uint8)
        assert hook.seen == []
        torch.ones(LIMIT // 4 + 1)
    assert hook.seen == [f"aten.ones.default returned torch.float32 [{LIMIT // 4 + 1}]"]


def test_no_quantized_matrix_is_ever_a_large_float_array(gemma, monkeypatch):
    """Issue 2: no float array above 16 MiB, from loading to the third token.

    Loading allocates one thing above it, the embedding's packed parts, a byte a weight; as float16
    it would be 336 MB. Nothing later comes near. (The tokenizer, a million small strings, is left
    out: watching each would take minutes.)
    """
    path = model_path()
    monkeypatch.setattr("halfbyte.transformers.load.tokenizer_of", lambda *_: gemma[1])
    with GGUFCheckpoint(path) as ckpt:
        packed = ckpt.info("token_embd").nbytes
        weights = 262144 * 640
    with NoLargeFloats() as hook:
        with large_numpy_allocations() as loading:
            model, tokenizer = load_model(path)
        with large_numpy_allocations() as running:
            tokens = [p.token for p in Generation(model, tokenizer, REFERENCE["generations"][0]["prompt"], max_tokens=2)]
    assert hook.seen == []
    assert running == []
    assert all(size <= packed + MIB < 1.1 * weights for _, size in loading), loading
    assert len(loading) <= 2, "at most the canonical order and a backend's own"
    assert tokens == REFERENCE["generations"][0]["tokens"][:2]


def test_command_line_within_its_memory_and_5_percent_of_its_plan(gemma):
    """Issue 2: under 1.1 GB of resident memory at the worst, mapped pages included; of logits, the
    last token's only (those of the prompt are 300 MB). The plan measures the overhead alike, in a
    process of its own.
    """
    prompt = "word " * 300
    options = ["-p", prompt, "-n", "2", "--seed", "7", "--json", "--engine", "transformers"]
    command = [sys.executable, "-m", "halfbyte", "generate", str(model_path()), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    *pieces, summary = (json.loads(line) for line in run.stdout.splitlines())
    alike = Generation(*gemma, prompt, max_tokens=2)
    assert [p["token"] for p in pieces] == [p.token for p in alike]
    assert "".join(p["text"] for p in pieces) == summary["text"] == alike.text
    assert summary["ready_s"] > 0
    assert 0 < summary["peak_memory_bytes"] < 1.1e9
    plan = [sys.executable, "-m", "halfbyte", "plan", str(model_path()), "--context", "320", "--json"]
    planned = json.loads(subprocess.check_output(plan, text=True))
    assert abs(planned["total"] - summary["peak_memory_bytes"]) < 0.05 * summary["peak_memory_bytes"]
    assert summary["weights"] == 268_098_176
    assert 7 < summary["bits_per_weight"] < 8
    assert summary["bits_per_weight"] == pytest.approx(8 * summary["bytes"] / summary["weights"], abs=1e-4)
    assert (summary["prompt_tokens"], summary["tokens"]) == (len(alike.prompt_ids), 2)
    assert summary["tokens_per_s"] > 0


def test_command_line_says_what_is_wrong_in_one_line(tmp_path, capsys):
    def lines(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "halfbyte", "generate", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert run.stdout == ""
        return run.stderr.splitlines()

    missing = tmp_path / "no.gguf"
    [line] = lines(str(missing), "-p", "x")
    assert str(missing) in line
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(b"GGUF\x03")
    [line] = lines(str(damaged), "-p", "x")
    assert line.startswith(f"halfbyte: [gguf] {damaged}: the version needs 4 bytes at byte 4, the file ends at 5")
    # What is found when torch has been imported, which takes a process of its own seconds.
    assert main(["generate", str(GOLDEN / "gguf" / "tiny_mixed.gguf"), "-p", "x", "--temperature", "-1"]) == 2
    said = capsys.readouterr()
    assert said.err == "halfbyte: [generate] temperature=-1.0; 0 (greedy) or more is allowed\n"
    assert said.out == ""


def test_model_holds_what_the_file_holds(gemma):
    """Packed bytes in memory are those in the file but for the unpacked 6-bit scales of Q4_K."""
    with GGUFCheckpoint(model_path()) as ckpt:
        stored = sum(i.nbytes for i in ckpt.infos())
    assert stored <= model_size(gemma[0]).nbytes < 1.02 * stored


class Scripted:
    """A model that says given tokens, whatever it reads; each step sees what came before through
    its cache.
    """

    def __init__(self, script: list[int], context: int = 1000, rng: np.random.Generator | None = None) -> None:
        self.script, self.rng = list(script), rng
        self.config = SimpleNamespace(max_position_embeddings=context, eos_token_id=1)
        self.config.get_text_config = lambda decoder=False: self.config
        self.read: list[int] = []

    def forward(self, input_ids=None, use_cache=None, logits_to_keep=0, cache=None):
        assert (cache is None) == (not self.read)
        assert logits_to_keep == 1
        self.read += input_ids[0].tolist()
        if self.rng is not None:
            logits = torch.from_numpy(self.rng.normal(size=(1, 1, 262144)).astype(np.float32))
        else:
            logits = torch.zeros(1, 1, 262144)
            logits[0, 0, self.script.pop(0)] = 1
        return CausalLMOutputWithPast(logits=logits, cache="state")

    __call__ = forward


@pytest.mark.parametrize("text", ["plain words", "Zażółć 漢字 😀👩‍👩‍👧", "\U0010fffd\u4dbf!", "a\n\n  b", " leading", "▁"])
def test_pieces_join_to_the_text_whatever_the_bytes(gemma, text):
    """Characters made of several byte tokens come out whole, in one piece."""
    tokenizer = gemma[1]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    generation = Generation(Scripted([*ids, 1]), tokenizer, "x", max_tokens=100)
    pieces = [p.text for p in generation]
    assert "".join(pieces) == generation.text == tokenizer.decode(ids)
    assert not any("\ufffd" in p for p in pieces) or "\ufffd" in text
    assert generation.stopped == "eos"


def test_a_text_cut_inside_a_character_shows_what_it_has(gemma):
    tokenizer = gemma[1]
    ids = tokenizer("\U0010fffd", add_special_tokens=False)["input_ids"][:2]
    generation = Generation(Scripted(ids), tokenizer, "x", max_tokens=2)
    assert "".join(p.text for p in generation) == tokenizer.decode(ids)


@pytest.mark.parametrize("stop", [(), ("##",)])
def test_text_goes_on_after_a_byte_that_is_no_character(gemma, stop):
    """The text that might have begun a stop text too."""
    tokenizer = gemma[1]
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in (*"漢".encode(), 0xE6)])
    ids += tokenizer(" and more #", add_special_tokens=False)["input_ids"]
    generation = Generation(Scripted([*ids, 1]), tokenizer, "x", max_tokens=100, stop=stop)
    assert "".join(p.text for p in generation) == generation.text == "漢\ufffd and more #"


def test_where_it_stops(gemma):
    tokenizer = gemma[1]
    prompt = tokenizer("x")["input_ids"]
    for script, options, stopped, count in (
        ([5, 6, 7], {"max_tokens": 2}, "length", 2), ([5, 1, 7], {"max_tokens": 9}, "eos", 2),
        ([5, 106], {"max_tokens": 9}, "eos", 2),
        ([5, 6], {"max_tokens": 9, "stop_ids": {6}}, "eos", 2), ([], {"max_tokens": 0}, "length", 0),
    ):  # fmt: skip
        generation = Generation(Scripted(script), tokenizer, "x", **options)
        list(generation)
        assert (generation.stopped, len(generation.tokens)) == (stopped, count)
    model = Scripted(list(range(10, 30)), context=len(prompt) + 3)
    generation = Generation(model, tokenizer, "x", max_tokens=20)
    list(generation)
    assert generation.stopped == "context"
    assert len(model.read) == len(prompt) + 3, "every place of the context was read, and none after it"


def test_prompts_that_cannot_be_used(gemma):
    for prompt, options, message in (
        ([], {}, "the prompt has no tokens"), ("x", {"max_tokens": -1}, "max_tokens=-1; 0 or more is allowed"),
        ([5] * 1001, {}, "the prompt has 1,001 tokens; the model takes up to 1,000"),
    ):  # fmt: skip
        with pytest.raises(GenerationError, match=message):
            Generation(Scripted([]), gemma[1], prompt, **options)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1; 0 \(greedy\) or more"), ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"), ({"top_k": -1}, r"top_k=-1; 0 \(all tokens\) or more"),
        ({"top_p": 0.0}, "top_p=0.0; above 0 and up to 1"), ({"top_p": 1.5}, "top_p=1.5"), ({"seed": -1}, "seed=-1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_used(setting, message):
    with pytest.raises(GenerationError, match=message):
        Sampling(**setting)


def drawn(logits: list[float], draws: int = 4000, **setting: Any) -> np.ndarray:
    """How often each token is drawn."""
    random = np.random.default_rng(0)
    sampling = Sampling(**setting)
    counts = np.bincount([choose(np.float32(logits), sampling, random) for _ in range(draws)], minlength=len(logits))
    return counts / draws


def test_draws_follow_the_softmax():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    spread = 4 * np.sqrt(0.25 / 4000)
    assert np.abs(drawn(logits, temperature=1.0) - [0.5, 0.3, 0.15, 0.05]).max() < spread
    half = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    assert np.abs(drawn(logits, temperature=0.5) - half / half.sum()).max() < spread
    assert np.abs(drawn(logits, temperature=1.0, top_k=2) - [0.625, 0.375, 0, 0]).max() < spread
    assert np.abs(drawn(logits, temperature=1.0, top_p=0.6) - [0.625, 0.375, 0, 0]).max() < spread
    assert drawn(logits, temperature=1.0, top_p=0.4).tolist() == [1, 0, 0, 0]
    assert drawn(logits, temperature=1e-4).tolist() == [1, 0, 0, 0]
    assert drawn([0.0, 3.0, 3.0]).tolist() == [0, 1, 0], "greedy takes the first of the largest"
    assert drawn([-np.inf, 0.0], temperature=1.0).tolist() == [0, 1]


def test_nan_logits_are_refused():
    with pytest.raises(GenerationError, match="NaN logits; a weight or scale of the file is NaN"):
        choose(np.float32([0, np.nan]), Sampling(), np.random.default_rng(0))


def test_a_seed_decides_the_text(gemma):
    def tokens(seed: int) -> list[int]:
        model = Scripted([], rng=np.random.default_rng(5))
        generation = Generation(model, gemma[1], "x", max_tokens=6, sampling=Sampling(1.0, seed=seed))
        list(generation)
        return generation.tokens

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_generate_streams_from_a_path(gemma, monkeypatch):
    case = REFERENCE["generations"][1]
    model = Scripted(case["tokens"])
    monkeypatch.setattr("halfbyte.transformers.load_model", lambda path, **options: (model, gemma[1]))
    stream = generate("any.gguf", case["prompt"], max_tokens=64)
    assert next(stream) == " there"
    assert len(model.script) == 63, "a piece comes before the next is computed"
    assert " there" + "".join(stream) == case["text"]
    assert model.read == [*case["prompt_ids"], *case["tokens"][:-1]]


def test_min_p_keeps_tokens_near_the_likeliest():
    logits = np.log(np.array([0.5, 0.3, 0.19, 0.01]))
    drawn = {choose(logits, Sampling(1.0, min_p=0.5), np.random.default_rng(i)) for i in range(200)}
    assert drawn == {0, 1}
    assert {choose(logits, Sampling(1.0, min_p=1.0), np.random.default_rng(i)) for i in range(50)} == {0}


def test_repeat_penalty_lowers_earlier_tokens():
    logits = np.array([2.0, 1.9, -1.0])
    assert choose(logits, Sampling(repeat_penalty=1.1), np.random.default_rng(0), [0]) == 1
    assert choose(logits, Sampling(repeat_penalty=1.1), np.random.default_rng(0), [0] + [2] * 64) == 0
    assert logits.tolist() == [2.0, 1.9, -1.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_p": 2.0}, "min_p=2.0; 0 to 1 is allowed"),
        ({"repeat_penalty": 0.0}, "repeat_penalty=0.0; above 0 is allowed"),
    ],
)
def test_settings_out_of_range(settings, said):
    with pytest.raises(GenerationError, match=said):
        Sampling(**settings)
