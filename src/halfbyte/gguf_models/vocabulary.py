"""tokenizer.json and its neighbours as the key-values of a GGUF vocabulary.

| tokenizer.json | tokenizer.ggml.model | what ranks merges |
|---|---|---|
| BPE on bytes | gpt2 | its merges; `tokenizer.ggml.pre` names what splits text first |
| BPE on characters with byte tokens | llama | scores: minus the rank of the first merge that makes a token |
| WordPiece | bert | "▁" before the first token of a word, where tokenizer.json has "##" before the others |
| Unigram | t5 | its scores |

Which `pre` is meant is found by comparing how a text full of edge cases is split. The key-values
are read back with this library's own reader, and must give the tokenizer's own tokens.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.gguf.writer import Pair
from ..checkpoints.io.bounded_json import check_token_ids, read_json
from ..errors import CheckpointError, UnsupportedError
from .pairs import metadata_of, pair
from .pretokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""
PROBES = (
    "Hello world! I'm sure they've said: it's 12345.67, isn't IT?  YOU'LL see\n\n  two\tlines \r\n  and   spaces   ",
    "def f(x):\n    return x**2 + 0x1F  # größer als 99999999999\n\n\n\t\tend",
    "日本語のテキスト、한국어 문장 12 그리고 中文字符。ภาษาไทย हिन्दी देवनागरी العربية ١٢٣ עברית Ελληνικά русский",
    "emoji 🙂🙃 👩‍👩‍👧 ½ ² ⅷ café cafe\u0301 naïve ŒUVRE McDonald iPhone15Pro camelCaseWord SHOUTING",
    " leading, --flags=--x [brackets]{braces}<tags/> http://a.b/c?d=e&f=g#h \\path\\to 'quoted' \"text\" $100 €5 100%",
)
"""Texts on which splits and tokens are compared."""


def vocabulary_pairs(folder: Path, config: Mapping[str, Any], rows: int, architecture: str) -> list[Pair]:
    """The key-values of the tokenizer in `folder`.

    rows  of the embedding; unused tokens fill the vocabulary up to it
    Raises CheckpointError when there is no tokenizer.json, or it is damaged; UnsupportedError for a
    tokenizer that no GGUF vocabulary expresses.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"[convert] {folder}: a GGUF holds the tokenizer, and there is no tokenizer.json here; copy it from the original "
            "model, or take the tokenizer of a GGUF of the same model with --like"
        )
    check_token_ids(path, "convert")
    try:
        backend = Tokenizer.from_file(str(path))
        raw = json.loads(backend.to_str())
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"[convert] {path}: {error}") from error
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    backend.no_truncation()
    kind = _kind(path, raw)
    tokens, types = _tokens(path, raw, rows, kind)
    pairs = [pair("tokenizer.ggml.model", "string", kind)]
    if kind == "gpt2":
        pairs.append(pair("tokenizer.ggml.pre", "string", _pre_tokenizer(path, backend, raw)))
    pairs += [pair("tokenizer.ggml.tokens", "array[string]", tokens), pair("tokenizer.ggml.token_type", "array[int32]", types)]
    pairs += _PARTS[kind](raw, tokens, types)
    pairs += _special_pairs(backend, settings, config, len(tokens), kind)
    template = _template(folder, settings)
    pairs += [pair("tokenizer.chat_template", "string", template)] if template else []
    _check(path, backend, pairs, architecture)
    return pairs


def _kind(path: Path, raw: Mapping[str, Any]) -> str:
    model = raw["model"]
    if model.get("type") == "BPE":
        if "ByteLevel" in json.dumps([raw.get("pre_tokenizer"), raw.get("decoder")]):
            return "gpt2"
        if model.get("byte_fallback"):
            return "llama"
    if model.get("type") in _OTHER_MODELS:
        return _OTHER_MODELS[model["type"]]
    raise UnsupportedError(
        f"[convert] {path}: a {model.get('type')} vocabulary; BPE on bytes, BPE on characters with byte tokens, WordPiece and "
        "Unigram are written. Take the tokenizer of a GGUF of the same model with --like"
    )


