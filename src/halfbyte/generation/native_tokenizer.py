"""A GGUF file's tokenizer without transformers: what `Generation` asks of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..errors import UnsupportedError

NEEDED = "tokenizers is not installed, and text needs it; pip install 'halfbyte[generate]'"


class NativeTokenizer:
    """The part of transformers' interface that generation uses.

    backend_tokenizer  the `tokenizers.Tokenizer`, which adds what the file says to the ends
    end_ids            tokens that end a reply, as the file names them
    eos_token_id       the token that ends a text, None where the file names none
    """

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        try:
            from ..gguf_models.tokenizer import described, end_of_turn_ids
        except ModuleNotFoundError as error:
            raise UnsupportedError(f"[generate] {NEEDED}") from error
        self.backend_tokenizer, settings = described(checkpoint)
        self.end_ids = end_of_turn_ids(checkpoint.metadata)
        eos = settings.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self.backend_tokenizer.token_to_id(eos)

    def __call__(self, text: str) -> dict[str, Any]:
        """`input_ids` of a text."""
        return {"input_ids": self.backend_tokenizer.encode(text).ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of these tokens."""
        text: str = self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text
