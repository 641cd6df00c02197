"""Small checkpoints for tests of conversions, in halfbyte's own layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

import halfbyte
from halfbyte import QTensor, quantize
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.safetensors.native_layout import OwnLayout
from halfbyte.verification.compare import verify

CONFIG = {
    "model_type": "part_of_a_llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "_note": "ünïcode",
}  # fmt: skip


LINEAR = {
    "self_attn.q_proj": (128, 128), "self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.down_proj": (128, 256),
}  # fmt: skip


def write_model(folder: Path, codec: str, layers: int = 2, config: dict | None = None, seed: int = 0) -> Path:
    """A small model in halfbyte's own layout: packed projections, dense embedding, norms and head,
    a tokenizer.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"model": "ü"}', encoding="utf-8")
    dense = ml_dtypes.bfloat16
    with SafetensorsWriter(folder / "model.safetensors", {"format": "halfbyte", "version": "1"}) as out:
        out.add("model.embed_tokens.weight", rng.standard_normal((64, 128)).astype(dense))
        for i in range(layers):
            for name, shape in LINEAR.items():
                q = quantize((rng.standard_normal(shape) * 0.05).astype(np.float32), codec)
                for part, array in OwnLayout().pack(q, {}).items():
                    out.add(f"model.layers.{i}.{name}.{part}", array)
            out.add(f"model.layers.{i}.input_layernorm.weight", np.ones(128, dense))
        out.add("lm_head.weight", rng.standard_normal((64, 128)).astype(dense))
    return folder


def gaps(path: Path) -> list[str]:
    """Names of what a checkpoint lacks for a whole model: a golden GGUF file holds a few tensors of
    one.
    """
    with halfbyte.open(path) as checkpoint:
        return [e.name for e in checkpoint.ledger().problems]


def identical(a: Path, b: Path, allow_unknown: Sequence[str] = ()) -> bool:
    with halfbyte.open(a, None, allow_unknown) as left, halfbyte.open(b, None, allow_unknown) as right:
        report = verify(left, right)
        assert len(report.comparisons) >= 1
        return report.verdict == "identical"


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "hidden_act": "silu",
}  # fmt: skip


LLAMA_SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256),
}  # fmt: skip


def write_llama(folder: Path, codec: str, tied: bool = False) -> tuple[Path, dict[str, QTensor], dict[str, np.ndarray]]:
    """A whole small Llama: packed projections in halfbyte's own layout, dense bfloat16 for the
    rest. A tied one stores no head.
    """
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"tie_word_embeddings": tied}))
    packed, dense = {}, {}
    bf16 = ml_dtypes.bfloat16
    for i in range(2):
        for name, shape in LLAMA_SHAPES.items():
            x = (rng.standard_normal(shape) * 0.08).astype(bf16)
            options = {"scale_dtype": "bfloat16"} if codec.startswith(("int", "uint", "affine")) else {}
            packed[f"model.layers.{i}.{name}"] = quantize(x, codec, **options)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            dense[f"model.layers.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, 128).astype(bf16)
    dense["model.norm.weight"] = np.ones(128, bf16)
    dense["model.embed_tokens.weight"] = rng.standard_normal((64, 128)).astype(bf16)
    if not tied:
        dense["lm_head.weight"] = (rng.standard_normal((64, 128)) * 0.1).astype(bf16)
    with SafetensorsWriter(folder / "model.safetensors", {"format": "halfbyte", "version": "1"}) as out:
        for name, q in packed.items():
            for part, array in OwnLayout().pack(q, {}).items():
                out.add(f"{name}.{part}", array)
        for name, array in dense.items():
            out.add(name, array)
    return folder, packed, dense


def plain_llama(packed: dict[str, QTensor], dense: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of the same model in NumPy's float64: nothing of any framework."""
    w = {n.removesuffix(".weight"): a.astype(np.float64) for n, a in dense.items()}
    w |= {n: q.dequantize("float64") for n, q in packed.items()}
    t, d = 32, 32
    angle = np.arange(t)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    cos, sin = np.tile(np.cos(angle), 2), np.tile(np.sin(angle), 2)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    def with_transposed_experts(x):
        return x * cos + np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    h = w["model.embed_tokens"][3:35]
    mask = np.triu(np.full((t, t), -np.inf), 1)
    for i in range(2):
        p = f"model.layers.{i}."
        x = norm(h, p + "input_layernorm")
        q, k, v = ((x @ w[f"{p}self_attn.{s}_proj"].T).reshape(t, -1, d).transpose(1, 0, 2) for s in "qkv")
        q, k, v = with_transposed_experts(q), np.repeat(with_transposed_experts(k), 2, 0), np.repeat(v, 2, 0)
        a = q @ k.transpose(0, 2, 1) / np.sqrt(d) + mask
        a = np.exp(a - a.max(-1, keepdims=True))
        h = h + ((a / a.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(t, -1) @ w[p + "self_attn.o_proj"].T
        x = norm(h, p + "post_attention_layernorm")
        g = x @ w[p + "mlp.gate_proj"].T
        h = h + (g / (1 + np.exp(-g)) * (x @ w[p + "mlp.up_proj"].T)) @ w[p + "mlp.down_proj"].T
    return norm(h, "model.norm") @ w.get("lm_head", w["model.embed_tokens"]).T


def tokenizer_beside(folder: Path) -> None:
    """Engines that load a whole model want a tokenizer: words w00 to w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i:02d}": i for i in range(LLAMA_CONFIG["vocab_size"])}, unk_token="w02"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w02", eos_token="w01", pad_token="w00").save_pretrained(folder)
