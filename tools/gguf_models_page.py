"""Write docs/gguf-models.md: which GGUF architectures and vocabularies are read, from the library's
own tables.

python tools/gguf_models_page.py
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from halfbyte.checkpoints.gguf.runnable import UNREAD, UNREAD_VOCABULARIES
from halfbyte.gguf_models.architectures import ARCHITECTURES
from halfbyte.gguf_models.names import OWN_MODEL
from halfbyte.gguf_models.pretokenizers import PRE_TOKENIZERS
from halfbyte.gguf_models.tokenizer import KINDS
from halfbyte.gguf_models.variants import WRITTEN_AS

PAGE = Path(__file__).parents[1] / "docs" / "gguf-models.md"
HEAD = """# GGUF models

Which of llama.cpp's architectures (`general.architecture`) and vocabularies
(`tokenizer.ggml.model`, `tokenizer.ggml.pre`) run here. The weights of every file can be inspected,
verified, converted and multiplied one by one, whatever its architecture; `halfbyte inspect` says
where a model cannot be run. The tables are written by `tools/gguf_models_page.py` from the
library's own.
"""
VOCABULARIES = {
    "llama": "SentencePiece BPE, with byte tokens",
    "gpt2": "byte-level BPE; `tokenizer.ggml.pre` names how text is split first",
    "gemma4": "BPE on characters, with byte tokens",
    "bert": "WordPiece",
    "t5": "SentencePiece Unigram",
    "rwkv": "from the left, the longest token of bytes",
    "plamo2": "the tokens whose scores add up to most, with byte tokens",
    "whitespace": "BPE on characters between whitespace, which is dropped",
}
"""What each kind that is read is."""


DIFFERENCES = """## Where programs differ

- `hy_v4`: the checkpoint has rotated channels in pairs. llama.cpp, vLLM and SGLang rotate pairs;
  transformers' class rotates halves, of rows that it only renames, and so is another model there.
  The file is read as its original: rows are put into the order of halves.
- `dots3note`: past `attention.indexer.top_k` tokens (2,048) an indexer chooses which are attended
  to. llama.cpp rotates halves of its channels, transformers pairs of the same rows, and a third
  program the last channels; the authors' own code was not at hand. The file is read as llama.cpp
  reads it, by the order of the rows. Up to that length all agree.
- `qwen4exp`: of a text longer than `attention.indexer.top_k` tokens transformers attends to whole
  chosen blocks and the unfinished one; llama.cpp to as many tokens as an unfinished block may have
  at most, which can be some of one block more. Here it is as in transformers.
- `hrm_text`: instructions are read causally, as in llama.cpp; transformers reads them in both
  directions only where a caller marks them by token types.
- `phimoe`, `gemma3n`, `qwen2vl`, `t5`, `mimo2`: benchmarks/gguf.md.
"""
"""What a reader of two programs' logits needs to know."""


