r"""How byte-level vocabularies split text before merging: `tokenizer.ggml.pre` -> expressions and
flags.

    PRE_TOKENIZERS["qwen2"].splits     expressions applied one after another, each to the pieces that the one before left
    PRE_TOKENIZERS["tekken"].add_bos   True

An expression cuts a piece at each of its matches; what lies between two matches is a piece too. The
names are those of llama.cpp's `llama-vocab.cpp`; the expressions follow the models' own tokenizers
where those are published, and llama.cpp's behaviour elsewhere. They are written for Oniguruma, the
engine of the `tokenizers` library: `(?i:...)` ignores case and `&&` intersects classes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """How one kind of vocabulary is read.

    splits         expressions, applied in order
    whole_words    a word that is a token is taken as it is, even where its merges would not make it
    add_bos        texts start with the bos token where the file does not say otherwise
    nfc            text is composed (Unicode NFC) first, as the model's own tokenizer does;
                   llama.cpp does not
    spaces         spaces are "▁" and characters outside the vocabulary are byte tokens `<0xNN>`:
                   merges work on characters
    characters     merges work on characters as they are; whitespace and characters outside the
                   vocabulary cut, and are left out
    line_breaks    a run of line breaks that is a token is taken whole, where the file leaves out
                   the merges that make it
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False
    spaces: bool = False
    characters: bool = False
    line_breaks: bool = False


def _words(
    digits: str,
    *,
    letters: str = r"\p{L}",
    other: str = r"\p{L}\p{N}",
    contractions: str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    line_end: str = r"[\r\n]*",
    newlines: str = r"\s*[\r\n]+",
) -> str:
    """OpenAI's cl100k expression and its relatives.

    digits        what a group of digits is
    letters       characters of a word
    other         characters that are not punctuation
    contractions  English endings, with the bar that follows
    line_end      what punctuation takes along after it
    newlines      whitespace that ends in line breaks
    """
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{other}]+{line_end}|{newlines}|\s+(?!\S)|\s+"


def _cased_words(
    digits: str, *, contractions: str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", within: str = "", line_end: str = "[\r\n/]*"
) -> str:
    """OpenAI's o200k expression and its relatives: a word is capitals, then small letters. `within`
    restricts both classes.
    """
    upper, lower = (rf"[\p{{{c}}}\p{{Lm}}\p{{Lo}}\p{{M}}{within}]" for c in (r"Lu}\p{Lt", "Ll"))
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{line_end}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = _words(r"\p{N}{1,3}")
_ONE_DIGIT = _words(r"\p{N}")
_O200K = _cased_words(r"\p{N}{1,3}")
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_AND_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    r"\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{16ea0}-\x{16ed3}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}]"
)
"""Letters with case that DeepSeek LLM's class lists: not Armenian's newest, modern Georgian and
mathematical ones.
"""
_ASCII_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_DEEPSEEK3_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_GROUPS_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Digits in threes, the short group first."""
_SPACES_IN_POWERS_OF_TWO = "".join(rf"|\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"
_KOREAN_WORDS = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
"""Words with single spaces between them, as one."""
_SOUTHEAST_ASIAN = r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
_EAST_ASIAN = (
    r"\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\uac00-\ud7af\u1100-\u11ff"
)
_NO_HAN = r"&&[^\p{Han}]"

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("gpt-2 gpt2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum", PreTokenizer((_GPT2,))),
    ("modern-bert jina-v1-en jina-v2-code roberta-bpe jais trillion granite-docling exaone4", PreTokenizer((_GPT2,))),
    ("mpt olmo", PreTokenizer((_GPT2,), nfc=True)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_CL100K,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_CL100K,))),
    ("glm4 glm5", PreTokenizer((_CL100K,), whole_words=True)),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True)),
    (
        "jais-2",
        PreTokenizer((_CL100K.removesuffix(r"|\s+(?!\S)|\s+") + _SPACES_IN_POWERS_OF_TWO,)),
    ),
    ("qwen2", PreTokenizer((_ONE_DIGIT,), nfc=True)),
    ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_ONE_DIGIT,))),
    ("qwen35", PreTokenizer((_words(r"\p{N}", letters=r"[\p{L}\p{M}]", other=r"\p{L}\p{M}\p{N}"),))),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _ONE_DIGIT))),
    ("ufakzeka", PreTokenizer((_words(r"\p{N}", contractions=""),))),
    ("seed-coder", PreTokenizer((_words(r"\p{N}", other=r"\p{L}\p{N}\r\n", line_end=""),))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_words(r"\p{N}", newlines=r"\s*[\r\n]"),))),
    (
        "exaone-moe",
        PreTokenizer(
            (rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_KOREAN_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)
        ),
    ),
    ("tekken", PreTokenizer((_cased_words(r"\p{N}", contractions=""),), whole_words=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_O200K,))),
    ("granite-embed-multi-97m", PreTokenizer((_O200K,), whole_words=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    (
        "youtu",
        PreTokenizer(
            (
                r"[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK,
                _cased_words(r"\p{N}"),
            ),
            whole_words=True,
        ),
    ),
    ("kimi-k2", PreTokenizer((r"\p{Han}+|" + _cased_words(r"\p{N}{1,3}", within=_NO_HAN, line_end=r"[\r\n]*"),))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                _CJK_AND_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3_WORDS))),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CJK,
                _DEEPSEEK3_WORDS.replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+", r"[\p{P}\p{S}]+|[\r\n]"),
                r"\p{N}",
            )
        ),
    ),
    (
        "afmoe",
        PreTokenizer(
            (
                _GROUPS_FROM_THE_RIGHT,
                rf"[{_EAST_ASIAN}{_SOUTHEAST_ASIAN}]+",
                _DEEPSEEK3_WORDS,
            )
        ),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ),
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                rf"[\p{{P}}{_ASCII_PUNCTUATION[1:]}",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((r"\n+",), add_bos=True, spaces=True, line_breaks=True)),
    ("sarvam-moe", PreTokenizer((r"\n+",), spaces=True)),
    ("whitespace", PreTokenizer((r"\S+",), characters=True)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _FAMILIES for name in names.split()}
"""tokenizer.ggml.pre -> how text is split."""
