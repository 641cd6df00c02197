"""A GGUF file's model against llama.cpp, which reads the same file: tokens, greedy text, logits.

    result = against_llama_cpp(path, model, tokenizer, text, windows)
    result.kl_mean, result.tokens_differ, result.greedy_equal, result.greedy_ties

Needs llama-cpp-python. llama.cpp keeps float32 keys and values here; its CPU products with packed
weights round activations to 8 bits, which is most of the divergence from exact products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch

from .compare import paired
from .perplexity import Perplexity, Progress, scored_logits, targets_of
from .protocols import EvaluationError, Window
from .texts import tokens_of

GREEDY = 32
"""Tokens that the first window's start is continued with."""
ERRORS = 3.0
"""Root mean squares of the change of a gap, by rounded activations, that a tie may be wide."""


@dataclass(frozen=True)
class Against:
    """halfbyte beside llama.cpp.

    tokens_differ  index of the first token of the text that differs, None where all are equal
    agreement      fraction of scored positions whose most likely tokens are equal
    kl             divergence from llama.cpp's distribution at each of them, nats
    greedy         greedy tokens of halfbyte's model, after each of which both are asked for the next
    greedy_equal   how many llama.cpp finds the most likely as well
    greedy_ties    how many of the others lead llama.cpp's choice by no more than `gap_error`
    gap_error      logits: `ERRORS` root mean squares of how far rounding the activations to 8 bits,
                   as llama.cpp does, moves the gap between the two likeliest; None where it was not
                   needed, or is not known
    """

    tokens_differ: int | None
    model: Perplexity
    llama_cpp: Perplexity
    agreement: float
    kl: NDArray[np.float64] = field(repr=False)
    greedy: int
    greedy_equal: int
    greedy_ties: int
    gap_error: float | None

    @property
    def kl_mean(self) -> float:
        return float(self.kl.mean())

    @property
    def kl_p99(self) -> float:
        """99th percentile."""
        return float(np.percentile(self.kl, 99))

    def record(self) -> dict[str, Any]:
        """The figures, as `eval --json` prints them."""
        return {
            "llama_cpp_perplexity": self.llama_cpp.value, "tokens_differ_at": self.tokens_differ,
            "agreement": self.agreement, "kl_mean": self.kl_mean, "kl_median": float(np.median(self.kl)), "kl_p99": self.kl_p99,
            "greedy_tokens": self.greedy, "greedy_equal": self.greedy_equal, "greedy_ties": self.greedy_ties,
            "gap_error": self.gap_error,
        }  # fmt: skip


def opened(path: Path, context: int) -> Any:
    """llama.cpp's model of a file, with logits of every position and float32 keys and values.

    EvaluationError where the package is missing or refuses the file.
    """
    try:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise EvaluationError(
            f"[eval] --against llama.cpp needs llama-cpp-python ({error}); pip install llama-cpp-python"
        ) from None
    try:
        return llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, logits_all=True, type_k=0, type_v=0, flash_attn=False, verbose=False
        )
    except (ValueError, RuntimeError) as error:
        raise EvaluationError(f"[eval] llama.cpp does not open {path}: {error}") from error


def against_llama_cpp(
    path: Path,
    model: Any,
    tokenizer: Any,
    text: str,
    windows: Sequence[Window],
    progress: Progress | None = None,
    other: Callable[[], Any] | None = None,
) -> Against:
    """Run both over the windows.

    other  loads the same model in the other class of activations: exact for one that rounds them
           to 8 bits, rounded for an exact one. It is called where a greedy token differs; without
           it no difference counts as a tie
    Raises EvaluationError where llama.cpp is missing, does not open the file, or has another number
    of tokens.
    """
    longest = max(len(w.tokens) for w in windows)
    start = list(windows[0].tokens[: max(1, windows[0].first)])
    theirs = opened(path, max(longest, len(start) + GREEDY))
    ours_losses, theirs_losses, kls = [], [], []
    same = 0
    for i, window in enumerate(windows):
        if progress is not None:
            progress(i, len(windows), "")
        ours = scored_logits(model, window)[0]
        expected = torch.from_numpy(_logits(theirs, window.tokens)[window.first - 1 : len(window.tokens) - 1])
        if expected.shape != ours.shape:
            raise EvaluationError(f"[eval] the model has {ours.shape[-1]} tokens, llama.cpp's {expected.shape[-1]}")
        pair = paired(expected, ours, targets_of(window, "cpu"))
        kls.append(pair.kl.numpy())
        same += pair.same
        theirs_losses.append(pair.baseline)
        ours_losses.append(pair.model)
    if progress is not None:
        progress(len(windows), len(windows), "")
    kl = np.concatenate(kls)
    return Against(
        _first_difference(tokens_of(tokenizer, text)[0], _tokens(theirs, text)),
        Perplexity.of(ours_losses),
        Perplexity.of(theirs_losses),
        same / len(kl),
        kl,
        GREEDY,
        *greedy_agreement(model, theirs, start, other),
    )


def _logits(llama: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    llama.reset()
    llama.eval(list(tokens))
    return np.array(llama.scores[: len(tokens)], np.float32)


def _tokens(llama: Any, text: str) -> list[int]:
    """The text's tokens with the bos token, where the file says so, and without an eos token."""
    ids: list[int] = list(llama.tokenize(text.encode("utf-8"), add_bos=True, special=True))
    return ids[:-1] if ids and ids[-1] == llama.token_eos() else ids


def _greedy_ours(model: Any, start: Sequence[int]) -> list[int]:
    """The most likely token after each, `GREEDY` times, by the transformers model."""
    device = model.get_input_embeddings().weight.device
    ids, cache, out = list(start), None, list[int]()
    with torch.inference_mode():
        for _ in range(GREEDY):
            step = model(input_ids=torch.tensor([ids], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = step.past_key_values
            ids = [int(step.logits[0, -1].argmax())]
            out += ids
    return out


def greedy_agreement(model: Any, llama: Any, start: list[int], other: Callable[[], Any] | None) -> tuple[int, int, float | None]:
    """`Against.greedy_equal`, `greedy_ties` and `gap_error`."""
    tokens = _greedy_ours(model, start)
    ids, place = [*start, *tokens[:-1]], np.arange(GREEDY)
    expected = _logits(llama, ids)[len(start) - 1 :].argmax(1)
    different = np.flatnonzero(expected != tokens)
    if not len(different) or other is None:
        return GREEDY - len(different), 0, None
    ours, changed = _last_logits(model, ids), _last_logits(other(), ids)
    first, second = np.argsort(-ours, axis=1)[:, :2].T
    moved = (changed[place, first] - changed[place, second]) - (ours[place, first] - ours[place, second])
    error = ERRORS * float(np.sqrt((moved**2).mean()))
    gaps = ours[different, np.asarray(tokens)[different]] - ours[different, expected[different]]
    return GREEDY - len(different), int((gaps <= error).sum()), error


def _last_logits(model: Any, ids: Sequence[int]) -> NDArray[np.float64]:
    """[GREEDY, vocabulary] after the last tokens."""
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False, logits_to_keep=GREEDY).logits
    return np.asarray(logits[0].double().cpu().numpy())


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    common = _common(a, b)
    return None if common == len(a) == len(b) else common
