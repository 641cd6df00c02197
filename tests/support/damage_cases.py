"""Checkpoints of layouts and producers that halfbyte reads and the tiny models of tiny_models.py
are not, for the damage matrix: a llama of one layer whose feed-forward weights are packed, or a
qwen3-moe or gpt-oss whose experts are.

    folder = write_case("exl3", path)

Codes are random: what a damaged file must give is what the whole file gives, which the layouts' own
tests compare with references.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
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


def packed(layout: str, codec: str, **options: Any) -> Callable[..., Tensors]:
    """What makes the tensors of a layout of a random weight or stack, rounded to a codec."""

    def make(rng: np.random.Generator, *shape: int) -> Tensors:
        w = rng.standard_normal(shape).astype(np.float32)
        w[..., 0, 0] = 8  # the largest of each matrix, since a stack may have one factor for all
        q = hb.quantize(w, codec, **options)
        return LAYOUTS[layout].pack(q, LAYOUTS[layout].config(q))

    return make


def e8m0_tiles(rng: np.random.Generator, n: int, k: int) -> Tensors:
    """DeepSeek-V4's scales: powers of two under `.scale`."""
    codes = rng.integers(0, 0x7F, (n, k)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = np.ldexp(np.float32(1), rng.integers(-9, -3, (n // 32, k // 32)))
    return {"weight": codes, "scale": scales.astype(ml_dtypes.float8_e8m0fnu)}


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
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "symmetric": None, "ch_axis": -1}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "modules_to_not_convert": ["self_attn", "lm_head"]}
ATTENTION = {f"model.layers.0.self_attn.{p}_proj": {"bits": 16} for p in "qkvo"}
AUTOROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "data_type": "int",
    "iters": 200,
    "extra_config": {**ATTENTION, ".*lm_head": {"bits": 16}},
}


def quark(weight: dict[str, Any], **export: Any) -> dict[str, Any]:
    """Quark's config of the feed-forward weights."""
    words = {"pack_method": "reorder", "weight_format": "real_quantized", **export}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "exclude": ["lm_head", "*self_attn*"],
        "export": words,
    }


def fp8(**words: Any) -> dict[str, Any]:
    """A config of `quant_method: fp8`."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", "self_attn"], **words}


def modelopt(algorithm: str, **words: Any) -> dict[str, Any]:
    """ModelOpt's config of the feed-forward weights."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*self_attn*"], **words}


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    """torchao's config of every module but the head."""
    return {
        "quant_method": "torchao",
        "modules_to_not_convert": ["lm_head", "self_attn"],
        "quant_type": {"default": {"_type": kind, "_data": data}},
    }


class Case(NamedTuple):
    """make: the tensors of a weight (n, k) or of a stack (e, n, k); config: the quantization
    config.
    """

    make: Callable[..., Tensors]
    config: dict[str, Any]
    arch: str = "llama"


