"""Models from every kind of checkpoint: logits equal to those of the dense model with the same
values.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
import torch
from halfbyte.errors import CheckpointError
from halfbyte.torch import ConcatLinear, QEmbedding, QExperts, QLinear, packed_modules
from halfbyte.transformers import load_model, model_size
from support.gguf_models import dense_model as gguf_model
from support.gguf_models import write as write_gguf
from support.gguf_writer import F32, GGUF, Q4_K, Tensor
from support.golden_case import GOLDEN, read_tensors
from support.tiny_models import CONFIGS, MATRIX, PRODUCERS, VOCAB, agree, dense_model, ids, logits, write_tiny
from support.tiny_tokenizer import write_tokenizer
from torch import nn


@pytest.fixture
def loaded(tmp_path):
    def load(arch: str, producer: str, **options):
        tiny = write_tiny(tmp_path, arch, producer, **options)
        return tiny, load_model(tmp_path)[0]

    return load


@pytest.mark.parametrize(("arch", "producer"), MATRIX)
def test_logits_equal_the_dense_model(loaded, arch, producer):
    tiny, model = loaded(arch, producer)
    assert packed_modules(model)
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


def test_every_architecture_is_in_the_matrix():
    assert {arch for arch, _ in MATRIX} == set(CONFIGS)
    assert {producer for _, producer in MATRIX} == set(PRODUCERS)


def test_case_57_the_checker_fails_on_shuffled_weights(tmp_path):
    """Logits near 1e-6 of another weight order, and of one wrong matrix, must not pass."""
    a, b = dense_model("llama"), dense_model("llama")
    b.model.layers[1].mlp.down_proj.weight.data = b.model.layers[1].mlp.down_proj.weight.data.flip(1)
    right, wrong = logits(a, ids()), logits(b, ids())
    assert agree(right, right.clone())
    assert not agree(wrong, right)
    assert not agree(wrong * 1e-6, right * 1e-6)
    assert not agree(right * 1e-6, right * 1e-6), "logits of nothing prove nothing"
    assert not agree(right * (1 + 1e-4), right)


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in GOLDEN.glob("*/ckpt_*/config.json")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_producers_checkpoints_load(folder):
    """Logits are those of a dense model filled with the exact values of every packed weight."""
    model, tokenizer = load_model(folder)
    assert tokenizer is None
    with hb.open(folder) as ckpt:
        dense = dense_model(
            "llama",
            **{k: v for k, v in ckpt.config.items() if k not in ("quantization_config", "quantization", "model_type", "dtype")},
        )
        state = {}
        for key in ckpt:
            value = ckpt[key]
            name = f"{key}.weight" if ckpt.info(key).quantized else key
            array = value.dequantize("float32") if ckpt.info(key).quantized else np.asarray(value).astype(np.float32)
            if name in dense.state_dict():
                state[name] = torch.from_numpy(np.array(array))
    assert dense.load_state_dict(state, strict=True)
    tokens = ids() % dense.config.vocab_size
    assert agree(logits(model, tokens), logits(dense, tokens))
    _, reference = read_tensors(folder / "reference.safetensors")
    assert reference


@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_scales_of_the_inputs_are_multiplied_by(tmp_path, arch):
    """ModelOpt's AWQ stores `pre_quant_scale` where it cannot fold it; saved, reloaded and cut for
    two ranks it stays.
    """
    from halfbyte.torch.tensor_parallel import cut_rows

    rng = np.random.default_rng(0)
    names = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    scales = {n: rng.uniform(0.5, 2, 64 if "o_proj" in n else 128).astype(np.float32) for n in names}
    tiny = write_tiny(tmp_path, arch, "modelopt", edit=lambda t: t.update({f"{n}.pre_quant_scale": s for n, s in scales.items()}))
    model, _ = load_model(tmp_path)
    for name, scale in scales.items():
        tiny.dense.get_submodule(name).weight.data *= torch.from_numpy(scale)
    want = logits(tiny.dense, ids())
    assert agree(logits(model, ids()), want)
    model.save_pretrained(tmp_path / "again")
    assert agree(logits(load_model(tmp_path / "again")[0], ids()), want)
    layer = model.get_submodule(names[0])
    x = torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float32))
    assert torch.equal(torch.cat([cut_rows(layer, [b])(x) for b in ((0, 32), (32, 64))], -1), layer(x))
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_experts_are_stacked_and_joined(loaded):
    _, model = loaded("mixtral", "gptq")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, QExperts)
    assert {name: h.shape for name, h in experts.packed.items()} == {"gate_up_proj": (4, 256, 64), "down_proj": (4, 64, 128)}


def test_case_44_gate_and_up_of_different_global_scales(loaded):
    """NVFP4 gives every matrix its own factor; gate and up of each expert stay apart, and nothing
    is off by their ratio.
    """
    tiny, model = loaded("qwen3_moe", "ct-nvfp4")
    experts = model.model.layers[0].mlp.experts
    assert set(experts.packed) == {"gate_proj", "up_proj", "down_proj"}
    gate, up = (tiny.packed[f"model.layers.0.mlp.experts.0.{p}_proj"].parts["global_scale"] for p in ("gate", "up"))
    assert gate != up
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


@pytest.mark.parametrize("scales", [(4e-5, 4e-5, 4e-5), (4e-5, 5e-5, 6e-5)], ids=["equal", "different"])
def test_case_44_fused_projections_with_global_scales(tmp_path, scales):
    """phi3 keeps gate and up, and q, k and v, in one matrix each; a checkpoint that has them apart
    may give each its factor.
    """
    tiny = write_tiny(tmp_path, "phi3", "ct-nvfp4", skip=lambda name: True)
    dense = {k: v.numpy() for k, v in tiny.dense.state_dict().items()}
    fused = {
        "self_attn.qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32},
        "mlp.gate_up_proj": {"gate_proj": 128, "up_proj": 128},
    }
    tensors = {}
    for layer, (module, parts) in itertools.product(range(2), fused.items()):
        path = f"model.layers.{layer}.{module}"
        pieces = np.split(dense[f"{path}.weight"], np.cumsum(list(parts.values()))[:-1])
        made = {}
        for piece, (part, rows), scale in zip(pieces, parts.items(), scales, strict=False):
            q = hb.quantize(piece, "nvfp4")
            assert q.shape == (rows, 64)
            made[f"{path.rpartition('.')[0]}.{part}"] = hb.QTensor(
                q.format, q.shape, {**q.parts, "global_scale": np.float32(scale).reshape(())}
            )
        tensors |= made
        dense[f"{path}.weight"] = np.concatenate([q.dequantize() for q in made.values()])
    tiny.dense.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in dense.items()})
    stored = {k: v for k, v in dense.items() if not any(f".{module}." in k for module in fused)}
    hb.save(tmp_path / "model.safetensors", {**stored, **tensors})
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(tmp_path)
    kind = QLinear if scales[0] == scales[1] else ConcatLinear
    for layer in model.model.layers:
        assert type(layer.mlp.gate_up_proj) is type(layer.self_attn.qkv_proj) is kind
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


def test_case_45_a_skip_entry_is_no_prefix(loaded):
    """`mlp.gate` leaves the router dense and not gate_proj; `layers.1` is not `layers.10`."""

    def skip_in_config(config):
        config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$", "model.layers.1"]

    tiny, model = loaded(
        "qwen3_moe", "ct-nvfp4", skip=lambda name: "layers.1." in name, change_config=skip_in_config, num_hidden_layers=11
    )
    names = set(packed_modules(model))
    assert "model.layers.10.self_attn.q_proj" in names
    assert "model.layers.0.mlp.experts" in names
    assert not any(name.startswith("model.layers.1.") for name in names)
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


def test_case_48_bits_of_one_layer(loaded):
    """Four bits, one layer six, the config naming it without the prefix `model.`."""
    name = "model.layers.1.mlp.down_proj"

    def override(config):
        config["quantization"]["layers.1.mlp.down_proj"] = {"group_size": 32, "bits": 6}

    tiny, model = loaded("llama", "mlx", codecs={name: "affine6:g32"}, change_config=override)
    bits = {n: m.weight.format.bits for n, m in packed_modules(model).items()}
    assert bits.pop(name) == 6
    assert set(bits.values()) == {4}
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("producer", ["mlx", "ct-int4"])
def test_case_50_tied_heads(tmp_path, tied, stored, producer):
    """A head that is stored is used; one that is not is the embedding, packed or dense; untied and
    not stored is an error.
    """
    own_head: dict[str, np.ndarray] = {}

    def edit(tensors):
        """Takes the head out, or puts the embedding's own tensors in its place."""
        own_head.update({n: tensors.pop(n) for n in list(tensors) if n.startswith("lm_head")})
        if stored and tied:
            table = {n: t for n, t in tensors.items() if n.startswith("model.embed_tokens")}
            tensors.update({n.replace("model.embed_tokens", "lm_head"): t for n, t in table.items()})
        elif stored:
            tensors.update(own_head)

    tiny = write_tiny(tmp_path, "llama", producer, edit=edit, change_config=lambda c: c.update(tie_word_embeddings=tied))
    if tied:
        tiny.dense.lm_head.weight = tiny.dense.model.embed_tokens.weight
    if not tied and not stored:
        with pytest.raises(CheckpointError, match=r"lm_head: missing \(config.json requires it\)"):
            load_model(tmp_path)
        return
    model, _ = load_model(tmp_path)
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))
    model.tie_weights()
    assert agree(logits(model, ids()), logits(tiny.dense, ids())), "tying again changes nothing"
    if tied and not stored:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    saved_and_loaded_again(model, tmp_path)


