"""The plug-in in vLLM's own engine: each checkpoint's log probabilities are those of its values."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tomllib

import halfbyte as hb
import torch
from halfbyte.conversion import convert
from support.gguf_models import dense_model as dense_gguf_model
from support.gguf_models import write as write_gguf
from support.tiny_models import PRODUCERS, Producer, write_tiny
from support.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]
IDS = [3, 17, 42, 5, 40, 21, 8, 33]
TOKENS = 8

ASKED = (
    "gptq", "gptq3", "awq", "ct-int4", "ct-nvfp4", "ct-mxfp4", "modelopt", "mlx", "mlx-mxfp4", "bitsandbytes", "hqq", "torchao",
    "metal-marlin", "fp8", "halfbyte",
)  # fmt: skip
TAKEN = ("gptq3", "ct-nvfp4", "ct-mxfp4", "modelopt", "bitsandbytes", "hqq", "torchao", "metal-marlin", "fp8")
"""What vLLM 0.32 alone refuses on a CPU (torchao: where that package is not installed)."""

NO_CPU_KERNEL = {
    "gptq8": Producer(
        "gptq",
        "int8:g32",
        {"scale_dtype": "float16"},
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": False},
    ),
    "ct-int8": Producer(
        "compressed-tensors",
        "int8:g32",
        {"scale_dtype": "bfloat16"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
                }
            },
        },
    ),
    "ct-fp8": Producer(
        "compressed-tensors",
        "fp8_e4m3:channel",
        {},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
                }
            },
        },
    ),
    "mxfp8": Producer(
        "modelopt", "mxfp8_e4m3", {}, {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "ignore": ["lm_head"]}
    ),
    "fp8-dynamic": Producer(
        "fp8",
        "fp8_e4m3:g32",
        {"rows": 32},
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    ),
}
"""Configurations that vLLM's classes accept and for which it has no kernel on any CPU."""

pytestmark = pytest.mark.ecosystem("vllm")


