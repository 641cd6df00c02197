"""Compare the tokenizers that halfbyte builds from GGUF headers with llama.cpp's, on random Unicode
text.

    python tools/compare_gguf_tokenizers.py FOLDER [--strings 20000] [--seed 0] [--only NAME]
                                            [--make]

FOLDER holds vocabularies (`ggml-vocab-*.gguf` of llama.cpp's models folder). Needs
llama-cpp-python. For each file it prints how many strings have other tokens, the first few, which
characters most of them share, and how many of them have equal tokens after each of `CHANGES`.
`--make` first writes vocabularies of the kinds that the folder lacks (`MADE`) from random text of
another seed.
"""

from __future__ import annotations

import argparse
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf

from halfbyte.checkpoints.gguf.checkpoint import GGUFCheckpoint
from halfbyte.errors import HalfbyteError
from halfbyte.gguf_models.tokenizer import backend_of

WORDS = [
    "the",
    "quick",
    "Brown",
    "FOX",
    "it's",
    "THEY'LL",
    "we've",
    "I'M",
    "don't",
    "x1",
    "foo_bar",
    "camelCase",
    "HTTPServer",
    "naïve",
    "Zażółć",
    "Ünïcödé",
    "東京",
    "カタカナ",
    "ひらがな",
    "한국어",
    "привет",
    "мир",
    "مرحبا",
    "שלום",
    "हिन्दी",
    "ไทย",
    "ქართული",
    "Հայ",
    "ὀδύσσεια",
    "1",
    "12",
    "123",
    "1234",
    "1234567",
    "3.14",
    "1,000,000",
    "½",
    "²",
    "Ⅷ",
    "٣٤٥",
]
BREAKS = (
    " ",
    "  ",
    "   ",
    "        ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\t",
    "\t\t",
    " \n",
    "\n ",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
)
EMOJI = ["😀", "👩\u200d👩\u200d👧", "🏳️\u200d🌈", "👍🏽", "🇵🇱", "❤️", "🧑🏿\u200d🚀"]
MARKS = tuple(map(chr, (*range(0x300, 0x310), 0x64B, 0x93C, 0x94D, 0xE31, 0x20D0, 0x3099)))
RANGES = (
    (0x20, 0x7F), (0x80, 0x250), (0x370, 0x590), (0x590, 0x800), (0x900, 0x1200), (0x1E00, 0x2C00), (0x3000, 0xA000),
    (0xAC00, 0xD7A4),    (0xE000, 0xFFFE), (0x10000, 0x20000), (0x20000, 0x32000), (0xE0000, 0xE0200),
)  # fmt: skip
"""Where single characters are drawn from: every plane that has any."""


def random_text(rng: random.Random) -> str:
    """Words, breaks, digits, punctuation, emoji, combining marks and characters of every plane, up
    to a dozen pieces.
    """
    pieces = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.randrange(10)
        if kind < 3:
            pieces.append(rng.choice(WORDS))
        elif kind < 6:
            pieces.append(rng.choice(BREAKS) * rng.choice((1, 1, 1, 2, 5)))
        elif kind == 6:
            pieces.append(rng.choice(EMOJI))
        elif kind == 7:
            pieces.append(rng.choice("aeioun") + rng.choice(MARKS) * rng.randint(1, 3))
        elif kind == 8:
            pieces.append(rng.choice("!?.,;:'\"()[]{}<>/\\|@#$%^&*-_=+~`") * rng.randint(1, 4))
        else:
            pieces.append("".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(rng.randint(1, 4))))
    return "".join(pieces)


def _without_marks(text: str) -> str:
    """Decomposed, Hangul too, without spacing and nonspacing marks."""
    return "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c)[0] != "M")


CHANGES: dict[str, Callable[[str], str]] = {
    "composed (NFC)": lambda t: unicodedata.normalize("NFC", t),
    "without marks": _without_marks,
    "with one mark a letter": lambda t: re.sub(
        r"([\u0300-\u030f\u064b\u0e31\u20d0\u3099])[\u0300-\u030f\u064b\u0e31\u20d0\u3099]+", r"\1", t
    ),
    "with spaces of U+2000 to U+3000 as hyphens": lambda t: re.sub("[\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]", "-", t),
    "with characters that Unicode 14 does not have as 'a'": lambda t: "".join(
        "a" if unicodedata.category(c) == "Cn" else c for c in t
    ),
    "with U+0130, which lower case makes two characters, as I": lambda t: t.replace("\u0130", "I"),
}
"""Name -> change of a text after which a known cause of different tokens is gone."""


def _substrings(texts: list[str], length: int, count: int) -> list[str]:
    """The most frequent pieces of two characters up to a length."""
    found = Counter(t[i : i + n] for t in texts for n in range(2, length + 1) for i in range(len(t) - n + 1))
    return [piece for piece, _ in found.most_common(count)]


