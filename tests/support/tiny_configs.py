"""Tiny architectures and random dense models of them. Nothing of the library: the producers' own
environments import this too.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HIDDEN, FEED, VOCAB, LAYERS, EXPERTS = 64, 128, 96, 2, 4

_BASE = {
    "hidden_size": HIDDEN, "intermediate_size": FEED, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {},
    "qwen2": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "phi3": {},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
                  "mlp_only_layers": []},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip


def dense_model(arch: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model; matrices of a size at which every layer matters."""
    config = AutoConfig.for_model(arch, **{**_BASE, **CONFIGS[arch], **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.15 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))
    return model
