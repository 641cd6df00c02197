"""`inspect --for` says of a model of every architecture what vLLM does with it (tests/vllm runs
vLLM on the same cases).
"""

from __future__ import annotations

import pytest

import halfbyte as hb
from halfbyte.checkpoints import engines
from halfbyte.checkpoints.engines import predictions
from halfbyte.conversion.to_dense import dequantize_checkpoint
from support import served_models
from support.gguf_families import family_model, write_family
from support.gguf_models import MODELS
from support.vllm_models import (
    CASES,
    DIFFERS,
    MENDED,
    NEWER,
    PASSED_OVER,
    REFUSED,
    SHORT,
    WINDOWS,
    published_heads,
    sizes_for_vllm,
)


@pytest.mark.parametrize("name", CASES)
def test_what_vllm_does_with_a_folder_is_predicted(tmp_path, monkeypatch, name):
    width = sizes_for_vllm(monkeypatch, name)
    if name in MODELS:
        served_models.write_gguf_file(tmp_path, name)
    else:
        write_family(tmp_path / "model.gguf", name, family_model(name, width))
    with hb.open(tmp_path / "model.gguf") as checkpoint:
        dequantize_checkpoint(checkpoint, tmp_path / "dense", dtype="float32")
    with hb.open(tmp_path / "dense") as folder:
        said = predictions(folder, "vllm-cpu")
    refused = name in REFUSED or name in NEWER
    wrong = name in DIFFERS or name in MENDED or name in PASSED_OVER or name in WINDOWS | SHORT
    if refused:
        assert said[0].verdict == "refused"
    elif wrong:
        assert said[0].verdict in ("wrong", "refused")
        for words in (DIFFERS.get(name), MENDED.get(name)):
            assert words is None or any(words in one.reason for one in said)
        assert said[0].verdict == "wrong" or "sigmoid scores" in MENDED.get(name, "")
    else:
        assert said[0].verdict == "fine", said[0].reason


@pytest.mark.parametrize(
    ("engine", "flags", "want"),
    [
        ("vllm", {"avx2"}, "fine"),
        ("vllm-cpu", {"avx2"}, "refused"),
        ("vllm-cpu", {"avx2", "avx512f"}, "refused"),
        ("vllm-cpu", {"avx2", "avx512f", "avx512_bf16"}, "fine"),
    ],
)
def test_deepseek_v4_of_the_published_sizes_needs_bf16_of_avx512(tmp_path, monkeypatch, engine, flags, want):
    """On a CPU: vLLM's operators for it are in one of its builds (benchmarks/vllm.md)."""
    published_heads(monkeypatch)
    write_family(tmp_path / "model.gguf", "deepseek4", family_model("deepseek4", 256))
    with hb.open(tmp_path / "model.gguf") as checkpoint:
        dequantize_checkpoint(checkpoint, tmp_path / "dense", dtype="float32")
    monkeypatch.setattr(engines, "cpu_flags", lambda: frozenset(flags))
    with hb.open(tmp_path / "dense") as folder:
        said = predictions(folder, engine)[0]
    assert said.verdict == want
    assert want == "fine" or "AVX-512 with BF16" in said.reason
