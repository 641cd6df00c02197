"""A model's own text, drawn from its probabilities as they are: calibration text for a model whose
readers' text is not at hand (self-calibration: Williams et al. 2024, arXiv 2410.17170).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np

from .single import Generation, GenerationError, Sampling, end_tokens, runner_of


def start_tokens(model: Any, tokenizer: Any) -> list[int]:
    """What a text begins with: the token that the tokenizer puts before every text; where it puts
    none, the one that ends the text before. GenerationError where the model has neither.
    """
    first = list(tokenizer("")["input_ids"])[:1]
    if first:
        return first
    if tokenizer.eos_token_id is None:
        raise GenerationError(
            "[sample] the model's vocabulary has no token that begins or ends a text; give quantize a text of your own"
        )
    return [int(tokenizer.eos_token_id)]


def own_text(model: Any, tokenizer: Any, *, sequences: int, tokens: int, seed: int = 0, at_once: int = 1) -> Iterator[str]:
    """`sequences` texts of `tokens` tokens, the first one included, each drawn at temperature 1. A
    text that the model ends earlier is followed by another, until the sequence is full.

    at_once  sequences that a transformers model draws together; equal seeds give equal texts for
             the same number. One at a time each has seeds of its own: two values of `seed` have
             none in common
    model, tokenizer  as for `Generation`; GenerationError as there, and where a sequence is longer
                      than the model's context
    """
    start = start_tokens(model, tokenizer)
    most = runner_of(model).context
    if not len(start) < tokens <= most:
        raise GenerationError(f"[sample] sequences of {tokens} tokens; {len(start) + 1} to {most} are allowed")
    ends = end_tokens(model, tokenizer)
    if at_once > 1:
        yield from _together(model, tokenizer, start, ends, sequences, tokens, seed, at_once)
        return
    for index in range(sequences):
        parts: list[str] = []
        left, attempt = tokens - len(start), 0
        while left > 0:
            sampling = Sampling(temperature=1.0, seed=(seed << 64) + index * tokens + attempt)
            generation = Generation(model, tokenizer, start, max_tokens=left, sampling=sampling, stop_ids=ends)
            parts.append("".join(piece.text for piece in generation))
            left -= len(generation.tokens)
            attempt += 1
        yield _joined(parts)


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part.strip())


def _without_plans(device: Any) -> Any:
    """A context without cuDNN's attention, which makes a plan for each length and number of rows:
    50 ms a token.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _together(
    model: Any, tokenizer: Any, start: list[int], ends: set[int], sequences: int, tokens: int, seed: int, at_once: int
) -> Iterator[str]:
    """The texts. Each pass of the model draws a text for the first `at_once` sequences that are not
    full: a text that ends early leaves its place empty for one pass only.
    """
    import torch
    from transformers import GenerationConfig

    device = model.device
    parts: list[list[str]] = [[] for _ in range(sequences)]
    left = [tokens - len(start)] * sequences
    given = 0
    for number in count():
        while given < sequences and left[given] <= 0:
            yield _joined(parts[given])
            given += 1
        rows = [i for i in range(given, sequences) if left[i] > 0][:at_once]
        if not rows:
            return
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(int(np.random.SeedSequence((seed, number)).generate_state(1)[0]))  # torch takes 32 bits
            ids = torch.tensor([start] * len(rows), device=device)
            drawing = GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(left[i] for i in rows),
                eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0),
            )  # fmt: skip
            with _without_plans(device):
                drawn = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=drawing)
        for i, row in zip(rows, drawn[:, len(start) :].tolist(), strict=True):
            row = row[: left[i]]
            row = row[: next((at + 1 for at, token in enumerate(row) if token in ends), len(row))]
            parts[i].append(tokenizer.decode(row, skip_special_tokens=True))
            left[i] -= len(row)