@pytest.fixture(autouse=True)
def _engine_in_this_process(monkeypatch):
    from halfbyte.vllm import register

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def write(folder: Any, arch: str, producer: str | Producer, **options: Any) -> Any:
    """A tiny checkpoint whose config.json names its class, as published ones do."""

    def named(config: dict[str, Any]) -> None:
        config["architectures"] = [ARCHITECTURES[arch]]

    if arch == "gpt_oss":
        options["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        }
    return write_tiny(folder, arch, producer, change_config=named, head_dim=32, **options)


def answer(folder: Any, **options: Any) -> tuple[np.ndarray, list[int]]:
    """(log probabilities of every token at each position of the prompt, greedy continuation)."""
    from vllm.distributed import cleanup_dist_env_and_memory

    import vllm

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_logprobs": -1, "skip_tokenizer_init": True}
    engine = vllm.LLM(str(folder), **(settings | options))
    try:
        wanted = vllm.SamplingParams(max_tokens=TOKENS, temperature=0, prompt_logprobs=-1, detokenize=False, ignore_eos=True)
        (reply,) = engine.generate([{"prompt_token_ids": IDS}], wanted)
    finally:
        del engine
        cleanup_dist_env_and_memory()
    rows = [[at[token].logprob for token in range(len(at))] for at in reply.prompt_logprobs[1:]]
    return np.array(rows), list(reply.outputs[0].token_ids)


def truth(dense: Any) -> tuple[np.ndarray, list[int]]:
    """The same of the dense model of the same values, in transformers."""
    with torch.no_grad():
        logits = dense(torch.tensor([IDS])).logits[0, :-1]
        ids = list(IDS)
        for _ in range(TOKENS):
            ids.append(int(dense(torch.tensor([ids])).logits[0, -1].argmax()))
    return torch.log_softmax(logits.double(), -1).numpy(), ids[len(IDS) :]


def check(folder: Any, dense: Any, **options: Any) -> None:
    theirs, text = answer(folder, **options)
    ours, wanted = truth(dense)
    assert theirs.shape == ours.shape
    assert np.abs(theirs - ours).max() < 1e-4
    assert text == wanted


def method_of(folder: Any) -> str | None:
    """The quantization method that vLLM chooses for a folder."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(folder), skip_tokenizer_init=True).create_model_config().quantization


@pytest.mark.parametrize("producer", ASKED)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3_text"])
def test_linear_layers_of_every_kind(tmp_path, arch, producer):
    """Layers, fused qkv and gate_up, tables and heads, tied and not."""
    tiny = write(tmp_path / "in", arch, producer)
    check(tmp_path / "in", tiny.dense, quantization="halfbyte")


@pytest.mark.parametrize("producer", ["gptq", "awq", "ct-int4", "modelopt", "mlx", "fp8", "halfbyte"])
def test_experts(tmp_path, producer):
    tiny = write(tmp_path / "in", "qwen3_moe", producer)
    check(tmp_path / "in", tiny.dense, quantization="halfbyte")


@pytest.mark.parametrize("producer", TAKEN)
def test_what_vllm_cannot_run_here_is_taken_over_unasked(tmp_path, producer):
    tiny = write(tmp_path / "in", "llama", producer)
    assert method_of(tmp_path / "in") == "halfbyte"
    check(tmp_path / "in", tiny.dense)


@pytest.mark.parametrize("producer", NO_CPU_KERNEL)
def test_what_vllm_accepts_without_a_kernel_is_taken_over_unasked(tmp_path, monkeypatch, producer):
    tiny = write(tmp_path / "in", "llama", NO_CPU_KERNEL[producer])
    with monkeypatch.context() as patch:  # as with AVX-512: the build's kernel is not why
        patch.setattr("halfbyte.vllm.config._has_integer_kernel", lambda: True)
        assert method_of(tmp_path / "in") == "halfbyte"
    check(tmp_path / "in", tiny.dense)


def test_sizes_that_are_no_multiples_of_32_are_taken_over_unasked(tmp_path):
    words = {**PRODUCERS["awq"].config, "group_size": 16}
    tiny = write(tmp_path / "in", "llama", PRODUCERS["awq"]._replace(codec="uint4:g16", config=words), intermediate_size=144)
    assert method_of(tmp_path / "in") == "halfbyte"
    check(tmp_path / "in", tiny.dense)


def test_vllm_alone_has_no_kernel_for_8_bits_on_a_cpu(tmp_path):
    """Of what `NO_CPU_KERNEL` lists, the integers: with AVX-512 too."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
    from vllm.scalar_type import scalar_types

    def chosen(kind):
        return choose_mp_linear_kernel(MPLinearLayerConfig((128, 128), (128, 128), kind, torch.bfloat16, 32, False))

    chosen(scalar_types.uint4b8)
    with pytest.raises(ValueError, match="uint8b128"):
        chosen(scalar_types.uint8b128)


def test_gpt_oss_is_taken_over_on_a_cpu(tmp_path):
    tiny = write(tmp_path / "in", "gpt_oss", "gpt-oss")
    check(tmp_path / "in", tiny.dense)


@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_a_compiled_model(tmp_path, arch):
    """torch.compile sees one call for each product."""
    tiny = write(tmp_path / "in", arch, "gpt-oss" if arch == "gpt_oss" else "gptq")
    check(tmp_path / "in", tiny.dense, quantization="halfbyte", enforce_eager=False)


@pytest.mark.parametrize(("producer", "method"), [("gptq", "auto_gptq"), ("awq", "awq"), ("ct-int4", "compressed-tensors")])
def test_what_vllm_reads_is_left_to_it(tmp_path, producer, method):
    """Its build for CPUs without AVX-512 has no kernel for packed integers."""
    import vllm._custom_ops  # noqa: F401 it loads the build's operators

    tiny = write(tmp_path / "in", "llama", producer)
    left = hasattr(torch.ops._C, "cpu_gemm_wna16")
    assert method_of(tmp_path / "in") == (method if left else "halfbyte")
    if not left:
        check(tmp_path / "in", tiny.dense)


def test_registering_adds_one_name_and_changes_none():
    from vllm.model_executor import model_loader
    from vllm.model_executor.layers import quantization

    from halfbyte.vllm import register

    builtin = set(get_args(quantization.QuantizationMethods))
    register()
    assert set(quantization.QUANTIZATION_METHODS) - builtin == {"halfbyte"}
    assert set(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG) == {"halfbyte"}
    assert set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER) - set(get_args(model_loader.LoadFormats)) == {"halfbyte"}


