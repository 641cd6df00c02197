"""The tokenizer of the tokens that occur in a text, beside the tokenizer of all of them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers.decoders import DecodeStream

from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.cli.demo import model_path
from halfbyte.generation.native_tokenizer import ChatTokenizer, NativeTokenizer, templated_tokenizer
from halfbyte.generation.streams import TextStream
from halfbyte.generation.templates import CHATML, render
from halfbyte.gguf_models import partial_tokenizer as module
from halfbyte.gguf_models.partial_tokenizer import BYTES, partial_tokenizer
from halfbyte.gguf_models.tokenizer import backend_of, described, end_of_turn_ids, tokenizer_of, tokens_of
from halfbyte.numerics.transpose import native
from support.gguf_writer import GGUF, f32

pytestmark = pytest.mark.skipif(native() is None, reason="the native core finds the tokens")

UNUSUAL = (
    "é", "ß", "漢字", "カタカナ", "안녕", "😀", "👨\u200d👩\u200d👧", "🏳️\u200d🌈", "\u0301", "\u200d", "\ufeff", "\u2028", "\x00",
    "\x7f", "\U0010ffff", "ﷺ", "א", "हिन्दी", "ไทย", "\u2581", "\ue000", "\ufffd", "½", "<0x0A>", "<0x", "0A>", "<0xFF>", "<0xZZ>",
)  # fmt: skip
SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", " " * 33, "\n" * 9, "\t" * 5, "\u2581 \u2581", " \n ")


def texts(tokens: list[str], count: int, seed: int) -> list[str]:
    """Texts of tokens, parts of tokens, whitespace, unusual characters, and long repeats."""
    rng = random.Random(seed)

    def piece() -> str:
        token = rng.choice(tokens)
        code = rng.choice([rng.randrange(32, 0x3000), rng.randrange(0x3000, 0xD800), rng.randrange(0xE000, 0x20000)])
        repeat = rng.choice(["a", "=", "ab", "0", "ha", " ", "\u2581", "\n"]) * rng.randrange(1, 60)
        return rng.choice(
            [token, token, token[: rng.randrange(1, 6)], rng.choice(SPACES), rng.choice(UNUSUAL), chr(code), repeat]
        )

    return ["", *("".join(piece() for _ in range(rng.randrange(1, 12))) for _ in range(count))]


def stream_of(backend):
    return TextStream(SimpleNamespace(backend_tokenizer=backend))


def streamed(step, ids: list[int]) -> list[str] | None:
    """What each token completes; None where the library refuses the sequence."""
    try:
        return [step(i) or "" for i in ids]
    except Exception as error:
        if "Invalid prefix" not in str(error):
            raise
        return None


def check_equal(checkpoint: GGUFCheckpoint, count: int, seed: int) -> None:
    """Ids, texts and streamed texts are those of the whole tokenizer."""
    tokens = tokens_of(checkpoint.metadata)
    whole, partial = backend_of(checkpoint.metadata, tokens), partial_tokenizer(checkpoint.metadata)
    assert partial is not None
    rng = random.Random(seed)
    for text in texts(tokens, count, seed):
        partial._searched = 0
        for ends in (True, False):
            assert partial.encode(text, add_special_tokens=ends).ids == whole.encode(text, add_special_tokens=ends).ids, repr(
                text
            )
        drawn = [
            rng.choice([rng.randrange(len(tokens) + 3), rng.randrange(min(300, len(tokens)))]) for _ in range(rng.randrange(20))
        ]
        for ids in (drawn, whole.encode(text).ids):
            for skip in (True, False):
                assert partial.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip), ids
            library = DecodeStream(skip_special_tokens=True)
            wanted = streamed(lambda i, library=library: library.step(whole, i), ids)
            for backend in (whole, partial):
                found = streamed(stream_of(backend), ids)
                assert found == wanted if wanted is not None else found is not None, ids
    for token in [*rng.sample(tokens, min(300, len(tokens))), *SPACES, *UNUSUAL, "no such token"]:
        assert partial.token_to_id(token) == whole.token_to_id(token), repr(token)
    assert "_whole" not in vars(partial)


def test_every_text_has_the_ids_that_gemmas_whole_tokenizer_gives():
    with GGUFCheckpoint(model_path()) as checkpoint:
        check_equal(checkpoint, 1500, seed=0)


def vocabulary(seed: int) -> tuple[list[str], list[int]]:
    """(tokens, types): few letters, so that merges overlap; spaces, bytes, control and user-defined
    tokens between them.
    """
    rng = random.Random(seed)
    words = {"".join(rng.choice("ab\u2581\n漢é0x<>") for _ in range(rng.randrange(1, 7))) for _ in range(150)}
    letters = set("ab\u2581\n漢0x<>FA")
    runs = {rng.choice([" ", "\u2581"]) * n for n in range(2, 6)}
    spaced = {" " * len(w) if set(w) == {"\u2581"} and len(w) > 1 else w for w in words}
    names = sorted((spaced | letters | runs) - {w for r in runs for w in (" " * len(r), "\u2581" * len(r)) if w != r})
    names = [n for n in names if "<0x" not in n]
    marked = ["<eos>", "<bos>", "<unk>", "<end_of_turn>", "a b", "<u1>", "\u2581 a"]
    everything = [(n, 1) for n in names] + [(n, 6) for n in BYTES] + [(n, rng.choice([3, 4, 2])) for n in marked]
    everything = [(n, rng.choice([4, 3]) if t == 1 and rng.random() < 0.1 else t) for n, t in everything]
    rng.shuffle(everything)
    return [n for n, _ in everything], [t for _, t in everything]


def checkpoint_of(tmp_path: Path, tokens: list[str], types: list[int], *more, arch: str = "gemma3") -> GGUFCheckpoint:
    pairs = [
        ("general.architecture", "string", arch),
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.tokens", "array[string]", tokens),
        ("tokenizer.ggml.scores", "array[float32]", [-float(i) for i in range(len(tokens))]),
        ("tokenizer.ggml.token_type", "array[int32]", types),
        *((f"tokenizer.ggml.{w}_token_id", "uint32", tokens.index(f"<{w}>")) for w in ("bos", "eos") if f"<{w}>" in tokens),
        *more,
    ]
    path = tmp_path / f"{arch}.gguf"
    path.write_bytes(GGUF(pairs=pairs, tensors=[f32("w", np.ones(1))]).bytes())
    return GGUFCheckpoint(path)


@pytest.mark.parametrize("seed", range(12))
def test_every_text_has_the_same_ids_in_a_made_vocabulary(tmp_path, seed):
    tokens, types = vocabulary(seed)
    unknown = ("tokenizer.ggml.unknown_token_id", "uint32", tokens.index("<unk>"))
    with checkpoint_of(tmp_path, tokens, types, unknown) as checkpoint:
        check_equal(checkpoint, 250, seed)
        partial, tokenizer = partial_tokenizer(checkpoint.metadata), NativeTokenizer(checkpoint)
        whole, settings = described(checkpoint)
        assert partial is not None
        assert partial.eos == settings["eos_token"] == "<eos>"
        assert tokenizer.eos_token_id == whole.token_to_id("<eos>")
        assert tokenizer.end_ids == partial.end_ids == end_of_turn_ids(checkpoint.metadata)
        ids = whole.encode("ab 漢 é\n").ids
        text_of = TextStream(tokenizer)
        assert "".join(map(text_of, ids)) == whole.decode(ids)


OWN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and eos_token is defined %}{{ eos_token }}{% endif %}"
    "<u1>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<u1>model\n{% endif %}"
    "{{ unk_token }}{{ pad_token }}{{ enable_thinking }}{{ tools | length if tools else '' }}"
)


@pytest.mark.parametrize("template", [None, CHATML, "{{ messages[0].content }}"])
@pytest.mark.parametrize("seed", range(6))
def test_conversations_have_the_ids_of_transformers_whole_tokenizer(tmp_path, seed, template):
    tokens, types = vocabulary(seed)
    words = ("unknown", "padding", "seperator", "mask")[: seed % 5]
    more = [(f"tokenizer.ggml.{word}_token_id", "uint32", tokens.index("<unk>")) for word in words]
    more += [("tokenizer.chat_template", "string", OWN_TEMPLATE)]
    with checkpoint_of(tmp_path, tokens, types, *more) as checkpoint:
        (ours, ends), whole = templated_tokenizer(checkpoint), tokenizer_of(checkpoint)
        assert isinstance(ours, ChatTokenizer)
        assert (ours.chat_template, ours.eos_token_id) == (whole.chat_template, whole.eos_token_id)
        assert ends == set(end_of_turn_ids(checkpoint.metadata))
        drawn = texts(tokens, 20, seed)
        for number, content in enumerate(drawn):
            roles = ("system", "user", "assistant", "user")[number % 2 : 2 + number % 3]
            messages = [{"role": role, "content": drawn[(number * 7 + i) % len(drawn)] + content} for i, role in enumerate(roles)]
            for thinking, tools in ((None, None), (True, None), (False, [{"type": "function"}])):
                given = {"template": template, "thinking": thinking, "tools": tools}
                assert render(ours, messages, **given) == render(whole, messages, **given), messages


@pytest.mark.parametrize("seed", range(4))
def test_text_goes_on_after_bytes_that_are_no_character(tmp_path, seed):
    """DecodeStream fails there, since all bytes of such a run are decoded alike: those too whose
    character was given.
    """
    rng = random.Random(seed)
    with checkpoint_of(tmp_path, *vocabulary(seed)) as checkpoint:
        whole, partial = backend_of(checkpoint.metadata), partial_tokenizer(checkpoint.metadata)
        refused = 0
        for _ in range(200):
            drawn = rng.choices(["a", "b", *(f"<0x{byte:02X}>" for byte in "漢é".encode())], k=8)
            names = [*(f"<0x{byte:02X}>" for byte in "漢".encode()), *drawn, "a"]
            ids = [whole.token_to_id(name) for name in names]
            library = DecodeStream(skip_special_tokens=True)
            refused += streamed(lambda i, library=library: library.step(whole, i), ids) is None
            for backend in (whole, partial):
                text = "".join(map(stream_of(backend), ids))
                assert text[0] == "漢"
                assert [c for c in text if c in "ab"] == [n for n in names if n in "ab"], (names, text)
        assert refused > 10


def test_long_texts_are_given_to_the_whole_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEARCHED", 10)
    with checkpoint_of(tmp_path, *vocabulary(0)) as checkpoint:
        whole, partial = backend_of(checkpoint.metadata), partial_tokenizer(checkpoint.metadata)
        assert partial is not None
        for text in ("abab", "ab\nab", "ab"):
            assert partial.encode(text).ids == whole.encode(text).ids
        assert "_whole" in vars(partial)


def changed(tokens: list[str], types: list[int], old: str, new: str) -> tuple[list[str], list[int]]:
    return [new if t == old else t for t in tokens], types


@pytest.mark.parametrize(
    "why", ["architecture", "merges", "twice", "spaces", "no byte", "in a byte", "long", "special", "types", "none"]
)
def test_other_vocabularies_have_the_whole_tokenizer(tmp_path, why):
    tokens, types = vocabulary(3)
    more, arch = [], "gemma3"
    if why == "architecture":
        arch = "llama"
    elif why == "merges":
        more = [("tokenizer.ggml.merges", "array[string]", ["a b"])]
    elif why == "twice":
        tokens, types = changed(tokens, types, "<u1>", "a")
    elif why == "spaces":
        tokens, types = [*tokens, " " * 9, "\u2581" * 9], [*types, 1, 1]
    elif why == "no byte":
        tokens, types = changed(tokens, types, "<0x41>", "no byte")
    elif why == "in a byte":
        tokens, types = changed(tokens, types, "<u1>", "x<0x41>")
    elif why == "long":
        tokens, types = changed(tokens, types, "<u1>", "x" * 128)
    elif why == "special":
        more = [("tokenizer.ggml.padding_token_id", "uint32", len(tokens))]
    elif why == "types":
        types = []
    with checkpoint_of(tmp_path, tokens, types, *more, arch=arch) as checkpoint:
        assert (partial_tokenizer(checkpoint.metadata) is None) == (why != "none")


def test_bytes_that_are_no_utf8_are_reported_as_without_the_core(tmp_path):
    tokens, types = changed(*vocabulary(4), "<u1>", "DAMAGED")
    with checkpoint_of(tmp_path, tokens, types) as checkpoint:
        path = checkpoint.path
    path.write_bytes(path.read_bytes().replace(b"DAMAGED", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9"))
    with GGUFCheckpoint(path) as checkpoint:
        assert partial_tokenizer(checkpoint.metadata) is None
        with pytest.raises(Exception, match="is not UTF-8: byte 0xff"):
            NativeTokenizer(checkpoint)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_core_finds_strings_as_python_does(swapped):
    rng = random.Random(swapped)
    for _ in range(40):
        words = [bytes(rng.choice(b"ab\xe2\x96") for _ in range(rng.randrange(6))) for _ in range(rng.randrange(60))]
        order = "big" if swapped else "little"
        stored = b"".join(len(w).to_bytes(8, order) + w for w in words)
        data = np.frombuffer(b"xyz" + stored, np.uint8)
        assert native().string_end(data, 3, len(words), swapped) == len(data)
        found = native().Strings(data, 3, len(words), swapped)
        assert [data[slice(*found.bounds(i))].tobytes() for i in range(len(words))] == words
        assert found.longest == max(map(len, words), default=0)
        assert found.distinct == (len(set(words)) == len(words))
        text = bytes(rng.choice(b"ab\xe2\x96") for _ in range(rng.randrange(40)))
        marks = np.zeros(len(words), np.uint8)
        found.pieces(text, marks)
        first = [words.index(w) == i for i, w in enumerate(words)]
        assert marks.tolist() == [int(bool(w) and w in text and f) for w, f in zip(words, first, strict=True)]
        for word in (*words, b"absent"):
            assert found.find(word) == (words.index(word) if word in words else -1)
        with pytest.raises(IndexError):
            found.bounds(len(words))


def test_the_core_refuses_strings_past_the_end():
    data = np.frombuffer((3).to_bytes(8, "little") + b"abc", np.uint8)
    assert native().string_end(data, 0, 1, False) == 11
    for start, count in ((0, 2), (1, 1), (8, 1), (0, 1 << 62)):
        assert native().string_end(data, start, count, False) == -1
        with pytest.raises(ValueError, match="run past the end"):
            native().Strings(data, start, count, False)
    huge = np.frombuffer(b"\xff" * 8 + b"abc", np.uint8)
    assert native().string_end(huge, 0, 1, False) == -1
    for start, count in ((-1, 1), (12, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"\[strings\]"):
            native().string_end(data, start, count, False)
    strings = native().Strings(data, 0, 1, False)
    with pytest.raises(ValueError, match="found"):
        strings.pieces(b"abc", np.zeros(2, np.uint8))
    still = np.zeros(1, np.uint8)
    still.flags.writeable = False
    with pytest.raises(ValueError, match=r"\[strings\] found is read-only"):
        strings.pieces(b"abc", still)
