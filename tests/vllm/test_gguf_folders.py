"""vLLM runs what a GGUF becomes, of every architecture that it and halfbyte know: a dense folder,
one in halfbyte's layout, and the file itself. Its log probabilities and its text are ours.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte
from halfbyte.cli import main
from halfbyte.gguf_models.architectures import ARCHITECTURES
from halfbyte.gguf_models.names import unsupported
from support import served_models
from support.gguf_families import FAMILIES, architecture, family_model, write_family
from support.gguf_models import MODELS
from support.served_models import BOUND

CASES = [*MODELS, *(name for name in FAMILIES if architecture(name).task == "text")]
"""Of `support.gguf_models`, and of `support.gguf_families` at a width of 256."""
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "halfbyte": {"quantization": "halfbyte"},
    "model.gguf": {"config_format": "halfbyte"},
}
"""What vLLM is given -> its options."""
NO_CLASS = {
    "bitnet", "deepseek2:temperature", "dots1", "minimax-m3", "minimax-m3:blocks", "mistral4", "mpt", "phimoe", "smallthinker",
    "smallthinker:global",
}  # fmt: skip
"""Cases whose class vLLM 0.32 does not have."""
NEWER = {"bailingmoe3", "dots3note"}
"""Cases whose model type the transformers beside vLLM 0.32 (5.19) does not have."""
LATENT = ("deepseek2", "deepseek2:v2", "deepseek2:whole", "deepseek32", "glm-dsa")
"""Cases of width 512: heads of latent attention that vLLM's CPUs have are 576 long."""
REFUSED = {
    "dbrx": "w13_weight",  # its loader looks for a name that its mixture no longer has
    "deepseek32": "Sparse Attention is not supported on CPU",
    "deepseek4": "mlp_layer_types",  # kinds of layers that transformers 5.19 does not know
    "glm-dsa": "Sparse Attention is not supported on CPU",
    "hrm_text": r"no module or parameter named 'model\.[HL]_module",  # published with fused matrices
    "hy_v4": "not initialized from checkpoint|no tensor for",  # names of hyper-connections and sinks
    "jamba": "selective_scan_fwd",
    "kimi-linear": "--mamba-block-size can only be set with --enable-prefix-caching",
    "mamba": "selective_scan_fwd",
    "mamba:falcon": "selective_scan_fwd",
    "mimo2": "'triton' has no attribute 'next_power_of_2'",
    "nemotron_h_moe": "is_act_and_mul=False is supported only for CUDA",
    "nemotron_h_moe:latent": "is_act_and_mul=False is supported only for CUDA",
    "qwen35": "failed to be inspected",  # it imports torchvision, whose build for this torch is none
    "qwen35moe": "failed to be inspected",
    "qwen3next": "CPU GDN attention requires BF16",
    "qwen4exp": "failed to be inspected",
    "qwen4exp:blocks": "failed to be inspected",
}
"""Cases that vLLM refuses on a CPU, and its words."""
DIFFERS = {
    "apertus": "the two numbers of the activation are in bfloat16",
    "bloom": "1.1e-4 apart: attention with ALiBi on CPUs",
    "ernie4_5-moe": "on CPUs experts are chosen without the router's bias",
    "gemma3n": "not found",
    "granitehybrid": "the gated norm of Mamba 2 is over each group of channels, not over all",
    "mamba2": "the same",
    "phi3:long": "long factors wherever max_model_len is longer, and no attention_factor",
    "phi3:short": "no attention_factor",
}
"""Cases of which vLLM computes something else, and why."""
PASSED_OVER = ("laguna", "laguna:element")
"""Cases whose bias of the router vLLM alone passes over; with the plug-in they are equal."""
ASKED: dict[str, dict[str, Any]] = {
    name: {"hf_overrides": {"sliding_window": 3}} for name in ("cohere2", "cohere2moe", "cohere2moe:rms")
}
"""Windows of four tokens: vLLM's Cohere 2 adds one to the field; transformers and llama.cpp do not."""

pytestmark = pytest.mark.ecosystem("vllm")


@pytest.fixture(autouse=True)
def _engine_in_this_process(monkeypatch):
    """Two faults of vLLM 0.32 on CPUs are mended. Its router has sigmoid scores of groups of
    experts alone, and ends at MiniMax M2; one group of all is the same choice. Its kernel of the
    rotation turns queries of [tokens, heads, length], as LFM2 and DeepSeek without YaRN have them,
    wrongly.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from halfbyte.vllm import register

    choose = CPURouter._compute_routing

    def grouped(router, *values, **options):
        if router.scoring_func == "sigmoid" and not router.use_grouped_topk and router.custom_routing_function is None:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
        return choose(router, *values, **options)

    rotate = RotaryEmbedding.forward_cpu

    def by_heads(rotation, positions, query, *values, **options):
        chosen = rotation.forward_native if query.ndim == 3 else functools.partial(rotate, rotation)
        return chosen(positions, query, *values, **options)

    monkeypatch.setattr(CPURouter, "_compute_routing", grouped)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", by_heads)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()


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


def write_packed(folder: Path, name: str, width: int) -> Path:
    """A packed GGUF of a case."""
    if name in MODELS:
        served_models.write_gguf_file(folder, name)
        return folder / "model.gguf"
    model = family_model(name, width)
    source = write_family(folder / "float.gguf", name, model)
    assert main(["quantize", str(source), str(folder / "model.gguf"), "--to", "gguf:q8_0"]) == 0
    return folder / "model.gguf"


@pytest.mark.parametrize("name", CASES)
def test_vllm_runs_what_a_file_becomes(tmp_path, monkeypatch, name):
    from vllm.model_executor.models.registry import ModelRegistry

    width = sizes_for_vllm(monkeypatch, name)
    if name in NEWER:
        with pytest.raises(ValueError, match="Unrecognized model identifier"):
            write_packed(tmp_path, name, width)
        return
    packed = write_packed(tmp_path, name, width)
    assert main(["dequantize", str(packed), str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    assert main(["convert", str(packed), str(tmp_path / "halfbyte"), "--to", "halfbyte"]) == 0
    (kind,) = json.loads((tmp_path / "dense" / "config.json").read_text("utf-8"))["architectures"]
    assert (kind in ModelRegistry.get_supported_archs()) == (name not in NO_CLASS)
    if name in NO_CLASS:
        return
    rows, text = served_models.answer(halfbyte.load_model(packed)[0])
    reason = unsupported(ARCHITECTURES[MODELS[name][0]] if name in MODELS else architecture(name))
    for form, options in FORMS.items():
        theirs = served_models.vllm_words(tmp_path / form, **options, **ASKED.get(name, {}))
        if form == "model.gguf" and reason:
            assert isinstance(theirs, str)
            assert f"another form than its GGUF ({reason})" in theirs
        elif name in REFUSED:
            assert isinstance(theirs, str)
            assert re.search(REFUSED[name], theirs)
        else:
            assert not isinstance(theirs, str), f"{form}: {theirs}"
            equal = np.abs(theirs[0] - rows).max() < BOUND and theirs[1] == text
            assert equal == (name not in DIFFERS and (form != "dense" or name not in PASSED_OVER)), form
