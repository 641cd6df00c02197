"""A GGUF file as a dense transformers model, by the gguf package's reader, decoders and map of
names: nothing of the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

import torch
from transformers import AutoModelForCausalLM

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "phi3": "phi3", "gpt_oss": "gpt-oss",
}  # fmt: skip


def gguf_twin(path: Path, config: Any) -> Any:
    """The float32 model of `config` with the file's values."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: np.asarray(dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}
    arch = ARCHITECTURES[config.model_type]
    word = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(word, config.num_hidden_layers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {}
    for name, parameter in model.state_dict().items():
        if ".experts." in name:
            array = experts(tensors, name, config.model_type == "gpt_oss")
        else:
            key = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if key is None:  # names of transformers 5 that llama.cpp knows by those of its checkpoints
                key = names.get_name(name.replace(".mlp.gate", ".block_sparse_moe.gate"), try_suffixes=(".weight", ".bias"))
            if name.endswith("self_attn.sinks"):
                key = f"blk.{name.split('.')[2]}.attn_sinks.weight"
            if key == "output.weight" and key not in tensors:
                key = "token_embd.weight"
            array = tensors[key]
            if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                # llama.cpp turns neighbours, transformers the halves of a head.
                array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            if arch == "gemma3" and name.endswith("norm.weight"):
                array = array - 1
        state[name] = torch.from_numpy(np.array(array)).reshape(parameter.shape)
    model.load_state_dict(state, strict=True)
    return model


def experts(tensors: dict[str, np.ndarray], name: str, gpt_oss: bool) -> np.ndarray:
    """One of transformers' stacks: gate's rows, then up's; in turns, and each matrix (k, n), for
    gpt-oss.
    """
    layer, leaf = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    if "down_proj" in name:
        array = tensors[f"blk.{layer}.ffn_down_exps.{leaf}"]
    else:
        gate, up = (tensors[f"blk.{layer}.ffn_{w}_exps.{leaf}"] for w in ("gate", "up"))
        array = np.concatenate([gate, up], axis=1)
        if gpt_oss:
            array = np.stack([gate, up], axis=2).reshape(array.shape)
    return array.swapaxes(1, 2) if gpt_oss and leaf == "weight" else array
