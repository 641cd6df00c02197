"""The windows of a text and the tokens that are scored in each.

`llama.cpp`  Chunks of `context` tokens that do not overlap, each with bos in place of its first
             token where the tokenizer adds one; a last short chunk is dropped. Tokens at positions
             context/2 + 1 to context − 1 are scored: 255 of 512.
`sliding`    `context` tokens every `stride`, the last window ending with the text. Tokens in no
             earlier window are scored, except those without a token before them in their window:
             the text's first, and every window's when the stride is the context.

The first is that of llama.cpp's `perplexity` tool, the second that of transformers' guide to the
perplexity of models of fixed length, tokens weighted equally. Their results are not comparable: the
first scores tokens with less context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import HalfbyteError, plural

PROTOCOLS = ("llama.cpp", "sliding")


class EvaluationError(HalfbyteError, ValueError):
    """A text, protocol or threshold that cannot be used; the message says what is allowed."""


class Window(NamedTuple):
    """Tokens that a model reads in one pass.

    first  position of the first scored token; it and all that follow are scored, each from the
           tokens before it
    """

    tokens: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def llama_cpp(ids: Sequence[int], context: int = 512, bos: int | None = None, chunks: int | None = None) -> list[Window]:
    """llama.cpp's chunks. EvaluationError when the text has not one whole chunk.

    bos     token that replaces the first one of each chunk; None for a tokenizer that adds none
    chunks  at most so many
    """
    if context < 4:
        raise EvaluationError(f"[eval] context {context}; 4 tokens or more are allowed")
    count = len(ids) // context
    if count < 1:
        raise EvaluationError(
            f"[eval] the text has {plural(len(ids), 'token')}; llama.cpp's protocol wants {context:,} (context) or more"
        )
    windows = []
    for i in range(count if chunks is None else min(count, chunks)):
        tokens = tuple(ids[i * context : (i + 1) * context])
        windows.append(Window(tokens if bos is None else (bos, *tokens[1:]), context // 2 + 1))
    return windows


def sliding(ids: Sequence[int], context: int = 512, stride: int | None = None, chunks: int | None = None) -> list[Window]:
    """Windows every `stride` tokens (half the context when None). EvaluationError for fewer than
    two tokens.
    """
    step = context // 2 if stride is None else stride
    if context < 2 or not 1 <= step <= context:
        raise EvaluationError(
            f"[eval] context {context}, stride {step}; a stride of 1 to the context, and a context of 2 or more"
        )
    if len(ids) < 2:
        raise EvaluationError(f"[eval] the text has {plural(len(ids), 'token')}; 2 or more are allowed")
    windows: list[Window] = []
    done = 1
    for start in range(0, len(ids), step):
        end = min(start + context, len(ids))
        windows.append(Window(tuple(ids[start:end]), max(done - start, 1)))
        done = end
        if end == len(ids) or len(windows) == chunks:
            break
    return windows


def windows_of(
    ids: Sequence[int],
    protocol: str = "llama.cpp",
    context: int = 512,
    *,
    stride: int | None = None,
    bos: int | None = None,
    chunks: int | None = None,
) -> list[Window]:
    """The windows of a protocol by name."""
    if chunks is not None and chunks < 1:
        raise EvaluationError(f"[eval] {chunks} chunks; 1 or more are allowed")
    if protocol == "llama.cpp":
        if stride is not None:
            raise EvaluationError(f"[eval] stride {stride} with the llama.cpp protocol, whose chunks do not overlap; use sliding")
        return llama_cpp(ids, context, bos, chunks)
    if protocol == "sliding":
        return sliding(ids, context, stride, chunks)
    raise EvaluationError(f"[eval] protocol {protocol!r}; allowed: {', '.join(PROTOCOLS)}")
