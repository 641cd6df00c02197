"""Text generation, streamed piece by piece.

    for piece in Generation(model, tokenizer, "Once upon", max_tokens=64):
        print(piece.text, end="")

Greedy by default: the token of the first largest logit. With a temperature t > 0 a token is drawn
from softmax(logits / t), restricted to the `top_k` most likely tokens and then to the fewest whose
probabilities reach `top_p`; the draw depends on `seed` alone. The prompt runs through the model in
one pass that computes the logits of its last position only, in several where attention writes its
scores to memory (`prompt_chunk`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import HalfbyteError, plural
from .native_model import NativeModel
from .native_tokenizer import TURN_ENDS
from .streams import StopTexts, TextStream
from .templates import token_ids

STORED_SCORES = 1 << 21
"""Largest product of a pass's tokens and its context where attention writes its scores to memory:
for gpt-oss, three copies for 64 heads are 0.8 GB of bfloat16.
"""
LEAST_CHUNK = 16
"""Fewest tokens of a pass."""


class GenerationError(HalfbyteError, ValueError):
    """A prompt or sampling setting that cannot be used; the message says what is allowed."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. With temperature 0 it is the most likely one; top_k 0, top_p 1, min_p
    0 and repeat_penalty 1 change nothing.

    min_p           least probability, relative to the most likely token's
    repeat_penalty  divides the logits of the last `REPEATED` tokens where they are positive, and
                    multiplies them where they are negative
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise GenerationError(f"[generate] temperature={self.temperature}; 0 (greedy) or more is allowed")
        if self.top_k < 0:
            raise GenerationError(f"[generate] top_k={self.top_k}; 0 (all tokens) or more is allowed")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"[generate] top_p={self.top_p}; above 0 and up to 1 is allowed")
        if not 0 <= self.min_p <= 1:
            raise GenerationError(f"[generate] min_p={self.min_p}; 0 to 1 is allowed")
        if not (self.repeat_penalty > 0 and np.isfinite(self.repeat_penalty)):
            raise GenerationError(f"[generate] repeat_penalty={self.repeat_penalty}; above 0 is allowed, 1 changes nothing")
        if self.seed < 0:
            raise GenerationError(f"[generate] seed={self.seed}; 0 or more is allowed")

    def random(self) -> np.random.Generator | None:
        """What draws the tokens of one text; None where nothing is drawn, since to import it takes
        20 ms.
        """
        return np.random.default_rng(self.seed) if self.temperature else None


REPEATED = 64
"""Tokens, the last of prompt and answer, that `repeat_penalty` applies to, as in llama.cpp."""


def choose(
    logits: NDArray[np.floating[Any]], sampling: Sampling, random: np.random.Generator | None, earlier: Sequence[int] = ()
) -> int:
    """The next token from logits [vocabulary], after the tokens `earlier`; a temperature needs
    `random`. Raises GenerationError when they hold NaN.
    """
    if sampling.repeat_penalty != 1 and len(earlier):
        logits, seen = logits.copy(), np.unique(np.asarray(earlier[-REPEATED:]))
        own = logits[seen]
        logits[seen] = np.where(own > 0, own / sampling.repeat_penalty, own * sampling.repeat_penalty)
    best = int(np.argmax(logits))  # the first NaN where there is one
    if np.isnan(logits[best]):
        raise GenerationError(
            "[generate] the model returned NaN logits; a weight or scale of the file is NaN, see `halfbyte inspect`"
        )
    if sampling.temperature == 0:
        return best
    assert random is not None
    kept = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        kept = np.argpartition(-logits, sampling.top_k - 1)[: sampling.top_k]
    if sampling.min_p > 0:
        kept = kept[logits[kept] >= logits[best] + sampling.temperature * np.log(sampling.min_p)]
    if sampling.top_p < 1:
        kept = kept[np.argsort(-logits[kept], kind="stable")]
    scaled = logits[kept].astype(np.float64) / sampling.temperature
    running = np.cumsum(np.exp(scaled - scaled.max()))
    if sampling.top_p < 1:
        running = running[: int(np.searchsorted(running, sampling.top_p * running[-1])) + 1]
    return int(kept[np.searchsorted(running, random.random() * running[-1], side="right")])


