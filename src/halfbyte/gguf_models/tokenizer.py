"""The tokenizer a GGUF header describes, built with the tokenizers library.

    tokenizer = tokenizer_of(checkpoint)        transformers' interface (encode, decode, chat
                                                template)
    backend = backend_of(checkpoint.metadata)   the `tokenizers.Tokenizer` below it

`tokenizer.ggml.model` names the kind:

llama   SentencePiece BPE: spaces are "▁", unknown characters fall back to byte tokens. The file has
        scores and no merges; every way to cut a token into two tokens is a merge, and the better
        token's merges come first. Gemma's scores do not rank its merges; the order of its tokens
        does.
gpt2    byte-level BPE: merges are in the file, `tokenizer.ggml.pre` names the expressions that
        split text first.
gemma4  BPE on characters: merges are in the file, spaces are "▁", unknown characters fall back to
        byte tokens.
bert    WordPiece: the longest token that fits, "▁" before the first one of a word.
t5      SentencePiece Unigram: the tokens whose scores add up to most.
rwkv    from the left, the longest token of bytes.
plamo2  as Unigram, over characters, with scores rounded to 1e-4 and byte tokens.
whitespace  BPE on characters; whitespace cuts and is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..checkpoints.gguf.checkpoint import GGUFCheckpoint
from ..checkpoints.gguf.metadata import Metadata
from ..checkpoints.gguf.runnable import UNREAD_VOCABULARIES
from ..checkpoints.io.bounded_json import check_token_ids
from ..errors import CheckpointError, UnsupportedError, plural
from .bpe_merges import Pairs, merges
from .pretokenizers import PRE_TOKENIZERS, PreTokenizer
from .scanners import Cheapest, Longest, Scanner, unescaped

SPACE = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Values of tokenizer.ggml.token_type: tokens matched whole in the text, the first two special, and
tokens of a byte.
"""
_PRINTED = [b for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or b > 173]
BYTES = {b: chr(b) for b in _PRINTED} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _PRINTED)}
"""Byte -> the character that stands for it in byte-level vocabularies."""
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma-embedding")

END_OF_TURN = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>",
        "<｜end▁of▁sentence｜>", "[e~[",
    }
)  # fmt: skip
"""Tokens that end a reply in some vocabulary, control tokens whatever type the file gives them."""


def tokens_of(metadata: Metadata) -> list[str]:
    """The texts of the tokens. They are decoded at every access: callers pass them on.
    CheckpointError where the file has none.
    """
    tokens: list[str] = metadata.typed("tokenizer.ggml.tokens", "array[string]")
    if not tokens:
        raise CheckpointError("[tokenizer] tokenizer.ggml.tokens is missing or empty")
    return tokens


def tokenizer_of(checkpoint: GGUFCheckpoint, tokens: list[str] | None = None) -> Any:
    """transformers' tokenizer of a GGUF file, with its special tokens and chat template.

    tokens  `tokens_of` the file, where the caller has them

    A vocabulary of a kind that is not read is taken from a `tokenizer.json` beside the file, where
    there is one. Raises UnsupportedError, naming what is read, for such a vocabulary without one;
    CheckpointError for missing or mistyped keys.
    """
    return transformers_tokenizer(checkpoint.metadata, *described(checkpoint, tokens))


def transformers_tokenizer(metadata: Metadata, backend: Tokenizer, settings: Mapping[str, Any]) -> Any:
    """transformers' tokenizer over a `tokenizers.Tokenizer`, with its settings and the file's chat
    template.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend  # given as an argument, it would be copied: hundreds of megabytes for a large vocabulary
    tokenizer.__init__(chat_template=metadata.typed("tokenizer.chat_template", "string"), **settings)
    return tokenizer


def described(checkpoint: GGUFCheckpoint, tokens: list[str] | None = None) -> tuple[Tokenizer, dict[str, Any]]:
    """The `tokenizers.Tokenizer` of a GGUF file and transformers' settings of it: special tokens,
    what is added at the ends. Raises as `tokenizer_of` does.
    """
    metadata = checkpoint.metadata
    try:
        backend = backend_of(metadata, tokens)
    except UnsupportedError:
        beside = checkpoint.path.parent / "tokenizer.json"
        if not beside.is_file():
            raise
        check_token_ids(beside, "tokenizer")
        try:
            backend = Tokenizer.from_file(str(beside))
        except BaseException as error:  # the tokenizers library raises plain Exception; its panics are none
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise CheckpointError(f"[tokenizer] {beside}: {error}") from error
    return backend, settings_of(metadata, backend)


def settings_of(metadata: Metadata, backend: Tokenizer) -> dict[str, Any]:
    """transformers' settings of a tokenizer: special tokens, what is added at the ends."""
    named = {
        f"{word}_token": _token(backend, i, f"tokenizer.ggml.{_SPECIAL_KEYS[word]}_token_id")
        for word, i in special_ids(metadata).items()
    }
    return {
        "add_bos_token": adds_bos(metadata),
        "add_eos_token": adds_eos(metadata),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        **named,
    }


