"""A small model of every text architecture whose GGUF halfbyte reads, and what vLLM 0.32 does with
each on a CPU: tests/vllm runs it, and `inspect --for` must predict it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfbyte.cli import main
from support import served_models
from support.gguf_families import FAMILIES, architecture, family, family_model, write_family
from support.gguf_models import MODELS

CASES = [*MODELS, *(name for name in FAMILIES if architecture(name).task == "text")]
"""Of `support.gguf_models`, and of `support.gguf_families` at a width of 256."""
NEWER = {"bailingmoe3", "dots3note"}
"""Cases whose model type the transformers beside vLLM 0.32 (5.19) does not have."""
LATENT = (
    "deepseek2", "deepseek2:v2", "deepseek2:temperature", "deepseek2:whole", "deepseek32", "glm-dsa", "hy_v4", "mistral4",
)  # fmt: skip
"""Cases of width 512: heads of latent attention that vLLM's CPUs have are 576 long."""
REFUSED = {
    "deepseek2:temperature": "is not supported by MLA",
    "dbrx": "w13_weight",  # its loader looks for a name that its mixture no longer has
    "deepseek32": "Sparse Attention is not supported on CPU",
    "deepseek4": "Unsupported head_dim for fused quant",  # heads of 512 and of 128 alone
    "glm-dsa": "Sparse Attention is not supported on CPU",
    "hy_v4": "sparse attention was requested, but no valid sparse MLA backend",
    "jamba": "selective_scan_fwd",
    "kimi-linear": "--mamba-block-size can only be set with --enable-prefix-caching",
    "mamba": "selective_scan_fwd",
    "mamba:falcon": "selective_scan_fwd",
    "mimo2": "'triton' has no attribute 'next_power_of_2'",
    "minimax-m3:blocks": "index 4 is out of bounds",  # transformers' code in vLLM, where it chooses blocks
    "mistral4": "is not supported by MLA",  # transformers' code in vLLM
    "mpt": "was supported in vLLM until v0.28.0",
    "nemotron_h_moe": "is_act_and_mul=False is supported only for CUDA",
    "nemotron_h_moe:latent": "is_act_and_mul=False is supported only for CUDA",
    "qwen35": "failed to be inspected",  # it imports torchvision, whose build for this torch is none
    "qwen35moe": "failed to be inspected",
    "qwen4exp": "failed to be inspected",
    "qwen4exp:blocks": "failed to be inspected",
    "smallthinker": "are not supported for now",  # nor has transformers the model
    "smallthinker:global": "are not supported for now",
}
"""Cases that vLLM refuses on a CPU, and its words."""
DIFFERS = {
    "apertus": "numbers of the activation in bfloat16",
    "bloom": "exact GELU",
    "ernie4_5-moe": "without the router's bias",
    "gemma3n": "leaves out each layer's embeddings",
    "granitehybrid": "over each group of channels",
    "hrm_text": "in both directions",
    "mamba2": "over each group of channels",
    "minimax-m3": "SiLU in place of the limited gate",
    "phi3:long": "takes long_factor for prompts of any length",
    "phimoe": "bias of the head",
}
"""Cases of which vLLM computes something else, and the words of the prediction. Each is equal where
the cause is mended (tests/vllm/test_causes.py).
"""
PASSED_OVER = {"laguna", "laguna:element"}
"""Cases whose bias of the router vLLM alone passes over; with the plug-in they are equal."""
MENDED = {
    "deepseek2:v2": "kernel of the rotation", "deepseek2:whole": "kernel of the rotation", "lfm2": "kernel of the rotation",
    "lfm2moe": "kernel of the rotation", "minimax-m2": "sigmoid scores", "laguna": "sigmoid scores",
    "laguna:element": "sigmoid scores", "minimax-m3": "sigmoid scores", "minimax-m3:blocks": "sigmoid scores",
}  # fmt: skip
"""Cases that meet two faults of vLLM on CPUs, which are mended for the tests, and the words of the
prediction.
"""
WINDOWS = {"cohere2", "cohere2moe", "cohere2moe:rms"}
"""Windows of four tokens: vLLM's Cohere 2 adds one to the field; transformers and llama.cpp do not."""
SHORT = {"phi3:short"}
"""LongRoPE, run with a `max_model_len` below the original length; at longer ones vLLM differs."""
HALF_PRECISION = {"qwen3next"}
"""Cases that vLLM computes in bfloat16 alone on a CPU."""
ASKED: dict[str, dict[str, Any]] = {name: {"hf_overrides": {"sliding_window": 3}} for name in WINDOWS} | {
    name: {"dtype": "bfloat16"} for name in HALF_PRECISION
}
"""What vLLM is told beside the file."""


