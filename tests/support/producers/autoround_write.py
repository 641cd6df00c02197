"""AutoRound: python autoround_write.py DENSE OUT [WORD ...]. Rounding to nearest, in its own
packing, GPTQ's and AWQ's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from auto_round import AutoRound
from dense import each

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def quantized(packing: str, sym: bool) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source)
        rounding = AutoRound(model, tokenizer, bits=4, group_size=32, sym=sym, iters=0, device_map="cpu", disable_opt_rtn=True)
        with tempfile.TemporaryDirectory() as scratch:
            rounding.quantize_and_save(scratch, format=packing)
            (written,) = Path(scratch).rglob("config.json")  # in a folder that it names itself
            shutil.copytree(written.parent, target)

    return write


if __name__ == "__main__":
    each({"gptq": quantized("auto_gptq", True), "awq": quantized("auto_awq", False), "own": quantized("auto_round", True)})
