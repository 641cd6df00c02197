"""ModelOpt: python modelopt_write.py DENSE OUT [WORD ...]. NVFP4, MXFP4, FP8 and AWQ integers as
Hugging Face checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
from dense import calibration, each
from modelopt.torch.export import export_hf_checkpoint

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def quantized(config: dict[str, Any]) -> Callable[[Path, Path, str], None]:
    def write(source: Path, target: Path, arch: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)

        def run(m: Any) -> None:
            for text in calibration(8):
                m(input_ids=text["input_ids"][None])

        model = mtq.quantize(model, copy.deepcopy(config), run)
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=str(target))
        AutoTokenizer.from_pretrained(source).save_pretrained(target)

    return write


def in_groups_of_32(config: dict[str, Any]) -> dict[str, Any]:
    """The same with smaller groups: its 128 do not divide 64 inputs."""
    made = copy.deepcopy(config)
    for entry in made["quant_cfg"]:
        sizes = entry.get("cfg", {}).get("block_sizes", {})
        if sizes.get(-1) == 128:
            sizes[-1] = 32
    return made


def variants() -> dict[str, Callable[[Path, Path, str], None]]:
    return {
        "nvfp4": quantized(mtq.NVFP4_DEFAULT_CFG),
        "nvfp4-awq": quantized(mtq.NVFP4_AWQ_LITE_CFG),
        "mxfp4": quantized(mtq.MXFP4_DEFAULT_CFG),
        "fp8": quantized(mtq.FP8_DEFAULT_CFG),
        "int4-awq": quantized(in_groups_of_32(mtq.INT4_AWQ_CFG)),
    }


if __name__ == "__main__":
    each(variants())
