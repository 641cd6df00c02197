"""Tiny random models of many architectures, their matrices packed by our layouts into a checkpoint
folder, beside the dense model that has the same values.

    tiny = write_tiny(folder, "mixtral", "gptq")        tiny.dense: the transformers model with every packed value dequantized
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import halfbyte as hb
import torch
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.safetensors.native_layout import OwnLayout
from halfbyte.layouts import LAYOUTS
from halfbyte.tensor.qtensor import QTensor
from support.tiny_configs import CONFIGS, EXPERTS, FEED, HIDDEN, LAYERS, VOCAB, dense_model
from torch import nn

__all__ = ["CONFIGS", "EXPERTS", "FEED", "HIDDEN", "LAYERS", "VOCAB", "dense_model"]


class Producer(NamedTuple):
    """How one producer's checkpoint is written: layout, codec, what `quantize` is given, its
    quantization config.
    """

    layout: str
    codec: str
    options: Mapping[str, Any]
    config: dict[str, Any]
    embedding: bool = False


PRODUCERS: dict[str, Producer] = {
    "gptq": Producer("gptq", "int4:g32", {"scale_dtype": "float16"},
                     {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "gptq3": Producer("gptq", "uint3:g32", {"scale_dtype": "float16"},
                      {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": False, "desc_act": False,
                       "checkpoint_format": "gptq_v2"}),
    "awq": Producer("awq-gemm", "uint4:g32", {"scale_dtype": "float16"},
                    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "ct-int4": Producer("compressed-tensors", "int4:g32", {"scale_dtype": "bfloat16"},
                        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                             "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}}}),
    "ct-nvfp4": Producer("compressed-tensors", "nvfp4", {"policy": "compressed-tensors"},
                         {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
                          "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                              "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
                              "group_size": 16}}}}),
    "ct-mxfp4": Producer("compressed-tensors", "mxfp4", {"policy": "compressed-tensors"},
                         {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
                          "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                              "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}}}}),
    "modelopt": Producer("modelopt", "nvfp4", {"policy": "modelopt"},
                         {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}),
    "mlx": Producer("mlx", "affine4:g32", {"scale_dtype": "bfloat16"}, {"group_size": 32, "bits": 4, "mode": "affine"}, True),
    "mlx-mxfp4": Producer("mlx", "mxfp4", {"policy": "mlx"}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}, True),
    "gpt-oss": Producer("gpt-oss", "mxfp4", {}, {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}),
    "bitsandbytes": Producer("bitsandbytes", "nf4:g64", {}, {"quant_method": "bitsandbytes", "load_in_4bit": True,
                                                              "bnb_4bit_quant_type": "nf4"}),
    "hqq": Producer("hqq", "hqq4:g64", {"policy": "hqq"}, {"quant_method": "hqq", "quant_config": {"weight_quant_params": {
        "nbits": 4, "group_size": 64, "axis": 1}}, "skip_modules": ["lm_head"]}),
    "torchao": Producer("torchao", "nvfp4", {"policy": "torchao"}, {"quant_method": "torchao", "quant_type": {
        "default": {"_type": "NVFP4WeightOnlyConfig", "_data": {}}}}),
    "onnx": Producer("onnx", "uint4:g32", {"scale_dtype": "float32"}, {"quant_method": "onnx", "bits": 4, "block_size": 32}),
    "metal-marlin": Producer("metal-marlin", "uint4:g32", {"scale_dtype": "float16"},
                             {"quant_method": "metal-marlin", "codec": "uint4", "group_size": 32}),
    "metal-marlin-fp4": Producer("metal-marlin", "fp4:g32", {},
                                 {"quant_method": "metal-marlin", "codec": "fp4", "group_size": 32}),
    "fp8": Producer("fp8", "fp8_e4m3:g32", {"rows": 32}, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "halfbyte": Producer("halfbyte", "int6:g32", {}, {}, True),
}  # fmt: skip


@dataclass
class Tiny:
    """What was written: the folder, its dense twin, and every packed weight by the key it was
    stored under.
    """

    folder: Path
    dense: Any
    packed: dict[str, QTensor]


Skip = Callable[[str], bool]


def expert_names(arch: str) -> tuple[str, dict[str, str]]:
    """How a checkpoint of the architecture names the module of experts and the projections of one."""
    if arch == "mixtral":
        return "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    return "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def write_tiny(
    folder: Path,
    arch: str,
    producer: str | Producer,
    *,
    skip: Skip = lambda name: False,
    codecs: Mapping[str, str] | None = None,
    change_config: Callable[[dict[str, Any]], None] = lambda config: None,
    edit: Callable[[dict[str, Any]], None] = lambda tensors: None,
    **changes: Any,
) -> Tiny:
    """Writes the checkpoint.

    skip           names of modules that stay dense
    codecs         a codec for some modules, by name, instead of the producer's
    change_config  changes config.json before it is written
    edit           changes the tensors before they are written
    """
    how = PRODUCERS[producer] if isinstance(producer, str) else producer
    model = dense_model(arch, **changes)
    packed: dict[str, QTensor] = {}
    tensors: dict[str, Any] = {}

    def pack(name: str, w: torch.Tensor) -> torch.Tensor:
        """The value `w` has after packing; its packed form goes into the file."""
        codec = (codecs or {}).get(name, how.codec)
        q = packed[name] = hb.quantize(w.detach().numpy(), codec, **how.options)
        layout = OwnLayout() if how.layout == "halfbyte" else LAYOUTS[how.layout]
        stated = {k: v for k, v in how.config.items() if k in ("checkpoint_format", "format")}
        for suffix, array in layout.pack(q, layout.config(q) | stated).items():
            tensors[f"{name}{layout.separator}{suffix}"] = array
        return torch.from_numpy(q.dequantize("float32"))

    tied = bool(model.config.tie_word_embeddings)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.Embedding) and not skip(name):
            heads = "lm_head" in name or "embed_tokens" in name
            wanted = how.embedding if heads else how.layout != "gpt-oss"
            if wanted and not (tied and "lm_head" in name):
                module.weight.data = pack(name, module.weight)
        elif hasattr(module, "gate_up_proj") and module.down_proj.__class__ is nn.Parameter and not skip(name):
            _pack_experts(arch, name, module, how, pack)
    if tied:
        model.tie_weights()
    renamed = (lambda n: n.replace(".mlp.gate.", ".block_sparse_moe.gate.")) if arch == "mixtral" else (lambda n: n)
    taken = {f"{name}.weight" for name in packed} | {n for n in model.state_dict() if ".experts." in n and "bias" not in n}
    for name, value in model.state_dict().items():
        if (name not in taken or skip(name.rpartition(".")[0])) and not (tied and name.startswith("lm_head")):
            tensors[renamed(name)] = value.numpy()
    edit(tensors)
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    if how.config:
        config["quantization" if how.layout == "mlx" else "quantization_config"] = json.loads(json.dumps(how.config))
    change_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    metadata = {"format": "halfbyte", "version": "1"} if how.layout == "halfbyte" else {"format": "pt"}
    with SafetensorsWriter(folder / "model.safetensors", metadata) as out:
        for name, array in tensors.items():
            out.add(name, np.asarray(array))
    return Tiny(folder, model, packed)


def _pack_experts(arch: str, name: str, module: Any, how: Producer, pack: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Experts one by one, or gpt-oss's as a stack, packed; the module's parameters get the packed
    values.
    """
    up, down = module.gate_up_proj.data, module.down_proj.data
    if arch == "gpt_oss":
        for leaf, value in (("gate_up_proj", up), ("down_proj", down)):
            rows = pack(f"{name}.{leaf}", value.transpose(1, 2).contiguous())
            getattr(module, leaf).data = rows.transpose(1, 2).contiguous()
        return
    parent, words = expert_names(arch)
    base = name.replace(".mlp.experts", f".{parent}.experts")
    half = up.shape[1] // 2
    for e in range(up.shape[0]):
        up[e, :half] = pack(f"{base}.{e}.{words['gate']}", up[e, :half].contiguous())
        up[e, half:] = pack(f"{base}.{e}.{words['up']}", up[e, half:].contiguous())
        down[e] = pack(f"{base}.{e}.{words['down']}", down[e])


