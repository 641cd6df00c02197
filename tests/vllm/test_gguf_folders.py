"""vLLM runs the folders that a GGUF becomes, dense and in halfbyte's layout: its log probabilities
and its text are ours.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import halfbyte
from halfbyte.cli import main
from support import served_models
from support.gguf_families import family_model, write_family
from support.gguf_models import MODELS
from support.served_models import BOUND

CASES = (
    *MODELS, "afmoe", "arcee", "cohere2", "cohere2moe", "command-r", "ernie4_5", "exaone-moe", "exaone4", "falcon", "gemma",
    "glm4", "glm4moe", "granite", "hunyuan-dense", "hunyuan-moe", "minimax-m2", "smollm3", "starcoder2",
)  # fmt: skip
"""Of `support.gguf_models`, and of `support.gguf_families` at a width of 256."""
REFUSED = {"falcon": r"exceeds dimension size|wants \[1024, 256\]"}
"""Cases whose folders vLLM refuses, and its words: its Falcon has feed-forward layers four times as
wide as the model.
"""
WIDE = ("qwen2", "qwen2-yarn")
"""Cases made twice as wide: vLLM's Qwen 2 takes the length of heads from the width."""
ASKED = {name: {"hf_overrides": {"sliding_window": 3}} for name in ("cohere2", "cohere2moe")}
"""Windows of four tokens: vLLM's Cohere 2 adds one to the field; transformers and llama.cpp do not."""

pytestmark = pytest.mark.ecosystem("vllm")


@pytest.fixture(autouse=True)
def _engine_in_this_process(monkeypatch):
    """The router of vLLM's CPUs has sigmoid scores of groups of experts alone, and ends at MiniMax
    M2; one group of all is the same choice.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from halfbyte.vllm import register

    choose = CPURouter._compute_routing

    def grouped(router, *values, **options):
        if router.scoring_func == "sigmoid" and not router.use_grouped_topk and router.custom_routing_function is None:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
        return choose(router, *values, **options)

    monkeypatch.setattr(CPURouter, "_compute_routing", grouped)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()


@pytest.mark.parametrize("name", CASES)
def test_vllm_runs_what_a_file_becomes(tmp_path, monkeypatch, name):
    from vllm.model_executor.models.registry import ModelRegistry

    packed = tmp_path / "model.gguf"
    if name in WIDE:
        arch, kind, changes, keys = MODELS[name]
        monkeypatch.setitem(MODELS, name, (arch, kind, changes | {"hidden_size": 128}, keys))
    if name in MODELS:
        served_models.write_gguf_file(tmp_path, name)
    else:
        gguf = write_family(tmp_path / "float.gguf", name, family_model(name, 256))
        assert main(["quantize", str(gguf), str(packed), "--to", "gguf:q8_0"]) == 0
    assert main(["dequantize", str(packed), str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    assert main(["convert", str(packed), str(tmp_path / "halfbyte"), "--to", "halfbyte"]) == 0
    (kind,) = json.loads((tmp_path / "dense" / "config.json").read_text("utf-8"))["architectures"]
    assert kind in ModelRegistry.get_supported_archs()  # a class of its own, not transformers' code
    rows, text = served_models.answer(halfbyte.load_model(packed)[0])
    for form, options in (("dense", {}), ("halfbyte", {"quantization": "halfbyte"})):
        theirs = served_models.vllm_words(tmp_path / form, **options, **ASKED.get(name, {}))
        if name in REFUSED:
            assert isinstance(theirs, str)
            assert re.search(REFUSED[name], theirs)
        else:
            assert not isinstance(theirs, str), theirs
            assert np.abs(theirs[0] - rows).max() < BOUND
            assert theirs[1] == text
