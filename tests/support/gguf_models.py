"""Small random models of transformers, and GGUF files of them as llama.cpp's converter writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import torch
from support.gguf_writer import BF16, F16, F32, GGUF, Q8_0, Tensor
from transformers import AutoConfig, AutoModelForCausalLM

HEADS, KV, HEAD, HIDDEN, VOCABULARY = 4, 2, 32, 64, 48
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e4,
}
GEMMA3_LAYERS = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# name -> (GGUF architecture, transformers model type, configuration, keys of the file)
MODELS: dict[str, tuple[str, str, dict[str, Any], list[tuple[str, str, Any]]]] = {
    "llama": ("llama", "llama", {"num_hidden_layers": 2, "tie_word_embeddings": False}, []),
    "llama-tied-bias": ("llama", "llama", {"num_hidden_layers": 1, "tie_word_embeddings": True, "attention_bias": True}, []),
    "llama-3": ("llama", "llama", {"num_hidden_layers": 2, "tie_word_embeddings": False, "rope_parameters": LLAMA3}, []),
    "qwen2": ("qwen2", "qwen2", {"num_hidden_layers": 2, "tie_word_embeddings": True}, []),
    "qwen2-yarn": (
        "qwen2",
        "qwen2",
        {"num_hidden_layers": 2, "tie_word_embeddings": False, "rope_parameters": YARN},
        [
            ("rope.scaling.type", "string", "yarn"),
            ("rope.scaling.factor", "float32", 4.0),
            ("rope.scaling.original_context_length", "uint32", 64),
        ],
    ),
    "qwen3": ("qwen3", "qwen3", {"num_hidden_layers": 2, "tie_word_embeddings": False}, []),
    "mixtral": (
        "llama",
        "mixtral",
        {
            "num_hidden_layers": 2,
            "tie_word_embeddings": False,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        [("expert_count", "uint32", 4), ("expert_used_count", "uint32", 2)],
    ),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        {
            "num_hidden_layers": 2,
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
        [("expert_count", "uint32", 4), ("expert_used_count", "uint32", 2), ("expert_feed_forward_length", "uint32", 32)],
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": YARN | {"truncate": False},
        },
        [
            ("expert_count", "uint32", 4),
            ("expert_used_count", "uint32", 2),
            ("attention.sliding_window", "uint32", 4),
            ("rope.scaling.type", "string", "yarn"),
            ("rope.scaling.factor", "float32", 4.0),
            ("rope.scaling.original_context_length", "uint32", 64),
        ],
    ),
    "phi3": ("phi3", "phi3", {"num_hidden_layers": 2, "tie_word_embeddings": False, "sliding_window": None}, []),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"num_hidden_layers": 3, "tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": HEAD},
        [
            ("attention.sliding_window", "uint32", 4),
            ("attn_logit_softcapping", "float32", 50.0),
            ("final_logit_softcapping", "float32", 30.0),
        ],
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "sliding_window": 4,
            "query_pre_attn_scalar": HEAD,
            "layer_types": GEMMA3_LAYERS,
            "rope_parameters": GEMMA3_ROPE,
        },
        [
            ("attention.sliding_window", "uint32", 4),
            ("rope.scaling.type", "string", "linear"),
            ("rope.scaling.factor", "float32", 8.0),
        ],
    ),
}

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
MOE_NAMES = GGUF_NAMES | {"mlp.gate": "ffn_gate_inp"}
GPT_OSS_NAMES = GGUF_NAMES | {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"}
PHI3_NAMES = GGUF_NAMES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def dense_model(name: str) -> Any:
    """The transformers model itself, random."""
    _, model_type, changes, _ = MODELS[name]
    torch.manual_seed(len(name))
    config = BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}} | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.05) + (0.2 if "norm" in key else 0))
    return model


def gguf_name(key: str, names: dict[str, str]) -> str:
    path, _, leaf = key.rpartition(".")
    if path.startswith("model.layers."):
        _, _, layer, within = path.split(".", 3)
        return f"blk.{layer}.{names[within]}.{leaf}"
    return f"{names[path]}.{leaf}"


def q8_0(x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """ggml's Q8_0 of rows of 32s, and the values it stands for."""
    groups = x.reshape(-1, 32)
    d = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.clip(np.round(groups / d.astype(np.float32)), -127, 127).astype(np.int8)
    raw = np.concatenate([d.view(np.uint8), codes.view(np.uint8)], axis=1)
    return raw.tobytes(), (codes * d.astype(np.float32)).reshape(x.shape)


MIXED = (Q8_0, Q8_0, F16, Q8_0, BF16)


def write(
    path: Path, name: str, model: Any, packed: bool, shards: int = 1, kinds: tuple[int, ...] = MIXED, more: Sequence[Tensor] = ()
) -> Path:
    """`model_file`, and its parts where it has several."""
    file = model_file(name, model, packed, kinds, more)
    path.write_bytes(file.bytes())
    for i in range(shards if shards > 1 else 0):
        split = [("split.no", "uint16", i), ("split.count", "uint16", shards)]
        split.append(("split.tensors.count", "int32", len(file.tensors)))
        part = GGUF(pairs=[*(file.pairs if i == 0 else []), *split], tensors=file.tensors[i::shards])
        path.with_name(f"{path.stem}-{i + 1:05d}-of-{shards:05d}.gguf").write_bytes(part.bytes())
    return path