def _escaped(token: bytes) -> str:
    """Bytes as RWKV's vocabularies have them."""
    try:
        return "".join(f"\\x{ord(c):02x}" if c < " " else "\\\\" if c == "\\" else c for c in token.decode())
    except UnicodeDecodeError:
        return "".join(f"\\x{b:02x}" for b in token)


def made_vocabulary(kind: str, texts: list[str]) -> dict[str, list[Any]]:
    """tokens, types and scores or merges of a vocabulary of frequent pieces of the texts."""
    pieces = _substrings(texts, 6, 3000)
    if kind == "rwkv":
        raw = [p.encode() for p in pieces]
        cut = [r[: len(r) - 1] for r in raw[::7]]  # tokens that end within a character
        words = dict.fromkeys([*(bytes([b]) for b in range(256)), *raw, *cut])
        return {"tokens": ["<s>", *map(_escaped, words)], "types": [3] + [1] * len(words)}
    if kind == "plamo2":
        characters = [c for c, _ in Counter("".join(texts)).most_common(400)]
        words = dict.fromkeys([*characters, *pieces])
        special = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", *(f"<0x{b:02X}>" for b in range(256))]
        scores = [-3.0 - 0.37 * (i % 41) / len(w) for i, w in enumerate(words)]
        return {
            "tokens": [*special, *words],
            "types": [2, 3, 3, 3, *[6] * 256, *[1] * len(words)],
            "scores": [0.0] * len(special) + scores,
        }
    characters = [c for c, _ in Counter("".join(texts).lower()).most_common(600) if not c.isspace()]
    words, merges = dict.fromkeys(characters), []
    for piece in pieces:
        left, right = piece[:-1], piece[-1]
        if left in words and right in words and piece not in words:
            words[piece] = None
            merges.append(f"{left} {right}")
    return {"tokens": ["<s>", *words], "types": [3] + [1] * len(words), "merges": merges}


MADE = {"rwkv": ("rwkv", False), "plamo2": ("plamo2", False), "whitespace": ("whitespace", False),
        "whitespace-lowercase": ("whitespace", True)}  # fmt: skip
"""Name of a file -> (kind, whether it lowers case)."""


def make(folder: Path) -> None:
    """Write the vocabularies of `MADE`."""
    rng = random.Random(1)
    texts = [random_text(rng) for _ in range(4000)]
    for name, (kind, lowers) in MADE.items():
        made = made_vocabulary(kind, texts)
        file = gguf.GGUFWriter(str(folder / f"made-{name}.gguf"), "llama")
        file.add_tokenizer_model(kind)
        file.add_tokenizer_pre("whitespace" if kind == "whitespace" else "default")
        file.add_token_list(made["tokens"])
        file.add_token_types(made["types"])
        if "scores" in made:
            file.add_token_scores(made["scores"])
        if "merges" in made:
            file.add_token_merges(made["merges"])
        if lowers:
            file.add_bool("tokenizer.ggml.normalizer.lowercase", True)
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.close()


def main() -> None:
    """The command line."""
    import llama_cpp

    parser = argparse.ArgumentParser(description="Compare tokenizers built from GGUF headers with llama.cpp's.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strings", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--make", action="store_true")
    args = parser.parse_args()
    if args.make:
        make(args.folder)
    for path in sorted(args.folder.glob("*.gguf")):
        if args.only not in path.name:
            continue
        try:
            with GGUFCheckpoint(path) as checkpoint:
                ours = backend_of(checkpoint.metadata)
        except HalfbyteError as error:
            print(f"{path.stem}: {error}")
            continue
        theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        rng = random.Random(args.seed)
        texts = [random_text(rng) for _ in range(args.strings)]

        def both(text: str, ours: Any = ours, theirs: Any = theirs) -> tuple[list[int], list[int]]:
            have = ours.encode(text, add_special_tokens=False).ids
            return have, theirs.tokenize(text.encode(), add_bos=False, special=True)

        compared = ((text, *both(text)) for text in texts)
        wrong = [(text, have, want) for text, have, want in compared if have != want]
        composed = sum(unicodedata.normalize("NFC", text) != text for text, _, _ in wrong)
        print(f"{path.stem}: {len(wrong)} of {len(texts)} differ ({composed} of them not composed)", flush=True)
        if not wrong:
            continue
        shared: Counter[str] = Counter(c for text, _, _ in wrong for c in set(text))
        print("   ", ", ".join(f"U+{ord(c):04X} {n}" for c, n in shared.most_common(8)))
        left = {text for text, _, _ in wrong}
        for name, change in CHANGES.items():
            equal = {text for text, _, _ in wrong if len({*map(tuple, both(change(text)))}) == 1}
            left -= equal
            print(f"    equal {name}: {len(equal)}")
        print(f"    equal after none: {len(left)}", *(ascii(t) for t in sorted(left, key=len)[:4]))
        for text, have, want in sorted(wrong, key=lambda w: len(w[0]))[:4]:
            print(f"    {text!a}: halfbyte {have}, llama.cpp {want}")


if __name__ == "__main__":
    main()