WRITING = """## A folder of a GGUF

`convert --to` any layout of folders, and `dequantize`, write the model of every architecture above
under transformers' names, with its configuration, tokenizer and template. Rows are moved, and whole
groups of inputs, so packed weights keep their codes. What a parameter of the model makes of packed
tensors by more than that is decoded and dense, and the command names it: the second projection of
latent attention (`kv_b_proj`, from `attn_k_b` and `attn_v_b`), inputs of `out_proj` in `qwen35`,
`qwen35moe` and `qwen4exp` that move by less than the block of a K-quant, and one matrix of tensors
of two types. GPTQ, AWQ and learned rounding of models with another form walk a folder: `dequantize`
first. `smallthinker`'s class is halfbyte's own, so transformers alone does not load its folder.

## What a GGUF of a folder cannot have

- Packed weights keep their codes where a file has their rows, whole. A file of these architectures
  has some weights in another form, for which the folder must be dense: a recurrent layer's
  convolution (`ssm_conv1d`, `shortconv.conv`), which is no linear layer and so is dense in packed
  folders too; `ssm_out` of `qwen35`, `qwen35moe` and `qwen4exp` where the model has more value
  heads than key heads, whose inputs have another order.
  The second projection of latent attention is divided; `deepseek2` and `mistral4` have it whole
  (`attn_kv_b`) where it is packed, as llama.cpp reads there alone.
- Of vocabularies, BPE on bytes, BPE on characters with byte tokens, WordPiece (BERT) and Unigram
  (T5) are written, and must give the folder's own tokens when they are read back; `--like`, a GGUF
  of the same model, gives others. llama.cpp does not decompose Hangul as BERT's own tokenizer does.
- A = −exp(A_log) of a recurrent layer is rounded once, as llama.cpp's converter does; A_log cannot
  be had back to the last bit.
- The multipliers of `falcon-h1` are in the weights of a file, as llama.cpp's converter has them:
  each product is rounded once, to float32. Biases beside them, or a shared table with two of them,
  are refused by the multipliers' names.
- A model whose configuration says what no key states (another activation, a scale, a pattern of
  layers, a bias, YaRN's `attention_factor`) is refused by the name of the field: every field of
  transformers' configuration is compared but those of training, of how it is computed, and names.
  Kinds of GELU (`gelu`, `gelu_new`) are one in a GGUF: a note names the kind that is read back.
  Logits of small random models changed by up to 1e-2.
- Tensors of an image or sound encoder, of layers that predict further tokens, and of an encoder's
  own heads are left out, and a note counts them.
"""
"""What the page says of the way from a folder to a file."""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def grouped(names: dict[str, str]) -> list[tuple[str, ...]]:
    """(names, reason) for each reason."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, why in names.items():
        groups[why].append(f"`{name}`")
    return [(" ".join(found), why) for why, found in groups.items()]


def page() -> str:
    """The whole page."""
    architectures = [
        (f"`{name}`", f"`{a.model_type}`", f"`{WRITTEN_AS.get(name, name)}`") for name, a in sorted(ARCHITECTURES.items())
    ]
    splits: dict[object, list[str]] = defaultdict(list)
    for name, pre in PRE_TOKENIZERS.items():
        splits[pre].append(f"`{name}`")
    flags = ("whole_words", "add_bos", "nfc", "spaces", "characters", "line_breaks")
    pre_rows = [
        (" ".join(names), str(len(pre.splits)), ", ".join(f"`{f}`" for f in flags if getattr(pre, f)))  # type: ignore[attr-defined]
        for pre, names in splits.items()
    ]
    return "\n".join(
        [
            HEAD,
            "## Architectures that run\n",
            "Each gives the logits of transformers' own model bit for bit. Beside llama.cpp's, from float32",
            "files and from quantized ones: benchmarks/gguf.md. A `llama` file with experts becomes `mixtral`.",
            f"The class of `{OWN_MODEL}` is halfbyte's own, for transformers has none.\n",
            "A transformers folder becomes the GGUF architecture of the last column, with the tensors and",
            "key-values that llama.cpp's converter gives it (`halfbyte convert FOLDER OUT.gguf --to gguf`).\n",
            table(("GGUF", "transformers", "written as"), architectures),
            WRITING,
            DIFFERENCES,
            "## Architectures that do not\n",
            table(("GGUF", "why"), grouped(UNREAD)),
            "## Vocabularies\n",
            table(("kind", "read"), [(f"`{k}`", VOCABULARIES[k]) for k in KINDS]),
            table(("kind", "not read, because"), grouped(UNREAD_VOCABULARIES)),
            "A `tokenizer.json` beside the file is used where the kind is not read.\n",
            "## Pre-tokenizers\n",
            "Names in one row split alike. Expressions are applied one after another; the flags are those of",
            "`halfbyte.gguf_models.pretokenizers.PreTokenizer`. llama.cpp knows no other name.\n",
            table(("names", "expressions", "flags"), pre_rows),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
