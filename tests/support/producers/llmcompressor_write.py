"""llm-compressor: python llmcompressor_write.py DENSE OUT [WORD ...]. Integers, NVFP4, MXFP4 to
nearest; AWQ and GPTQ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dense import calibration, each
from llmcompressor import oneshot

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROUTERS = ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*router$", "re:.*router.*"]


def groups(**weights: Any) -> dict[str, Any]:
    """A config group of weights in groups of 32."""
    stated = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    return {"group_0": {"targets": ["Linear"], "weights": stated}}


def quantized(modifier: Callable[[], Any], texts: bool = False) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        from datasets import Dataset

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source)
        options: dict[str, Any] = {}
        if texts:
            rows = [{k: v.tolist() for k, v in row.items()} for row in calibration(16)]
            options = {"dataset": Dataset.from_list(rows), "num_calibration_samples": len(rows), "max_seq_length": 48}
        oneshot(model=model, processor=tokenizer, recipe=[modifier()], **options)
        model.save_pretrained(target, save_compressed=True)
        tokenizer.save_pretrained(target)

    return write


def rounding(scheme: str | None = None, **weights: Any) -> Callable[[], Any]:
    def make() -> Any:
        from llmcompressor.modifiers.quantization import QuantizationModifier

        if scheme:
            return QuantizationModifier(targets="Linear", scheme=scheme, ignore=ROUTERS)
        return QuantizationModifier(config_groups=groups(**weights), ignore=ROUTERS)

    return make


def awq() -> Any:
    from llmcompressor.modifiers.awq import AWQModifier

    return AWQModifier(config_groups=groups(symmetric=False), ignore=ROUTERS)


def gptq() -> Any:
    from llmcompressor.modifiers.quantization import GPTQModifier

    return GPTQModifier(config_groups=groups(symmetric=True, actorder="weight"), ignore=ROUTERS)


def variants() -> dict[str, Callable[[Path, Path, str], None]]:
    return {
        "int4": quantized(rounding(symmetric=True)),
        "uint4": quantized(rounding(symmetric=False)),
        "nvfp4": quantized(rounding("NVFP4A16")),
        "mxfp4": quantized(rounding("MXFP4A16")),
        "awq": quantized(awq, texts=True),
        "gptq": quantized(gptq, texts=True),
    }


if __name__ == "__main__":
    each(variants())