def test_activation_order(tmp_path):
    """GPTQ whose groups are scattered over the inputs, which vLLM 0.32 refuses."""
    rng = np.random.default_rng(0)

    def scattered(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.endswith(".qweight"):
                groups = np.arange(tensors[name].shape[0] * 8) // 32
                tensors[f"{name.removesuffix('qweight')}g_idx"] = rng.permutation(groups).astype(np.int32)

    def desc_act(config: dict[str, Any]) -> None:
        config["architectures"] = ["LlamaForCausalLM"]
        config["quantization_config"]["desc_act"] = True

    tiny = write_tiny(tmp_path / "in", "llama", "gptq", edit=scattered, change_config=desc_act, head_dim=32)
    with hb.open(tmp_path / "in") as checkpoint, torch.no_grad():
        for key in checkpoint:
            if checkpoint.info(key).quantized:
                values = torch.from_numpy(checkpoint[key].dequantize("float32"))
                assert not torch.equal(values, tiny.dense.get_submodule(key).weight)
                tiny.dense.get_submodule(key).weight.copy_(values)
    assert method_of(tmp_path / "in") == "halfbyte"
    check(tmp_path / "in", tiny.dense)


def test_a_damaged_file_is_named(tmp_path):
    def lose(tensors: dict[str, Any]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.qweight"]

    def named(config: dict[str, Any]) -> None:
        config["architectures"] = ["LlamaForCausalLM"]

    write_tiny(tmp_path / "in", "llama", "gptq", edit=lose, change_config=named, head_dim=32)
    with pytest.raises(Exception, match=r"model\.layers\.1\.self_attn\.k_proj"):
        answer(tmp_path / "in", quantization="halfbyte")


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH in which the package's entry points are found, as pip leaves them."""
    installed = folder / "installed" / "halfbyte-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbyte\nVersion: 0\n", "utf-8")
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["vllm.general_plugins"]
    lines = "".join(f"{name} = {target}\n" for name, target in stated.items())
    (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{lines}", "utf-8")
    return installed.parent


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize(("arch", "producer"), [("llama", "gptq"), ("qwen3_moe", "mlx"), ("gpt_oss", "gpt-oss")])
def test_two_ranks(tmp_path, monkeypatch, arch, producer):
    """Tensor parallelism: each rank has its rows and inputs of the packed weights."""
    tiny = write(tmp_path / "in", arch, producer)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(install(tmp_path))]))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    check(tmp_path / "in", tiny.dense, quantization="halfbyte", tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3moe"])
def test_a_gguf_that_was_converted(tmp_path, name):
    """As llama.cpp's converter writes it, a folder of halfbyte's layout, the same values."""
    dense = dense_gguf_model(name)
    convert(write_gguf(tmp_path / "m.gguf", name, dense, True), tmp_path / "in", to="halfbyte")
    check(tmp_path / "in", dense, quantization="halfbyte")


SERVED = [
    ("llama", "bitsandbytes"),
    ("qwen3", "gptq3"),
    ("gemma3_text", "mlx"),
    ("qwen3_moe", "modelopt"),
    ("gpt_oss", "gpt-oss"),
]


@pytest.mark.parametrize(("arch", "producer"), SERVED)
def test_the_server_finds_the_plug_in_by_itself(tmp_path, arch, producer):
    """`vllm serve FOLDER`, its engine in a process of its own: the log probabilities of a prompt
    and the greedy text of a completion.
    """
    tiny = write(tmp_path / "in", arch, producer)
    write_tokenizer(tmp_path / "in")
    installed = install(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "in"), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--served-model-name", "tiny",
        *(["--quantization", "halfbyte"] if producer == "mlx" else []),
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(installed)]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        body = {
            "model": "tiny",
            "prompt": IDS,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "prompt_logprobs": 0,
        }
        reply = _post(f"http://127.0.0.1:{port}/v1/completions", body, server, tmp_path / "log")
    finally:
        server.terminate()
        server.wait(30)
    (choice,) = reply["choices"]
    rows, text = truth(tiny.dense)
    theirs = [at[str(token)]["logprob"] for at, token in zip(choice["prompt_logprobs"][1:], IDS[1:], strict=True)]
    assert np.abs(np.array(theirs) - rows[np.arange(len(theirs)), IDS[1:]]).max() < 1e-4
    assert choice["token_ids"] == text


def _post(url: str, body: dict[str, Any], server: subprocess.Popen[bytes], log: Path) -> Any:
    """The server's answer, once it is up."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(600):
        assert server.poll() is None, log.read_text("utf-8", "replace")[-3000:]
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read()) from error
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not start")
