"""Files that learned rounding wrote, codes and norms trained, in the readers of their formats: the
logits are those of the file's values, but for what a reader rounds.
"""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.cli import main
from halfbyte.transformers import load_model
from support.calibration_models import write_model, write_text
from support.gguf_families import IDS as LLAMA_IDS
from support.gguf_families import family_model, write_family
from support.llama_cpp_logits import llama_cpp_logits

IDS = list(range(3, 35))
TRAINED = ("--method", "learned", "--context", "32", "--sequences", "32", "--steps", "2", "--distill", "8", "--norms")


def trained(tmp_path, to: str):
    """A model of random weights, packed; its trained norms are not the source's."""
    write_model(tmp_path / "in", "llama", num_hidden_layers=2)
    text, out = write_text(tmp_path / "text.txt", 1200), tmp_path / "out"
    assert main(["quantize", str(tmp_path / "in"), str(out), "--to", to, "--calibration", str(text), *TRAINED]) == 0
    with halfbyte.open(out) as written, halfbyte.open(tmp_path / "in") as source:
        norms = [key for key in source if "layernorm" in key]
        assert any(not np.array_equal(written[key], source[key]) for key in norms)
    return out


def logits_of(model, ids=IDS) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([ids])).logits[0].double().numpy()
    return found


def close(theirs: np.ndarray, ours: np.ndarray, bound: float) -> None:
    """The squared error relative to the logits."""
    assert theirs.shape == ours.shape
    assert np.square(theirs - ours).mean() < bound * np.square(ours).mean()


@pytest.mark.ecosystem("compressed-tensors")
@pytest.mark.parametrize("codec", ["nvfp4", "int4:g32"])
def test_transformers_reads_what_was_learned(tmp_path, codec):
    import transformers

    folder = trained(tmp_path, f"compressed-tensors:{codec}")
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    with halfbyte.open(folder) as written:
        packed = {key: written[key] for key in written if written.info(key).quantized}
    assert len(packed) == 14
    for name, q in packed.items():
        weight = theirs.get_submodule(name).weight.detach().float().numpy()
        assert np.array_equal(weight, q.dequantize("bfloat16", "producer").astype(np.float32)), name
    close(logits_of(theirs.float()), logits_of(load_model(folder)[0]), 1e-3)


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("codec", ["affine4:g32", "mxfp4"])
def test_mlx_lm_reads_what_was_learned(tmp_path, codec):
    import mlx.core as mx
    import mlx_lm.utils

    folder = trained(tmp_path, f"mlx:{codec}")
    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    theirs = np.array(model(mx.array([IDS])).astype(mx.float32))[0].astype(np.float64)
    close(theirs, logits_of(load_model(folder)[0]), 1e-4)


@pytest.mark.ecosystem("llama-cpp-python")
@pytest.mark.parametrize("codec", ["q4_0", "q4_K", "mxfp4"])
def test_llama_cpp_reads_what_was_learned(tmp_path, monkeypatch, codec):
    """llama.cpp rounds inputs to 8 bits, which the bound leaves room for."""
    source, out = write_family(tmp_path / "in.gguf", "granite", family_model("granite", 256)), tmp_path / "out.gguf"
    ids = np.random.default_rng(0).integers(3, 48, (32, 32)).tolist()
    monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: ids)
    text = write_text(tmp_path / "text.txt")
    assert main(["quantize", str(source), str(out), "--to", f"gguf:{codec}", "--calibration", str(text), *TRAINED]) == 0
    close(llama_cpp_logits(out), logits_of(load_model(out)[0], LLAMA_IDS), 2e-3)