def saved_and_loaded_again(model, folder):
    """Bit for bit the same logits."""
    model.save_pretrained(folder / "again")
    again, _ = load_model(folder / "again")
    assert torch.equal(logits(again, ids()), logits(model, ids()))


def test_case_50_packed_embedding_with_a_plain_head(loaded, tmp_path):
    """Tied by the config, the embedding packed, another head stored dense: each keeps its own
    values.
    """
    other = dense_model("llama", seed=5).lm_head.weight.detach()

    def edit(tensors):
        for name in [n for n in tensors if n.startswith("lm_head")]:
            del tensors[name]
        tensors["lm_head.weight"] = other.numpy()

    tiny, model = loaded("llama", "mlx", edit=edit, change_config=lambda c: c.update(tie_word_embeddings=True))
    assert isinstance(model.model.embed_tokens, QEmbedding)
    assert isinstance(model.lm_head, nn.Linear)
    tiny.dense.lm_head.weight.data = other
    model.tie_weights()
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))
    saved_and_loaded_again(model, tmp_path)


def test_biases_are_there_when_stored(loaded):
    """qwen2 has biases of q, k and v; GPTQ's zero biases elsewhere are dropped, others that are
    stored are added.
    """
    bias = np.random.default_rng(0).standard_normal(64).astype(np.float16)

    def edit(tensors):
        tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(64, np.float16)
        tensors["model.layers.1.self_attn.o_proj.bias"] = bias

    tiny, model = loaded("qwen2", "gptq", edit=edit)
    layers = model.model.layers
    assert layers[0].self_attn.q_proj.bias is not None
    assert layers[0].self_attn.o_proj.bias is None
    tiny.dense.model.layers[1].self_attn.o_proj.bias = nn.Parameter(torch.from_numpy(bias.astype(np.float32)))
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


