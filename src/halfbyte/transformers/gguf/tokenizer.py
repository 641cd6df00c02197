"""The tokenizer a GGUF header describes, built with the tokenizers library.

    tokenizer = tokenizer_of(checkpoint)        transformers' interface (encode, decode, chat template)
    backend = backend_of(checkpoint.metadata)   the `tokenizers.Tokenizer` below it

`tokenizer.ggml.model` says which of two kinds it is:

llama  SentencePiece BPE: spaces are "▁", unknown characters fall back to byte tokens. The file has scores and no merges; every
       way to cut a token into two tokens is a merge, and the better token's merges come first. Gemma's scores do not rank its
       merges; the order of its tokens does.
gpt2   byte-level BPE: merges are in the file, `tokenizer.ggml.pre` names the expression that splits text first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from transformers import PreTrainedTokenizerFast

from ...checkpoints.gguf.checkpoint import GGUFCheckpoint
from ...checkpoints.gguf.metadata import Metadata
from ...errors import CheckpointError, UnsupportedError
from .bpe_merges import merges

SPACE = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type: tokens matched whole in the text, special or not."""
_GEMMA = ("gemma", "gemma2", "gemma3")

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_LETTERS}|\p{{N}}|{_REST}"
SPLITS: dict[str, str] = {
    **dict.fromkeys(("gpt-2", "gpt2", "default"), ""),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
}
"""tokenizer.ggml.pre -> the expression that splits text before merging; "" is GPT-2's own."""


def tokenizer_of(checkpoint: GGUFCheckpoint) -> PreTrainedTokenizerFast:
    """transformers' tokenizer of a GGUF file, with its special tokens and chat template.

    Raises UnsupportedError, naming what is read, for another kind of vocabulary; CheckpointError for missing or mistyped keys.
    """
    metadata = checkpoint.metadata
    backend = backend_of(metadata)
    named = {}
    for word, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.typed(f"tokenizer.ggml.{key}_token_id", "integer")
        if index is not None:
            named[f"{word}_token"] = _token(backend, index, f"tokenizer.ggml.{key}_token_id")
    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend  # given as an argument, it would be copied: hundreds of megabytes for a large vocabulary
    tokenizer.__init__(
        add_bos_token=adds_bos(metadata),
        add_eos_token=metadata.typed("tokenizer.ggml.add_eos_token", "bool", False),
        chat_template=metadata.typed("tokenizer.chat_template", "string"),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **named,
    )
    return tokenizer


def adds_bos(metadata: Metadata) -> bool:
    """Whether texts start with the bos token: as stated, else as llama.cpp assumes for the kind of vocabulary."""
    kind = metadata.typed("tokenizer.ggml.model", "string")
    pre = metadata.typed("tokenizer.ggml.pre", "string", "default")
    return bool(metadata.typed("tokenizer.ggml.add_bos_token", "bool", kind == "llama" or SPLITS.get(pre) == _LLAMA3))


def backend_of(metadata: Metadata) -> Tokenizer:
    """The `tokenizers.Tokenizer` of a GGUF header."""
    kind = metadata.typed("tokenizer.ggml.model", "string")
    if kind not in ("llama", "gpt2"):
        raise UnsupportedError(
            f"[tokenizer] tokenizer.ggml.model is {kind!r}; read: 'llama' (SentencePiece) and 'gpt2' (byte-level)"
        )
    tokens = metadata.typed("tokenizer.ggml.tokens", "array[string]")
    if not tokens:
        raise CheckpointError("[tokenizer] tokenizer.ggml.tokens is missing or empty")
    types = metadata.typed("tokenizer.ggml.token_type", "array[int32]", ())
    if len(types) not in (0, len(tokens)):
        raise CheckpointError(f"[tokenizer] {len(tokens)} tokens and {len(types)} token types")
    backend = _sentencepiece(metadata, tokens) if kind == "llama" else _byte_level(metadata, tokens)
    _add_whole_tokens(backend, tokens, types, byte_level=kind == "gpt2")
    _add_ends(backend, metadata)
    return backend


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    gemma = metadata.typed("general.architecture", "string", "") in _GEMMA
    if gemma:
        # Gemma's files spell its runs of spaces as spaces.
        tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
        rank: Mapping[str, float] = {t: i for i, t in enumerate(tokens)}
    else:
        scores = metadata.typed("tokenizer.ggml.scores", "array[float32]")
        if scores is None or len(scores) != len(tokens):
            have = "none" if scores is None else len(scores)
            raise CheckpointError(f"[tokenizer] {len(tokens)} tokens and {have} tokenizer.ggml.scores")
        rank = dict(zip(tokens, (-scores).tolist(), strict=True))
    vocabulary = {t: i for i, t in enumerate(tokens)}
    unknown = metadata.typed("tokenizer.ggml.unknown_token_id", "integer", 0)
    if not 0 <= unknown < len(tokens):
        raise CheckpointError(f"[tokenizer] tokenizer.ggml.unknown_token_id is {unknown}; there are {len(tokens)} tokens")
    pairs = _stated_merges(metadata) or merges(vocabulary, rank)
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        prefix = metadata.typed("tokenizer.ggml.add_space_prefix", "bool", True)
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first" if prefix else "never", split=False)
        if prefix:
            to_text.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(to_text)
    return backend


