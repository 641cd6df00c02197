"""Models of every architecture that is built: a small random one of transformers, as llama.cpp writes it, read back packed.

Stored as float32 the logits are equal bit for bit. Packed, they are those of the dense model with the decoded weights, up to
float32's order of summation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gguf_writer import BF16, F16, F32, GGUF, Q8_0, Tensor
from halfbyte.errors import CheckpointError, HalfbyteError, UnsupportedError
from halfbyte.torch import QEmbedding, QLinear, packed_modules
from halfbyte.transformers import load_model, model_size

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


def write(path: Path, name: str, model: Any, packed: bool, shards: int = 1) -> Path:
    """The model as llama.cpp's converter writes it. With `packed`, matrices become Q8_0 (some F16, BF16), here and in `model`."""
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
    tensors = []
    for i, (key, p) in enumerate(model.named_parameters()):
        x = p.detach().numpy().copy()
        if arch == "llama" and (".q_proj." in key or ".k_proj." in key):
            x = x.reshape(-1, 2, HEAD // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)  # llama.cpp's order of rotated pairs
        if gemma and "norm" in key:
            x = x + np.float32(1)
            p.data = torch.from_numpy(x - np.float32(1))
        kind, data = F32, x.tobytes()
        if packed and x.ndim == 2:
            kind = (Q8_0, Q8_0, F16, Q8_0, BF16)[i % 5]
            data, decoded = encoded(x, kind)
            if arch == "llama" and (".q_proj." in key or ".k_proj." in key):
                decoded = decoded.reshape(-1, HEAD // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
            p.data = torch.from_numpy(decoded)
        tensors.append(Tensor(gguf_name(key, GEMMA_NAMES if gemma else GGUF_NAMES), tuple(reversed(x.shape)), kind, data))
    if name == "llama-3":
        tensors.append(Tensor("rope_freqs.weight", (HEAD // 2,), F32, rotation_factors(config).tobytes()))
    path.write_bytes(GGUF(pairs=pairs, tensors=tensors).bytes())
    for i in range(shards if shards > 1 else 0):
        split = [("split.no", "uint16", i), ("split.count", "uint16", shards), ("split.tensors.count", "int32", len(tensors))]
        part = GGUF(pairs=[*(pairs if i == 0 else []), *split], tensors=tensors[i::shards])
        path.with_name(f"{path.stem}-{i + 1:05d}-of-{shards:05d}.gguf").write_bytes(part.bytes())
    return path


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


IDS = torch.tensor([[1, 5, 9, 13, 40, 22, 7, 7, 30, 11, 3, 46]])


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", MODELS)
def test_dense_tensors_give_the_same_logits_bit_for_bit(tmp_path, name):
    model = dense_model(name)
    read, _ = load_model(write(tmp_path / "m.gguf", name, model, packed=False))
    assert packed_modules(read) == {}
    if name == "llama-3":
        torch.testing.assert_close(read.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=3e-7, atol=0)
        torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-5)
    else:
        assert torch.equal(logits(read), logits(model))
    assert dict(read.named_parameters()).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_give_the_logits_of_the_decoded_ones(tmp_path, name):
    model = dense_model(name)
    read, _ = load_model(write(tmp_path / "m.gguf", name, model, packed=True))
    want, have = logits(model), logits(read)
    assert len(packed_modules(read)) >= 4
    error, size = (have - want).double(), want.double().pow(2).mean().sqrt()
    # A sum of k float32 products in another order is off by about √k · 2^−24; seven products a layer add up as a random walk.
    bound = math.sqrt(HEADS * HEAD) * 2**-24 * math.sqrt(7 * MODELS[name][2]["num_hidden_layers"] + 1)
    assert error.pow(2).mean().sqrt() <= bound * size
    assert error.abs().max() <= 8 * bound * size
    assert torch.equal(have.argmax(-1), want.argmax(-1))


def test_the_check_sees_one_wrong_norm(tmp_path):
    """The bounds above are not vacuous: a norm without its offset is far outside."""
    model = dense_model("gemma3")
    read, _ = load_model(write(tmp_path / "m.gguf", "gemma3", model, packed=True))
    with torch.no_grad():
        read.model.layers[3].self_attn.q_norm.weight.add_(1)
    assert (logits(read) - logits(model)).abs().max() > 1e-3 * logits(model).abs().max()


def test_case_50_tied_heads_share_one_weight(tmp_path):
    """Tied and untied, packed and dense: no head is made twice, and none is missing."""
    tied, _ = load_model(write(tmp_path / "a.gguf", "gemma3", dense_model("gemma3"), packed=True))
    assert isinstance(tied.lm_head, QLinear)
    assert isinstance(tied.model.embed_tokens, QEmbedding)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    dense, _ = load_model(write(tmp_path / "b.gguf", "gemma3", dense_model("gemma3"), packed=False))
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    untied, _ = load_model(write(tmp_path / "c.gguf", "qwen3", dense_model("qwen3"), packed=True))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    n = VOCABULARY * HIDDEN
    assert model_size(dense).weights == sum(p.numel() for p in dense_model("gemma3").parameters())
    assert model_size(untied).weights == sum(p.numel() for p in dense_model("qwen3").parameters())
    assert model_size(tied).weights == model_size(dense).weights
    assert model_size(tied).nbytes < model_size(dense).nbytes - 2 * n


def test_a_split_file_and_a_folder_are_the_model_too(tmp_path):
    model = dense_model("qwen3")
    path = write(tmp_path / "whole.gguf", "qwen3", model, packed=True)
    want = logits(load_model(path)[0])
    write(path, "qwen3", dense_model("qwen3"), packed=True, shards=3)
    path.unlink()
    assert torch.equal(logits(load_model(tmp_path / "whole-00002-of-00003.gguf")[0]), want)
    assert torch.equal(logits(load_model(tmp_path)[0]), want)


def test_other_checkpoints_are_refused_by_name(tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="is a dense checkpoint; models are built from GGUF files"):
        load_model(tmp_path)


def test_cached_steps_equal_one_pass(tmp_path):
    """Token by token, past the sliding window, with the architecture's own cache."""
    read, _ = load_model(write(tmp_path / "m.gguf", "gemma3", dense_model("gemma3"), packed=True))
    whole = logits(read)[0]
    with torch.inference_mode():
        out = read(input_ids=IDS[:, :3], use_cache=True)
        rows = [out.logits[0, -1]]
        for i in range(3, IDS.shape[1]):
            out = read(input_ids=IDS[:, i : i + 1], use_cache=True, cache=out.cache)
            rows.append(out.logits[0, -1])
    torch.testing.assert_close(torch.stack(rows), whole[2:], rtol=0, atol=5e-6 * float(whole.abs().max()))


def without(tensor: str) -> Any:
    def change(file: GGUF) -> None:
        file.tensors = [t for t in file.tensors if t.name != tensor]

    return change


def with_pair(key: str, kind: str, value: Any) -> Any:
    def change(file: GGUF) -> None:
        file.pairs = [p for p in file.pairs if p[0] != key]
        if kind:
            file.pairs.append((key, kind, value))

    return change


def with_tensor(tensor: Tensor) -> Any:
    def change(file: GGUF) -> None:
        file.tensors = [*(t for t in file.tensors if t.name != tensor.name), tensor]

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without("blk.1.ffn_up.weight"), CheckpointError, "no tensor for model.layers.1.mlp.up_proj.weight of Llama"),
        (without("token_embd.weight"), CheckpointError, "tensor 'token_embd.weight' is missing"),
        (
            with_tensor(Tensor("blk.0.moon.weight", (4,), F32, bytes(16))),
            UnsupportedError,
            "blk.0.moon.weight have no place in LlamaForCausalLM; this variant of llama is not built",
        ),
        (
            with_tensor(Tensor("blk.2.ffn_up.weight", (64, 96), F32, bytes(64 * 96 * 4))),
            CheckpointError,
            r"'blk.2.ffn_up.weight' belongs to model.layers.2.mlp.up_proj, which a LlamaForCausalLM of 2 layers does not have",
        ),
        (
            with_tensor(Tensor("blk.0.ffn_up.weight", (64, 95), F32, bytes(64 * 95 * 4))),
            CheckpointError,
            r"'blk.0.ffn_up.weight' is \[95, 64\]; the model wants \[96, 64\]",
        ),
        (
            with_tensor(Tensor("blk.0.ffn_up.weight", (64, 97), Q8_0, bytes(2 * 97 * 34))),
            CheckpointError,
            r"'blk.0.ffn_up' is \[97, 64\]; the model wants \[96, 64\]",
        ),
        (
            with_tensor(Tensor("blk.0.attn_norm.weight", (64,), Q8_0, bytes(68))),
            CheckpointError,
            "'blk.0.attn_norm' is quantized, and model.layers.0.input_layernorm.weight of a LlamaRMSNorm cannot be",
        ),
        (
            with_tensor(Tensor("blk.0.ffn_up.bias", (96,), F32, bytes(384))),
            CheckpointError,
            "no tensor for model.layers.0.mlp.gate_proj.bias",
        ),
        (
            with_tensor(Tensor("rope_freqs.weight", (7,), F32, bytes(28))),
            CheckpointError,
            r"'rope_freqs.weight' is \[7\]; the model wants \[16\]",
        ),
        (with_pair("llama.block_count", "", None), CheckpointError, "key 'llama.block_count' is missing; the model needs it"),
        (with_pair("llama.block_count", "string", "2"), CheckpointError, "key 'llama.block_count' is string; integer is wanted"),
        (with_pair("llama.attention.head_count", "uint32", 0), CheckpointError, "a size is 0"),
        (
            with_pair("llama.attention.head_count", "array[uint32]", [4, 4]),
            CheckpointError,
            r"is array\[uint32\]; integer is wanted",
        ),
        (with_pair("llama.rope.dimension_count", "uint32", 16), UnsupportedError, "a llama model that rotates part of each head"),
        (
            with_pair("llama.attention.value_length", "uint32", 16),
            UnsupportedError,
            "a llama model whose keys and values differ in length",
        ),
        (with_pair("llama.expert_count", "uint32", 8), UnsupportedError, "a llama model with experts"),
        (
            with_pair("llama.rope.scaling.type", "string", "longrope"),
            UnsupportedError,
            "with rope scaling 'longrope'; none, linear and yarn",
        ),
        (
            with_pair("general.architecture", "string", "mamba"),
            UnsupportedError,
            "architecture 'mamba'; models that can be built: gemma2, gemma3, llama, qwen2, qwen3",
        ),
        (with_pair("general.architecture", "", None), UnsupportedError, "architecture ''"),
    ],
)
def test_files_that_are_not_the_model_they_claim(tmp_path, monkeypatch, change, error, message):
    path = tmp_path / "m.gguf"
    whole = GGUF.bytes

    def changed(file: GGUF) -> bytes:
        change(file)
        return whole(file)

    monkeypatch.setattr(GGUF, "bytes", changed)
    write(path, "llama", dense_model("llama"), packed=False)
    with pytest.raises(error, match=message) as caught:
        load_model(path)
    assert isinstance(caught.value, HalfbyteError)
    assert str(path) in str(caught.value)
