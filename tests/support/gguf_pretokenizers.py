"""Tokens that llama.cpp makes with each pre-tokenizer of one small vocabulary: the cases of
test_pretokenizers.py.

    python tests/support/gguf_pretokenizers.py      records them again (needs llama-cpp-python)

The vocabulary is trained on whole texts, so that merges run across every boundary and tokens show
where text was split.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from support.gguf_writer import GGUF

PATH = Path(__file__).parents[1] / "data" / "gguf_pretokenizers.json"
TEXTS = [
    "The quick Brown FOX; it's 1234567 o'clock, THEY'LL say I'M we've don't",
    "def f(x1):\n    return x1 ** 22\n\n\nprint(f(10))\r\n\r\n\t\tend   ",
    "camelCase HTTPServer URLs x=3.14, 1,000,000 and 12345 or 007!!! ???\n\n  ok",
    "Zażółć gęślą jaźń naïve ÜBER straße ὀδύσσεια Ελλάδα привет Привет",
    "漢字とカタカナ 東京123 한국어 ภาษาไทย हिन्दी مرحبا 。、！？「」　全角",
    "😀 👩‍👩‍👧 🇵🇱 → ∑ €100 ½ ² ٣٤٥ _under_score_ #tag @user /path/to\\file",
    "   leading, trailing   \n \n  \t mixed \u00a0nbsp\u2003em",
    "it's It'S 'til '90s x'y'z ''quoted'' \"double\" (a)[b]{c}<d>",
]
BYTES = "gpt2"
CHARACTERS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""Pre-tokenizers of vocabularies of characters."""


def vocabulary(characters: bool) -> tuple[list[str], list[str]]:
    """(tokens, merges) of 900 tokens."""
    texts = [t.replace(" ", "\u2581") for t in TEXTS] if characters else TEXTS
    trained = Tokenizer(models.BPE())
    alphabet = [] if characters else pre_tokenizers.ByteLevel.alphabet()
    if characters:
        texts = [line for t in texts for line in t.split("\n") if line]
    else:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.train_from_iterator(texts * 2, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if characters:
        tokens += [t for t in ("\n", "\n\n", "\n\n\n") if t not in tokens] + [f"<0x{b:02X}>" for b in range(256)]
    return tokens, [" ".join(m) for m in model["merges"]]


def header(pre: str, tokens: list[str], merges: list[str]) -> bytes:
    """A file of the vocabulary alone."""
    kinds = [6 if t.startswith("<0x") and len(t) == 6 else 1 for t in tokens]
    pairs: list[tuple[str, str, Any]] = [
        ("general.architecture", "string", "llama"), ("llama.context_length", "uint32", 64),
        ("llama.embedding_length", "uint32", 64),
        ("llama.block_count", "uint32", 1), ("llama.feed_forward_length", "uint32", 64),
        ("llama.attention.head_count", "uint32", 1),
        ("llama.attention.layer_norm_rms_epsilon", "float32", 1e-5), ("llama.rope.dimension_count", "uint32", 64),
        ("tokenizer.ggml.model", "string", "gpt2"), ("tokenizer.ggml.pre", "string", pre),
        ("tokenizer.ggml.tokens", "array[string]", tokens), ("tokenizer.ggml.token_type", "array[int32]", kinds),
        ("tokenizer.ggml.merges", "array[string]", merges), ("tokenizer.ggml.bos_token_id", "uint32", 0),
        ("tokenizer.ggml.eos_token_id", "uint32", 0), ("tokenizer.ggml.unknown_token_id", "uint32", 0),
    ]  # fmt: skip
    return GGUF(pairs=pairs, tensors=[]).bytes()


def recorded() -> dict[str, Any]:
    """{"bytes": {tokens, merges}, "characters": {...}, "cases": [{"pre": names, "ids": a list for
    each text}]}
    """
    data: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
    return data


def llama_cpp_tokens(path: Path) -> list[list[int]]:
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(t.encode(), add_bos=False, special=True) for t in TEXTS]


def main() -> None:
    from halfbyte.gguf_models.pretokenizers import PRE_TOKENIZERS

    data: dict[str, Any] = {}
    for kind in ("bytes", "characters"):
        tokens, merges = vocabulary(kind == "characters")
        data[kind] = {"tokens": tokens, "merges": merges}
    cases: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE_TOKENIZERS:
            kind = data["characters" if pre in CHARACTERS else "bytes"]
            path = Path(folder) / "v.gguf"
            path.write_bytes(header(pre, kind["tokens"], kind["merges"]))
            try:
                cases.setdefault(json.dumps(llama_cpp_tokens(path)), []).append(pre)
            except (ValueError, RuntimeError) as error:
                print(pre, error)
    data["cases"] = [{"pre": names, "ids": json.loads(ids)} for ids, names in cases.items()]
    PATH.write_text(json.dumps(data, ensure_ascii=True, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