@dataclass(frozen=True)
class Piece:
    """One token and the text it completes ("" in the middle of a character)."""

    token: int
    text: str


class Generation:
    """Iterates over the pieces of a continuation and records tokens, times and the reason for
    stopping.

    model       a transformers causal language model, or a `NativeModel`
    tokenizer   its tokenizer
    prompt      text, tokenized with what the tokenizer adds (bos), or token ids as they are
    max_tokens  most new tokens
    stop_ids    tokens that end the text; None takes `end_tokens`
    stop        texts that end it; they and what follows are left out (`StopTexts`)
    session     what the same model computed for an earlier text: tokens that both texts begin with
                are not computed again. It then belongs to this text; the earlier one cannot go on

    stopped  "" while it runs, then the reason: "length", "eos", "stop", or "context" (the model's
             context is full)
    session  what the model has computed, for the next text; None before, and where a pass of the
             model was broken off
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: str | list[int],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop_ids: set[int] | None = None,
        stop: Sequence[str] = (),
        session: Any = None,
    ) -> None:
        if max_tokens < 0:
            raise GenerationError(f"[generate] max_tokens={max_tokens}; 0 or more is allowed")
        check_continues("generate", model)
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens, self.sampling = max_tokens, sampling or Sampling()
        self.prompt_ids = token_ids(tokenizer, prompt, "generate") if isinstance(prompt, str) else list(prompt)
        self.context = runner_of(model).context
        if not self.prompt_ids:
            raise GenerationError("[generate] the prompt has no tokens; give some text")
        if len(self.prompt_ids) > self.context:
            raise GenerationError(
                f"[generate] the prompt has {plural(len(self.prompt_ids), 'token')}; the model takes up to {self.context:,}"
            )
        self.stop_ids = end_tokens(model, tokenizer) if stop_ids is None else stop_ids
        self.stop = tuple(stop)
        if not all(self.stop):
            raise GenerationError("[generate] an empty stop text; give one or more characters")
        self.text_of, self.until = TextStream(tokenizer), StopTexts(self.stop)
        self.session: Any = None
        self._earlier = session
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = ""
        self.prompt_seconds = 0.0
        self.decode_seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, without the first one, which the prompt's pass yields."""
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0

    def __iter__(self) -> Iterator[Piece]:
        random = self.sampling.random()
        runner = runner_of(self.model)
        session, first = resumed(self._earlier, self.prompt_ids)
        self.session = self._earlier = None
        if session is None:
            session = runner.session()
        chunk = prompt_chunk(len(self.prompt_ids), runner.stores_scores)
        pending = [self.prompt_ids[i : i + chunk] for i in range(first, len(self.prompt_ids), chunk)]
        while len(self.tokens) < self.max_tokens:
            if len(self.prompt_ids) + len(self.tokens) > self.context:
                self.stopped = "context"
                break
            start = time.perf_counter()
            self.session = None
            for tokens in pending:
                logits = session(tokens)
            self.session = session
            token = choose(_as_numpy(logits), self.sampling, random, [*self.prompt_ids, *self.tokens][-REPEATED:])
            seconds = time.perf_counter() - start
            if self.tokens:
                self.decode_seconds += seconds
            else:
                self.prompt_seconds = seconds
            self.tokens.append(token)
            if token in self.stop_ids:
                self.stopped = "eos"
                break
            ready = self.until(self.text_of(token))
            self.text += ready
            yield Piece(token, ready)
            if self.until.stopped:
                self.stopped = "stop"
                return
            pending = [[token]]
        yield from self.finish()

    def finish(self) -> Iterator[Piece]:
        """The text that the streaming decoder has kept at the end: bytes of an incomplete
        character, or of a last token. `stopped` is "length" where no other reason is known.
        """
        rest = self.until(self.text_of.rest())
        self.stopped = "stop" if self.until.stopped else self.stopped or "length"
        if rest := rest + self.until.rest():
            self.text += rest
            yield Piece(self.tokens[-1], rest)