def model_file(name: str, model: Any, packed: bool, kinds: tuple[int, ...] = MIXED, more: Sequence[Tensor] = ()) -> GGUF:
    """The model as llama.cpp's converter writes it, and the tensors `more`. With `packed`, matrices
    become tensors of `kinds` in turn, here and in `model`.
    """
    arch, _, _, keys = MODELS[name]
    gemma = arch.startswith("gemma")
    config = model.config
    theta = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    pairs: list[tuple[str, str, Any]] = [
        ("general.architecture", "string", arch),
        *(
            (f"{arch}.{k}", "uint32", v)
            for k, v in {
                "context_length": config.max_position_embeddings,
                "embedding_length": config.hidden_size,
                "block_count": config.num_hidden_layers,
                "feed_forward_length": config.intermediate_size,
                "attention.head_count": HEADS,
                "attention.head_count_kv": KV,
                "attention.key_length": HEAD,
                "attention.value_length": HEAD,
            }.items()
        ),
        (f"{arch}.attention.layer_norm_rms_epsilon", "float32", config.rms_norm_eps),
        (f"{arch}.rope.freq_base", "float32", theta),
        *((f"{arch}.{k}", kind, v) for k, kind, v in keys),
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.tokens", "array[string]", ["<pad>", "<bos>", "<eos>", *map(chr, range(97, 97 + VOCABULARY - 3))]),
        ("tokenizer.ggml.scores", "array[float32]", [-float(i) for i in range(VOCABULARY)]),
        ("tokenizer.ggml.token_type", "array[int32]", [3, 3, 3] + [1] * (VOCABULARY - 3)),
        ("tokenizer.ggml.bos_token_id", "uint32", 1),
        ("tokenizer.ggml.eos_token_id", "uint32", 2),
    ]
    tensors = list(more)
    names = {"gpt-oss": GPT_OSS_NAMES, "phi3": PHI3_NAMES}.get(arch, GEMMA_NAMES if gemma else MOE_NAMES)
    for i, (key, p) in enumerate(model.named_parameters()):
        if ".experts." in key or key.endswith("sinks"):
            tensors += experts(key, p, packed, transposed=arch == "gpt-oss")
            continue
        x = p.detach().numpy().copy()
        if arch == "llama" and (".q_proj." in key or ".k_proj." in key):
            x = x.reshape(-1, 2, HEAD // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)  # llama.cpp's order of rotated pairs
        if gemma and "norm" in key:
            x = x + np.float32(1)
            p.data = torch.from_numpy(x - np.float32(1))
        kind, data = F32, x.tobytes()
        if packed and x.ndim == 2 and "ffn_gate_inp" not in gguf_name(key, names):
            kind = kinds[i % len(kinds)]
            data, decoded = encoded(x, kind)
            if arch == "llama" and (".q_proj." in key or ".k_proj." in key):
                decoded = decoded.reshape(-1, HEAD // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
            p.data = torch.from_numpy(decoded)
        tensors.append(Tensor(gguf_name(key, names), tuple(reversed(x.shape)), kind, data))
    if name == "llama-3":
        tensors.append(Tensor("rope_freqs.weight", (HEAD // 2,), F32, rotation_factors(config).tobytes()))
    return GGUF(pairs=pairs, tensors=tensors)


def experts(key: str, p: Any, packed: bool, transposed: bool) -> list[Tensor]:
    """Stacks of experts, gate and up apart; gpt-oss's are (e, k, n) in transformers, with gate and
    up in turns.
    """
    layer, leaf = key.split(".")[2], key.rpartition(".")[2]
    if leaf == "sinks":
        return [Tensor(f"blk.{layer}.attn_sinks.weight", tuple(p.shape), F32, p.detach().numpy().tobytes())]
    bias = leaf.endswith("_bias")
    x = p.detach().numpy().copy()
    x = x.swapaxes(1, 2) if transposed and not bias else x
    if "gate_up" in leaf:
        half = x.shape[1] // 2
        parts = {"gate": x[:, ::2] if transposed else x[:, :half], "up": x[:, 1::2] if transposed else x[:, half:]}
    else:
        parts = {"down": x}
    out = []
    for word, part in parts.items():
        part = np.ascontiguousarray(part)
        kind, data = F32, part.tobytes()
        if packed and not bias:
            kind, (data, decoded) = Q8_0, q8_0(part)
            parts[word] = decoded
        out.append(Tensor(f"blk.{layer}.ffn_{word}_exps.{'bias' if bias else 'weight'}", part.shape[::-1], kind, data))
    whole = list(parts.values())
    x = whole[0]
    if len(whole) == 2:
        x = (
            np.stack(whole, axis=2).reshape(p.shape if bias else (len(x), -1, x.shape[-1]))
            if transposed
            else np.concatenate(whole, axis=1)
        )
    p.data = torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2) if transposed and not bias else x))
    return out


def encoded(x: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    if kind == Q8_0:
        return q8_0(x)
    t = torch.from_numpy(x.copy()).to(torch.float16 if kind == F16 else torch.bfloat16)
    return t.view(torch.int16).numpy().tobytes(), t.float().numpy()


def rotation_factors(config: Any) -> np.ndarray:
    """llama.cpp's divisor for each frequency of Llama 3's rotation."""
    rope = config.rope_parameters
    factors = []
    for i in range(0, HEAD, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / HEAD)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.float32(factors)
