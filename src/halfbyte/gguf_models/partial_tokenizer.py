"""Gemma's tokenizer, built anew for each text from the tokens that occur in it.

    tokenizer = partial_tokenizer(metadata)      None where the vocabulary is of another kind
    ids = tokenizer.encode("Once upon a time").ids
    text = tokenizer.decode(ids)
    text = tokenizer.templates().apply_chat_template(messages, tokenize=False)

The tokenizers library takes a second and 150 MB for a vocabulary of 262,144 tokens and its 514,847
merges, and a text of some words needs a hundred of them. Every token that the library can make of a
text is a piece of it as the normalizer writes it, a token that is matched whole, or a token of a
byte; merges that join to other tokens are never tried, and the order of those that are left is the
same. So the library gives the same ids for the tokens that occur in a text as for all of them.

Tokens are decoded by the library's own decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ..checkpoints.gguf.metadata import Metadata
from .bpe_merges import merges
from .tokenizer import (
    END_OF_TURN,
    SPACE,
    backend_of,
    finish,
    gemma_backend,
    gemma_decoder,
    gemma_name,
    is_gemma,
    is_special,
    settings_of,
    special_ids,
    transformers_tokenizer,
    turn_ends,
)

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""The tokens of single bytes."""
SEARCHED = 1 << 15
"""Characters of all texts from which the whole tokenizer is built."""
LONGEST = 127
"""Bytes of the longest token: the lengths between the tokens are then bytes of ASCII."""


def partial_tokenizer(metadata: Metadata) -> PartialTokenizer | None:
    """The tokenizer of a Gemma vocabulary. None where another rule could make a difference, or an
    error is to be reported: merges that the file states, two tokens of one name, bytes without a
    token, a token that contains the name of a byte's, special tokens that are not there, bytes that
    are not UTF-8.
    """
    if metadata.typed("tokenizer.ggml.model", "string") != "llama" or not is_gemma(metadata):
        return None
    key, types = "tokenizer.ggml.tokens", metadata.typed("tokenizer.ggml.token_type", "array[int32]", ())
    found = metadata.strings(key) if key in metadata and "tokenizer.ggml.merges" not in metadata else None
    if found is None or len(types) != metadata.length(key) or not len(types):
        return None
    strings, header = found
    spaces = [n for n in range(1, LONGEST + 1) if strings.find(b" " * n) >= 0 and strings.find((SPACE * n).encode()) >= 0]
    if not strings.distinct or strings.longest > LONGEST or spaces:
        return None
    text = header[strings.bounds(0)[0] : strings.bounds(len(types) - 1)[1]].tobytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    if text.count(b"<0x") != len(BYTES) or any(strings.find(name.encode()) < 0 for name in BYTES):
        return None
    special = special_ids(metadata)
    unknown: int = metadata.typed("tokenizer.ggml.unknown_token_id", "integer", 0)
    if not all(0 <= i < len(types) for i in (unknown, *special.values())):
        return None
    return PartialTokenizer(metadata, strings, header, types, special, unknown)


class PartialTokenizer:
    """The part of `tokenizers.Tokenizer`'s interface that generation uses, with the same results.

    eos      the token that ends a text, None where the file names none
    end_ids  the tokens that end a reply
    """

    def __init__(
        self,
        metadata: Metadata,
        strings: Any,
        header: NDArray[np.uint8],
        types: NDArray[np.int32],
        special: dict[str, int],
        unknown: int,
    ) -> None:
        self._metadata, self._strings, self._header, self._types = metadata, strings, header, types
        self._unknown, self._decoder, self._searched = unknown, gemma_decoder(), 0
        self._always = [unknown, *special.values(), *(strings.find(name.encode()) for name in BYTES)]
        known = [(i, token) for token in END_OF_TURN if (i := strings.find(token.encode())) >= 0]
        self.eos = gemma_name(self._token(special["eos"])) if "eos" in special else None
        self.end_ids = turn_ends(metadata, known, len(types))

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """The library's encoding of a text. Raises what the library raises."""
        self._searched += len(text)
        backend = self._whole if self._searched > SEARCHED else self._of_text(text)
        return backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens; an id that the vocabulary does not have has none."""
        tokens = [(i, self._token(i)) for i in ids if 0 <= i < len(self._types)]
        names = [gemma_name(token) for i, token in tokens if not (skip_special_tokens and self._left_out(i, token))]
        text: str = self._decoder.decode(names)
        return text

    def templates(self) -> Any:
        """transformers' tokenizer of the special tokens alone, which writes conversations as text."""
        backend = self._of_text("")
        return transformers_tokenizer(self._metadata, backend, settings_of(self._metadata, backend))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, None for what is none."""
        spelled = " " * len(token) if not token.strip(SPACE) else token
        found = [i for name in (spelled, token) if (i := self._strings.find(name.encode())) >= 0]
        return next((i for i in found if gemma_name(self._token(i)) == token), None)

    def _token(self, i: int) -> str:
        """A token as the file spells it."""
        begin, end = self._strings.bounds(i)
        return self._header[begin:end].tobytes().decode()

    def _left_out(self, i: int, token: str) -> bool:
        return gemma_name(token) == token and is_special(token, int(self._types[i]))

    @cached_property
    def _whole(self) -> Tokenizer:
        return backend_of(self._metadata)

    def _of_text(self, text: str) -> Tokenizer:
        # Tokens that are matched whole are pieces of the text as it is, others of the normalized
        # one.
        normalized = text.replace(" ", SPACE)
        found = np.zeros(len(self._types), np.uint8)
        found[self._always] = 1
        for written in {text, normalized, normalized.replace(SPACE, " ")}:
            self._strings.pieces(written.encode(), found)
        ids = np.flatnonzero(found).tolist()
        tokens = [self._token(i) for i in ids]
        vocabulary = dict(zip(map(gemma_name, tokens), ids, strict=True))
        backend = gemma_backend(vocabulary, merges(vocabulary, vocabulary), self._token(self._unknown))
        finish(backend, self._metadata, tokens, self._types[ids].tolist())
        return backend