@dataclass(frozen=True)
class TransformersModel:
    """A transformers model as `Generation` uses one; `NativeModel` has the same members."""

    model: Any

    @property
    def context(self) -> int:
        """Most tokens of prompt and text together."""
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    @property
    def stores_scores(self) -> bool:
        """True for a decoder whose attention is transformers' "eager" one (gpt-oss, since torch's
        fused attention has no sinks). An encoder-decoder model reads a text in one pass in any
        case, and a model with other states than keys and values must.
        """
        config = self.model.config
        if getattr(config, "_attn_implementation", None) != "eager" or getattr(config, "is_encoder_decoder", False):
            return False
        from ..transformers.compat import keeps_states

        return not keeps_states(self.model)

    def session(self) -> Any:
        """One empty sequence: a function of tokens that returns the last one's logits."""
        from ..transformers.decode.session import DecodeSession

        return DecodeSession(self.model)

    def end_ids(self, tokenizer: Any) -> tuple[Any, ...]:
        """eos of configuration, generation settings and tokenizer: a token, several or None each.

        Of a GGUF, the generation settings have every end-of-turn token that the file names.
        """
        settings = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return getattr(self.model.config, "eos_token_id", None), settings, tokenizer.eos_token_id


def runner_of(model: Any) -> NativeModel | TransformersModel:
    """What runs a model."""
    return model if isinstance(model, NativeModel) else TransformersModel(model)


def resumed(session: Any, ids: Sequence[int]) -> tuple[Any, int]:
    """(a session that has computed the first tokens of `ids`, how many); (None, 0) where they have
    none in common with the session's, or it cannot go back so far. The last token, whose logits are
    wanted, is not among them.
    """
    most = 0 if session is None else min(len(session.tokens), len(ids) - 1)
    same = next((i for i in range(most) if session.tokens[i] != ids[i]), most)
    return (session, same) if same and session.rewind(same) else (None, 0)


def _as_numpy(logits: Any) -> NDArray[np.float32]:
    array: NDArray[np.float32] = logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()
    return array


def check_continues(operation: str, model: Any) -> None:
    """GenerationError for an encoder, which makes vectors and no text."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is not None and not can_generate():
        raise GenerationError(
            f"[{operation}] a {type(model).__name__} makes vectors of a text, it does not continue it; use "
            "load_model(path)[0](input_ids=...).last_hidden_state"
        )


def prompt_chunk(length: int, stores_scores: bool) -> int:
    """Tokens of a prompt of `length` that go through the model at once: all, unless attention
    writes its scores to memory.
    """
    if not stores_scores or length * length <= STORED_SCORES:
        return length
    return max(LEAST_CHUNK, STORED_SCORES // length)


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text: those of `end_ids`, and the end-of-turn token of a vocabulary
    that has one.
    """
    ids: set[int] = set()
    for source in runner_of(model).end_ids(tokenizer):
        if source is not None:
            ids |= set(source) if isinstance(source, list | tuple) else {source}
    turns = (tokenizer.backend_tokenizer.token_to_id(t) for t in TURN_ENDS)
    return ids | {t for t in turns if t is not None}


def generate(
    path: Any,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> Iterator[str]:
    """Loads a packed model (`options` as for `load_model`) and streams the text that follows
    `prompt`; see `Generation` for the parts and the statistics.
    """
    from ..transformers import load_model

    sampling = Sampling(temperature, top_k, top_p, seed)
    model, tokenizer = load_model(path, **options)
    for piece in Generation(model, tokenizer, prompt, max_tokens=max_tokens, sampling=sampling):
        yield piece.text