def _tokens(path: Path, raw: Mapping[str, Any], rows: int, kind: str) -> tuple[list[str], list[int]]:
    """Tokens in the order of their ids and their types."""
    stored = raw["model"]["vocab"]
    named: dict[int, str] = (
        {i: t for t, i in stored.items()} if isinstance(stored, dict) else {i: t for i, (t, _) in enumerate(stored)}
    )
    special = {a["id"]: a for a in raw.get("added_tokens", ())}
    named |= {i: a["content"] for i, a in special.items()}
    if named and max(named) >= rows:
        raise CheckpointError(f"[convert] {path}: token {named[max(named)]!r} has id {max(named)}; the embedding has {rows} rows")
    tokens, types = [], []
    unknown = raw["model"].get("unk_token")
    unknown = named.get(raw["model"].get("unk_id")) if kind == "t5" else unknown
    for i in range(rows):
        token = named.get(i)
        if token is None:
            tokens.append(f"[PAD{i}]")
            types.append(UNUSED)
            continue
        word = kind == "bert" and i not in special
        tokens.append(_phantom_space(token) if word else token)
        if kind in ("llama", "t5") and token == unknown:
            types.append(UNKNOWN)
        elif i in special:
            types.append(CONTROL if special[i].get("special") else USER_DEFINED)
        else:
            is_byte = kind == "llama" and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            types.append(BYTE if is_byte else NORMAL)
    return tokens, types


