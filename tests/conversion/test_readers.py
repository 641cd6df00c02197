"""Whole checkpoints of ours in engines that run them: their own code reads the files, builds the
model and gives our logits.

`make test-ecosystem` runs each test in the environment of its engine: GPTQModel, AutoAWQ (with the
transformers it was written for), llama-cpp-python, onnxruntime, vLLM for the CPU.
benchmarks/ecosystem.log keeps the last run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte
from halfbyte import QTensor, quantize
from halfbyte.cli import main
from halfbyte.conversion import convert
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.formats import format_named
from halfbyte.layouts import LAYOUTS
from support.conversion_models import plain_llama, write_llama

IDS = list(range(3, 35))
"""What `plain_llama` reads."""


def close(logits: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """Within a part of the largest logit everywhere, and of the logits' size on the whole."""
    assert logits.shape == wanted.shape
    assert np.abs(logits - wanted).max() < tolerance * np.abs(wanted).max()
    assert np.square(logits - wanted).mean() < (tolerance / 2) ** 2 * np.square(wanted).mean()


@pytest.mark.ecosystem("gptqmodel")
@pytest.mark.parametrize("to", ["gptq", "gptq-v2"])
def test_gptqmodel_reads_an_order_of_inputs(tmp_path, to):
    """act-order: g_idx says which group each input is in."""
    import gptqmodel.nn_modules.qlinear.torch as layer

    import torch

    rng = np.random.default_rng(0)
    q = quantize(rng.standard_normal((64, 128)).astype(np.float32), "uint4:g32", scale_dtype="float16")
    index = rng.permutation(np.repeat(np.arange(4, dtype=np.int32), 32))
    q = QTensor(q.format, q.shape, {**q.parts, "zeros": np.maximum(q.parts["zeros"], 1), "group_index": index})
    version = {"gptq": "gptq", "gptq-v2": "gptq_v2"}[to]
    tensors = LAYOUTS["gptq"].pack(q, {"bits": 4, "group_size": 32, "checkpoint_format": version})
    module = layer.TorchLinear(4, 32, False, True, 128, 64, bias=False, pack_dtype=torch.int32, dtype=torch.float16)
    state = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in tensors.items()}
    module.load_state_dict(state, strict=False)
    if version == "gptq":
        # What GPTQModel does to v1 files as it loads them.
        module.qzeros.data += 0x11111111
    module.post_init()
    assert np.array_equal(module.dequantize_weight().T.numpy(), q.dequantize("float16"))


@pytest.mark.ecosystem("autoawq")
@pytest.mark.parametrize("codec", ["uint4:g64", "int4:g64", "uint4:g32", "int4:channel"])
def test_autoawq_runs_the_model(tmp_path, codec):
    """AutoAWQ's WQLinear_GEMM on its torch path, in transformers' Llama, its buffers loaded from
    our file by name.
    """
    import awq.modules.linear.gemm as gemm
    import awq.utils.packing_utils as packing
    from safetensors.torch import load_file

    import torch
    import transformers

    folder, _, dense = write_llama(tmp_path / "in", codec)
    convert(folder, tmp_path / "out", to="awq", scale_dtype="float16", lossy=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    described = config.pop("quantization_config")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, "torch_dtype": "float32"})).eval().float()
    with halfbyte.open(tmp_path / "out") as written:
        held = {key: written[key] for key in written if written.info(key).quantized}
    for name, q in held.items():
        n, k = q.shape
        size = described["group_size"] if described["group_size"] != -1 else k
        module = gemm.WQLinear_GEMM(described["bits"], size, k, n, False, "cpu")
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    missing, unexpected = model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    assert not missing
    assert not unexpected
    for name, q in held.items():
        m = model.get_submodule(name)
        size = m.group_size if m.group_size > 0 else m.in_features
        theirs = packing.dequantize_gemm(m.qweight, m.qzeros, m.scales, 4, size).T.numpy()
        assert np.array_equal(theirs, q.dequantize("float16")), name
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].float().numpy()
    close(logits, plain_llama(held, dense), 0.02)


