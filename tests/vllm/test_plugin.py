"""The plug-in in vLLM's own engine: each checkpoint's log probabilities are those of its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import torch
from support.tiny_models import write_tiny

IDS = [3, 17, 42, 5, 60, 21, 8, 33]
TOKENS = 8

DENSE_ARCHITECTURES = ("llama", "qwen3", "gemma3_text")
EVERYWHERE = ("gptq", "gptq3", "awq", "ct-int4", "ct-nvfp4", "ct-mxfp4", "modelopt", "mlx", "mlx-mxfp4", "bitsandbytes", "hqq",
              "torchao", "metal-marlin", "fp8", "halfbyte")  # fmt: skip

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


def write(folder: Any, arch: str, producer: str, **options: Any) -> Any:
    """A tiny checkpoint whose config.json names its class, as published ones do."""

    def named(config: dict[str, Any]) -> None:
        config["architectures"] = [ARCHITECTURES[arch]]

    if arch == "gpt_oss":
        options["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 32,
        }  # fmt: skip
    return write_tiny(folder, arch, producer, change_config=named, head_dim=32, **options)


def answer(folder: Any, **options: Any) -> tuple[np.ndarray, list[int]]:
    """(log probabilities of every token at each position of the prompt, greedy continuation)."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

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


@pytest.mark.parametrize("producer", EVERYWHERE)
@pytest.mark.parametrize("arch", DENSE_ARCHITECTURES)
def test_linear_layers(tmp_path, arch, producer):
    tiny = write(tmp_path / "in", arch, producer)
    check(tmp_path / "in", tiny.dense, quantization="halfbyte")


@pytest.mark.parametrize("producer", ("gptq", "awq", "ct-int4", "modelopt", "mlx", "fp8", "halfbyte"))
def test_experts(tmp_path, producer):
    tiny = write(tmp_path / "in", "qwen3_moe", producer)
    check(tmp_path / "in", tiny.dense, quantization="halfbyte")


def test_gpt_oss(tmp_path):
    tiny = write(tmp_path / "in", "gpt_oss", "gpt-oss")
    check(tmp_path / "in", tiny.dense)
