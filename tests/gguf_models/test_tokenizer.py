"""Tokenizers from GGUF headers: equal to what transformers builds, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.checkpoints.io.bounded_json import check_token_ids
from halfbyte.cli.demo import model_path
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.gguf_models.bpe_merges import merges
from halfbyte.gguf_models.model_files import model_files
from halfbyte.gguf_models.pretokenizers import PRE_TOKENIZERS
from halfbyte.gguf_models.tokenizer import SPACE, backend_of, end_of_turn_ids, tokenizer_of
from support.gguf_writer import GGUF, f32

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "gemma3_270m_tokenizer.json").read_text("utf-8"))
CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 1234567 o'clock, they've said.",
    "Zażółć gęślą jaźń, naïve café",
    "def f(x):\n    return x ** 2\n\n\nprint(f(10))",
    "  spaces   and\ttabs \r\n",
    "漢字とカタカナ 😀😃",
    "HELLO'S WE'LL",
    "",
]


@pytest.fixture(scope="module")
def gemma():
    with GGUFCheckpoint(model_path()) as ckpt:
        return tokenizer_of(ckpt)


def test_gemma_equals_transformers_on_every_text(gemma):
    for case in REFERENCE["texts"]:
        ids = gemma(case["text"])["input_ids"]
        assert ids == case["ids"], case["text"]
        assert gemma.decode(ids) == case["decoded"]
        assert gemma.decode(ids, skip_special_tokens=True) == case["decoded_skip"]
        assert gemma.backend_tokenizer.encode(case["text"]).ids == case["ids"]


def test_gemma_knows_its_special_tokens(gemma):
    assert (gemma.bos_token, gemma.eos_token, gemma.unk_token, gemma.pad_token) == ("<bos>", "<eos>", "<unk>", "<pad>")
    assert (gemma.bos_token_id, gemma.eos_token_id) == (2, 1)
    assert len(gemma) == 262144
    assert gemma("x", add_special_tokens=False)["input_ids"] == [236781]


def checkpoint(tmp_path: Path, pairs: list[tuple[str, str, object]], arch: str = "llama") -> GGUFCheckpoint:
    path = tmp_path / "t.gguf"
    head = ("general.architecture", "string", arch)
    named = [(f"tokenizer.ggml.{k}" if "." not in k else k, kind, v) for k, kind, v in pairs]
    path.write_bytes(GGUF(pairs=[head, *named], tensors=[f32("w", np.ones(1))]).bytes())
    return GGUFCheckpoint(path)


def sentencepiece_words() -> tuple[list[str], list[float], list[int]]:
    """A small vocabulary with bytes, spaces, tied scores, a control and a user-defined token."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(words)
    letters = "▁etaoinshrdlucmfwypvbgkjqxzTHLWDa1234567890'.,;()\n:*"
    pieces = (
        "th he ▁t ▁th ▁the ▁The The in er an on re ▁a ▁qu qu ick ck ic ow wn own ox ▁f um mp ps ▁o ▁ov ver over la zy "
        "▁▁ ▁▁▁ do og dog x) f("
    )
    for rank, piece in enumerate(dict.fromkeys([*pieces.split(), *letters])):
        words.append(piece)
        scores.append(-float(rank // 2))  # pairs of equal scores
        types.append(1)
    return [*words, "<think>"], [*scores, 0.0], [*types, 4]


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("bos", [True, False])
def test_sentencepiece_equals_transformers_own_builder(tmp_path, arch, bos):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    words, scores, types = sentencepiece_words()
    pairs = [
        ("model", "string", "llama"), ("tokens", "array[string]", words), ("scores", "array[float32]", scores),
        ("token_type", "array[int32]", types), ("bos_token_id", "uint32", 1), ("eos_token_id", "uint32", 2),
        ("unknown_token_id", "uint32", 0), ("add_bos_token", "bool", bos),
    ]  # fmt: skip
    ours = tokenizer_of(checkpoint(tmp_path, pairs, arch))
    described = {"tokenizer_type": "llama", "tokens": words, "scores": scores, "token_type": types}
    theirs, _ = convert_gguf_tokenizer(arch, described)
    texts = [*CORPUS, "the  the   the", *(["<s>the<think> x</s>", "▁the"] if arch == "gemma3" else [])]
    for text in texts:
        if arch == "llama" and text.startswith(" "):
            continue  # transformers loses one of the spaces; SentencePiece does not (test_case_84)
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours(text, add_special_tokens=False)["input_ids"] == want
        assert ours(text)["input_ids"] == [1] * bos + want
        assert ours.decode(want) == theirs.decode(want, skip_special_tokens=False)


def test_no_space_is_put_before_the_text_when_the_file_says_so(tmp_path):
    words, scores, types = sentencepiece_words()
    pairs = [
        ("model", "string", "llama"), ("tokens", "array[string]", words), ("scores", "array[float32]", scores),
        ("token_type", "array[int32]", types), ("add_bos_token", "bool", 0), ("add_space_prefix", "bool", 0),
    ]  # fmt: skip
    tokenizer = tokenizer_of(checkpoint(tmp_path, pairs))
    assert tokenizer.tokenize("the") == ["th", "e"]
    assert tokenizer.decode(tokenizer(" the")["input_ids"]) == " the"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_equals_the_tokenizer_it_came_from(tmp_path, pre):
    """A vocabulary trained here, written into a header and read back, with llama.cpp's names for
    the split expressions.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    original = Tokenizer(models.BPE(fuse_unk=False))
    if pre in GGUF_PRE_TOKENIZER_SPLITS and pre != "gpt-2":
        from tokenizers import Regex

        assert PRE_TOKENIZERS[pre].splits == (GGUF_PRE_TOKENIZER_SPLITS[pre],), "the expressions are the published ones"
        split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
        original.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    original.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    original.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(original.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pairs = [
        ("model", "string", "gpt2"), ("pre", "string", pre), ("tokens", "array[string]", words),
        ("merges", "array[string]", [" ".join(m) for m in model["merges"]]), ("bos_token_id", "uint32", 0),
        ("token_type", "array[int32]", [3 if w == "<|end|>" else 1 for w in words]), ("eos_token_id", "uint32", 0),
    ]  # fmt: skip
    ours = tokenizer_of(checkpoint(tmp_path, pairs))
    for text in [*CORPUS, "a<|end|>b"]:
        want = original.encode(text).ids
        assert ours(text, add_special_tokens=False)["input_ids"] == want
        assert ours(text)["input_ids"] == [0] * (pre == "llama-bpe") + want, (
            "llama.cpp puts bos before Llama 3's texts unless told"
        )
        assert ours.decode(ours(text, add_special_tokens=False)["input_ids"]) == text


def test_merges_take_the_better_token_then_the_longer_left_part():
    words = ["a", "b", "c", "ab", "bc", "abc"]
    vocabulary = {w: i for i, w in enumerate(words)}
    assert merges(vocabulary, {w: i for i, w in enumerate(words)}) == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    better = {"a": 0, "b": 0, "c": 0, "abc": 1, "bc": 2, "ab": 3}
    assert merges(vocabulary, better) == [("ab", "c"), ("a", "bc"), ("b", "c"), ("a", "b")]
    assert merges(vocabulary, dict.fromkeys(words, 0)) == [("ab", "c"), ("a", "bc"), ("a", "b"), ("b", "c")]


# What llama-cpp-python 0.3.36 makes of the vocabulary of `sentencepiece_words`, without bos.
LLAMA_CPP_TOKENS = {
    "the": [263],
    " the": [298, 263],
    "  spaces": [292, 305, 316, 301, 311, 299, 305],
    "<s>the<think> x</s>": [1, 263, 349, 291, 323, 2],
    "\u2581the": [298, 263],
    "é😀": [298, 198, 172, 243, 162, 155, 131],
}


def test_case_84_every_space_before_a_text_counts(tmp_path):
    words, scores, types = sentencepiece_words()
    pairs = [
        ("model", "string", "llama"), ("tokens", "array[string]", words), ("scores", "array[float32]", scores),
        ("token_type", "array[int32]", types), ("bos_token_id", "uint32", 1), ("eos_token_id", "uint32", 2),
    ]  # fmt: skip
    backend = backend_of(checkpoint(tmp_path, pairs).metadata)
    for text, want in LLAMA_CPP_TOKENS.items():
        assert backend.encode(text, add_special_tokens=False).ids == want, text
        assert backend.decode(want, skip_special_tokens=False) == text.replace(SPACE, " ") or "<s>" in text


@pytest.mark.parametrize(
    ("kind", "pre", "flag", "starts"),
    [
        ("gpt2", "qwen2", None, False), ("gpt2", "qwen2", True, True), ("gpt2", "qwen2", False, False),
        ("gpt2", "llama-bpe", None, True), ("gpt2", "llama-bpe", False, False), ("gpt2", "tekken", None, True),
        ("gpt2", "smollm", None, False), ("llama", "default", None, True), ("llama", "default", False, False),
        ("gemma4", "gemma4", False, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("named", [True, False])
def test_case_83_the_begin_token(tmp_path, kind, pre, flag, starts, named):
    """As the file says, else as llama.cpp assumes; never without an id; once, also through a
    template that begins with it.
    """
    words, scores, types = sentencepiece_words()
    pairs = [
        ("model", "string", kind), ("pre", "string", pre), ("tokens", "array[string]", words),
        ("merges" if kind != "llama" else "unused", "array[string]", ["t h"]),
        *([("add_bos_token", "bool", flag)] if flag is not None else []),
        *([("bos_token_id", "uint32", 1)] if named else []),
        ("tokenizer.chat_template", "string", "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
    ]  # fmt: skip
    if kind != "gpt2":
        pairs += [("scores", "array[float32]", scores), ("token_type", "array[int32]", types)]
    tokenizer = tokenizer_of(checkpoint(tmp_path, pairs))
    ids = tokenizer("th")["input_ids"]
    assert (ids[0] == 1) == (starts and named)
    assert ids.count(1) == (starts and named)
    if named:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "th"}], tokenize=True, return_dict=True)["input_ids"]
        assert chat.count(1) == 1


def test_end_of_turn_tokens(tmp_path):
    def ids(tokens, **named):
        pairs = [("tokens", "array[string]", tokens), *((f"{k}_token_id", "uint32", v) for k, v in named.items())]
        return end_of_turn_ids(checkpoint(tmp_path, pairs).metadata)

    assert ids(["<s>", "</s>", "<|im_end|>", "<|endoftext|>"], eos=1) == [1, 2, 3]
    assert ids(["a", "<|end|>", "<|return|>", "<|call|>"], eos=2) == [2, 3]
    assert ids(["a", "b"], eot=1, eos=9) == [1]


def test_wordpiece_equals_bert(tmp_path):
    """The file's spelling of a WordPiece vocabulary, and the tokenizers library's of the same one."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the,quick,##er,br,##own,un,##happ,##y,+,!,漢,##1".split(",")]  # noqa: SIM905
    original = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer()
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    spelt = [p if p[0] == "[" else p[2:] if p.startswith("##") else SPACE + p for p in pieces]
    pairs = [
        ("model", "string", "bert"), ("tokens", "array[string]", spelt), ("bos_token_id", "uint32", 2),
        ("token_type", "array[int32]", [3] * 5 + [1] * 12), ("unknown_token_id", "uint32", 1),
        ("seperator_token_id", "uint32", 3),
        ("padding_token_id", "uint32", 0), ("mask_token_id", "uint32", 4),
    ]  # fmt: skip
    ours = tokenizer_of(checkpoint(tmp_path, pairs, "bert"))
    for text in ["The QUICKER brown, unhappy+ 漢!", "bröwn1, the\tquick xyz", ""]:
        want = original.encode(text).ids
        assert ours(text, add_special_tokens=False)["input_ids"] == want
        assert ours(text)["input_ids"] == [2, *want, 3]


def test_unigram_takes_the_best_scores(tmp_path):
    tokens = ["<pad>", "</s>", "<unk>", SPACE, "a", "b", "ab", SPACE + "ab", "<x>"]
    pairs = [
        ("model", "string", "t5"), ("tokens", "array[string]", tokens), ("eos_token_id", "uint32", 1),
        ("unknown_token_id", "uint32", 2),
        ("scores", "array[float32]", [0.0, 0.0, 0.0, -2.0, -3.0, -3.0, -4.0, -7.0, 0.0]), ("add_space_prefix", "bool", True),
        ("token_type", "array[int32]", [3, 3, 2, 1, 1, 1, 1, 1, 4]), ("remove_extra_whitespaces", "bool", True),
    ]  # fmt: skip
    ours = tokenizer_of(checkpoint(tmp_path, pairs, "t5"))
    assert ours("  ab   ab z")["input_ids"] == [3, 6, 3, 6, 3, 2, 1]
    assert ours("ab<x>")["input_ids"][-2:] == [8, 1]


def test_a_tokenizer_beside_the_file_serves_where_the_kind_is_unknown(tmp_path):
    pairs = [("model", "string", "moon"), ("tokens", "array[string]", ["a", "b"])]
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.model is 'moon'; read: 'llama'"):
        tokenizer_of(checkpoint(tmp_path, pairs))
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(checkpoint(tmp_path, pairs))("b")["input_ids"] == [1]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: "):
        tokenizer_of(checkpoint(tmp_path, pairs))


def test_chat_template_and_ends(tmp_path):
    words, scores, types = sentencepiece_words()
    pairs = [
        ("model", "string", "llama"), ("tokens", "array[string]", words), ("scores", "array[float32]", scores),
        ("token_type", "array[int32]", types), ("bos_token_id", "uint32", 1), ("eos_token_id", "uint32", 2),
        ("add_eos_token", "bool", 1),
        ("tokenizer.chat_template", "string", "{% for m in messages %}{{ m.content }}!{% endfor %}"),
    ]  # fmt: skip
    tokenizer = tokenizer_of(checkpoint(tmp_path, pairs))
    ids = tokenizer("the")["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2), "a SentencePiece text starts with bos unless the file says otherwise"
    assert backend_of(checkpoint(tmp_path, pairs).metadata).encode("the").ids == ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_it_can_be_saved_and_loaded_without_the_library(tmp_path):
    from transformers import AutoTokenizer

    words, scores, types = sentencepiece_words()
    pairs = [
        ("model", "string", "llama"), ("tokens", "array[string]", words), ("scores", "array[float32]", scores),
        ("token_type", "array[int32]", types), ("bos_token_id", "uint32", 1), ("eos_token_id", "uint32", 2),
    ]  # fmt: skip
    tokenizer = tokenizer_of(checkpoint(tmp_path, pairs))
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in CORPUS:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([], UnsupportedError, r"tokenizer.ggml.model is None; read: 'llama', 'gpt2', 'gemma4', 'bert', 't5'"),
        ([("model", "string", "rwkv")], CheckpointError, "tokens is missing or empty"),
        ([("model", "string", "hybriddna")], UnsupportedError, r"is 'hybriddna' \(its DNA markers"),
        (
            [("model", "string", "rwkv"), ("tokens", "array[string]", ["a", r"\x1"])], CheckpointError,
            r"token '\\\\x1' ends within an escape",
        ),
        ([("model", "string", "llama")], CheckpointError, "tokenizer.ggml.tokens is missing or empty"),
        ([("model", "uint32", 1)], CheckpointError, "key 'tokenizer.ggml.model' is uint32; string is needed"),
        ([("model", "string", "llama"), ("tokens", "array[int32]", [1])], CheckpointError, r"array\[string\] is needed"),
        (
            [("model", "string", "llama"), ("tokens", "array[string]", ["a", "b"]), ("scores", "array[float32]", [0.0])],
            CheckpointError, "2 tokens and 1 tokenizer.ggml.scores",
        ),
        (
            [("model", "string", "llama"), ("tokens", "array[string]", ["a"]), ("token_type", "array[int32]", [1, 1])],
            CheckpointError, "1 token and 2 token types",
        ),
        (
            [("model", "string", "llama"), ("tokens", "array[string]", ["a"]), ("scores", "array[float32]", [0.0]),
             ("unknown_token_id", "uint32", 9)],
            CheckpointError, "tokenizer.ggml.unknown_token_id is 9; the vocabulary has 1 token",
        ),
        (
            [("model", "string", "llama"), ("tokens", "array[string]", ["a"]), ("scores", "array[float32]", [0.0]),
             ("bos_token_id", "uint32", 9)],
            CheckpointError, "tokenizer.ggml.bos_token_id is 9; the vocabulary has 1 tokens",
        ),
        (
            [("model", "string", "gpt2"), ("tokens", "array[string]", ["a"]), ("pre", "string", "moon")],
            UnsupportedError, "tokenizer.ggml.pre 'moon' splits text in a way that is not read; read: gpt-2",
        ),
        ([("model", "string", "gpt2"), ("tokens", "array[string]", ["a"])], CheckpointError, "without tokenizer.ggml.merges"),
        (
            [("model", "string", "gpt2"), ("tokens", "array[string]", ["a", "b"]), ("merges", "array[string]", ["a b"])],
            CheckpointError, r"merge \('a', 'b'\) joins or makes a token that tokenizer.ggml.tokens does not have",
        ),
        (
            [("model", "string", "gpt2"), ("tokens", "array[string]", ["a", "b"]), ("merges", "array[string]", ["ab"])],
            CheckpointError, "merge 'ab' is not two tokens",
        ),
    ],
)  # fmt: skip
def test_vocabularies_that_cannot_be_used(tmp_path, pairs, error, message):
    with pytest.raises(error, match=message):
        tokenizer_of(checkpoint(tmp_path, pairs))


