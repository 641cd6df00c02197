"""vLLM's engine in the test's own process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def vllm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Two faults of vLLM 0.32 on CPUs are mended. Its router has sigmoid scores of groups of
    experts alone, and ends at MiniMax M2; one group of all is the same choice. Its kernel of the
    rotation turns queries of [tokens, heads, length], as LFM2 and DeepSeek without YaRN have them,
    wrongly. A file beside the model says that one of them was met.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from halfbyte.vllm import register

    choose = CPURouter._compute_routing

    def grouped(router: Any, *values: Any, **options: Any) -> Any:
        if router.scoring_func == "sigmoid" and not router.use_grouped_topk and router.custom_routing_function is None:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
            (tmp_path / "mended-router").touch()
        return choose(router, *values, **options)

    rotate = RotaryEmbedding.forward_cpu

    def by_heads(rotation: Any, positions: Any, query: Any, *values: Any, **options: Any) -> Any:
        if query.ndim == 3:
            (tmp_path / "mended-rotation").touch()
        chosen = rotation.forward_native if query.ndim == 3 else functools.partial(rotate, rotation)
        return chosen(positions, query, *values, **options)

    monkeypatch.setattr(CPURouter, "_compute_routing", grouped)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", by_heads)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()
    return monkeypatch
