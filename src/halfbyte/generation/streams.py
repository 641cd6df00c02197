"""Text of tokens that come one after another, and where it ends.

stream = TextStream(tokenizer)          stream(token) -> the text that it completes
until = StopTexts(("\\n\\n", "User:"))    until(text) -> what of it comes before a stop text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """A function of one token after another: the text that each completes, "" in the middle of a
    character. The rule is that of `tokenizers.decoders.DecodeStream`, which fails where a byte that
    begins no character follows bytes whose character was given: it makes none of them valid. Here
    the text goes on after what was given.

    special  whether special tokens have text
    """

    def __init__(self, tokenizer: Any, *, special: bool = False) -> None:
        self._backend, self._special = tokenizer.backend_tokenizer, special
        self._given: list[int] = []
        self._kept: list[int] = []

    def __call__(self, token: int) -> str:
        self._kept.append(token)
        added = self._added()
        if not added or added.endswith("\ufffd"):
            return ""
        self._given, self._kept = self._kept, []
        return added

    def rest(self) -> str:
        """At the end: the text of bytes that are no whole character."""
        added = self._added() if self._kept else ""
        self._given, self._kept = self._given + self._kept, []
        return added

    def _added(self) -> str:
        before, text = self._decode(self._given), self._decode(self._given + self._kept)
        return text[len(before) :] if text.startswith(before) else self._decode(self._kept)

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=not self._special))


class StopTexts:
    """A function of one piece of text after another: what is certain to come before a stop text.
    Text that may be the beginning of one is held back.

    The stop text that ends first counts, and of those that end at one character the longest; it,
    and what follows, is left out. That does not depend on how the text is cut into pieces.

    stop     texts of one or more characters
    stopped  whether one has come
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.stopped = tuple(stop), False
        self._held = ""

    def __call__(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(i + len(s), i) for s in self.stop if (i := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        begun = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def rest(self) -> str:
        """At the end: the text that began no stop text after all."""
        held, self._held = self._held, ""
        return held


def until_stop(text: str, stop: Sequence[str]) -> str:
    """A whole text up to a stop text."""
    until = StopTexts(stop)
    return until(text) + until.rest()