F16, F32 = {"scale_dtype": "float16"}, {"scale_dtype": "float32"}
CASES: dict[str, Case] = {
    "exl3": Case(exl3, {"quant_method": "exl3", "bits": 3.0, "head_bits": 6, "codebook": "mcg", "version": "1.0"}),
    "nvfp4-svd": Case(nvfp4_svd, modelopt("NVFP4_SVD", group_size=16)),
    "ct-marlin-24": Case(marlin_24, linear_group({**INT4, "group_size": 128}, "marlin-24")),
    "ct-sparse-24": Case(
        sparse_24,
        linear_group({"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}, "float-quantized")
        | {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
    ),
    "ct-transform": Case(
        transform,
        linear_group({**INT4, "group_size": 32}, "pack-quantized") | {"transform_config": {"config_groups": {"v": V_INPUT}}},
    ),
    "ct-uint4": Case(packed("compressed-tensors", "uint4:g32", **F32),
                     linear_group({**INT4, "symmetric": False, "group_size": 32}, "pack-quantized")),
    "ct-int8": Case(packed("compressed-tensors", "int8:channel", **F32),
                    linear_group({"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, "int-quantized")),
    "ct-stack": Case(packed("compressed-tensors-stack", "int4:g32", **F32),
                     linear_group({**INT4, "group_size": 32}, "pack-quantized"), "qwen3_moe"),
    "quark-int4": Case(quark_int4, quark(UINT4)),
    "quark-mxfp4": Case(packed("quark", "mxfp4"), quark(FP4)),
    "quark-fp8": Case(packed("quark", "fp8_e4m3:channel", **F32),
                      quark({"dtype": "fp8_e4m3", "qscheme": "per_channel", "symmetric": True, "ch_axis": 0})),
    "awq-gemv": Case(packed("awq-gemv", "uint4:g64", **F16), {**AWQ, "version": "gemv"}),
    "awq-gemv-fast": Case(packed("awq-gemv_fast", "uint4:g64", **F16), {**AWQ, "version": "gemv_fast"}),
    "awq-marlin": Case(packed("awq-marlin", "int4:g128", **F16),
                       {**AWQ, "group_size": 128, "zero_point": False, "version": "marlin"}),
    "autoround-gptq": Case(packed("gptq", "uint4:g32", **F16), {**AUTOROUND, "packing_format": "auto_round:auto_gptq"}),
    "autoround-awq": Case(packed("awq-gemm", "uint4:g32", **F16), {**AUTOROUND, "packing_format": "auto_round:auto_awq"}),
    "autoround-fp8": Case(packed("fp8", "fp8_e4m3:channel", **F32),
                          {**AUTOROUND, "bits": 8, "group_size": -1, "sym": True, "data_type": "fp",
                           "packing_format": "auto_round:fp8_static"}),
    "fp8-one-scale": Case(packed("fp8", "fp8_e4m3", group_size=-1, rows=-1, scale_dtype="bfloat16"), fp8(weight_block_size=None)),
    "fp8-static": Case(packed("fp8", "fp8_e4m3:channel", **F32), fp8(activation_scheme="static")),
    "deepseek-v4": Case(e8m0_tiles, fp8(weight_block_size=[32, 32], scale_fmt="ue8m0", fmt="e4m3")),
    "deepseek-v4-experts": Case(packed("fp8", "mxfp4"), fp8(weight_block_size=[32, 32], scale_fmt="ue8m0", fmt="e4m3")),
    "w4afp8": Case(packed("fp8", "int4:g128", scale_dtype="bfloat16"),
                   fp8(quant_method="w4afp8", weight_block_size=[128, 128], group_size=128)),
    "modelopt-fp8": Case(packed("modelopt", "fp8_e4m3", group_size=-1, rows=-1, **F32),
                         modelopt("FP8")),
    "modelopt-int4": Case(packed("modelopt", "int4:g128", **F32),
                          modelopt("W4A16_AWQ", group_size=128, pre_quant_scale=False)),
    "modelopt-stack": Case(packed("modelopt-stack", "nvfp4", policy="modelopt"),
                           modelopt("NVFP4", group_size=16), "gpt_oss"),
    "bitsandbytes-int8": Case(packed("bitsandbytes", "bnb_int8"),
                              {"quant_method": "bitsandbytes", "load_in_8bit": True,
                               "llm_int8_skip_modules": ["lm_head", "self_attn"]}),
    "torchao-int4": Case(packed("torchao", "uint4:g32", scale_dtype="bfloat16"),
                         torchao("IntxWeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "int4"})),
    "torchao-float8": Case(packed("torchao", "fp8_e4m3:channel", **F32), torchao("Float8WeightOnlyConfig")),
    "mlx-nvfp4": Case(packed("mlx", "nvfp4", policy="mlx"), {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
    "vllm-experts": Case(vllm_experts, {"quant_method": "mxfp4"}, "qwen3_moe"),
}  # fmt: skip
"""Name -> how its checkpoint is made."""
FUSED = {"gate_up_proj": "w13", "down_proj": "w2"}
"""Projection of the model's experts -> vLLM's name of it."""


def write_case(name: str, path: Path) -> Path:
    """The whole checkpoint, in one file."""
    rng = np.random.default_rng(0)
    make, config, arch = CASES[name]
    more = {"gpt_oss": {"layer_types": ["full_attention"]}, "qwen3_moe": {"moe_intermediate_size": 96}}
    model = dense_model(arch, **SIZES, **more.get(arch, {}))
    state = {key: np.ascontiguousarray(t.numpy()) for key, t in model.state_dict().items()}
    if arch == "llama":
        for key in [key for key in state if ".mlp." in key]:
            state |= under(key.removesuffix(".weight"), make(rng, *state.pop(key).shape))
    for key in [key for key in state if ".experts." in key and not key.endswith("bias")]:
        module, _, projection = key.rpartition(".")
        e, n, k = state.pop(key).shape
        if arch == "gpt_oss":  # its parameters are (e, k, n)
            n, k = k, n
        word = FUSED[projection] if name == "vllm-experts" else projection
        state |= {f"{module}.{word}{'_' if s else ''}{s}": t for s, t in make(rng, e, n, k).items()}
    own = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    where = "quantization" if "mode" in config else "quantization_config"  # MLX's
    return folder(path, {"model.safetensors": state}, {**json.loads(json.dumps(own)), where: config})


ROWS = [
    *[("llama", p) for p in ("gptq", "gptq3", "awq", "ct-int4", "ct-nvfp4", "ct-mxfp4", "modelopt", "mlx", "mlx-mxfp4",
      "bitsandbytes", "hqq", "torchao", "onnx", "metal-marlin", "metal-marlin-fp4", "fp8", "halfbyte")],
    ("gpt_oss", "gpt-oss"), ("mixtral", "gptq"), ("qwen2", "gptq"),
    *[(case.arch, name) for name, case in CASES.items()],
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