BYTE_TOKENS = [f"<0x{b:02X}>" for b in range(256)]


def test_rwkv_takes_the_longest_token(tmp_path):
    """Tokens are bytes, escaped in the file."""
    tokens = ["<s>", *(rf"\x{b:02x}" for b in range(256)), "ab", "abc", "abcd", r"\n\n", r"é", "bcd ", r"\\"]
    pairs = [("model", "string", "rwkv"), ("tokens", "array[string]", tokens), ("token_type", "array[int32]", [3] + [1] * 263)]
    with checkpoint(tmp_path, pairs) as ckpt:
        tokenizer = tokenizer_of(ckpt)
    assert tokenizer("abcabcdabcd \n\n\né\\<s>")["input_ids"] == [258, 259, 259, 33, 260, 11, 261, 263, 0]
    for text in CORPUS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_vocabulary_that_tokenizer_json_cannot_state_is_a_remark(tmp_path):
    pairs = [("model", "string", "rwkv"), ("tokens", "array[string]", ["<s>", *(rf"\x{b:02x}" for b in range(256))])]
    with checkpoint(tmp_path, [*pairs, ("token_type", "array[int32]", [3] + [1] * 256)]) as ckpt:
        files, remarks = model_files(ckpt)
    assert files == {}
    assert "no tokenizer is written: tokenizer.json cannot state how a 'rwkv' vocabulary cuts text" in remarks[0]


