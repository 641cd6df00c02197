"""Splits that no expression describes, as pre-tokenizers of the tokenizers library: RWKV's longest
tokens and PLaMo 2's cheapest ones.

    backend.pre_tokenizer = PreTokenizer.custom(Scanner(Longest(tokens)))

Each piece is a token; a piece that is none is one character, which falls back to byte tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import CheckpointError

UNKNOWN_COST = 10_000_000
"""Of a character that no token begins with, in PLaMo 2's units of 1e-4."""


class Scanner:
    """A pre-tokenizer from a function that cuts a text into (start, end) pairs."""

    def __init__(self, cut: Callable[[str], list[tuple[int, int]]]) -> None:
        self.cut = cut

    def pre_tokenize(self, pretokenized: Any) -> None:
        """Cuts every piece; the library's interface of a pre-tokenizer."""
        pretokenized.split(lambda _, piece: [piece[start:end] for start, end in self.cut(str(piece))])


class Trie:
    """Tokens by their characters, in memory linear in their length.

    after  (node, character) -> node; 0 is the root
    value  node at a token's end -> the token's value
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.after: dict[tuple[int, str], int] = {}
        self.value: dict[int, int] = {}
        for token, value in tokens.items():
            node = 0
            for character in token:
                node = self.after.setdefault((node, character), len(self.after) + 1)
            self.value[node] = value

    def ends(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        """(end, value) of every token that the text has at `start`, the shortest first."""
        node = 0
        for end in range(start, len(text)):
            following = self.after.get((node, text[end]))
            if following is None:
                return
            node = following
            if node in self.value:
                yield end + 1, self.value[node]


class Longest:
    """From the left, the longest token that the text goes on with."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.trie = Trie(dict.fromkeys(filter(None, tokens), 0))

    def __call__(self, text: str) -> list[tuple[int, int]]:
        out, start = [], 0
        while start < len(text):
            end = max((end for end, _ in self.trie.ends(text, start)), default=start + 1)
            out.append((start, end))
            start = end
        return out


class Cheapest:
    """The tokens whose scores add up to most; of equal ones the longest first token.

    scores  token -> round(score · 10⁴)
    """

    def __init__(self, scores: Mapping[str, int]) -> None:
        self.trie = Trie(scores)

    def __call__(self, text: str) -> list[tuple[int, int]]:
        costs, ends = [0] * (len(text) + 1), [0] * len(text)
        for start in range(len(text) - 1, -1, -1):
            costs[start], ends[start] = costs[start + 1] + UNKNOWN_COST, start + 1
            for end, score in self.trie.ends(text, start):
                if costs[end] - score <= costs[start]:
                    costs[start], ends[start] = costs[end] - score, end
        out, start = [], 0
        while start < len(text):
            out.append((start, ends[start]))
            start = ends[start]
        return out


def unescaped(token: str) -> bytes:
    r"""The bytes of one of RWKV's tokens: `\t`, `\n`, `\r`, `\xNN`, and any other character after a
    backslash itself. CheckpointError where an escape is not complete.
    """
    out, raw, i = bytearray(), token.encode(), 0
    while i < len(raw):
        if raw[i] != 0x5C:
            out.append(raw[i])
            i += 1
        elif raw[i + 1 : i + 2] == b"x":
            digits = raw[i + 2 : i + 4]
            if len(digits) < 2 or not digits.isalnum() or digits.strip(b"0123456789abcdefABCDEF"):
                raise CheckpointError(
                    f"[tokenizer] token {token!r} ends within an escape; \\xNN with two hexadecimal digits is allowed"
                )
            out.append(int(digits, 16))
            i += 4
        elif i + 1 == len(raw):
            raise CheckpointError(f"[tokenizer] token {token!r} ends within an escape; a character follows each backslash")
        else:
            out.append({ord("t"): 9, ord("n"): 10, ord("r"): 13}.get(raw[i + 1], raw[i + 1]))
            i += 2
    return bytes(out)