def test_a_packed_router_is_decoded(loaded):
    """MLX packs routers too; transformers multiplies by them as plain parameters."""
    router = hb.quantize(
        dense_model("qwen3_moe").model.layers[0].mlp.gate.weight.detach().numpy(), "affine8:g32", scale_dtype="bfloat16"
    )

    def edit(tensors):
        from halfbyte.layouts import LAYOUTS

        del tensors["model.layers.0.mlp.gate.weight"]
        for suffix, array in LAYOUTS["mlx"].pack(router, {}).items():
            tensors[f"model.layers.0.mlp.gate.{suffix}"] = array

    def override(config):
        config["quantization"]["model.layers.0.mlp.gate"] = {"group_size": 32, "bits": 8}

    tiny, model = loaded("qwen3_moe", "mlx", edit=edit, change_config=override)
    tiny.dense.model.layers[0].mlp.gate.weight.data = torch.from_numpy(router.dequantize())
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


def test_experts_of_different_bits(tmp_path):
    """Experts that cannot be stacked are kept one by one."""
    name = "model.layers.0.block_sparse_moe.experts.2.w2"
    tiny = write_tiny(tmp_path, "mixtral", "halfbyte", codecs={name: "mxfp4"})
    model, _ = load_model(tmp_path)
    experts = model.model.layers[0].mlp.experts
    assert {n: str(h.format) for n, h in experts.packed.items() if "down" in n} == {
        f"{e}.down_proj": "mxfp4:g32" if e == 2 else "int6:g32" for e in range(4)
    }
    assert agree(logits(model, ids()), logits(tiny.dense, ids()))


