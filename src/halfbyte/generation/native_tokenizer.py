"""A GGUF file's tokenizer without torch.

NativeTokenizer      what `Generation` needs, by the tokenizers library alone
templated_tokenizer  transformers' own, for its chat templates; it imports no torch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import UnsupportedError

NEEDED = "text needs the tokenizers library; pip install 'halfbyte[generate]'"
NEEDED_TO_CHAT = "chat templates need transformers and jinja2; pip install 'halfbyte[chat]'"


class NativeTokenizer:
    """The part of transformers' interface that generation uses.

    backend_tokenizer  the `tokenizers.Tokenizer`, which adds what the file says to the ends
    end_ids            tokens that end a reply, as the file names them
    eos_token_id       the token that ends a text, None where the file names none
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint, GGUFCheckpoint)  # as `native_model` asks for
        try:
            from ..gguf_models.tokenizer import described, end_of_turn_ids, tokens_of
        except ModuleNotFoundError as error:
            raise UnsupportedError(f"[generate] {NEEDED}") from error
        tokens = tokens_of(checkpoint.metadata)
        self.backend_tokenizer, settings = described(checkpoint, tokens)
        self.end_ids = end_of_turn_ids(checkpoint.metadata, tokens)
        eos = settings.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self.backend_tokenizer.token_to_id(eos)

    def __call__(self, text: str) -> dict[str, Any]:
        """`input_ids` of a text."""
        return {"input_ids": self.backend_tokenizer.encode(text).ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of these tokens."""
        text: str = self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def templated_tokenizer(checkpoint: Checkpoint) -> tuple[Any, set[int]]:
    """(transformers' tokenizer of the file, the tokens that end a reply)."""
    try:
        import jinja2  # noqa: F401  transformers imports it when it renders

        import transformers  # noqa: F401

        from ..gguf_models.tokenizer import end_of_turn_ids, tokenizer_of, tokens_of
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"[chat] {NEEDED_TO_CHAT}") from error
    assert isinstance(checkpoint, GGUFCheckpoint)
    tokens = tokens_of(checkpoint.metadata)
    return tokenizer_of(checkpoint, tokens), set(end_of_turn_ids(checkpoint.metadata, tokens))
