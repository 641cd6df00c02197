"""Batched generation: each pass of the model yields the next token of every sequence.

    for index, piece in BatchGeneration(model, tokenizer, ["Once", "There was a"], max_tokens=64):
        ...                                        # pieces as they are made, and the index of the
                                                   # prompt that each continues

Prompts are padded on the left and the padding is masked, so each text equals that of a single run
except for the order of floating-point sums. Texts that have ended stay in the batch until the last
one ends; their further tokens are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from .single import Generation, GenerationError, Piece, Sampling, choose, prompt_chunk, runner_of


class BatchGeneration:
    """Iterates over (index of the prompt, piece). Arguments as for `Generation`, without
    `stop_ids`; every text samples as in a single run.

    texts  a `Generation` for each prompt, with tokens, text and reason for stopping
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[str | list[int]],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        if not prompts:
            raise GenerationError("[generate] no prompts; give one or more")
        options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": sampling, "stop": stop}
        self.texts = [Generation(model, tokenizer, p, **options) for p in prompts]
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        import torch

        from ..transformers.compat import cache_name

        device = getattr(self.model, "device", "cpu")
        longest = max(len(t.prompt_ids) for t in self.texts)
        ids = torch.zeros(len(self.texts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(self.texts):
            ids[row, longest - len(text.prompt_ids) :] = torch.tensor(text.prompt_ids)
            mask[row, longest - len(text.prompt_ids) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        name = cache_name(self.model)
        random = [t.sampling.random() for t in self.texts]
        state: Any = None
        chunk = prompt_chunk(longest, runner_of(self.model).stores_scores)
        for step in range(self.max_tokens):
            for text in self.texts:
                if not text.stopped and len(text.prompt_ids) + len(text.tokens) > text.context:
                    text.stopped = "context"
            if all(t.stopped for t in self.texts):
                break
            start = time.perf_counter()
            with torch.inference_mode():
                before = mask.shape[1] - ids.shape[1]
                for first in range(0, ids.shape[1], chunk):
                    last = min(first + chunk, ids.shape[1])
                    out = self.model(
                        input_ids=ids[:, first:last],
                        attention_mask=mask[:, : before + last],
                        position_ids=positions[:, first:last],
                        use_cache=True,
                        logits_to_keep=1,
                        **{name: state},
                    )
                    state = out[name]
            logits = out.logits[:, -1].float().cpu().numpy()
            seconds = time.perf_counter() - start
            tokens = []
            for row, text in enumerate(self.texts):
                token = 0 if text.stopped else choose(logits[row], text.sampling, random[row], [*text.prompt_ids, *text.tokens])
                tokens.append(token)
                if not text.stopped:
                    text.prompt_seconds, text.decode_seconds = (
                        (seconds, 0.0) if step == 0 else (text.prompt_seconds, text.decode_seconds + seconds)
                    )
                    yield from ((row, piece) for piece in self._take(text, token))
            ids = torch.tensor(tokens, device=device)[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
        for row, text in enumerate(self.texts):
            yield from ((row, piece) for piece in text.finish())

    def _take(self, text: Generation, token: int) -> list[Piece]:
        """Appends a token to a text; the piece it adds, none where the token ends the text."""
        text.tokens.append(token)
        if token in text.stop_ids:
            text.stopped = "eos"
            return []
        words = text.until(text.text_of(token))
        text.text += words
        text.stopped = "stop" if text.until.stopped else ""
        return [Piece(token, words)]