def _stated_merges(metadata: Metadata) -> list[tuple[str, str]]:
    """tokenizer.ggml.merges as pairs; [] when the file has none."""
    pairs = []
    for line in metadata.typed("tokenizer.ggml.merges", "array[string]", ()):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise CheckpointError(f"[tokenizer] merge {line!r} is not two tokens with a space between")
        pairs.append((left, right))
    return pairs


def _byte_level(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    pre = metadata.typed("tokenizer.ggml.pre", "string", "default")
    if pre not in SPLITS:
        known = ", ".join(SPLITS)
        raise UnsupportedError(f"[tokenizer] tokenizer.ggml.pre {pre!r} splits text in a way that is not known; known: {known}")
    pairs = _stated_merges(metadata)
    if not pairs:
        raise CheckpointError("[tokenizer] a byte-level vocabulary without tokenizer.ggml.merges")
    vocabulary = {t: i for i, t in enumerate(tokens)}
    absent = next((p for p in pairs if not (p[0] in vocabulary and p[1] in vocabulary and p[0] + p[1] in vocabulary)), None)
    if absent is not None:
        raise CheckpointError(f"[tokenizer] merge {absent} joins or makes a token that tokenizer.ggml.tokens does not have")
    # Llama 3 takes a word that is a token as it is, even where its merges would not make it.
    backend = Tokenizer(models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=SPLITS[pre] == _LLAMA3))
    if SPLITS[pre]:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_whole_tokens(backend: Tokenizer, tokens: list[str], types: Sequence[int], byte_level: bool) -> None:
    """Control tokens (special) and user-defined ones (not special) are matched whole, before anything is split.

    In a byte-level vocabulary a control token with a character outside the byte alphabet is a converter's mistake and no text.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet()) if byte_level else None
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL and (alphabet is None or alphabet.issuperset(token)):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED and backend.token_to_id(token) is not None:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_ends(backend: Tokenizer, metadata: Metadata) -> None:
    """A bos token before and an eos token after the text, as the file states."""
    ends: dict[str, int] = {}
    template = ["$A"]
    bos = metadata.typed("tokenizer.ggml.bos_token_id", "integer")
    eos = metadata.typed("tokenizer.ggml.eos_token_id", "integer")
    if bos is not None and adds_bos(metadata):
        token = _token(backend, bos, "tokenizer.ggml.bos_token_id")
        ends[token], template = bos, [token, *template]
    if eos is not None and metadata.typed("tokenizer.ggml.add_eos_token", "bool", False):
        token = _token(backend, eos, "tokenizer.ggml.eos_token_id")
        ends[token], template = eos, [*template, token]
    if ends:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(ends.items()))


def _token(backend: Tokenizer, index: int, key: str) -> str:
    token = backend.id_to_token(index) if index >= 0 else None
    if token is None:
        raise CheckpointError(f"[tokenizer] {key} is {index}; the vocabulary has {backend.get_vocab_size()} tokens")
    return str(token)