@pytest.mark.ecosystem("mlx")
def test_mlx_lm_refuses_a_tensor_scale(tmp_path):
    """What `inspect --for mlx` predicts of NVFP4 with a scale of the tensor."""
    import mlx_lm.utils

    folder, _, _ = write_llama(tmp_path / "in", "nvfp4")
    convert(folder, tmp_path / "out", to="mlx")
    with pytest.raises(ValueError, match="global_scale"):
        mlx_lm.utils.load_model(tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out"), "--for", "mlx"]) == 1


VLLM = [("int4:g64", "gptq"), ("uint4:g64", "awq"), ("int4:g64", "compressed-tensors"), ("uint4:g64", "compressed-tensors")]
"""What vLLM 0.32 has kernels for on a CPU with AVX-512."""


def multiply_as_vllm_packs(input: Any, q_weight: Any, scales: Any, zeros: Any, bias: Any, pack_factor: int, isa_hint: str) -> Any:
    """The product of vLLM's kernel `cpu_gemm_wna16`, which its build for AVX2 lacks.

    q_weight  words of eight 4-bit codes, [outputs / 16, inputs, 2]: 16 outputs lie together
    scales    [groups, outputs]; zeros: words of eight along the outputs, None for 8 everywhere
    """
    import torch

    k, (groups, n) = input.shape[-1], scales.shape
    shifts = torch.arange(0, 32, 32 // pack_factor)
    codes = (q_weight.reshape(n // 16, k, 2, 1) >> shifts & 15).reshape(n // 16, k, 16).permute(1, 0, 2).reshape(groups, -1, n)
    zero = 8 if zeros is None else (zeros.reshape(groups, -1, 1) >> shifts & 15).reshape(groups, 1, n)
    w = ((codes - zero) * scales.float()[:, None]).reshape(k, n)
    y = input.float() @ w
    return (y if bias is None else y + bias.float()).to(input.dtype)


@pytest.mark.ecosystem("vllm")
@pytest.mark.parametrize(("codec", "to"), VLLM)
def test_vllm_runs_the_model(tmp_path, monkeypatch, codec, to):
    """vLLM's CPU engine: the log probabilities of every token of a prompt are those of the values.
    Where its build has no kernel for packed integers, the product of what vLLM packed for it.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.distributed import cleanup_dist_env_and_memory

    import torch
    import vllm
    from vllm import _custom_ops

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        monkeypatch.setattr(_custom_ops, "cpu_gemm_wna16", multiply_as_vllm_packs)

    folder, packed, dense = write_llama(tmp_path / "in", codec)
    convert(folder, tmp_path / "out", to=to)
    engine = vllm.LLM(
        str(tmp_path / "out"),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_logprobs=64,
        skip_tokenizer_init=True,
    )
    try:
        wanted_tokens = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=64, detokenize=False)
        (answer,) = engine.generate([{"prompt_token_ids": IDS}], wanted_tokens)
    finally:
        del engine
        cleanup_dist_env_and_memory()
    theirs = np.array([[at[token].logprob for token in range(64)] for at in answer.prompt_logprobs[1:]])
    logits = plain_llama(packed, dense)[:-1]
    ours = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    close(theirs, ours, 0.02)


LLAMA_CPP = [
    (name, to)
    for name in ("llama", "qwen3", "gemma3")
    for to in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4", "iq4_nl", "nvfp4")
    if (name, to) != ("gemma3", "nvfp4")
]
"""llama.cpp applies no tensor scale to Gemma 3's feed-forward weights: its logits of an NVFP4 file
are NaN.
"""


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize(("name", "to"), LLAMA_CPP)
def test_llama_cpp_runs_the_model(tmp_path, name, to):
    """A tiny model quantized to a GGUF: llama.cpp's logits are ours, to what its 8-bit activations
    lose.
    """
    import llama_cpp

    import torch
    from support.gguf_models import VOCABULARY, dense_model, write

    source = write(tmp_path / "in.gguf", name, dense_model(name), False)
    with halfbyte.open(source) as checkpoint:
        quantize_checkpoint(checkpoint, tmp_path / "out.gguf", recipe_of(f"gguf:{to}"))
    ids = np.random.default_rng(0).integers(3, VOCABULARY, 24).tolist()
    wanted = _own_logits(tmp_path / "out.gguf", torch.tensor([ids]))
    engine = llama_cpp.Llama(str(tmp_path / "out.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    engine.eval(ids)
    logits = np.array(engine.scores[: len(ids)])
    engine.close()
    # Gemma's norms multiply by up to 2, and so what is lost before them; with float32 weights
    # llama.cpp is within 0.1 % of us.
    close(logits, wanted, 0.1 if name == "gemma3" else 0.05)
    source_logits = _own_logits(source, torch.tensor([ids]))
    # Nearer to our packed weights than to the dense ones, which are off by what the rounding costs.
    if to != "q8_0":
        assert np.square(logits - wanted).sum() < 0.3 * np.square(logits - source_logits).sum()


@pytest.mark.ecosystem("llama-cpp-python")
def test_llama_cpp_runs_what_a_folder_was_converted_to(tmp_path):
    """Folder to GGUF by --like: rows of q and k in llama.cpp's order, its tokenizer and key-values,
    our bits.
    """
    import llama_cpp

    import torch
    from support.gguf_models import VOCABULARY, dense_model, write

    model = dense_model("llama")
    like = write(tmp_path / "like.gguf", "llama", model, False)
    model.save_pretrained(tmp_path / "dense")
    with halfbyte.open(tmp_path / "dense") as checkpoint:
        quantize_checkpoint(checkpoint, tmp_path / "folder", recipe_of("gptq:int4:g32"))
    convert(tmp_path / "folder", tmp_path / "out.gguf", to="gguf:q4_0", like=like)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, 24).tolist()
    wanted = _own_logits(tmp_path / "folder", torch.tensor([ids]))
    engine = llama_cpp.Llama(str(tmp_path / "out.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    engine.eval(ids)
    logits = np.array(engine.scores[: len(ids)])
    engine.close()
    close(logits, wanted, 0.05)


@pytest.mark.ecosystem("onnxruntime")
@pytest.mark.parametrize(
    ("codec", "k"),
    [("int4:g128", 256)] + [(c, k) for c in ("int4:g32", "uint4:g32", "uint8:g64", "uint2:g32") for k in (256, 288)],
)  # the golden files have a short last block of 128
def test_onnxruntime_multiplies_by_what_is_written(codec, k):
    """MatMulNBits on our initializers: one-hot inputs give our values, exactly; others our product
    to float32's rounding.
    """
    import onnx
    import onnxruntime

    n, rng = 24, np.random.default_rng(k)
    q = quantize(rng.standard_normal((n, k)).astype(np.float32), format_named(codec, scale_dtype="float32"))
    layout = LAYOUTS["onnx"]
    attributes = layout.config(q)
    tensors = layout.pack(q, attributes)
    order = [s for s in tensors if s.startswith("weight_Q")] + ["weight_scales", "weight_zero_points", "weight_g_idx"]
    names = [s if s in tensors else "" for s in order]
    while not names[-1]:
        names.pop()
    node = onnx.helper.make_node(
        "MatMulNBits",
        ["x", *names],
        ["y"],
        domain="com.microsoft",
        **{a: v for a, v in {**attributes, "K": k, "N": n}.items() if a in ("K", "N", "bits", "block_size")},
    )
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [None, k])],
        [value("y", onnx.TensorProto.FLOAT, [None, n])],
        [onnx.numpy_helper.from_array(np.asarray(tensors[s]), s) for s in names if s],
    )
    opset = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    session = onnxruntime.InferenceSession(
        onnx.helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = q.dequantize("float32")
    assert np.array_equal(session.run(None, {"x": np.eye(k, dtype=np.float32)})[0], values.T)
    x = rng.standard_normal((5, k)).astype(np.float32)
    wanted = x.astype(np.float64) @ values.T.astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(values.T).astype(np.float64) * k * 2.0**-24
    assert (np.abs(session.run(None, {"x": x})[0] - wanted) <= bound).all()


def _own_logits(path: Path, ids: Any) -> np.ndarray:
    import torch

    model, _ = halfbyte.load_model(path)
    with torch.no_grad():
        return model(ids).logits[0].float().numpy()
