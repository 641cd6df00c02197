"""A conversation with a packed model: its own chat template, streamed replies.

    chat = Chat(model, tokenizer, system="Be brief.")
    for piece in chat.say("Hello"):
        print(piece, end="")

Each turn is the whole conversation as the template writes it; what the turn before computed of it
is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UnsupportedError
from .single import Generation, Sampling
from .template_limits import TemplateLimitError
from .templates import render


class Chat:
    """Messages so far, and how the next reply is sampled.

    system      what the template puts before the conversation, "" for nothing
    max_tokens  of each reply
    template    a Jinja template in place of the tokenizer's own
    stop        texts that end a reply
    stop_ids    tokens that end it; None for what model and tokenizer say

    last  the `Generation` of the latest reply, with its statistics
    Raises UnsupportedError for a tokenizer without a chat template, and where a template does not
    render the conversation.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system: str = "",
        max_tokens: int = 512,
        sampling: Sampling | None = None,
        template: str | None = None,
        stop: Sequence[str] = (),
        stop_ids: set[int] | None = None,
    ) -> None:
        self.template, self.stop, self.stop_ids = template, tuple(stop), stop_ids
        if not template and not getattr(tokenizer, "chat_template", None):
            raise UnsupportedError(
                "[chat] the tokenizer has no chat template: the model was not made for conversation, or the template was left "
                "out; give a template (chatml), or continue plain text with halfbyte generate"
            )
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens, self.sampling = max_tokens, sampling
        self.system = system
        self.last: Generation | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, not the system message."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> Iterator[str]:
        """The reply to `text`, a piece at a time; it joins the conversation when it ends, or when
        the caller stops reading. A `text` whose prompt cannot be made, or does not fit the model's
        context, does not join it.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            self.last = Generation(
                self.model,
                self.tokenizer,
                self.prompt(),
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                stop=self.stop,
                stop_ids=self.stop_ids,
                session=self.last.session if self.last else None,
            )
        except BaseException:
            self.messages.pop()
            raise
        pieces: list[str] = []
        try:
            for piece in self.last:
                pieces.append(piece.text)
                yield piece.text
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def prompt(self) -> list[int]:
        """Token ids of the conversation, up to where the reply begins.

        Templates that know no system message get it at the head of the first message.
        """
        try:
            return self._template(self.messages)
        except UnsupportedError as error:
            if not self.system or isinstance(error, TemplateLimitError):
                raise
        _, first, *rest = self.messages
        return self._template([{**first, "content": f"{self.system}\n\n{first['content']}"}, *rest])

    def _template(self, messages: list[dict[str, str]]) -> list[int]:
        return render(self.tokenizer, messages, template=self.template)