def ids(count: int = 12, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """Token ids."""
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB, (batch, count)))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=tokens).logits


BOUND = 2e-5
"""Largest difference of two logits, over the largest of all, between sums of float32 products taken
in two orders.
"""


def agree(ours: torch.Tensor, dense: torch.Tensor) -> bool:
    """True when logits differ by rounding alone."""
    scale = float(dense.abs().max())
    return ours.shape == dense.shape and bool(scale > 1e-3) and bool(((ours - dense).abs() <= BOUND * scale).all())


MATRIX = [("llama", p) for p in PRODUCERS if p != "gpt-oss"] + [
    ("mistral", "awq"), ("qwen3", "mlx"), ("qwen3", "ct-int4"), ("qwen2", "gptq"), ("gemma3_text", "mlx"),
    ("gemma3_text", "ct-int4"), ("gemma3_text", "halfbyte"), ("phi3", "ct-mxfp4"), ("phi3", "gptq"),
    ("mixtral", "gptq"), ("mixtral", "awq"), ("mixtral", "mlx"),
    ("qwen3_moe", "ct-nvfp4"), ("qwen3_moe", "modelopt"), ("qwen3_moe", "bitsandbytes"), ("gpt_oss", "gpt-oss"),
    ("gpt_oss", "halfbyte"),
]  # fmt: skip
"""(architecture, producer): every producer with a llama, and the architectures that differ."""
