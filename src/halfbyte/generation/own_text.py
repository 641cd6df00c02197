"""A model's own text, drawn from its probabilities as they are: calibration text for a model whose
readers' text is not at hand (self-calibration: Williams et al. 2024, arXiv 2410.17170).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def own_text(model: Any, tokenizer: Any, *, sequences: int, tokens: int, seed: int = 0) -> Iterator[str]:
    """`sequences` texts of `tokens` tokens, the first one included, each drawn at temperature 1
    with seeds of its own: two values of `seed` have none in common. A text that the model ends
    earlier is followed by another, until the sequence is full.

    model, tokenizer  as for `Generation`; GenerationError as there, and where a sequence is longer
                      than the model's context
    """
    start = start_tokens(model, tokenizer)
    most = runner_of(model).context
    if not len(start) < tokens <= most:
        raise GenerationError(f"[sample] sequences of {tokens} tokens; {len(start) + 1} to {most} are allowed")
    ends = end_tokens(model, tokenizer)
    for index in range(sequences):
        parts: list[str] = []
        left, attempt = tokens - len(start), 0
        while left > 0:
            sampling = Sampling(temperature=1.0, seed=(seed << 64) + index * tokens + attempt)
            generation = Generation(model, tokenizer, start, max_tokens=left, sampling=sampling, stop_ids=ends)
            parts.append("".join(piece.text for piece in generation))
            left -= len(generation.tokens)
            attempt += 1
        yield "\n\n".join(part for part in parts if part.strip())
