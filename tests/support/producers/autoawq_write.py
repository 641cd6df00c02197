"""AutoAWQ (archived; GPTQModel is its successor): python autoawq_write.py DENSE OUT [WORD ...]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from awq import AutoAWQForCausalLM
from dense import ARCHITECTURES, WIDE, calibration, each

from transformers import AutoTokenizer


def quantized(version: str) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(source)
        texts = [" ".join(f"<tok{i}>" for i in text["input_ids"].tolist()) for text in calibration(32, 24)]
        config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": version}
        model.quantize(tokenizer, quant_config=config, calib_data=texts, max_calib_seq_len=32, max_calib_samples=32)
        model.save_quantized(str(target))
        tokenizer.save_pretrained(target)

    return write


if __name__ == "__main__":
    each({"awq": quantized("GEMM")}, {arch: arch + WIDE for arch in ARCHITECTURES})
