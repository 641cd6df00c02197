"""What `inspect` says of small checkpoints of which one thing is changed.

    python -m support.folder_outcomes             # in tests/: write data/folder_outcomes.txt anew
    python -m support.folder_outcomes gptq        # print each change of a folder and what is said

Changes are those of `support.mutations`, of one module's tensors and of every key of the
quantization config, and keys of config.json that are absent, null, 0 or a word. What is said are
the tensors, the findings, what the ledger names, and what each engine is expected to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

import halfbyte as hb
from halfbyte.checkpoints import engines
from halfbyte.checkpoints.engines import predictions
from halfbyte.checkpoints.inspect import records
from halfbyte.checkpoints.safetensors import checkpoint as checkpoint_module
from halfbyte.errors import HalfbyteError
from support.damage_cases import AWQ, CASES, INT4, Case, linear_group, modelopt, packed, torchao
from support.mutations import mutations, write
from support.outcome_table import OutcomeTable
from support.safetensors_bytes import folder, under

F16, F32 = {"scale_dtype": "float16"}, {"scale_dtype": "float32"}
MORE: dict[str, Case] = {
    "gptq": Case(packed("gptq", "uint4:g32", **F16), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False,
                 "desc_act": False, "checkpoint_format": "gptq_v2"}),
    "gptq-int8": Case(packed("gptq", "int8:g64", **F16), {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": True,
                      "dynamic": {"-:.*q_proj": {}}}),
    "awq-gemm": Case(packed("awq-gemm", "uint4:g64", **F16), {**AWQ, "version": "gemm"}),
    "mlx": Case(packed("mlx", "affine4:g64"), {"group_size": 64, "bits": 4, "mode": "affine"}),
    "ct-int4": Case(packed("compressed-tensors", "int4:g32", **F32), linear_group({**INT4, "group_size": 32}, "pack-quantized")),
    "ct-nvfp4": Case(packed("compressed-tensors", "nvfp4", global_scale="divide"),
                     linear_group({**INT4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                                  "nvfp4-pack-quantized")),
    "ct-fp8-block": Case(packed("compressed-tensors", "fp8_e4m3", group_size=64, rows=64, **F32),
                         linear_group({"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block",
                                       "block_structure": [64, 64]}, "float-quantized")),
    "modelopt-nvfp4": Case(packed("modelopt", "nvfp4"), modelopt("NVFP4", group_size=16)),
    "hqq": Case(packed("hqq", "hqq4:g64"), {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config":
                {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}),
    "torchao-nvfp4": Case(packed("torchao", "nvfp4"), torchao("NVFP4InferenceConfig")),
    "bitsandbytes": Case(packed("bitsandbytes", "nf4:g64"), {"quant_method": "bitsandbytes", "load_in_4bit": True,
                         "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head", "self_attn"]}),
    "metal-marlin": Case(packed("metal-marlin", "uint4:g32", **F16), {"quant_method": "metal-marlin", "codec": "uint4",
                         "group_size": 32}),
    "gptq-experts": Case(packed("gptq", "int4:g32", **F16), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
                         "qwen3_moe"),
    "ct-experts": Case(packed("compressed-tensors", "uint4:g32", **F32),
                       linear_group({**INT4, "symmetric": False, "group_size": 32}, "pack-quantized"), "qwen3_moe"),
    "mlx-experts": Case(packed("mlx", "affine4:g64"), {"group_size": 64, "bits": 4}, "qwen3_moe"),
    "gpt-oss": Case(packed("gpt-oss", "mxfp4"), {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "gpt_oss"),
}  # fmt: skip
FOLDERS: dict[str, Case] = {**MORE, **{name: case for name, case in CASES.items() if case.arch == "llama"}}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "torch_dtype": "float16",
}  # fmt: skip
MIXTURE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3_moe": {**LLAMA, **MIXTURE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "gpt_oss": {**LLAMA, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 2,
                "num_experts_per_tok": 1, "sliding_window": 32, "layer_types": ["full_attention"]},
}  # fmt: skip
ROOT = ("gptq", "mlx", "mlx-experts", "gpt-oss", "ct-fp8-block")
"""Folders whose config.json is changed outside the quantization config too."""
LAYER = "model.layers.0"
CHANGED = (f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.experts.0.down_proj", f"{LAYER}.mlp.experts.down_proj", "model.norm")


def write_folder(name: str, path: Path) -> Path:
    """The whole checkpoint of a label."""
    case, rng = FOLDERS[name], np.random.default_rng(0)
    half = ml_dtypes.bfloat16
    dense = {f"{LAYER}.{n}layernorm.weight": np.ones(128, half) for n in ("input_", "post_attention_")}
    dense["model.norm.weight"] = np.ones(128, half)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        dense[key] = rng.standard_normal((64, 128)).astype(half)
    apart = "self_attn" in json.dumps(case.config) or "mlp" in json.dumps(case.config) or case.arch != "llama"
    for projection in "qkvo":
        module = f"{LAYER}.self_attn.{projection}_proj"
        if apart:
            dense[f"{module}.weight"] = rng.standard_normal((128, 128)).astype(half)
        else:
            dense |= under(module, case.make(rng, 128, 128))
        if case.arch == "gpt_oss":
            dense[f"{module}.bias"] = np.zeros(128, half)
    if case.arch == "gpt_oss":
        for word, rows in (("gate_up_proj", 256), ("down_proj", 128)):
            dense |= under(f"{LAYER}.mlp.experts.{word}", case.make(rng, 2, rows, 128), "_")
            dense[f"{LAYER}.mlp.experts.{word}_bias"] = np.zeros((2, rows), half)
        dense |= {f"{LAYER}.mlp.router.weight": np.ones((2, 128), half), f"{LAYER}.mlp.router.bias": np.ones(2, half)}
        dense[f"{LAYER}.self_attn.sinks"] = np.ones(2, half)
    else:
        experts = [""] if case.arch == "llama" else ["experts.0.", "experts.1."]
        for word in (f"{e}{p}" for e in experts for p in ("gate_proj", "up_proj", "down_proj")):
            dense |= under(f"{LAYER}.mlp.{word}", case.make(rng, 128, 128))
        if case.arch != "llama":
            dense[f"{LAYER}.mlp.gate.weight"] = np.ones((2, 128), half)
            dense |= {f"{LAYER}.self_attn.{p}_norm.weight": np.ones(64, half) for p in "qk"}
    where = "quantization" if name.startswith("mlx") else "quantization_config"
    return folder(path, {"model.safetensors": dense}, {**CONFIGS[case.arch], where: case.config})


def said(path: Path) -> list[str]:
    """What is said of a checkpoint, on a CPU with AVX-512 and without transformers."""
    flags = patch.object(engines, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    with flags, patch.object(checkpoint_module, "required_by_transformers", lambda config, keys: "transformers is not asked"):
        try:
            with hb.open(path) as checkpoint:
                lines = [json.dumps(record, default=str) for record in records(checkpoint, checkpoint.findings())]
                lines += [str(entry) for entry in checkpoint.ledger().entries]
                for prediction in predictions(checkpoint, "all"):
                    lines.append(" ".join((prediction.engine, prediction.key, prediction.verdict, prediction.reason)))
        except HalfbyteError as error:
            lines = [str(error)]
    return [line.replace(str(path), "FOLDER").replace(str(path.resolve()), "FOLDER") for line in lines]


def outcomes(name: str) -> Iterator[tuple[str, str, str]]:
    """(subject, change, what is said) of each change of a folder."""
    with TemporaryDirectory() as place:
        whole, changed = Path(place) / "whole", Path(place) / "changed"
        write_folder(name, whole)
        yield "nothing", "", "\n    ".join(said(whole))
        for mutation in mutations(whole):
            if mutation.subject == "key" or mutation.target[0].startswith(CHANGED):
                write(whole, mutation, changed)
                yield ".".join(mutation.target), mutation.kind, "\n    ".join(said(changed))
        config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
        for key in config if name in ROOT else ():
            for value in (..., None, 0, 3, "x"):
                other = {k: v for k, v in config.items() if k != key} | ({} if value is ... else {key: value})
                (whole / "config.json").write_text(json.dumps(other), encoding="utf-8")
                yield f"config.json {key}", "absent" if value is ... else json.dumps(value), "\n    ".join(said(whole))


TABLE = OutcomeTable("folder_outcomes", FOLDERS, outcomes, "changes")

if __name__ == "__main__":
    TABLE.main()
