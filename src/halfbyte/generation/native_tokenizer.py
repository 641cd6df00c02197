"""The tokenizer of a GGUF file or of a folder, without torch.

NativeTokenizer      what `Generation` needs, by the tokenizers library alone
ChatTokenizer        the same, and transformers' chat templates
templated_tokenizer  one that writes conversations
tokenizer_of_folder  transformers' own, of a folder
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints import Checkpoint
from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.io.bounded_json import check_plain_files, check_token_ids, read_json
from ..errors import CheckpointError, UnsupportedError, summary_of

if TYPE_CHECKING:
    from ..gguf_models.partial_tokenizer import PartialTokenizer

NEEDED = "text needs the tokenizers library; pip install 'halfbyte[generate]'"
TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>")
"""Tokens that end a turn in whatever vocabulary has them."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
"""Any of these says that the folder has a tokenizer."""
NEEDED_TO_CHAT = "chat templates need transformers and jinja2; pip install 'halfbyte[chat]'"


class NativeTokenizer:
    """The part of transformers' interface that generation uses.

    backend_tokenizer  the `tokenizers.Tokenizer`, which adds what the file says to the ends, or a
                       `PartialTokenizer`
    end_ids            tokens that end a reply, as the file or the folder names them
    eos_token_id       the token that ends a text, None where none is named
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            import tokenizers  # noqa: F401  named in the error before a module that needs it is
        except ModuleNotFoundError as error:
            raise UnsupportedError(f"[generate] {NEEDED}") from error
        self.end_ids: list[int]
        if isinstance(checkpoint, GGUFCheckpoint):
            from ..gguf_models.partial_tokenizer import partial_tokenizer
            from ..gguf_models.tokenizer import described, end_of_turn_ids, tokens_of

            self.backend_tokenizer: Any = partial_tokenizer(checkpoint.metadata)
            if self.backend_tokenizer:
                self.end_ids, eos = self.backend_tokenizer.end_ids, self.backend_tokenizer.eos
            else:
                tokens = tokens_of(checkpoint.metadata)
                self.backend_tokenizer, settings = described(checkpoint, tokens)
                self.end_ids, eos = end_of_turn_ids(checkpoint.metadata, tokens), settings.get("eos_token")
        else:
            self.backend_tokenizer, eos = _of_folder(checkpoint)
            self.end_ids = _end_ids(checkpoint)
        self.eos_token_id: int | None = None if eos is None else self.backend_tokenizer.token_to_id(eos)

    def __call__(self, text: str) -> dict[str, Any]:
        """`input_ids` of a text."""
        return {"input_ids": self.backend_tokenizer.encode(text).ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of these tokens."""
        text: str = self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


class ChatTokenizer(NativeTokenizer):
    """Of a `PartialTokenizer`: conversations become text by transformers, over the special tokens
    alone, and text becomes tokens as in `NativeTokenizer`.
    """

    def __init__(self, partial: PartialTokenizer) -> None:
        self.backend_tokenizer, self.end_ids = partial, partial.end_ids
        self._templates = partial.templates()
        self.chat_template, self.eos_token_id = self._templates.chat_template, self._templates.eos_token_id

    def apply_chat_template(self, conversation: Any, *, return_dict: bool = True, **options: Any) -> Any:
        """`input_ids` of a conversation, as transformers' method."""
        text = self._templates.apply_chat_template(conversation, tokenize=False, **options)
        ids = self.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return {"input_ids": ids} if return_dict else ids


def templated_tokenizer(checkpoint: Checkpoint) -> tuple[Any, set[int]]:
    """(a tokenizer of the file or folder with transformers' chat templates, the tokens that end a
    reply). Raises UnsupportedError without the packages of templates.
    """
    try:
        import jinja2  # noqa: F401  transformers imports it when it renders

        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"[chat] {NEEDED_TO_CHAT}") from error
    if not isinstance(checkpoint, GGUFCheckpoint):
        tokenizer = tokenizer_of_folder(checkpoint)
        turns = {tokenizer.backend_tokenizer.token_to_id(t) for t in TURN_ENDS}
        return tokenizer, ({*_end_ids(checkpoint), tokenizer.eos_token_id} | turns) - {None}
    from ..gguf_models.partial_tokenizer import partial_tokenizer
    from ..gguf_models.tokenizer import end_of_turn_ids, tokenizer_of, tokens_of

    if partial := partial_tokenizer(checkpoint.metadata):
        return ChatTokenizer(partial), set(partial.end_ids)
    tokens = tokens_of(checkpoint.metadata)
    return tokenizer_of(checkpoint, tokens), set(end_of_turn_ids(checkpoint.metadata, tokens))


def no_tokenizer(checkpoint: Checkpoint) -> str:
    """Why transformers is needed to read the tokenizer, "" where it is not."""
    if isinstance(checkpoint, GGUFCheckpoint) or (folder_of(checkpoint) / "tokenizer.json").is_file():
        return ""
    return "without a tokenizer.json the tokenizer is read by transformers"


def _of_folder(checkpoint: Checkpoint) -> tuple[Any, str | None]:
    """(the tokenizer of tokenizer.json, the token that ends a text). What is added to a text is
    what tokenizer.json adds; transformers too reads `add_bos_token` only where there is none.
    """
    from tokenizers import Tokenizer

    folder = folder_of(checkpoint)
    check_token_ids(folder / "tokenizer.json", "generate")
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except BaseException as error:  # a panic of tokenizers is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"[generate] {folder}: its tokenizer cannot be read: {summary_of(error)}") from error
    backend.no_truncation()
    backend.no_padding()
    settings = _settings(folder, "special_tokens_map.json") | _settings(folder, "tokenizer_config.json")
    return backend, _text(settings.get("eos_token"))


def _end_ids(checkpoint: Checkpoint) -> list[int]:
    """What config.json and generation_config.json state as eos: a token or several each."""
    stated = [c.get("eos_token_id") for c in (checkpoint.config, _settings(folder_of(checkpoint), "generation_config.json"))]
    ids = [i for value in stated for i in (value if isinstance(value, list) else [value])]
    return [i for i in ids if isinstance(i, int)]


def _settings(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).exists() else {}


def _text(token: Any) -> str | None:
    """A token's text, which may be within an object that also describes it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def folder_of(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint's files."""
    return checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent


def tokenizer_of_folder(checkpoint: Checkpoint) -> Any:
    """The tokenizer beside the tensors, None when there is none. CheckpointError for one that
    cannot be read.
    """
    from transformers import AutoTokenizer

    folder = folder_of(checkpoint)
    if not any((folder / name).exists() for name in TOKENIZERS):
        return None
    check_plain_files(folder, "load_model")
    for name in ("tokenizer.json", "vocab.json"):
        if (folder / name).exists():
            check_token_ids(folder / name, "load_model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # of JSON, of a package that it wants; a panic of tokenizers is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"[load_model] {folder}: its tokenizer cannot be read: {summary_of(error)}") from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise CheckpointError(
            f"[load_model] {folder}: tokenizer_config.json has model_max_length {longest!r:.80}; a number is allowed"
        )
    return tokenizer