def test_plamo2_takes_the_best_scores(tmp_path):
    """Of "abc" the pieces a + bc beat ab + c; of "aaa" the longest first token wins a tie."""
    words = {"a": -3.0, "b": -4.0, "c": -4.0, "ab": -5.0, "bc": -4.5, "aa": -4.0, "aaa": -7.0}
    tokens = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", *BYTE_TOKENS, *words]
    pairs = [
        ("model", "string", "plamo2"), ("tokens", "array[string]", tokens),
        ("scores", "array[float32]", [0.0] * 260 + list(words.values())),
        ("token_type", "array[int32]", [2, 3, 3, 3, *[6] * 256, *[1] * len(words)]),
    ]  # fmt: skip
    with checkpoint(tmp_path, pairs) as ckpt:
        tokenizer = tokenizer_of(ckpt)
    assert tokenizer("abcaaaaé")["input_ids"] == [260, 264, 265, 265, 4 + 0xC3, 4 + 0xA9]
    assert tokenizer("aaa")["input_ids"] == [266]
    for text in CORPUS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_whitespace_vocabularies_drop_whitespace_and_unknown_characters(tmp_path):
    pairs = [
        ("model", "string", "whitespace"), ("pre", "string", "whitespace"), ("tokens", "array[string]", ["<s>", "a", "b", "ab"]),
        ("merges", "array[string]", ["a b"]), ("token_type", "array[int32]", [3, 1, 1, 1]),
    ]  # fmt: skip
    with checkpoint(tmp_path, pairs) as ckpt:
        tokenizer = tokenizer_of(ckpt)
    assert tokenizer("ab a b  a!b\n")["input_ids"] == [3, 1, 2, 1, 2]


