"""Checkpoints of layouts that halfbyte reads and conversions do not write, for the damage matrix: a
llama of one layer whose feed-forward weights are packed.

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
from support.safetensors_bytes import folder, under
from support.tiny_configs import dense_model

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


def linear_group(weights: dict[str, Any], word: str) -> dict[str, Any]:
    """compressed-tensors' config of the feed-forward weights."""
    groups = {"group_0": {"targets": ["re:.*mlp.*"], "weights": weights, "format": word}}
    return {"quant_method": "compressed-tensors", "format": word, "ignore": ["lm_head"], "config_groups": groups}


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
V_INPUT = {"type": "random-matrix", "apply": [{"targets": ["re:.*mlp.*"], "location": "input", "inverse": False}]}
UINT4 = {"dtype": "uint4", "qscheme": "per_group", "group_size": 32, "symmetric": False, "ch_axis": -1}
CASES: dict[str, tuple[Callable[[np.random.Generator, int, int], Tensors], dict[str, Any]]] = {
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
}  # fmt: skip
"""Name -> the tensors of a weight (n, k), and the quantization config."""


def write_case(name: str, path: Path) -> Path:
    """The whole checkpoint, in one file."""
    rng = np.random.default_rng(0)
    make, config = CASES[name]
    model = dense_model("llama", **SIZES)
    state = {key: np.ascontiguousarray(t.numpy()) for key, t in model.state_dict().items()}
    for key in [key for key in state if ".mlp." in key]:
        state |= under(key.removesuffix(".weight"), make(rng, *state.pop(key).shape))
    own = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    whole = {**json.loads(json.dumps(own)), "quantization_config": config}
    return folder(path, {"model.safetensors": state}, whole)
