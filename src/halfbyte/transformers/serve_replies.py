"""Replies of the server, token after token: the text up to a stop text, as OpenAI's API has it.

transformers leaves a stop string at the end of the text, says "length" of a reply whose last
allowed token ends it, and takes a stream of bytes that are no text for an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from transformers.cli.serving.utils import ReasoningText, build_response_parser, response_events_to_chunks

import torch

from ..generation.streams import StopTexts, TextStream, until_stop

STOP: ContextVar[tuple[str, ...]] = ContextVar("stop", default=())
"""The stop texts of the request that this task answers."""


def stop_texts(body: dict[str, Any]) -> tuple[str, ...]:
    """What a request's `stop` names."""
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


class Stopping:
    """For transformers' handlers: the request's stop texts are known to what answers it, and a
    chat's reply, which transformers parses from all tokens, ends at them.
    """

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        STOP.set(stop_texts(body))
        return super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]

    def _build_completion(self, request_id: str, content: str | None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("reasoning_content"):
            kwargs["reasoning_content"] = until_stop(kwargs["reasoning_content"], STOP.get())
        return super()._build_completion(request_id, until_stop(content or "", STOP.get()), *args, **kwargs)  # type: ignore[misc]


def end_ids(config: Any) -> set[int]:
    """The tokens that end a reply by a generation config."""
    ids = config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, list | tuple) else {int(ids)}


class Reply:
    """A streamer and a stopping criterion of `model.generate`.

    text        what was sent, reasoning and tool calls left out
    config      the request's generation config. Its `max_new_tokens` becomes None when the reply
                ends otherwise: the handler then says "stop"
    parser      transformers' of reasoning and tool calls, None for plain text. A stop text lies in
                the content or in the reasoning, not across them
    send        takes the pieces: text, reasoning, tool calls; None at the end
    cancelled   set when nobody waits for it
    counter     `total_tokens` of it counts the tokens; None where nobody asks
    """

    def __init__(
        self,
        tokenizer: Any,
        config: Any,
        parser: Any,
        stop: tuple[str, ...],
        send: Callable[[Any], None],
        cancelled: threading.Event,
        counter: Any = None,
    ) -> None:
        self.text, self._counter = "", counter
        self._text_of = TextStream(tokenizer, special=parser is not None)
        self._until: dict[type, StopTexts] = {str: StopTexts(stop), ReasoningText: StopTexts(stop)}
        self._config, self._parser, self._send, self._cancelled = config, parser, send, cancelled
        self._ends = end_ids(config)
        self._read = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return any(until.stopped for until in self._until.values())

    def put(self, value: Any) -> None:
        """As a streamer: the prompt, then tokens, which the criterion has read by then."""
        if not self._read:
            self._read = value.numel()

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        """As a stopping criterion, before the streamer: whether no further token is wanted."""
        for token in ids[0, self._read :].tolist():
            self._read += 1
            if self._counter is not None:
                self._counter.total_tokens += 1
            ends = token in self._ends
            if not ends or self._parser is not None:
                self._take(self._text_of(token))
            if ends or self.stopped:
                self._config.max_new_tokens = None
        return torch.full((ids.shape[0],), self.stopped or self._cancelled.is_set(), device=ids.device)

    def end(self) -> None:
        """As a streamer: what was held back, and that nothing follows."""
        self._take(self._text_of.rest())
        if self._parser is not None:
            with contextlib.suppress(ValueError, RuntimeError):  # a tool call without its end, as in transformers
                self._pass(response_events_to_chunks(self._parser.finalize()[1]))
        self._flush()
        if self.stopped:
            self._config.max_new_tokens = None
        self._send(None)

    def _take(self, text: str) -> None:
        if text:
            self._pass([text] if self._parser is None else response_events_to_chunks(self._parser.feed(text)))

    def _pass(self, items: list[Any]) -> None:
        for item in items:
            if self.stopped:
                return
            kind = type(item)
            self._flush(other_than=kind)
            self._give(kind(self._until[kind](item)) if kind in self._until else item)

    def _flush(self, other_than: type | None = None) -> None:
        """Sends text that began no stop text after all."""
        for kind, until in self._until.items():
            if kind is not other_than:
                self._give(kind(until.rest()))

    def _give(self, item: Any) -> None:
        if isinstance(item, str) and not item:
            return
        if type(item) is str:
            self.text += item
        self._send(item)


class Replying:
    """A model whose `generate` makes a `Reply`.

    reply      of the last call
    stop       the request's stop texts
    """

    def __init__(self, model: Any, stop: tuple[str, ...]) -> None:
        self._model, self._stop = model, stop
        self.cancelled = threading.Event()
        self.reply: Reply | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, input_ids: Any, *, tokenizer: Any, generation_config: Any, streamer: Any = None, **kwargs: Any) -> Any:
        """With transformers' streamer the pieces go to its queue, and its parser reads them."""
        if self.cancelled.is_set():
            return input_ids
        generation_config.stop_strings = None
        if streamer is None:
            parser = build_response_parser(tokenizer, self._model, input_ids)
            send: Callable[[Any], None] = _nowhere
            cancelled = self.cancelled
        else:
            parser, send, cancelled = streamer._parser, streamer._enqueue, streamer._cancelled
        plain = getattr(tokenizer, "tokenizer", tokenizer)
        reply = self.reply = Reply(plain, generation_config, parser, self._stop, send, cancelled, streamer)
        return self._model.generate(
            input_ids=input_ids, generation_config=generation_config, streamer=reply, stopping_criteria=[reply], **kwargs
        )


class Decoded:
    """In place of tokenizers' stream in transformers' streamer of a batch."""

    def __init__(self, tokenizer: Any, config: Any, special: bool) -> None:
        self._text_of = TextStream(getattr(tokenizer, "tokenizer", tokenizer), special=special)
        self._config, self._special = config, special
        self._ends = end_ids(config)

    def step(self, tokenizer: Any, token: int) -> str | None:
        """The text that a token completes, None where it completes none."""
        if token in self._ends:
            self._config.max_new_tokens = None
            if not self._special:
                return None
        return self._text_of(token) or None


def _nowhere(item: Any) -> None:
    """A reply that is sent as a whole."""
