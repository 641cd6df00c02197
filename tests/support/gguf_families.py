"""Small random models of every architecture whose tensors are named by a table, and GGUF files of
them.

The names are the inverse of the library's own table; that they are llama.cpp's is shown where
llama.cpp itself loads these files and gives the same logits (test_gguf_families.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import torch
from halfbyte.gguf_models.architectures import ARCHITECTURES, EXPERTS, PARAMETER
from support.gguf_writer import F32, GGUF, Tensor
from transformers import AutoConfig, AutoModelForCausalLM

HEADS, KV, VOCABULARY = 4, 2, 48
IDS = [1, 5, 9, 13, 40, 22, 7, 7, 30, 11, 3, 46]
EXPERT_KEYS = [("expert_count", "uint32", 4), ("expert_used_count", "uint32", 2)]
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SIGMOID = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "sliding_window": None, "use_qk_norm": True,
}  # fmt: skip
SIGMOID_KEYS = [
    *EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("expert_shared_count", "uint32", 1),
    ("leading_dense_block_count", "uint32", 1), ("expert_weights_scale", "float32", 1.5), ("expert_weights_norm", "bool", 1),
    ("expert_gating_func", "uint32", 2),
]  # fmt: skip
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.2}
GRANITE_KEYS = [
    ("embedding_scale", "float32", 3.0), ("residual_scale", "float32", 0.7), ("logit_scale", "float32", 2.0),
    ("attention.scale", "float32", 0.2),
]  # fmt: skip
MROPE = [("rope.dimension_sections", "array[int32]", [4, 2, 2, 0])]
HALF = {"partial_rotary_factor": 0.5}

# architecture -> (changes of the configuration, keys of the file)
FAMILIES: dict[str, tuple[dict[str, Any], list[tuple[str, str, Any]]]] = {
    "arcee": (UNTIED, []),
    "baichuan": (UNTIED | {"num_key_value_heads": HEADS, "num_hidden_layers": 32}, []),
    "cohere2": (
        TIED | {"num_hidden_layers": 4, "logit_scale": 0.25, "sliding_window": 4}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
        [("logit_scale", "float32", 0.25), ("attention.sliding_window", "uint32", 4)],
    ),
    "command-r": (TIED | {"logit_scale": 0.25}, [("logit_scale", "float32", 0.25)]),
    "dots1": (UNTIED | SIGMOID | {"num_key_value_heads": HEADS}, SIGMOID_KEYS),
    "ernie4_5": (TIED, []),
    "exaone4": (UNTIED | {"sliding_window": None, "layer_types": ["full_attention"] * 2}, []),
    "gemma": (TIED, []),
    "glm4": (UNTIED | {"attention_bias": True} | HALF, []),
    "glm4moe": (UNTIED | SIGMOID | HALF, SIGMOID_KEYS),
    "gpt2": (TIED | {"num_key_value_heads": HEADS}, []),
    "gptneox": (UNTIED | {"num_key_value_heads": HEADS} | HALF, [("use_parallel_residual", "bool", 1)]),
    "granite": (UNTIED | GRANITE, GRANITE_KEYS),
    "granitemoe": (UNTIED | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}, GRANITE_KEYS + EXPERT_KEYS),
    "hunyuan-dense": (TIED, []),
    "hunyuan-moe": (
        UNTIED | {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1},
        [*EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 96), ("expert_shared_feed_forward_length", "uint32", 96)],
    ),
    "internlm2": (UNTIED, []),
    "minicpm": (TIED | GRANITE | {"attention_multiplier": None}, GRANITE_KEYS[:3]),
    "nemotron": (UNTIED | HALF, []),
    "olmo2": (UNTIED, []),
    "olmoe": (UNTIED | {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": HEADS}, EXPERT_KEYS),
    "phi2": (UNTIED | HALF, []),
    "qwen2moe": (
        UNTIED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
        | {"mlp_only_layers": [], "norm_topk_prob": False},
        [*EXPERT_KEYS, ("expert_feed_forward_length", "uint32", 32), ("expert_shared_feed_forward_length", "uint32", 64)],
    ),
    "qwen2vl": (TIED, MROPE),
    "qwen3vl": (TIED, MROPE),
    "seed_oss": (UNTIED | {"attention_bias": True, "attention_out_bias": False}, []),
    "smollm3": (TIED | {"num_hidden_layers": 4, "no_rope_layer_interval": 4}, []),
    "stablelm": (UNTIED | HALF, []),
    "starcoder2": (TIED, []),
    "xverse": (UNTIED, []),
}  # fmt: skip


def family_model(arch: str, hidden: int = 64) -> Any:
    """The transformers model itself, random. `hidden` is the width; feed-forward layers of 96
    become as wide for 256.
    """
    changes, _ = FAMILIES[arch]
    head = hidden // HEADS
    base = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 96 if hidden == 64 else hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": head, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 5e4}
    changes = {k: head**-0.5 if k == "attention_multiplier" and v is None else v for k, v in changes.items()}
    if "partial_rotary_factor" in changes:
        rope["partial_rotary_factor"] = changes["partial_rotary_factor"]
    if hidden != 64 and "moe_intermediate_size" in changes:
        changes |= {"moe_intermediate_size": hidden}
        changes |= {"shared_expert_intermediate_size": hidden} if "shared_expert_intermediate_size" in changes else {}
    if arch == "gpt2":
        changes |= {"n_inner": base["intermediate_size"]}
    config = AutoConfig.for_model(ARCHITECTURES[arch].model_type, **(base | {"rope_parameters": rope} | changes))
    torch.manual_seed(sum(map(ord, arch)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, p in named_tensors(model):
            scale = 0.3 if p.ndim == 1 else 1.0 / p.shape[-1] ** 0.5
            p.copy_(torch.randn_like(p) * scale + (1.0 if "norm" in key and key.endswith("weight") else 0.0))
            if ARCHITECTURES[arch].norm_offset and "norm" in key and key.endswith("weight"):
                p.sub_(1.0)
    return model


def named_tensors(model: Any) -> list[tuple[str, Any]]:
    """Parameters, and the buffers that a file has."""
    extra = [(k, b) for k, b in model.named_buffers() if k.endswith("e_score_correction_bias")]
    return [*model.named_parameters(), *extra]


def gguf_tensors(arch: str, model: Any) -> dict[str, np.ndarray]:
    """The model's tensors under the file's names, as llama.cpp's converter orders their rows."""
    a = ARCHITECTURES[arch]
    within = {path: stem for stem, path in a.names.items()}
    top = {path: stem for stem, path in a.top.items()}
    out: dict[str, np.ndarray] = {}
    transposed = {n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    for key, p in named_tensors(model):
        x = p.detach().float().numpy().copy()
        path, _, leaf = key.rpartition(".")
        if path in transposed and leaf == "weight":
            x = x.T
        if a.norm_offset and path.endswith("norm") and leaf == "weight":
            x = x + np.float32(1)
        if not path.startswith(f"{a.layers}."):
            out[f"{top[path]}.{leaf}"] = x
            continue
        number, _, inner = path.removeprefix(f"{a.layers}.").partition(".")
        prefix = f"blk.{number}."
        if leaf in ("gate_up_proj", "down_proj"):
            parts = {"gate": x[:, : x.shape[1] // 2], "up": x[:, x.shape[1] // 2 :]} if leaf == "gate_up_proj" else {"down": x}
            for word, part in parts.items():
                out[f"{prefix}{within[f'{inner}{EXPERTS}{word}_proj']}.weight"] = np.ascontiguousarray(part)
            continue
        if f"{inner}{PARAMETER}{leaf}" in within:
            out[f"{prefix}{within[f'{inner}{PARAMETER}{leaf}']}.bias"] = x
            continue
        stem = within[inner]
        if a.interleaved and stem in ("attn_q", "attn_k"):
            head = model.config.hidden_size // HEADS
            x = x.reshape(-1, 2, head // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if a.fused_heads and stem == "attn_qkv":
            x = x.reshape(HEADS, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        if stem == "ffn_gate_inp_shexp":
            x = x[0]
        out[f"{prefix}{stem}.{leaf}"] = x
    return out


def write_family(path: Path, arch: str, model: Any) -> Path:
    """The model as a float32 file."""
    config, a = model.config, ARCHITECTURES[arch]
    head = config.hidden_size // HEADS
    tensors = gguf_tensors(arch, model)
    ff = next((v.shape[-2] for k, v in tensors.items() if k.endswith("blk.0.ffn_up.weight")), config.hidden_size)
    if arch in ("glm4",):
        ff //= 2
    rotated = int(head * FAMILIES[arch][0].get("partial_rotary_factor", 1.0))
    sizes = {
        "context_length": 256, "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or ff, "attention.head_count": HEADS,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", HEADS), "attention.key_length": head,
        "attention.value_length": head, "rope.dimension_count": rotated,
    }  # fmt: skip
    keys = [(k, kind, v) for k, kind, v in FAMILIES[arch][1]]
    if config.hidden_size != 64:
        width = config.hidden_size
        keys = [(k, kind, width if k.endswith("feed_forward_length") else v) for k, kind, v in keys]
        keys = [(k, kind, [head // 4, head // 8, head // 8, 0] if k.endswith("sections") else v) for k, kind, v in keys]
    pairs: list[tuple[str, str, Any]] = [
        ("general.architecture", "string", arch),
        *((f"{arch}.{k}", "uint32", v) for k, v in sizes.items()),
        (f"{arch}.{a.eps[0]}", "float32", 1e-5),
        (f"{arch}.rope.freq_base", "float32", 5e4),
        *((f"{arch}.{k}", kind, v) for k, kind, v in keys),
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.tokens", "array[string]", ["<pad>", "<bos>", "<eos>", *map(chr, range(97, 97 + VOCABULARY - 3))]),
        ("tokenizer.ggml.scores", "array[float32]", [-float(i) for i in range(VOCABULARY)]),
        ("tokenizer.ggml.token_type", "array[int32]", [3, 3, 3] + [1] * (VOCABULARY - 3)),
        ("tokenizer.ggml.bos_token_id", "uint32", 1),
        ("tokenizer.ggml.eos_token_id", "uint32", 2),
    ]
    entries = [
        Tensor(k, tuple(reversed(v.shape)), F32, np.ascontiguousarray(v, np.float32).tobytes()) for k, v in tensors.items()
    ]
    path.write_bytes(GGUF(pairs=pairs, tensors=entries).bytes())
    return path
