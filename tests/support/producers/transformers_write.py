"""bitsandbytes, HQQ and torchao through transformers: python transformers_write.py DENSE OUT [WORD
...].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dense import each

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HqqConfig, TorchAoConfig


def quantized(config: Callable[[], Any]) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config(), device_map="cpu")
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(source).save_pretrained(target)

    return write


def torch_ao(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchao.prototype.mx_formats
        import torchao.quantization

        where = torchao.prototype.mx_formats if hasattr(torchao.prototype.mx_formats, name) else torchao.quantization
        return TorchAoConfig(getattr(where, name)(**options))

    return make


def bitsandbytes(**options: Any) -> Callable[[], Any]:
    return lambda: BitsAndBytesConfig(**options)


VARIANTS = {
    "bnb-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    "bnb-nf4-nested": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bnb-fp4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-int8": bitsandbytes(load_in_8bit=True),
    "hqq4": lambda: HqqConfig(nbits=4, group_size=64, axis=1),
    "torchao-int4": torch_ao("Int4WeightOnlyConfig", group_size=32),
    "torchao-int8": torch_ao("Int8WeightOnlyConfig"),
    "torchao-nvfp4": torch_ao("NVFP4WeightOnlyConfig"),
}

if __name__ == "__main__":
    each({name: quantized(config) for name, config in VARIANTS.items()})