def test_a_projection_is_freed_before_the_next_is_packed(tmp_path, monkeypatch):
    """The canonical parts of all of a layer's experts beside all of them packed would be twice the
    layer, not the layer and a tensor.
    """
    from halfbyte.torch.packed_weight import PackedWeight

    seen, alive = [], []
    plain = PackedWeight.of.__func__

    def of(cls, w, **options):
        if isinstance(w, hb.QTensor):
            gc.collect()
            alive.append([shape for shape, earlier in seen if earlier() is not None])
            seen.append((w.shape, weakref.ref(w)))
        return plain(cls, w, **options)

    monkeypatch.setattr(PackedWeight, "of", classmethod(of))
    write_tiny(tmp_path, "gpt_oss", "gpt-oss", num_hidden_layers=1, layer_types=["full_attention"])
    load_model(tmp_path)
    assert [shape for shape, _ in seen if len(shape) == 3] == [(4, 256, 64), (4, 64, 128)]
    assert not any(alive)


def test_case_55_a_model_with_any_text_loads_under_any_locale(tmp_path):
    """Configuration, generation settings, tokenizer and template in UTF-8, where files are read as
    something else by default.
    """
    folder = tmp_path / "model"
    write_tiny(folder, "llama", "mlx", change_config=lambda c: c.update(_note="Zoë 模型 “½”"))
    write_tokenizer(folder, "“{{ messages[0].content }}” <tok7>")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words["模型"] = words.pop("<tok9>")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7, "_note": "é½"}', encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    code = (
        "import builtins, io, sys\n"
        "real = io.open\n"
        "def opened(file, mode='r', buffering=-1, encoding=None, *rest, **more):\n"
        "    encoding = preferred if 'b' not in mode and encoding in (None, 'locale') else encoding\n"
        "    return real(file, mode, buffering, encoding, *rest, **more)\n"
        "from halfbyte.transformers import load_model\n"
        "builtins.open = io.open = opened\n"
        "for preferred in ('ascii', 'cp1252'):\n"
        "    model, tokenizer = load_model(sys.argv[1])\n"
        "    word = tokenizer(chr(0x6a21) + chr(0x578b))['input_ids']\n"
        "    text = tokenizer.apply_chat_template([{'role': 'user', 'content': chr(0xe9)}], tokenize=False)\n"
        "    print(model.generation_config.max_new_tokens, ascii(model.config._note), word, ascii(text))\n"
    )
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = f"7 {'Zoë 模型 “½”'!a} [1, 9] {'“é” <tok7>'!a}"
    assert done.stdout.splitlines() == [line, line]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is Linux's")