def adds_bos(metadata: Metadata) -> bool:
    """Whether texts start with the bos token: as stated, else as llama.cpp assumes for the kind of
    vocabulary.
    """
    kind = metadata.typed("tokenizer.ggml.model", "string")
    pre = PRE_TOKENIZERS.get(_pre_name(metadata))
    assumed = kind in ("llama", "bert", "gemma4") or (kind == "gpt2" and pre is not None and pre.add_bos)
    # Files of Gemma 4 that say otherwise were converted wrongly.
    return kind == "gemma4" or bool(metadata.typed("tokenizer.ggml.add_bos_token", "bool", assumed))


def adds_eos(metadata: Metadata) -> bool:
    """Whether texts end with the eos token (for bert, the separator): as stated, else only T5's and
    BERT's do.
    """
    kind = metadata.typed("tokenizer.ggml.model", "string")
    return kind == "bert" or bool(metadata.typed("tokenizer.ggml.add_eos_token", "bool", kind == "t5"))


def end_of_turn_ids(metadata: Metadata, tokens: Sequence[str] | None = None) -> list[int]:
    """Ids of the tokens that end a reply: the eos and eot tokens that the file names, and those
    known by their text.
    """
    tokens = metadata.typed("tokenizer.ggml.tokens", "array[string]", ()) if tokens is None else tokens
    return turn_ends(metadata, [(i, token) for i, token in enumerate(tokens) if token in END_OF_TURN], len(tokens))


def turn_ends(metadata: Metadata, known: Sequence[tuple[int, str]], count: int) -> list[int]:
    """`end_of_turn_ids` of a vocabulary of `count` tokens that has those in `known` of
    `END_OF_TURN`.
    """
    ids = {i for i, _ in known}
    if {"<|return|>", "<|call|>"} <= {token for _, token in known}:
        ids -= {i for i, token in known if token == "<|end|>"}  # gpt-oss ends a part of its reply with it
    for name in ("eos", "eot", "eom"):
        index = metadata.typed(f"tokenizer.ggml.{name}_token_id", "integer")
        if index is not None and 0 <= index < count:
            ids.add(index)
    return sorted(ids)


def backend_of(metadata: Metadata, tokens: list[str] | None = None) -> Tokenizer:
    """The `tokenizers.Tokenizer` of a GGUF header; `tokens` as for `tokenizer_of`."""
    kind = metadata.typed("tokenizer.ggml.model", "string")
    if kind not in _KINDS:
        why = f" ({UNREAD_VOCABULARIES[kind]})" if kind in UNREAD_VOCABULARIES else ""
        raise UnsupportedError(f"[tokenizer] tokenizer.ggml.model is {kind!r}{why}; read: {', '.join(map(repr, _KINDS))}")
    tokens = tokens_of(metadata) if tokens is None else tokens
    types = metadata.typed("tokenizer.ggml.token_type", "array[int32]", ())
    if len(types) not in (0, len(tokens)):
        raise CheckpointError(f"[tokenizer] {plural(len(tokens), 'token')} and {plural(len(types), 'token type')}")
    backend = _KINDS[kind](metadata, tokens, types)
    finish(backend, metadata, tokens, types)
    return backend