@pytest.mark.parametrize("bos", ["<s:", "$A", "a:b:c", "<s>"])
def test_a_bos_token_whose_name_is_template_syntax_is_put_first(tmp_path, bos):
    words = ["<unk>", bos, "</s>", SPACE, "h", "e", f"{SPACE}he"]
    pairs = [
        ("model", "string", "llama"), ("tokens", "array[string]", words), ("scores", "array[float32]", [0.0] * len(words)),
        ("token_type", "array[int32]", [2, 3, 3, 1, 1, 1, 1]), ("bos_token_id", "uint32", 1), ("eos_token_id", "uint32", 2),
        ("add_bos_token", "bool", 1), ("add_eos_token", "bool", 1),
    ]  # fmt: skip
    with checkpoint(tmp_path, pairs) as c:
        ids = backend_of(c.metadata).encode("he").ids
    assert (ids[0], ids[-1]) == (1, 2)


@pytest.mark.parametrize("where", ["vocab", "added_tokens", "vocab.json"])
def test_an_id_that_no_vocabulary_reaches_is_refused(tmp_path, where):
    """The tokenizers library lists every id below the largest, and aborts where memory ends."""
    value = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 10**7 - 1}, "merges": []},
        "added_tokens": [{"id": 1, "content": "c"}],
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(value))
    check_token_ids(path, "load_model")
    if where == "vocab":
        value["model"]["vocab"]["b"] = 2**31
    elif where == "added_tokens":
        value["added_tokens"][0]["id"] = 10**7
    else:
        value, path = {"a": 0, "b": 2**32 - 1}, tmp_path / "vocab.json"
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"\[load_model\] .*json: token '[bc]' has id \d+; ids up to 9,999,999 are allowed"):
        check_token_ids(path, "load_model")
