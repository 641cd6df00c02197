"""DeepSeek-V4 in the names and formats that it is published in: FP8 tiles and FP4 experts under
E8M0 scales called `.scale`; `load_model` gives the logits of the dense model with the decoded
values.

Facts: the model code of the release and transformers' renamings of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("transformers")

import halfbyte as hb
import torch
from halfbyte.conversion.to_dense import dequantize_checkpoint
from halfbyte.torch import packed_modules
from support.tiny_models import agree, ids, logits
from transformers import AutoConfig, AutoModelForCausalLM

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "head_dim": 32, "q_lora_rank": 64, "num_experts_per_tok": 2, "n_routed_experts": 4, "max_position_embeddings": 64,
    "o_groups": 2, "o_lora_rank": 64, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4, "sliding_window": 8,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "swiglu_limit": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}  # fmt: skip
NAMES = (
    (r"^model\.embed_tokens\.", "embed."), (r"^lm_head\.", "head."), (r"^model\.hc_head\.hc_", "hc_head_"), (r"^model\.", ""),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."), (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"(compressor.*)\.kv_norm\.", r"\1.norm."), (r"\.position_bias", ".ape"), (r"(compressor.*)\.gate_proj\.", r"\1.wgate."),
    (r"\.input_layernorm\.", ".attn_norm."), (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"), (r"\.sinks$", ".attn_sink"), (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
    (r"\.q_a_proj\.", ".wq_a."), (r"\.q_b_proj\.", ".wq_b."), (r"\.kv_proj\.", ".wkv."), (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."), (r"\.q_a_norm\.", ".q_norm."), (r"\.e_score_correction_bias", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."), (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)  # fmt: skip
"""transformers' names -> those of the release, in this order."""


def published(name: str) -> str:
    for pattern, word in NAMES:
        name = re.sub(pattern, word, name)
    return name


def fp8(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tiles of 128 by 128 under powers of two."""
    n, k = w.shape
    exponents = np.zeros((-(-n // 128), -(-k // 128)), int)
    for i, j in np.ndindex(exponents.shape):
        exponents[i, j] = np.ceil(np.log2(np.abs(w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max() / 448))
    powers = np.ldexp(np.float32(1), np.repeat(np.repeat(exponents, 128, 0), 128, 1)[:n, :k])
    codes = (w / powers).astype(E4M3)
    return {"weight": codes, "scale": (exponents + 127).astype(np.uint8).view(E8M0)}, codes.astype(np.float32) * powers


def fp4(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Groups of 32 along the inputs under powers of two, the even element in the low nibble."""
    exponents = np.ceil(np.log2(np.abs(w.reshape(len(w), -1, 32)).max(-1) / 6)).astype(int)
    powers = np.ldexp(np.float32(1), np.repeat(exponents, 32, 1))
    codes = np.abs((w / powers)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
    return {"weight": packed, "scale": (exponents + 127).astype(np.uint8).view(E8M0)}, E2M1[codes] * powers


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> tuple[Path, Any]:
    """(folder, the dense model of the decoded values)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v4", **SIZES), dtype=torch.float32).eval()
    state = model.state_dict()
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        if name.endswith("tid2eid"):
            tensor.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(len(tensor))]))
        elif tensor.ndim > 1:
            tensor.copy_(torch.randn_like(tensor) * 0.15)
        else:
            tensor.add_(0.2 * torch.randn_like(tensor))
        value, key = tensor.numpy(), published(name)
        if ".experts." in name:
            for e, stack in enumerate(value):
                halves = {"w1": stack[:64], "w3": stack[64:]} if "gate_up" in name else {"w2": stack}
                for word, w in halves.items():
                    parts, w[:] = fp4(w)
                    tensors |= {f"{key.rpartition('.')[0]}.{e}.{word}.{suffix}": t for suffix, t in parts.items()}
        elif re.search(r"self_attn\.(q_a|q_b|kv|o_a|o_b)_proj|shared_experts|indexer\.q_b", name):
            parts, value[:] = fp8(value)
            tensors |= {key.removesuffix("weight") + suffix: t for suffix, t in parts.items()}
        else:
            tensors[key] = value.copy()
    model.load_state_dict(state)
    folder = tmp_path_factory.mktemp("v4")
    save_file({key: np.ascontiguousarray(t) for key, t in tensors.items()}, folder / "model.safetensors")
    own = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "expert_dtype": "fp4",
    }
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": quantization}, default=str))
    return folder, model


def test_case_72_load_model_gives_the_logits_of_the_decoded_values(release):
    folder, dense = release
    with hb.open(folder) as checkpoint:
        assert not checkpoint.ledger().problems
        kinds = {str(checkpoint.info(key).format) for key in checkpoint if checkpoint.info(key).quantized}
    assert kinds == {"fp8_e4m3:g128", "mxfp4:g32"}
    model, _ = hb.load_model(folder)
    want = logits(dense, ids())
    assert agree(logits(model, ids()), want)
    packed = packed_modules(model)
    assert "model.layers.0.mlp.experts" in packed
    # Groups of heads are no plain product: they are decoded to a parameter.
    assert "model.layers.0.self_attn.o_a_proj" not in packed
    experts = model.model.layers[1].mlp.experts
    experts.limit = 10.0  # without the clamp the logits are others
    assert not agree(logits(model, ids()), want)


def test_case_72_the_dequantized_folder_has_every_value(release, tmp_path):
    folder, dense = release
    with hb.open(folder) as checkpoint:
        dequantize_checkpoint(checkpoint, tmp_path / "dense", dtype="float32")
    with hb.open(tmp_path / "dense") as written:
        for name, tensor in dense.state_dict().items():
            if ".experts." not in name:
                assert np.array_equal(written[published(name)], tensor.numpy()), name
        stack = dense.model.layers[2].mlp.experts.gate_up_proj.detach().numpy()
        for e in range(4):
            both = [written[f"layers.2.ffn.experts.{e}.{word}.weight"] for word in ("w1", "w3")]
            assert np.array_equal(np.concatenate(both), stack[e])