def finish(backend: Tokenizer, metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are matched whole, and what is added to the ends of a text."""
    _add_whole_tokens(backend, metadata, tokens, types)
    _add_ends(backend, metadata)


def _sentencepiece(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    if is_gemma(metadata):
        vocabulary = gemma_vocabulary(tokens)
        pairs = _stated_merges(metadata) or merges(vocabulary, vocabulary)
        return gemma_backend(vocabulary, pairs, tokens[_unknown(metadata, tokens, 0)])
    vocabulary = {t: i for i, t in enumerate(tokens)}
    rank = dict(zip(tokens, [-score for score in _scores(metadata, tokens)], strict=True))
    pairs = _stated_merges(metadata) or merges(vocabulary, rank)
    unknown = tokens[_unknown(metadata, tokens, 0)]
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # Every text between two special tokens gets a space of its own, one that starts with spaces
    # too.
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.typed("tokenizer.ggml.add_space_prefix", "bool", True):
        steps = [normalizers.Prepend(SPACE), *steps]
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(to_text)
    return backend


def is_gemma(metadata: Metadata) -> bool:
    """Whether a SentencePiece vocabulary is ranked and spelled as Gemma's: see `gemma_vocabulary`."""
    return metadata.typed("general.architecture", "string", "") in _GEMMA


def gemma_vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id, which is its rank too."""
    return {gemma_name(t): i for i, t in enumerate(tokens)}


def gemma_name(token: str) -> str:
    """A token as texts have it: Gemma's files spell its runs of spaces as spaces."""
    return SPACE * len(token) if token[:1] == " " and not token.strip(" ") else token


def gemma_backend(vocabulary: Mapping[str, int], pairs: Pairs, unknown: str) -> Tokenizer:
    """Gemma's algorithm for these tokens and merges; it adds nothing to the ends."""
    backend = Tokenizer(models.BPE(dict(vocabulary), pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = gemma_decoder()
    return backend


def gemma_decoder() -> decoders.Decoder:
    """Texts of tokens -> their text."""
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def _scores(metadata: Metadata, tokens: list[str]) -> list[float]:
    scores = metadata.typed("tokenizer.ggml.scores", "array[float32]")
    if scores is None or len(scores) != len(tokens):
        have = "none" if scores is None else len(scores)
        raise CheckpointError(f"[tokenizer] {plural(len(tokens), 'token')} and {have} tokenizer.ggml.scores")
    return [float(s) for s in scores.tolist()]


def _unknown(metadata: Metadata, tokens: list[str], default: int) -> int:
    unknown: int = metadata.typed("tokenizer.ggml.unknown_token_id", "integer", default)
    if not 0 <= unknown < len(tokens):
        raise CheckpointError(
            f"[tokenizer] tokenizer.ggml.unknown_token_id is {unknown}; the vocabulary has {plural(len(tokens), 'token')}"
        )
    return unknown


def _stated_merges(metadata: Metadata) -> list[tuple[str, str]]:
    """tokenizer.ggml.merges as pairs; [] when the file has none. A token may begin with a space."""
    pairs = []
    for line in metadata.typed("tokenizer.ggml.merges", "array[string]", ()):
        cut = line.find(" ", 1)
        if cut < 1 or cut + 1 == len(line):
            raise CheckpointError(f"[tokenizer] merge {line!r} is not two tokens with a space between")
        pairs.append((line[:cut], line[cut + 1 :]))
    return pairs


def _pre_name(metadata: Metadata) -> str:
    if metadata.typed("tokenizer.ggml.model", "string") == "gemma4":
        return "gemma4"
    return str(metadata.typed("tokenizer.ggml.pre", "string", "default"))


def _bpe(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    name = _pre_name(metadata)
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedError(f"[tokenizer] tokenizer.ggml.pre {name!r} splits text in a way that is not read; read: {known}")
    pre = PRE_TOKENIZERS[name]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    pairs = _stated_merges(metadata)
    if not pairs and name == "kimi-k2":
        # The ranks of its tokens are the order of its merges.
        normal = [t for i, t in enumerate(tokens) if i >= len(types) or types[i] == 1]
        pairs = merges(normal, {t: vocabulary[t] for t in normal})
    if not pairs:
        raise CheckpointError("[tokenizer] a byte-level vocabulary without tokenizer.ggml.merges")
    absent = next((p for p in pairs if not (p[0] in vocabulary and p[1] in vocabulary and p[0] + p[1] in vocabulary)), None)
    if absent is not None:
        raise CheckpointError(f"[tokenizer] merge {absent} joins or makes a token that tokenizer.ggml.tokens does not have")
    if pre.characters:
        return _bpe_on_words(metadata, vocabulary, pairs)
    if pre.spaces:
        return _bpe_on_characters(metadata, pre, tokens, vocabulary, pairs)
    backend = Tokenizer(models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=pre.whole_words))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe_on_words(metadata: Metadata, vocabulary: dict[str, int], pairs: list[tuple[str, str]]) -> Tokenizer:
    """Whitespace and characters outside the vocabulary cut, and are left out."""
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    if metadata.typed("tokenizer.ggml.normalizer.lowercase", "bool", False):
        backend.normalizer = normalizers.Lowercase()
    known = "".join(rf"\x{{{ord(token):X}}}" for token in vocabulary if len(token) == 1)
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.WhitespaceSplit()]
    if known:
        steps.append(pre_tokenizers.Split(Regex(f"[^{known}]"), behavior="removed"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.Fuse()
    return backend


def _bpe_on_characters(
    metadata: Metadata, pre: PreTokenizer, tokens: list[str], vocabulary: dict[str, int], pairs: list[tuple[str, str]]
) -> Tokenizer:
    if pre.line_breaks and not any(left == right == "\n" for left, right in pairs):
        breaks = {t: len(t) for t in tokens if t and not t.strip("\n")}
        pairs = [*merges(breaks, breaks), *pairs]
    unknown = tokens[_unknown(metadata, tokens, 0)]
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.splits]
    )
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _wordpiece(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    """The file marks the tokens that start a word with "▁"; the tokenizers library marks the others
    with "##".
    """
    names = []
    for i, token in enumerate(tokens):
        if i < len(types) and types[i] != 1:
            names.append(token)
        else:
            names.append(token[1:] if token.startswith(SPACE) and len(token) > 1 else f"##{token}")
    vocabulary = {name: i for i, name in enumerate(names)}
    if len(vocabulary) != len(names):
        twice = next(name for i, name in enumerate(names) if vocabulary[name] != i)
        raise CheckpointError(f"[tokenizer] WordPiece token {twice!r} is in tokenizer.ggml.tokens twice")
    unknown = names[_unknown(metadata, names, 100)]
    lower = metadata.typed("tokenizer.ggml.normalizer.lowercase", "bool", True)
    accents = metadata.typed("tokenizer.ggml.normalizer.strip_accents", "bool", lower)
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=accents, lowercase=lower
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def _unigram(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    scores = _scores(metadata, tokens)
    if metadata.typed("tokenizer.ggml.treat_whitespace_as_suffix", "bool", False):
        raise UnsupportedError("[tokenizer] tokenizer.ggml.treat_whitespace_as_suffix is true; spaces before words are read")
    unknown = _unknown(metadata, tokens, 2)
    # User-defined tokens win over any others; control tokens are never made of text.
    for i in range(len(types)):
        scores[i] = 0.0 if types[i] == _USER_DEFINED else scores[i]
    ranked = list(zip(tokens, scores, strict=True))
    backend = Tokenizer(models.Unigram(ranked, unknown, byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        try:
            steps.append(normalizers.Precompiled(bytes(bytearray(int(b) & 255 for b in charsmap))))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise CheckpointError(f"[tokenizer] tokenizer.ggml.precompiled_charsmap cannot be read: {error}") from error
    if metadata.typed("tokenizer.ggml.remove_extra_whitespaces", "bool", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = metadata.typed("tokenizer.ggml.add_space_prefix", "bool", False)
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return backend


def _longest(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    """RWKV's tokens are bytes; here each byte is the character that byte-level BPE gives it."""
    names = ["".join(BYTES[b] for b in unescaped(token)) for token in tokens]
    names = [
        token if i < len(types) and types[i] == _CONTROL else name
        for i, (token, name) in enumerate(zip(tokens, names, strict=True))
    ]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.PreTokenizer.custom(Scanner(Longest(names)))
    backend.pre_tokenizer = pre_tokenizers.Sequence([to_bytes, cut])
    backend.decoder = decoders.ByteLevel()
    return backend


def _cheapest(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    scores = _scores(metadata, tokens)
    ranked = {}
    for i, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        if token and math.isfinite(score) and not (i < len(types) and types[i] == _BYTE):
            ranked[token] = math.floor(abs(score) * 1e4 + 0.5) * (1 if score > 0 else -1)
    unknown = tokens[_unknown(metadata, tokens, 0)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown, byte_fallback=True, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Scanner(Cheapest(ranked)))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


_KINDS: dict[str, Callable[[Metadata, list[str], Sequence[int]], Tokenizer]] = {
    "llama": _sentencepiece, "gpt2": _bpe, "gemma4": _bpe, "bert": _wordpiece, "t5": _unigram,
    "rwkv": _longest, "plamo2": _cheapest, "whitespace": _bpe,
}  # fmt: skip
"""tokenizer.ggml.model -> what builds it."""
SCANNED = ("rwkv", "plamo2")
"""Kinds whose pre-tokenizer is a `Scanner`, which tokenizer.json cannot state."""
KINDS = tuple(_KINDS)


def is_special(token: str, kind: int) -> bool:
    """Whether a token that is matched whole is left out of decoded text."""
    return kind in (_CONTROL, _UNKNOWN) or token in END_OF_TURN


def _add_whole_tokens(backend: Tokenizer, metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control and unknown tokens (special) and user-defined ones (not special) are matched whole,
    before anything is split.
    """
    name = metadata.typed("general.name", "string", "").lower()
    # Phi-3's own tokenizer drops the whitespace after all but these.
    strips = "phi-3" in name or "phi3" in name
    kept = ("<unk>", "<s>", "<|endoftext|>")
    special, plain = [], []
    for token, kind in zip(tokens, np.asarray(types).tolist(), strict=False):
        alone = is_special(token, kind)
        if not token or not (alone or kind == _USER_DEFINED) or backend.token_to_id(token) is None:
            continue
        rstrip = strips and token not in kept
        if alone:
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        else:
            plain.append(AddedToken(token, normalized=False, special=False, rstrip=rstrip))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _special(metadata: Metadata, key: str) -> int | None:
    """The id of a special token: as stated, else BERT's own where the vocabulary is BERT's."""
    assumed = _BERT_IDS.get(key) if metadata.typed("tokenizer.ggml.model", "string") == "bert" else None
    index: int | None = metadata.typed(f"tokenizer.ggml.{key}_token_id", "integer", assumed)
    if key == "eos" and assumed is not None:
        index = _special(metadata, "seperator")  # what ends BERT's texts
    return index


def special_ids(metadata: Metadata) -> dict[str, int]:
    """transformers' word for a special token -> its id, of those that the file has."""
    found = {word: _special(metadata, key) for word, key in _SPECIAL_KEYS.items()}
    return {word: index for word, index in found.items() if index is not None}


_SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""transformers' word for a special token -> the format's."""
_BERT_IDS = {"bos": 101, "seperator": 102, "eos": 102, "unknown": 100, "padding": 0, "mask": 103}
"""Ids of the first BERT vocabulary; the key of the separator is misspelt in the format."""


def _add_ends(backend: Tokenizer, metadata: Metadata) -> None:
    """A bos token before and an eos token after the text, as the file states."""
    ends: list[Any] = []
    template = ["$A"]
    bos, eos = _special(metadata, "bos"), _special(metadata, "eos")
    if bos is not None and adds_bos(metadata):
        token = _token(backend, bos, "tokenizer.ggml.bos_token_id")
        piece, entry = _piece("bos", token, bos)
        ends, template = [entry], [piece, *template]
    if eos is not None and adds_eos(metadata):
        token = _token(backend, eos, "tokenizer.ggml.eos_token_id")
        piece, entry = _piece("eos", token, eos)
        ends, template = [*ends, entry] if entry not in ends else ends, [*template, piece]
    if ends:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)


def _piece(word: str, token: str, index: int) -> tuple[str, Any]:
    """How a template names a token, and its entry: a name with `:` or `$` would be read as syntax,
    and `word` stands for it.
    """
    if token and ":" not in token and "$" not in token:
        return token, (token, index)
    return word, {"id": word, "ids": [index], "tokens": [token]}


def _token(backend: Tokenizer, index: int, key: str) -> str:
    token = backend.id_to_token(index) if index >= 0 else None
    if token is None:
        raise CheckpointError(f"[tokenizer] {key} is {index}; the vocabulary has {backend.get_vocab_size()} tokens")
    return str(token)
