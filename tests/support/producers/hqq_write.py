"""HQQ: python hqq_write.py DENSE OUT [WORD ...]. Its own writer's state dict in safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dense import each
from hqq.core.quantize import BaseQuantizeConfig
from hqq.models.hf.base import AutoHQQHFModel

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def quantized(bits: int, group: int) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=1)
        AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float16, device="cpu")
        target.parent.mkdir(parents=True, exist_ok=True)
        AutoHQQHFModel.save_to_safetensors(model, str(target))
        AutoTokenizer.from_pretrained(source).save_pretrained(target)

    return write


if __name__ == "__main__":
    each({"4": quantized(4, 64), "8": quantized(8, 64), "3": quantized(3, 64)})
