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

import torch
from halfbyte.conversion import convert
from halfbyte.numerics.waiting import POLICY
from support import served_models
from support.served_models import ASKED, BOUND, CELLS, IDS, KINDS, TOKENS, path_of, write
from support.tiny_models import PRODUCERS, Producer, write_tiny

ROOT = Path(__file__).parents[2]
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
    "modelopt-fp8": Producer(
        "modelopt", "fp8_e4m3:channel", {"rows": -1}, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
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


def check(folder: Any, dense: Any, **options: Any) -> None:
    theirs, text = served_models.vllm_answer(folder, **options)
    ours, wanted = served_models.answer(dense)
    assert theirs.shape == ours.shape
    assert np.abs(theirs - ours).max() < BOUND
    assert text == wanted


def method_of(folder: Any) -> str | None:
    """The quantization method that vLLM chooses for a folder."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(folder), skip_tokenizer_init=True).create_model_config().quantization


@pytest.mark.parametrize(("shape", "kind"), CELLS)
def test_every_kind_of_every_shape(tmp_path, shape, kind):
    """Layers, fused qkv and gate_up, tables and heads, tied and not, experts; GGUF files as they
    are. Asked for only where vLLM reads the file itself, or no method is named.
    """
    dense = write(tmp_path, shape, kind)
    options = {name: value for name, value in ASKED.get(kind, {}).items() if name != "tokenizer_mode"}
    check(path_of(tmp_path, kind), dense, **options)


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", ["mlx", "halfbyte"])
def test_a_tied_head_shares_a_packed_table(tmp_path, shape, kind):
    """Also a table that vLLM gives no name (Llama's), and one that it keeps dense (Mixtral's). Its
    gpt-oss has no tied head.
    """
    dense = write(tmp_path, shape, kind, tie_word_embeddings=True)
    check(tmp_path, dense, quantization="halfbyte")


@pytest.mark.parametrize("case", ["llama-tied-bias", "mixtral"])
def test_a_gguf_of_other_shapes(tmp_path, case):
    """A tied Llama; a Mixtral, whose module of experts has another name in vLLM."""
    dense = served_models.write_gguf_file(tmp_path, case)
    check(path_of(tmp_path, "gguf"), dense, config_format="halfbyte")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ASKED])
def test_what_vllm_cannot_run_here_is_taken_over_unasked(tmp_path, kind):
    write(tmp_path, "llama", kind)
    assert method_of(tmp_path) == "halfbyte"


@pytest.mark.parametrize("producer", NO_CPU_KERNEL)
def test_what_vllm_accepts_without_a_kernel_is_taken_over_unasked(tmp_path, monkeypatch, producer):
    dense = write(tmp_path / "in", "llama", NO_CPU_KERNEL[producer])
    with monkeypatch.context() as patch:  # as with AVX-512: the build's kernel is not why
        patch.setattr("halfbyte.vllm.config._has_integer_kernel", lambda: True)
        assert method_of(tmp_path / "in") == "halfbyte"
    check(tmp_path / "in", dense)


AUTO_ROUND = PRODUCERS["gptq"]._replace(
    config={"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True}
)


@pytest.mark.parametrize(("shape", "how"), [("qwen3_moe", AUTO_ROUND), ("qwen3_moe", "modelopt"), ("llama", "modelopt-fp8")])
def test_scales_of_activations_and_caches_are_passed_over(tmp_path, shape, how):
    """As ModelOpt writes them beside each layer; experts, whose kernel vLLM lacks, unasked."""

    def scaled(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight_scale")]:
            tensors[name.replace("weight_scale", "input_scale")] = np.float32(0.25)
        for layer in range(2):
            for word in ("k_proj.k_scale", "v_proj.v_scale"):
                tensors[f"model.layers.{layer}.self_attn.{word}"] = np.float32(0.5)

    producer = NO_CPU_KERNEL.get(how) or PRODUCERS[how] if isinstance(how, str) else how
    dense = write(tmp_path / "in", shape, producer, **({} if producer is AUTO_ROUND else {"edit": scaled}))
    assert method_of(tmp_path / "in") == "halfbyte"
    check(tmp_path / "in", dense)


def test_experts_of_gpt_oss_one_by_one_with_their_biases(tmp_path):
    """As llm-compressor writes them: gate and up in matrices of their own."""

    def one_by_one(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            stack, (base, _, leaf) = tensors.pop(name), name.partition(".experts.")
            joint, part = leaf.startswith("gate_up_proj"), leaf.replace("_bias", ".bias").partition(".")[2]
            for e, value in enumerate(stack):
                for first, word in enumerate(("gate_proj", "up_proj") if joint else ("down_proj",)):
                    rows = value[first::2] if joint and value.ndim else value
                    tensors[f"{base}.experts.{e}.{word}.{part}"] = np.ascontiguousarray(rows)

    dense = write(tmp_path / "in", "gpt_oss", "nvfp4", edit=one_by_one)
    check(tmp_path / "in", dense, quantization="halfbyte")


def test_sizes_that_are_no_multiples_of_32_are_taken_over_unasked(tmp_path):
    words = {**PRODUCERS["awq"].config, "group_size": 16}
    dense = write(tmp_path / "in", "llama", PRODUCERS["awq"]._replace(codec="uint4:g16", config=words), intermediate_size=144)
    assert method_of(tmp_path / "in") == "halfbyte"
    check(tmp_path / "in", dense)


def test_vllm_alone_has_no_kernel_for_8_bits_on_a_cpu(tmp_path):
    """Of what `NO_CPU_KERNEL` lists, the integers: with AVX-512 too."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
    from vllm.scalar_type import scalar_types

    def chosen(kind):
        return choose_mp_linear_kernel(MPLinearLayerConfig((128, 128), (128, 128), kind, torch.bfloat16, 32, False))

    chosen(scalar_types.uint4b8)
    with pytest.raises(ValueError, match="uint8b128"):
        chosen(scalar_types.uint8b128)


@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_a_compiled_model(tmp_path, monkeypatch, arch):
    """torch.compile sees one call for each product. The environment's other tests compile nothing."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    dense = write(tmp_path / "in", arch, "mxfp4" if arch == "gpt_oss" else "gptq")
    check(tmp_path / "in", dense, quantization="halfbyte", enforce_eager=False)


@pytest.mark.parametrize(("producer", "method"), [("gptq", "auto_gptq"), ("awq", "awq"), ("ct-int4", "compressed-tensors")])
def test_what_vllm_reads_is_left_to_it(tmp_path, producer, method):
    """Its build for CPUs without AVX-512 has no kernel for packed integers."""
    import vllm._custom_ops  # noqa: F401 it loads the build's operators

    dense = write(tmp_path / "in", "llama", producer)
    left = hasattr(torch.ops._C, "cpu_gemm_wna16")
    assert method_of(tmp_path / "in") == (method if left else "halfbyte")
    if not left:
        check(tmp_path / "in", dense)


def test_registering_adds_one_name_to_each_list_and_changes_one_function():
    from vllm.engine import arg_utils
    from vllm.model_executor import model_loader
    from vllm.model_executor.layers import quantization
    from vllm.renderers import registry as renderers
    from vllm.tokenizers import registry as tokenizers
    from vllm.transformers_utils import config as configs

    from halfbyte.vllm import register

    builtin = set(get_args(quantization.QuantizationMethods))
    register()
    assert set(quantization.QUANTIZATION_METHODS) - builtin == {"halfbyte"}
    assert set(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG) == {"halfbyte"}
    assert set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER) - set(get_args(model_loader.LoadFormats)) == {"halfbyte"}
    assert {*configs._CONFIG_FORMAT_TO_CONFIG_PARSER, "auto"} - set(get_args(configs.ConfigFormat)) == {"halfbyte"}
    assert configs._CONFIG_FORMAT_TO_CONFIG_PARSER["hf"] is configs.HFConfigParser
    for registered, own in (
        (tokenizers.TokenizerRegistry.tokenizers, tokenizers._VLLM_TOKENIZERS),
        (renderers.RENDERER_REGISTRY.renderers, renderers._VLLM_RENDERERS),
    ):
        assert set(registered) - set(own) == {"halfbyte"}
    look = arg_utils.maybe_override_with_speculators
    assert look.__wrapped__ is configs.maybe_override_with_speculators
    with pytest.raises(OSError, match="nowhere"):
        look("/nowhere", "tokenizer", False)


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_of_a_gguf_file_no_speculator_is_looked_for(speculative):
    from vllm.engine.arg_utils import maybe_override_with_speculators

    given = {"model": "/nowhere.gguf", "tokenizer": None, "trust_remote_code": False, "vllm_speculative_config": speculative}
    assert maybe_override_with_speculators(**given) == ("/nowhere.gguf", None, speculative)


def test_the_tokenizer_and_the_end_of_a_gguf_file(tmp_path):
    """As `load_model` has them."""
    from vllm.tokenizers.registry import get_tokenizer
    from vllm.transformers_utils.config import get_config

    from halfbyte.transformers import load_model

    write(tmp_path, "llama", "gguf")
    file = tmp_path / "model.gguf"
    model, tokenizer = load_model(file)
    theirs = get_tokenizer(file, tokenizer_mode="halfbyte")
    for text in ("hello world", " ab\n", "é"):
        assert theirs(text).input_ids == tokenizer(text).input_ids
    config = get_config(file, False, config_format="halfbyte")
    assert config.eos_token_id == model.generation_config.eos_token_id
    write(tmp_path / "folder", "llama", "halfbyte")
    with pytest.raises(Exception, match="is no GGUF file"):
        get_config(tmp_path / "folder", False, config_format="halfbyte")


def test_a_damaged_file_is_named(tmp_path):
    def lose(tensors: dict[str, Any]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.qweight"]

    def named(config: dict[str, Any]) -> None:
        config["architectures"] = ["LlamaForCausalLM"]

    write_tiny(tmp_path / "in", "llama", "gptq", edit=lose, change_config=named, head_dim=32)
    with pytest.raises(Exception, match=r"model\.layers\.1\.self_attn\.k_proj"):
        served_models.vllm_answer(tmp_path / "in", quantization="halfbyte")


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
@pytest.mark.parametrize(("arch", "producer"), [("llama", "gptq"), ("qwen3_moe", "mlx"), ("gpt_oss", "mxfp4")])
def test_two_ranks(tmp_path, monkeypatch, arch, producer):
    """Tensor parallelism: each rank has its rows and inputs of the packed weights."""
    dense = write(tmp_path / "in", arch, producer)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(install(tmp_path))]))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    check(tmp_path / "in", dense, quantization="halfbyte", tensor_parallel_size=2)


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_a_gguf_that_was_converted(tmp_path, shape):
    """A folder of halfbyte's layout, the same values."""
    dense = write(tmp_path, shape, "gguf")
    convert(tmp_path / "model.gguf", tmp_path / "in", to="halfbyte")
    check(tmp_path / "in", dense, quantization="halfbyte")


def test_idle_threads_of_the_engine_sleep(tmp_path, monkeypatch):
    """torch's threads leave the cores to the kernels in the process that vLLM starts after this,
    and in no other model's.
    """
    from vllm.engine.arg_utils import EngineArgs

    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    monkeypatch.delenv(POLICY, raising=False)
    write(tmp_path / "theirs", "llama", "ct-int4")
    EngineArgs(str(tmp_path / "theirs"), dtype="bfloat16", **options).create_engine_config()
    assert POLICY not in os.environ
    write(tmp_path / "packed", "llama", "bnb-nf4")
    EngineArgs(str(tmp_path / "packed"), **options).create_engine_config()
    assert os.environ[POLICY] == "passive"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"  # it reads the variable anew


SERVED = [
    ("llama", "bnb-nf4"),
    ("llama", "gguf"),
    ("qwen3", "gptq-3-v2"),
    ("gemma3_text", "mlx"),
    ("qwen3_moe", "nvfp4-modelopt"),
    ("gpt_oss", "mxfp4"),
]


@pytest.mark.parametrize(("shape", "kind"), SERVED)
def test_the_server_finds_the_plug_in_by_itself(tmp_path, shape, kind):
    """`vllm serve`, its engine in a process of its own: the log probabilities of a prompt and the
    greedy text of a completion. tools/vllm_matrix.py does this with every kind of every shape.
    """
    dense = write(tmp_path / "in", shape, kind)
    options = [word for name, value in ASKED.get(kind, {}).items() for word in (f"--{name.replace('_', '-')}", value)]
    installed = install(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = path_of(tmp_path / "in", kind)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--served-model-name", "tiny",
        *options,
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
    rows, text = served_models.answer(dense)
    theirs = [at[str(token)]["logprob"] for at, token in zip(choice["prompt_logprobs"][1:], IDS[1:], strict=True)]
    assert np.abs(np.array(theirs) - rows[np.arange(len(theirs)), IDS[1:]]).max() < BOUND
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
