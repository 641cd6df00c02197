"""Tiny random models of the causal language models of transformers that `load_model` builds.

The lists are explicit, so that an architecture that a new transformers adds or breaks is seen:
`ARCHITECTURES` give equal logits, `REFUSED` are refused with a sentence, `NOT_COMPARED` are no
language models on their own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "ffn_hidden_size": 128,
    "ffn_dim": 128, "sliding_window": 8, "query_pre_attn_scalar": 16, "shared_expert_intermediate_size": 64, "moe_k": 2,
    "moe_topk": 2, "num_layers": 2, "n_layer": 2, "n_head": 4, "n_embd": 64, "n_inner": 128, "d_model": 64, "n_layers": 2,
    "n_heads": 4, "expert_ffn_hidden_size": 64, "d_ff": 128, "d_kv": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "state_size": 16, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_n_groups": 1, "conv_kernel": 4,
    "depth": 2, "image_size": 32, "patch_size": 8, "emb_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rotary_dim": 16, "n_positions": 64, "n_ctx": 64,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "out_hidden_size": 64, "num_heads": 4,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96, "laurel_rank": 16, "word_embed_proj_dim": 64,
    "rotary_pct": 1.0, "d_inner": 128, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "mamba_dt_rank": 8,
    "mamba_ngroups": 1, "zero_expert_num": 2, "hash_vocab_size": 96,
}  # fmt: skip
"""Values for whichever of these a configuration has."""

_LATENT = {"num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
_SPARSE = _HYBRID | {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_ROPE = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
         "minicpm3", "sarvam_mla", "youtu"), _LATENT
    ),
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _HYBRID),
    "qwen4_exp_text": _SPARSE,
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _LATENT | _HYBRID),
    **dict.fromkeys(("lfm2_moe", "lfm3"), _CONVOLUTION),
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 96, "use_cache": False},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _ROPE},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2}},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "initializer_range": 1.0,
             "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
                     "activation_sparsity_pattern": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "inkling2_text": {"unpadded_vocab_size": 96},
    "inkling2_loop_text": {"unpadded_vocab_size": 96},
    "falcon": {"head_dim": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1},
    "prophetnet": {"num_hidden_layers": None},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8], "attn_layers": ["local"] * 2,
                 "local_attn_chunk_length": 4},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"is_decoder": True, "max_position_embeddings": None},
    "xlstm": {"v_head_dim": None, "head_dim": None, "qk_dim_factor": 1.0, "num_heads": 4},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "head_dim": None, "mamba_dt_rank": 8},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "head_dim": None, "mamba_headdim": 16,
               "n_mamba_heads": 8},
}  # fmt: skip
"""What a model type needs beside or instead of `SIZES`; None leaves transformers' default."""
PARTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _HYBRID),
    "qwen4_exp_text": _SPARSE,
}
"""The same of a configuration inside another one."""

ARCHITECTURES = (
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "beam",
    "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small", "bloom",
    "camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cpmant", "ctrl", "cwm",
    "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dory",
    "dots1", "dots3_note_text", "electra", "ernie", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon",
    "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "fuyu", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text",
    "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
    "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium",
    "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling2_text", "internlm3",
    "iquestcoder", "jais2", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2", "lfm2_moe", "lfm3",
    "llama", "llama4", "llama4_text", "longcat_flash", "mamba", "mamba2", "marian", "mbart", "megatron-bert", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral",
    "mixtral", "modernbert-decoder", "moshi", "moss_transcribe_diarize", "mpt", "mvp", "nanochat", "nemotron", "nemotron_h",
    "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "pegasus", "persimmon", "phi", "phi3",
    "phi4_multimodal", "phimoe", "plbart", "prophetnet", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "rwkv", "sarvam_mla", "sarvam_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr", "vaultgemma", "whisper", "xglm", "xlm",
    "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "youtu", "zamba", "zamba2", "zaya",
)  # fmt: skip
"""Model types whose dequantized folder gives the logits of the packed model."""

QUICK = (
    "afmoe", "apertus", "aria_text", "bailing_hybrid", "bart", "bert", "bloom", "cohere2_moe", "ctrl", "deepseek_v2",
    "doge", "ernie4_5_moe", "falcon", "gemma2", "gemma3_text", "gemma3n_text", "gemma4", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "granitemoe", "granitemoehybrid", "hrm_text", "hunyuan_v1_moe", "jamba", "jetmoe", "lara_mini",
    "lfm2", "llama", "llama4_text", "longcat_flash", "mamba", "minimax", "mixtral", "modernbert-decoder", "moshi", "mpt",
    "nemotron", "nemotron_h", "olmo2", "olmo_hybrid", "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe",
    "prophetnet", "qwen2_moe", "qwen3_next", "rembert", "rwkv", "sarvam_moe", "stablelm", "starcoder2", "xglm", "xlm",
    "zamba",
)  # fmt: skip
"""Those of them that differ in what is filled; `make test` runs these, `make test-slow` all."""

REFUSED = {
    "emu3": "no causal language model of this emu3_text_model",
    "inkling_text": "gate.global_scale: unknown",
    "inkling2_loop_text": "transformers converts these tensors",
    "mllama": "no causal language model of this mllama_text_model",
}
"""Model type -> a part of the sentence that refuses it."""

NOT_COMPARED = {
    "blt": "reads bytes by the patches of another model",
    "dots3_note": "its text model, dots3_note_text, is",
    "gemma3n": "needs the package timm; its text model, gemma3n_text, is",
    "gemma4_assistant": "reads the keys and values of another model",
    "gemma4_unified_assistant": "reads the keys and values of another model",
    "musicgen": "its causal model is built from the configuration of its decoder alone",
    "musicgen_melody": "its causal model is built from the configuration of its decoder alone",
}
"""Model type -> why transformers runs no model of it on token ids alone."""

DRAWN_AGAIN = ("youtu",)
"""Model types whose embedding transformers draws at random after it has read it."""


def sizes_for(config: Any) -> dict[str, Any]:
    """The values that make a configuration small, those of its parts too."""
    given: dict[str, Any] = {}
    for name, value in SIZES.items():
        try:
            have = getattr(config, name, "")
        except RuntimeError:  # layers of this configuration differ in it
            continue
        if have is None or isinstance(have, int | float):
            given[name] = value
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            given[name] = {"model_type": part.model_type, **sizes_for(part), **PARTS.get(part.model_type, {})}
    return given


def random_model(kind: str, **changes: object) -> torch.nn.Module:
    """A random float32 model; matrices of a size at which every layer affects the logits."""
    given = sizes_for(AutoConfig.for_model(kind)) | CHANGES.get(kind, {}) | changes
    kept = CHANGES.get(kind, {})
    config = AutoConfig.for_model(kind, **{k: v for k, v in given.items() if k not in kept or kept[k] is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.15 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))
    return model
