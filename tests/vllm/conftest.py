"""vLLM's engine in the test's own process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from support.vllm_models import choose_in_one_group


@pytest.fixture
def vllm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Two faults of vLLM 0.32 on CPUs are mended. Its router has sigmoid scores of groups of
    experts alone, and ends at MiniMax M2; one group of all is the same choice. Its kernel of the
    rotation turns queries of [tokens, heads, length], as LFM2 and DeepSeek without YaRN have them,
    wrongly. A file beside the model says that one of them was met.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from halfbyte.vllm import register

    def sigmoid_without_groups(router: Any) -> bool:
        met = router.scoring_func == "sigmoid" and not router.use_grouped_topk and router.custom_routing_function is None
        if met:
            (tmp_path / "mended-router").touch()
        return bool(met)

    rotate = RotaryEmbedding.forward_cpu

    def by_heads(rotation: Any, positions: Any, query: Any, *values: Any, **options: Any) -> Any:
        if query.ndim == 3:
            (tmp_path / "mended-rotation").touch()
        chosen = rotation.forward_native if query.ndim == 3 else functools.partial(rotate, rotation)
        return chosen(positions, query, *values, **options)

    choose_in_one_group(monkeypatch, sigmoid_without_groups)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", by_heads)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()
    return monkeypatch
