"""Converted and quantized checkpoints in their own ecosystem's hands: what the producer's code reads is what we meant.

Run by `make test-ecosystem` in an environment that has mlx and mlx-lm, compressed-tensors with transformers, or nvidia-modelopt.
benchmarks/ecosystem-convert.md keeps the last run's log.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte import QTensor, quantize
from halfbyte.checkpoints import SafetensorsWriter
from halfbyte.checkpoints.safetensors.native_layout import OwnLayout
from halfbyte.conversion import convert

pytestmark = pytest.mark.ecosystem

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256),
}  # fmt: skip


def write_model(folder: Path, codec: str) -> tuple[Path, dict[str, QTensor], dict[str, np.ndarray]]:
    """A whole small Llama: packed projections in halfbyte's own layout, dense bfloat16 for the rest."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    packed, dense = {}, {}
    bf16 = ml_dtypes.bfloat16
    for i in range(2):
        for name, shape in SHAPES.items():
            x = (rng.standard_normal(shape) * 0.08).astype(bf16)
            options = {"scale_dtype": "bfloat16"} if codec.startswith(("int", "uint", "affine")) else {}
            packed[f"model.layers.{i}.{name}"] = quantize(x, codec, **options)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            dense[f"model.layers.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, 128).astype(bf16)
    dense["model.norm.weight"] = np.ones(128, bf16)
    dense["model.embed_tokens.weight"] = rng.standard_normal((64, 128)).astype(bf16)
    dense["lm_head.weight"] = (rng.standard_normal((64, 128)) * 0.1).astype(bf16)
    with SafetensorsWriter(folder / "model.safetensors", {"format": "halfbyte", "version": "1"}) as out:
        for name, q in packed.items():
            for part, array in OwnLayout().pack(q, {}).items():
                out.add(f"{name}.{part}", array)
        for name, array in dense.items():
            out.add(name, array)
    return folder, packed, dense


@pytest.mark.parametrize("codec", ["affine4:g64", "int4:g64", "mxfp4", "affine3:g32", "int8:g32"])
def test_mlx_reads_every_weight_as_it_is(tmp_path, codec):
    mx = pytest.importorskip("mlx.core")
    folder, packed, _ = write_model(tmp_path / "in", codec)
    convert(folder, tmp_path / "out", to="mlx")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    with halfbyte.open(tmp_path / "out") as written:
        for name in packed:
            own = {**{k: v for k, v in config.items() if not isinstance(v, dict | bool)}, **(config.get(name) or {})}
            biases = arrays.get(f"{name}.biases")
            theirs = mx.dequantize(
                arrays[f"{name}.weight"], arrays[f"{name}.scales"], biases, own["group_size"], own["bits"], mode=own["mode"]
            )
            ours = written[name].dequantize("float32" if biases is None else written[name].parts["scales"].dtype, "producer")
            assert np.array_equal(np.array(theirs.astype(mx.float32)), ours.astype(np.float32))
            assert np.array_equal(written[name].dequantize("float64"), packed[name].dequantize("float64"))


@pytest.mark.parametrize("codec", ["affine4:g64", "int4:g64", "mxfp4", "affine8:g32"])
def test_mlx_lm_runs_the_model(tmp_path, codec):
    """mlx-lm builds the model from our config and tensors, and its logits are those of the exact values to float32's rounding."""
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    folder, packed, dense = write_model(tmp_path / "in", codec)
    convert(folder, tmp_path / "out", to="mlx")
    model, _ = utils.load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    logits = np.array(model(mx.arange(3, 35)[None]).astype(mx.float32))
    assert logits.shape == (1, 32, 64)
    quantized = [n for n, m in model.named_modules() if type(m).__name__ == "QuantizedLinear"]
    assert sorted(quantized) == sorted(packed)
    np.save(tmp_path / "logits.npy", logits)
    want = plain_llama(packed, dense)
    assert np.abs(logits[0] - want).max() < 2e-3 * np.abs(want).max()


def plain_llama(packed: dict[str, QTensor], dense: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of the same model in NumPy's float64: nothing of any framework."""
    w = {n.removesuffix(".weight"): a.astype(np.float64) for n, a in dense.items()}
    w |= {n: q.dequantize("float64") for n, q in packed.items()}
    t, d = 32, 32
    angle = np.arange(t)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    cos, sin = np.tile(np.cos(angle), 2), np.tile(np.sin(angle), 2)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    def turned(x):
        return x * cos + np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    h = w["model.embed_tokens"][3:35]
    mask = np.triu(np.full((t, t), -np.inf), 1)
    for i in range(2):
        p = f"model.layers.{i}."
        x = norm(h, p + "input_layernorm")
        q, k, v = ((x @ w[f"{p}self_attn.{s}_proj"].T).reshape(t, -1, d).transpose(1, 0, 2) for s in "qkv")
        q, k, v = turned(q), np.repeat(turned(k), 2, 0), np.repeat(v, 2, 0)
        a = q @ k.transpose(0, 2, 1) / np.sqrt(d) + mask
        a = np.exp(a - a.max(-1, keepdims=True))
        h = h + ((a / a.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(t, -1) @ w[p + "self_attn.o_proj"].T
        x = norm(h, p + "post_attention_layernorm")
        g = x @ w[p + "mlp.gate_proj"].T
        h = h + (g / (1 + np.exp(-g)) * (x @ w[p + "mlp.up_proj"].T)) @ w[p + "mlp.down_proj"].T
    return norm(h, "model.norm") @ w["lm_head"].T


@pytest.mark.parametrize("codec", ["int4:g64", "uint4:g64", "int8:channel", "mxfp4", "nvfp4", "fp8_e4m3"])
def test_transformers_reads_compressed_tensors(tmp_path, codec):
    """from_pretrained decompresses our checkpoint through compressed-tensors itself: bfloat16 weights, bit for bit ours."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    folder, packed, _ = write_model(tmp_path / "in", codec)
    done = convert(folder, tmp_path / "out", to="compressed-tensors")
    assert done.counts["lossy"] == 0
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=config)
    for name, q in packed.items():
        theirs = model.get_submodule(name).weight.detach().float().numpy()
        assert np.array_equal(theirs, q.dequantize("bfloat16").astype(np.float32)), name


@pytest.mark.parametrize("codec", ["nvfp4", "mxfp4"])
def test_modelopt_decodes_what_is_written(tmp_path, codec):
    torch = pytest.importorskip("torch")
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    from safetensors.torch import load_file

    folder, packed, _ = write_model(tmp_path / "in", codec)
    convert(folder, tmp_path / "out", to="modelopt")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, q in packed.items():
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        if codec == "nvfp4":
            held = qtensor.NVFP4QTensor(torch.Size(q.shape), torch.float32, weight)
            theirs = held.dequantize(
                dtype=torch.float32, scale=scale, double_scale=tensors[f"{name}.weight_scale_2"], block_sizes={-1: 16}, fast=False
            )
        else:
            held = qtensor.MXFP4QTensor(torch.Size(q.shape), torch.float32, weight)
            theirs = held.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
        with halfbyte.open(tmp_path / "out") as written:
            assert np.array_equal(theirs.numpy(), written[name].dequantize("float32", "producer"))
