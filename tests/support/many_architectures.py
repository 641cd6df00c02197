"""Tiny random models of the causal language models of transformers that `load_model` builds.

The list is explicit, so that an architecture that a new transformers breaks is seen.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "ffn_hidden_size": 128,
    "ffn_dim": 128, "sliding_window": 8, "query_pre_attn_scalar": 16, "shared_expert_intermediate_size": 64, "moe_k": 2,
    "moe_topk": 2, "num_layers": 2, "n_layer": 2, "n_head": 4, "n_embd": 64, "n_inner": 128, "d_model": 64, "n_layers": 2,
    "n_heads": 4, "expert_ffn_hidden_size": 64,
}  # fmt: skip
"""Values for whichever of these a configuration has."""

ARCHITECTURES = (
    "afmoe", "arcee", "beam", "bitnet", "bloom", "cohere", "cohere2", "cohere2_moe", "cpmant", "ctrl", "cwm", "diffllama",
    "doge", "dots1", "electra", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon_mamba", "flex_olmo",
    "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hy_v3", "hunyuan_v1_moe", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "lfm2", "llama",
    "llama4_text", "mamba", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "moshi", "mpt", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "openai-gpt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "rembert", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm", "xlm",
)  # fmt: skip


def random_model(kind: str, **changes: object) -> torch.nn.Module:
    """A random float32 model; matrices of a size at which every layer affects the logits."""
    have = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **{k: v for k, v in SIZES.items() if hasattr(have, k)} | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.15 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))
    return model
