"""Tiny checkpoints of every kind and shape that vLLM serves with the plug-in, and what a right
engine answers to one prompt.

    dense = write(folder, "qwen3", "awq")      the same values in a dense transformers model
    rows, text = answer(dense)                 log probabilities at each position, greedy continuation
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import halfbyte as hb
import torch
from support.gguf_models import dense_model as dense_gguf_model
from support.gguf_models import write as write_gguf
from support.tiny_models import PRODUCERS, Producer, dense_model, write_tiny
from support.tiny_tokenizer import write_tokenizer

IDS = [3, 17, 42, 5, 40, 21, 8, 33]
TOKENS = 8
BOUND = 1e-4
"""Largest difference of two log probabilities in float32."""

SHAPES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Model type -> its class, which config.json of published checkpoints names."""
GGUF_NAMES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}


def gptq(bits: int, version: str) -> Producer:
    """Asymmetric GPTQ."""
    stated = {"bits": bits, "sym": False, "checkpoint_format": version}
    return PRODUCERS["gptq"]._replace(codec=f"uint{bits}:g32", config={**PRODUCERS["gptq"].config, **stated})


def bitsandbytes(codec: str, **stated: Any) -> Producer:
    return Producer("bitsandbytes", codec, {}, {"quant_method": "bitsandbytes", **stated})


def intx() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))


def int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def float8() -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig()


def nvfp4() -> Any:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig()