def sizes_for_vllm(monkeypatch: Any, name: str) -> int:
    """Gives a case the sizes that vLLM's model of it takes for granted; its width."""
    if name in ("qwen2", "qwen2-yarn"):  # heads are as long as the width over their number
        arch, kind, changes, keys = MODELS[name]
        monkeypatch.setitem(MODELS, name, (arch, kind, changes | {"hidden_size": 128}, keys))
    if name in ("falcon", "falcon:40b"):  # feed-forward layers are four times as wide as the model
        changes, keys = FAMILIES[name]
        monkeypatch.setitem(FAMILIES, name, (changes | {"ffn_hidden_size": 1024}, keys))
    if name == "llama4":  # one expert a token, as every published one has
        changes, keys = FAMILIES[name]
        one = [key for key in keys if key[0] != "expert_used_count"] + [("expert_used_count", "uint32", 1)]
        monkeypatch.setitem(FAMILIES, name, (changes | {"num_experts_per_tok": 1}, one))
    return 512 if name in LATENT else 256


def published_heads(monkeypatch: Any) -> None:
    """Gives DeepSeek-V4 the sizes of its heads that vLLM's kernels take: those of the published
    ones, and as many keys that the indexer chooses.
    """
    changes, keys = family("deepseek4", 256)
    sizes = {"head_dim": 512, "index_head_dim": 128, "index_topk": 512, "partial_rotary_factor": 64 / 512}
    rope = {kind: stated | {"partial_rotary_factor": 64 / 512} for kind, stated in changes["rope_parameters"].items()}
    stated = {"attention.indexer.key_length": 128, "attention.indexer.top_k": 512, "rope.dimension_count": 64}
    stated |= {"attention.key_length": 512, "attention.value_length": 512}
    keys = [key for key in keys if key[0] not in stated] + [(name, "uint32", size) for name, size in stated.items()]
    monkeypatch.setitem(FAMILIES, "deepseek4", (changes | sizes | {"rope_parameters": rope}, keys))


def choose_in_one_group(patch: Any, needed: Callable[[Any], bool]) -> None:
    """Gives vLLM's router on CPUs one group of all experts where `needed` says so of it: the same
    choice, by the code that has sigmoid scores and biases, which its code without groups lacks.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    choose = CPURouter._compute_routing

    def grouped(router: Any, *values: Any, **options: Any) -> Any:
        if needed(router):
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
        return choose(router, *values, **options)

    patch.setattr(CPURouter, "_compute_routing", grouped)


def write_packed(folder: Path, name: str, width: int) -> Path:
    """A packed GGUF of a case."""
    if name in MODELS:
        served_models.write_gguf_file(folder, name)
        return folder / "model.gguf"
    source = write_family(folder / "float.gguf", name, family_model(name, width))
    assert main(["quantize", str(source), str(folder / "model.gguf"), "--to", "gguf:q8_0"]) == 0
    return folder / "model.gguf"


def write_folders(folder: Path, packed: Path) -> None:
    """What a file becomes: a dense folder in float32, and one in halfbyte's layout."""
    assert main(["dequantize", str(packed), str(folder / "dense"), "--dtype", "float32"]) == 0
    assert main(["convert", str(packed), str(folder / "halfbyte"), "--to", "halfbyte"]) == 0


def config_of(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return found
