"""Checkpoints of layouts that halfbyte reads and conversions do not write, for the damage matrix: a
llama of one layer whose feed-forward weights are packed, or a qwen3-moe whose experts are.

    folder = write_case("exl3", path)

Codes are random: what a damaged file must give is what the whole file gives, which the layouts' own
tests compare with references.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import halfbyte as hb
from halfbyte.layouts import LAYOUTS
from support.mutations import Mutation
from support.safetensors_bytes import folder, under
from support.tiny_configs import dense_model
from support.tiny_models import write_tiny

Tensors = dict[str, np.ndarray]
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}


def exl3(rng: np.random.Generator, n: int, k: int) -> Tensors:
    trellis = rng.integers(-(1 << 15), 1 << 15, (k // 16, n // 16, 48)).astype(np.int16)
    suh, svh = ((rng.standard_normal(size) * 0.1).astype(np.float16) for size in (k, n))
    return {"trellis": trellis, "suh": suh, "svh": svh, "mcg": np.array(-877912083, np.int32)}


def nvfp4_svd(rng: np.random.Generator, n: int, k: int) -> Tensors:
    weight = hb.quantize(rng.standard_normal((n, k)).astype(np.float32), "nvfp4", policy="modelopt")
    low = {f"svdquant_lora_{s}": rng.standard_normal(shape).astype(np.float16) for s, shape in (("a", (8, k)), ("b", (n, 8)))}
    return {**LAYOUTS["modelopt"].pack(weight, {}), **low}


def two_of_four(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(weight, mask of its positions)."""
    mask = np.argsort(np.argsort(rng.random((n, k // 4, 4)), -1), -1) < 2
    return np.where(mask, rng.standard_normal(mask.shape) + 3, 0).reshape(n, k).astype(np.float32), mask.reshape(n, k)


def marlin_24(rng: np.random.Generator, n: int, k: int) -> Tensors:
    q = hb.quantize(two_of_four(rng, n, k)[0], "int4", scale_dtype="float16", group_size=128)
    return LAYOUTS["compressed-tensors-marlin-24"].pack(q, {})


def sparse_24(rng: np.random.Generator, n: int, k: int) -> Tensors:
    w, mask = two_of_four(rng, n, k)
    q = hb.quantize(w, "fp8_e4m3:channel", scale_dtype="float32")
    dense = LAYOUTS["compressed-tensors"].pack(q, {})
    values = dense["weight"].view(np.uint8)[mask].reshape(n, k // 2).view(dense["weight"].dtype)
    bits = np.packbits(mask, axis=-1, bitorder="little")
    shape = np.array([[n], [k]], np.int64)
    return {"compressed": values, "bitmask": bits, "shape": shape, "weight_scale": dense["weight_scale"]}


def transform(rng: np.random.Generator, n: int, k: int) -> Tensors:
    q = hb.quantize(rng.standard_normal((n, k)).astype(np.float32), "int4:g32", scale_dtype="float32")
    matrix = (rng.integers(-8, 8, (k, k)) / 8).astype(np.float32)
    return {**LAYOUTS["compressed-tensors"].pack(q, {}), "v_input.weight": matrix}


def quark_int4(rng: np.random.Generator, n: int, k: int) -> Tensors:
    q = hb.quantize(rng.standard_normal((n, k)).astype(np.float32), "uint4:g32", scale_dtype="float32")
    return LAYOUTS["quark"].pack(q, {})


def vllm_experts(rng: np.random.Generator, e: int, n: int, k: int) -> Tensors:
    q = hb.quantize(rng.standard_normal((e, n, k)).astype(np.float32), "mxfp4")
    return {"weight": q.parts["codes"], "weight_scale": q.parts["scales"]}


def linear_group(weights: dict[str, Any], word: str) -> dict[str, Any]:
    """compressed-tensors' config of the feed-forward weights."""
    groups = {"group_0": {"targets": ["re:.*mlp.*"], "weights": weights, "format": word}}
    return {"quant_method": "compressed-tensors", "format": word, "ignore": ["lm_head"], "config_groups": groups}


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
V_INPUT = {"type": "random-matrix", "apply": [{"targets": ["re:.*mlp.*"], "location": "input", "inverse": False}]}
UINT4 = {"dtype": "uint4", "qscheme": "per_group", "group_size": 32, "symmetric": False, "ch_axis": -1}
CASES: dict[str, tuple[Callable[..., Tensors], dict[str, Any]]] = {
    "exl3": (exl3, {"quant_method": "exl3", "bits": 3.0, "head_bits": 6, "codebook": "mcg", "version": "1.0"}),
    "nvfp4-svd": (nvfp4_svd, {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD", "group_size": 16, "ignore": ["lm_head"]}),
    "ct-marlin-24": (marlin_24, linear_group({**INT4, "group_size": 128}, "marlin-24")),
    "ct-sparse-24": (
        sparse_24,
        linear_group({"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}, "float-quantized")
        | {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
    ),
    "ct-transform": (
        transform,
        linear_group({**INT4, "group_size": 32}, "pack-quantized") | {"transform_config": {"config_groups": {"v": V_INPUT}}},
    ),
    "quark-int4": (
        quark_int4,
        {"quant_method": "quark", "global_quant_config": {"weight": UINT4}, "exclude": ["lm_head", "*self_attn*"],
         "export": {"pack_method": "reorder", "weight_format": "real_quantized"}},
    ),
    "vllm-experts": (vllm_experts, {"quant_method": "mxfp4"}),
}  # fmt: skip
"""Name -> the tensors of a weight (n, k) or of a stack (e, n, k), and the quantization config."""
FUSED = {"gate_up_proj": "w13", "down_proj": "w2"}
"""Projection of the model's experts -> vLLM's name of it."""


def architecture(name: str) -> str:
    """Of the checkpoint of a case."""
    return "qwen3_moe" if name == "vllm-experts" else "llama"


def write_case(name: str, path: Path) -> Path:
    """The whole checkpoint, in one file."""
    rng = np.random.default_rng(0)
    make, config = CASES[name]
    model = dense_model(architecture(name), **SIZES)
    state = {key: np.ascontiguousarray(t.numpy()) for key, t in model.state_dict().items()}
    if architecture(name) == "llama":
        for key in [key for key in state if ".mlp." in key]:
            state |= under(key.removesuffix(".weight"), make(rng, *state.pop(key).shape))
    for key in [key for key in state if ".experts." in key]:
        module, _, projection = key.rpartition(".")
        state |= {f"{module}.{FUSED[projection]}_{s}": t for s, t in make(rng, *state.pop(key).shape).items()}
    own = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    whole = {**json.loads(json.dumps(own)), "quantization_config": config}
    return folder(path, {"model.safetensors": state}, whole)


ROWS = [
    *[("llama", p) for p in ("gptq", "gptq3", "awq", "ct-int4", "ct-nvfp4", "ct-mxfp4", "modelopt", "mlx", "mlx-mxfp4",
      "bitsandbytes", "hqq", "torchao", "onnx", "metal-marlin", "metal-marlin-fp4", "fp8", "halfbyte")],
    ("gpt_oss", "gpt-oss"), ("mixtral", "gptq"), ("qwen2", "gptq"),
    *[(architecture(name), name) for name in CASES],
]  # fmt: skip
"""(architecture, producer) of every checkpoint of the matrix."""

OTHER_FILES: dict[tuple[str, str, str], str] = {
    ("metal-marlin-fp4", "drop", "codec"): "buffers without the key are int4, as docs of the layout say",
    ("gptq3", "drop", "checkpoint_format"): "AutoGPTQ's files without the key are v1: nothing in the headers says otherwise",
}
"""(producer, kind, key) -> why the changed file is a valid one of another meaning, whose values
`test_a_file_of_another_meaning_has_the_values_that_it_states` checks.
"""


def checkpoint(tmp_path: Path, arch: str, producer: str) -> Path:
    """The whole checkpoint of a row, in `whole` below the folder."""
    if producer in CASES:
        return write_case(producer, tmp_path / "whole")
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if arch == "gpt_oss":
        changes["layer_types"] = ["full_attention"]
    return write_tiny(tmp_path / "whole", arch, producer, **changes).folder


def exempt(producer: str, mutation: Mutation) -> bool:
    return mutation.subject == "key" and (producer, mutation.kind, mutation.target[-1]) in OTHER_FILES