TORCHAO = {"torchao-int4": intx, "torchao-int8": int8, "torchao-fp8": float8, "torchao-nvfp4": nvfp4}
"""Kind -> torchao's configuration; torchao itself packs and writes these."""
ACT_ORDER = "gptq-act-order"
KINDS: dict[str, Producer | None] = {
    "gguf": None,
    "gptq": PRODUCERS["gptq"],
    ACT_ORDER: PRODUCERS["gptq"]._replace(config={**PRODUCERS["gptq"].config, "desc_act": True}),
    **{f"gptq-{bits}-v{i}": gptq(bits, word) for bits in range(2, 9) for i, word in ((1, "gptq"), (2, "gptq_v2"))},
    "awq": PRODUCERS["awq"],
    "bnb-nf4": PRODUCERS["bitsandbytes"],
    "bnb-fp4": bitsandbytes("bnb_fp4:g64", load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-int8": bitsandbytes("bnb_int8", load_in_8bit=True),
    "hqq": PRODUCERS["hqq"],
    "mlx": PRODUCERS["mlx"],
    "mlx-mxfp4": PRODUCERS["mlx-mxfp4"],
    "mxfp4": PRODUCERS["ct-mxfp4"],
    "nvfp4": PRODUCERS["ct-nvfp4"],
    "nvfp4-modelopt": PRODUCERS["modelopt"],
    "ct-int4": PRODUCERS["ct-int4"],
    **dict.fromkeys(TORCHAO),
    "metal-marlin": PRODUCERS["metal-marlin"],
    "fp8": PRODUCERS["fp8"],
    "halfbyte": PRODUCERS["halfbyte"],
}
"""Kind -> how `write_tiny` writes it; a GGUF is written as llama.cpp's converter does, torchao's by
transformers.
"""
MATRICES_ALONE = ("gptq", "awq-gemm", "hqq", "fp8")
"""Layouts without stacks: gpt-oss's experts stay dense beside their packed attention."""
ASKED = {
    "gguf": {"config_format": "halfbyte", "tokenizer_mode": "halfbyte"},
    **{kind: {"quantization": "halfbyte"} for kind in ("mlx", "mlx-mxfp4", "halfbyte", "gptq", "awq", "ct-int4")},
    **{kind: {"quantization": "halfbyte"} for kind in TORCHAO},
}
"""What a user must say of kinds whose config.json names no method, and of those that vLLM runs by
itself on a CPU with AVX-512 (torchao's where torchao is installed); the others are taken over
unasked.
"""
CELLS = [(shape, kind) for shape in SHAPES for kind in KINDS]


def path_of(folder: Path, kind: str) -> Path:
    """Where vLLM finds the checkpoint."""
    return folder / "model.gguf" if kind == "gguf" else folder


def write(folder: Path, shape: str, kind: str | Producer, **options: Any) -> Any:
    """Writes the checkpoint with its tokenizer; the dense model of its values."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "gguf":
        return write_gguf_file(folder, GGUF_NAMES.get(shape, shape))
    if isinstance(kind, str) and kind in TORCHAO:
        return write_torchao(folder, shape, TORCHAO[kind]())
    how = KINDS[kind] if isinstance(kind, str) else kind
    assert how is not None

    def named(config: dict[str, Any]) -> None:
        config["architectures"] = [SHAPES.get(shape, "MixtralForCausalLM")]

    if shape == "gpt_oss":
        options["rope_parameters"] = YARN
        if kind == "mxfp4":
            how = PRODUCERS["gpt-oss"]
        elif how.layout in MATRICES_ALONE or kind == "bnb-int8":
            options["skip"] = lambda name: name.endswith(".experts")
    dense = write_tiny(folder, shape, how, change_config=named, head_dim=32, **options).dense
    if kind == ACT_ORDER:
        scatter_groups(folder, dense)
    write_tokenizer(folder)
    return dense


def write_gguf_file(folder: Path, case: str) -> Any:
    """A packed GGUF of a case of `support.gguf_models`; its dense model."""
    dense = dense_gguf_model(case)
    write_gguf(folder / "model.gguf", case, dense, True)
    return dense


def write_torchao(folder: Path, shape: str, config: Any) -> Any:
    """Packs a bfloat16 model by transformers and torchao; the dense model of the file's values."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    whole = folder / "whole"
    dense_model(shape, head_dim=32, **({"rope_parameters": YARN} if shape == "gpt_oss" else {})).bfloat16().save_pretrained(whole)
    options = {"dtype": torch.bfloat16, "quantization_config": TorchAoConfig(config)}
    AutoModelForCausalLM.from_pretrained(whole, **options).save_pretrained(folder)
    write_tokenizer(folder)
    shutil.rmtree(whole)
    return dense_of(folder)


def dense_of(path: Path) -> Any:
    """A dense float32 model of transformers with the values of a checkpoint."""
    from halfbyte.conversion.to_dense import dequantize_checkpoint
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch, hb.open(path) as checkpoint:
        dequantize_checkpoint(checkpoint, Path(scratch) / "values", dtype="float32")
        return AutoModelForCausalLM.from_pretrained(Path(scratch) / "values", dtype=torch.float32).eval()


def scatter_groups(folder: Path, dense: Any) -> None:
    """Gives every GPTQ weight of a folder an index that scatters its groups, and the dense model
    the values that it then has.
    """
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith(".qweight")]:
        groups = np.arange(tensors[name].shape[0] * 8) // 32
        tensors[f"{name.removesuffix('qweight')}g_idx"] = rng.permutation(groups).astype(np.int32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with hb.open(folder) as checkpoint, torch.no_grad():
        for key in checkpoint:
            if checkpoint.info(key).quantized:
                values, target = torch.from_numpy(checkpoint[key].dequantize("float32")), _weight(dense, key)
                assert not torch.equal(values, target)
                target.copy_(values)


def _weight(dense: Any, key: str) -> torch.Tensor:
    """The matrix of the dense model at a key of the checkpoint, an expert's among them."""
    path, found, leaf = key.partition(".experts.")
    if not found:
        return dense.get_submodule(key).weight
    experts = dense.get_submodule(f"{path}.experts")
    number, _, projection = leaf.partition(".")
    if projection == "down_proj":
        return experts.down_proj[int(number)]
    half = experts.gate_up_proj.shape[1] // 2
    joined = experts.gate_up_proj[int(number)]
    return joined[:half] if projection == "gate_proj" else joined[half:]


def answer(dense: Any) -> tuple[np.ndarray, list[int]]:
    """(log probabilities of every token at each position but the first, greedy continuation)."""
    with torch.no_grad():
        logits = dense(torch.tensor([IDS])).logits[0, :-1]
        ids = list(IDS)
        for _ in range(TOKENS):
            ids.append(int(dense(torch.tensor([ids])).logits[0, -1].argmax()))
    return torch.log_softmax(logits.double(), -1).numpy(), ids[len(IDS) :]


def vllm_answer(folder: Any, **options: Any) -> tuple[np.ndarray, list[int]]:
    """What vLLM answers: (log probabilities of every token at each position but the first, greedy
    continuation).
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    import vllm

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_logprobs": -1, "skip_tokenizer_init": True}
    settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 64}  # for so many the engine warms up
    engine = vllm.LLM(str(folder), **(settings | options))
    try:
        wanted = vllm.SamplingParams(max_tokens=TOKENS, temperature=0, prompt_logprobs=-1, detokenize=False, ignore_eos=True)
        (reply,) = engine.generate([{"prompt_token_ids": IDS}], wanted)
    finally:
        del engine
        cleanup_dist_env_and_memory()
    rows = [[at[token].logprob for token in range(len(at))] for at in reply.prompt_logprobs[1:]]
    return np.array(rows), list(reply.outputs[0].token_ids)


def vllm_words(folder: Any, **options: Any) -> tuple[np.ndarray, list[int]] | str:
    """`vllm_answer` of a process that is forked for it, or the class and words of the refusal: a
    refused engine leaves process groups and settings behind.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send_answer, args=(writer, folder, options))
    process.start()
    writer.close()
    try:
        answered: tuple[np.ndarray, list[int]] | str = reader.recv()
    except EOFError:
        answered = "the engine's process ended"
    process.join()
    return answered


def _send_answer(writer: Any, folder: Any, options: Any) -> None:
    try:
        writer.send(vllm_answer(folder, **options))
    except Exception as error:
        writer.send(f"{type(error).__name__}: {error}")
