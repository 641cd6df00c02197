"""llama.cpp: python llamacpp_write.py DENSE OUT [WORD ...]. Its convert_hf_to_gguf.py, then its
llama-quantize.

LLAMA_CPP names a checkout with the converter, LLAMA_QUANTIZE the program. The converter knows a
tokenizer by a hash of what it makes of a text; the tiny ones are none it knows, so that one
question is answered for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dense import each

CONVERT = """
import sys, runpy
sys.path.insert(0, sys.argv[1] + "/gguf-py")
sys.path.insert(0, sys.argv[1])
script = sys.argv[1] + "/convert_hf_to_gguf.py"
sys.argv = [script, *sys.argv[2:]]
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
runpy.run_path(script, run_name="__main__")
"""


def quantized(kind: str) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        full = target.with_suffix(".full")
        if arch == "gpt_oss" and kind != "MXFP4_MOE":
            raise ValueError("llama-quantize requantizes no MXFP4: the converter's own file is the one")
        source = with_another_tokenizer(source, arch)
        kept = "bf16" if arch == "gpt_oss" else "f32"
        convert = [
            sys.executable,
            "-c",
            CONVERT,
            os.environ["LLAMA_CPP"],
            str(source),
            "--outtype",
            kept,
            "--outfile",
            str(full),
        ]
        run(convert)
        if arch == "gpt_oss":  # the converter's own file: experts in MXFP4 as they were
            full.rename(f"{target}.gguf")
            return
        run([os.environ["LLAMA_QUANTIZE"], str(full), f"{target}.gguf", kind, "1"])
        full.unlink()

    return write


def with_another_tokenizer(source: Path, arch: str) -> Path:
    """A copy of the folder whose tokenizer llama.cpp has a kind for: bytes with a merge, or
    SentencePiece for Phi 3.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from transformers import PreTrainedTokenizerFast

    copy = Path(tempfile.mkdtemp()) / source.name
    shutil.copytree(source, copy)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", "th", *(["t", "h"] + [c for c in alphabet if c not in "th"])[:92]]
    bytes_only = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [("t", "h")], unk_token="<unk>"))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.save_pretrained(copy)
    if arch == "phi3":
        sentences(copy / "tokenizer.model")
    return copy


def sentences(path: Path) -> None:
    """A SentencePiece model of 96 pieces: the converter takes no other tokenizer for Phi 3."""
    import sentencepiece

    words = ["".join(chr(97 + (i * j) % 26) for j in range(1, 7)) for i in range(1, 400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_prefix=str(path.with_suffix("")), vocab_size=96, model_type="bpe", pad_id=-1
    )


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(" ".join((done.stderr or done.stdout).splitlines()[-3:]))


if __name__ == "__main__":
    each({k: quantized(k) for k in ("Q4_0", "Q8_0", "Q4_K_M", "MXFP4_MOE", "IQ4_NL")}, {"gpt_oss": "gpt_oss_mxfp4"})