def _phantom_space(token: str) -> str:
    """A WordPiece token as a file has it: those that begin a word are marked, not the others."""
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def _gpt2(raw: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[Pair]:
    return [pair("tokenizer.ggml.merges", "array[string]", [" ".join(m) for m in _merges(raw)])]


def _llama(raw: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[Pair]:
    return [
        pair("tokenizer.ggml.scores", "array[float32]", _scores(tokens, types, _merges(raw))),
        pair("tokenizer.ggml.add_space_prefix", "bool", "Prepend" in json.dumps(raw.get("normalizer"))),
    ]


def _bert(raw: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[Pair]:
    normalizer = raw.get("normalizer") or {}
    lower = bool(normalizer.get("lowercase"))
    accents = normalizer.get("strip_accents")
    return [
        pair("tokenizer.ggml.normalizer.lowercase", "bool", lower),
        pair("tokenizer.ggml.normalizer.strip_accents", "bool", lower if accents is None else bool(accents)),
    ]


def _t5(raw: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[Pair]:
    """A table of what characters become is in tokenizer.json as base64."""
    stored = [score for _, score in raw["model"]["vocab"]]
    scores = stored + [0.0] * (len(tokens) - len(stored))
    steps, cuts = (list(_steps(raw.get(name))) for name in ("normalizer", "pre_tokenizer"))
    kinds = {step.get("type") for step in (*steps, *cuts)}
    prefix = any(step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in cuts)
    pairs = [
        pair("tokenizer.ggml.scores", "array[float32]", scores),
        pair("tokenizer.ggml.add_space_prefix", "bool", prefix),
        pair("tokenizer.ggml.remove_extra_whitespaces", "bool", bool(kinds & {"WhitespaceSplit", "Replace", "Strip"})),
    ]
    for step in steps:
        if step.get("type") == "Precompiled" and step.get("precompiled_charsmap"):
            table = base64.b64decode(step["precompiled_charsmap"])
            pairs.append(pair("tokenizer.ggml.precompiled_charsmap", "array[uint8]", list(table)))
    return pairs


def _steps(stage: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, sequences opened."""
    if isinstance(stage, dict):
        inner = stage.get("normalizers") or stage.get("pretokenizers")
        if inner is None:
            yield stage
        for step in inner or ():
            yield from _steps(step)


_OTHER_MODELS = {"WordPiece": "bert", "Unigram": "t5"}
_PARTS = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5}


def _merges(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges, as pairs; older files have them as one string with a space."""
    out = []
    for merge in raw["model"].get("merges", ()):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        out.append((left, right))
    return out


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, str]]) -> list[float]:
    """Minus the rank of the first merge that makes a token; tokens that no merge makes come last."""
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    order = {token: -float(n) for n, token in enumerate(sorted(rank, key=lambda t: rank[t]))}
    last = -float(len(order))
    return [order.get(t, last) if kind == NORMAL else 0.0 for t, kind in zip(tokens, types, strict=True)]


def _pre_tokenizer(path: Path, backend: Any, raw: Mapping[str, Any]) -> str:
    """The name under which llama.cpp splits text as this tokenizer does."""
    from tokenizers import Regex, pre_tokenizers

    own = backend.pre_tokenizer
    whole = bool(raw["model"].get("ignore_merges"))
    composed = "NFC" in json.dumps(raw.get("normalizer"))
    want = [own.pre_tokenize_str(text) for text in PROBES]
    splits: dict[tuple[str, ...], bool] = {}

    def fits(pre: PreTokenizer) -> bool:
        if pre.spaces:
            return False
        if pre.splits not in splits:
            parts = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in pre.splits]
            other = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
            splits[pre.splits] = all(other.pre_tokenize_str(t) == w for t, w in zip(PROBES, want, strict=True))
        return splits[pre.splits]

    found = [name for name, pre in PRE_TOKENIZERS.items() if pre.whole_words == whole and fits(pre)]
    found.sort(key=lambda name: PRE_TOKENIZERS[name].nfc != composed)
    if not found:
        raise UnsupportedError(
            f"[convert] {path} splits text before merging in a way that no tokenizer.ggml.pre of llama.cpp names. Take the "
            "tokenizer of a GGUF of the same model with --like"
        )
    return found[0]


def _special_pairs(backend: Any, settings: Mapping[str, Any], config: Mapping[str, Any], count: int, kind: str) -> list[Pair]:
    """Ids of special tokens, and what is added at the ends of a text: BERT's classification token
    and separator are the first and the last.
    """
    ids: dict[str, int] = {}
    ends = (("cls", "bos"), ("sep", "eos"), ("sep", "seperator")) if kind == "bert" else (("bos", "bos"), ("eos", "eos"))
    for word, key in (*ends, ("unk", "unknown"), ("pad", "padding"), ("mask", "mask")):
        token = settings.get(f"{word}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = backend.token_to_id(token) if isinstance(token, str) else None
        stated = config.get(f"{word}_token_id")
        stated = stated[0] if isinstance(stated, list) and stated else stated
        if index is None and isinstance(stated, int) and 0 <= stated < count:
            index = stated
        if index is not None:
            ids[key] = int(index)
    pairs = [pair(f"tokenizer.ggml.{key}_token_id", "uint32", index) for key, index in ids.items()]
    bare, ended = (backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    first = len(ended) > len(bare) and ended[0] == ids.get("bos") and ended[0] != bare[0]
    last = len(ended) > len(bare) and ended[-1] == ids.get("eos") and ended[-1] != bare[-1]
    if not first and "bos" in ids and settings.get("add_bos_token") is True:
        first = True
    return [*pairs, pair("tokenizer.ggml.add_bos_token", "bool", first), pair("tokenizer.ggml.add_eos_token", "bool", last)]


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    """The chat template, "" without one: its own file, else that of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size < 1 << 24:
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _check(path: Path, backend: Any, pairs: list[Pair], architecture: str) -> None:
    """UnsupportedError where the vocabulary, read back, gives other tokens."""
    from .tokenizer import backend_of

    described = [pair("general.architecture", "string", architecture), *pairs]
    other = backend_of(metadata_of(described, path))
    for text in PROBES:
        want = backend.encode(text, add_special_tokens=False).ids
        have = other.encode(text, add_special_tokens=False).ids
        if have != want:
            at = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
            raise UnsupportedError(
                f"[convert] {path} as a GGUF vocabulary gives other tokens from number {at} of {text[:30]!r}...: "
                f"{have[at : at + 3]} instead of {want[at : at + 3]}. Take the tokenizer of a GGUF of the same model with --like"
            )