def test_case_43_a_gguf_model_loads_in_its_packed_size_and_one_tensor(tmp_path):
    """79 MB of Q4_K: far from the 0.5 GB of the same in float32. The file is one hole, so nothing
    of it need be written.
    """
    size, feed, heads, layers, vocabulary = 2048, 8192, 16, 2, 48
    numbers = {
        "context_length": 256,
        "embedding_length": size,
        "block_count": layers,
        "feed_forward_length": feed,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
    }
    pairs = [
        ("general.architecture", "string", "llama"), *((f"llama.{k}", "uint32", v) for k, v in numbers.items()),
        ("llama.attention.layer_norm_rms_epsilon", "float32", 1e-5), ("llama.rope.freq_base", "float32", 1e4),
        ("tokenizer.ggml.model", "string", "llama"), ("tokenizer.ggml.bos_token_id", "uint32", 1),
        ("tokenizer.ggml.tokens", "array[string]", ["<pad>", "<bos>", "<eos>", *map(chr, range(97, 94 + vocabulary))]),
        ("tokenizer.ggml.scores", "array[float32]", [-float(i) for i in range(vocabulary)]),
        ("tokenizer.ggml.token_type", "array[int32]", [3, 3, 3] + [1] * (vocabulary - 3)),
    ]  # fmt: skip
    square, wide = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up")
    shapes = {"token_embd": (size, vocabulary), "output": (size, vocabulary), "output_norm": (size,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.{n}": (size, size) for n in square} | {f"blk.{i}.{n}": (size, feed) for n in wide}
        shapes |= {f"blk.{i}.ffn_down": (feed, size), f"blk.{i}.attn_norm": (size,), f"blk.{i}.ffn_norm": (size,)}
    tensors, at = [], 0
    for name, shape in shapes.items():
        tensors.append(Tensor(f"{name}.weight", shape, Q4_K if len(shape) == 2 else F32, b"", offset=at))
        at += math.prod(shape) // 256 * 144 if len(shape) == 2 else 4 * shape[0]
    head = GGUF(pairs=pairs, tensors=tensors).head()
    with (tmp_path / "model.gguf").open("wb") as f:
        f.write(head)
        f.truncate(-(-len(head) // 32) * 32 + at)
    write_gguf(tmp_path / "small.gguf", "llama", gguf_model("llama"), packed=True)
    code = (
        "import sys\n"
        "from halfbyte.transformers import load_model, model_size\n"
        "def peak():\n"
        "    return next(int(l.split()[1]) << 10 for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "load_model(sys.argv[1])\n"
        "before = peak()\n"
        "model, _ = load_model(sys.argv[2])\n"
        "print(before, peak(), model_size(model).nbytes)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "small.gguf"), str(tmp_path / "model.gguf")]
    before, after, held = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert at <= held <= 1.06 * at, "scales of 6 bits take a byte"
    largest = size * feed * 144 // 256
    assert after - before <= held + 2 * largest + (24 << 20), (before, after, held)


def test_packed_bytes_are_the_files(loaded):
    tiny, model = loaded("llama", "halfbyte")
    packed = sum(q.nbytes for q in tiny.packed.values())
    dense = sum(p.numel() * 4 for p in model.parameters())
    assert packed <= model_size(model).nbytes - dense <= 1.1 * packed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float16])
def test_half_precision(tmp_path, dtype):
    tiny = write_tiny(tmp_path, "gemma3_text", "mlx")
    model, _ = load_model(tmp_path, dtype=dtype)
    word = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    out = logits(model, ids())
    assert out.dtype == word
    dense = logits(tiny.dense, ids())
    assert float((out.float() - dense).abs().max() / dense.abs().max()) < (0.08 if word == torch.bfloat16 else 0.02)


def test_int8_activations(loaded, tmp_path):
    tiny, _ = loaded("llama", "ct-int4")
    if hb.ops.backend_named("cpu").reason() is not None:
        pytest.skip("int8 activations need the native CPU backend")
    model, _ = load_model(tmp_path, activations="int8")
    ours, dense = logits(model, ids()), logits(tiny.dense, ids())
    error = float((ours - dense).pow(2).mean().sqrt() / dense.pow(2).mean().sqrt())
    assert 1e-4 < error < 0.1


def test_no_token_is_an_empty_answer(loaded):
    _, model = loaded("mixtral", "gptq")
    experts = model.model.layers[0].mlp.experts
    nothing = experts(torch.zeros(0, 64), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert nothing.shape == (0, 64)
    assert model.config.vocab_size == VOCAB


@pytest.mark.parametrize(("arch", "producer"), [("llama", "gptq"), ("gemma3_text", "mlx"), ("gpt_oss", "gpt-oss")])
def test_a_model_compiles_to_one_graph(tmp_path, arch, producer):
    """Norms, products and experts: no graph break, and one graph for all layers."""
    write_tiny(tmp_path, arch, producer)
    model, graphs = hb.load_model(tmp_path)[0], []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
    with torch.no_grad():
        for tokens in (ids(), ids() + 1):
            assert torch.equal(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    assert len(graphs) == 1
