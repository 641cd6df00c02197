"""`convert --to mlx` of whole models: mlx-lm loads the folder as it is, its logits are ours."""

from __future__ import annotations

import json

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoints.engines import predictions
from halfbyte.conversion import convert
from halfbyte.conversion.targets import codecs_of
from halfbyte.gguf_models.view import with_older_names
from halfbyte.transformers import load_model
from support.gguf_models import VOCABULARY, dense_model, write
from support.tiny_models import EXPERTS, LAYERS, Producer, agree, expert_names, ids, logits, write_tiny

PATTERN = {"num_hidden_layers": 7}
"""Gemma 3's pattern of layers has six; mlx-lm builds no model of fewer."""
KINDS = ("gptq", "gptq3", "awq", "ct-int4", "ct-mxfp4", "mlx-mxfp4", "halfbyte", "onnx")
FOLDERS = [
    *(
        (arch, kind)
        for arch in ("llama", "qwen2", "qwen3", "gemma3_text")
        for kind in KINDS
        if (arch, kind) != ("gemma3_text", "onnx")
    ),
    ("gpt_oss", "gpt-oss"), ("qwen3_moe", "gptq"), ("qwen3_moe", "ct-int4"), ("mixtral", "awq"), ("mixtral", "gptq3"),
]  # fmt: skip

CODECS = [f"{codec}:{group}" if group else codec
          for codec in codecs_of("mlx") for group in (("g32", "g64") if codec.startswith("affine") else ("",))]  # fmt: skip


def test_the_rotation_and_the_experts_are_named_as_mlx_lm_reads_them(tmp_path):
    write_tiny(tmp_path / "in", "qwen3_moe", "gptq")
    source = json.loads((tmp_path / "in" / "config.json").read_text("utf-8"))
    assert not {"rope_theta", "num_experts"} & set(source)
    convert(tmp_path / "in", tmp_path / "out", to="mlx")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (config["rope_theta"], config["num_experts"]) == (10000.0, 4)
    assert set(source) - {"quantization_config"} <= set(config)


@pytest.mark.parametrize(("arch", "kind", "parent"), [("qwen3_moe", "gptq", "mlp"), ("mixtral", "awq", "block_sparse_moe")])
def test_single_experts_become_stacks(arch, kind, parent, tmp_path):
    """Every code and scale of an expert is that of its matrix in the stack."""
    tiny = write_tiny(tmp_path / "in", arch, kind)
    convert(tmp_path / "in", tmp_path / "out", to="mlx")
    words = expert_names(arch)[1]
    with hb.open(tmp_path / "out") as out:
        assert not [key for key in out if ".experts." in key]
        for layer in range(LAYERS):
            at = f"model.layers.{layer}.{parent}"
            for word in ("gate", "up", "down"):
                stack = out[f"{at}.switch_mlp.{word}_proj"]
                for e in range(EXPERTS):
                    one = tiny.packed[f"{at}.experts.{e}.{words[word]}"]
                    assert np.array_equal(stack[e].dequantize("float32"), one.dequantize("float32"))
    assert agree(logits(load_model(tmp_path / "out")[0], ids()), logits(tiny.dense, ids()))


def test_experts_of_two_formats_stay_single(tmp_path):
    other = "model.layers.0.mlp.experts.2.up_proj"
    write_tiny(tmp_path / "in", "qwen3_moe", "mlx", codecs={other: "affine8:g32"})
    convert(tmp_path / "in", tmp_path / "out", to="mlx")
    with hb.open(tmp_path / "out") as out:
        assert other in out
        assert "model.layers.0.mlp.switch_mlp.up_proj" not in out
        assert out["model.layers.0.mlp.switch_mlp.gate_proj"].shape[0] == EXPERTS


def test_mixtral_of_a_gguf_has_mlx_lms_names(tmp_path):
    write(tmp_path / "in.gguf", "mixtral", dense_model("mixtral"), True)
    convert(tmp_path / "in.gguf", tmp_path / "out", to="mlx")
    with hb.open(tmp_path / "out") as out:
        at = "model.layers.1.block_sparse_moe"
        assert {f"{at}.gate.weight", *(f"{at}.switch_mlp.{word}_proj" for word in ("gate", "up", "down"))} <= set(out)
        assert not [key for key in out if ".mlp." in key]


def test_older_names_of_gemma_and_of_scaled_rotations_beside_what_is_there():
    local = {"rope_type": "default", "rope_theta": 1e4}
    whole = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    gemma = {
        "model_type": "gemma3_text",
        "_sliding_window_pattern": 6,
        "rope_parameters": {"sliding_attention": local, "full_attention": whole},
    }
    assert with_older_names(gemma) == gemma | {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    }
    assert with_older_names({"rope_theta": 5.0, "rope_parameters": local}) == {"rope_theta": 5.0, "rope_parameters": local}
    assert with_older_names({"model_type": "gpt2"}) == {"model_type": "gpt2"}


def mlx_lm_logits(path, tokens) -> np.ndarray:
    import mlx.core as mx
    import mlx_lm.utils

    model, _ = mlx_lm.utils.load_model(path)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(tokens.numpy())).astype(mx.float32))


def close(theirs: np.ndarray, ours: np.ndarray) -> None:
    assert np.abs(theirs - ours).max() < 0.02 * np.abs(ours).max()


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize(("arch", "kind"), FOLDERS)
def test_mlx_lm_runs_what_a_folder_becomes(tmp_path, arch, kind):
    write_tiny(tmp_path / "in", arch, kind, **(PATTERN if arch == "gemma3_text" else {}))
    convert(tmp_path / "in", tmp_path / "out", to="mlx")
    close(mlx_lm_logits(tmp_path / "out", ids()), logits(load_model(tmp_path / "out")[0], ids()).numpy())


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("name", ["llama", "llama-3", "llama-tied-bias", "qwen3", "qwen3moe", "gemma3"])
def test_mlx_lm_runs_what_a_gguf_becomes(tmp_path, name):
    write(tmp_path / "in.gguf", name, dense_model(name), True)
    convert(tmp_path / "in.gguf", tmp_path / "out", to="mlx")
    tokens = ids() % VOCABULARY
    close(mlx_lm_logits(tmp_path / "out", tokens), logits(load_model(tmp_path / "out")[0], tokens).numpy())


@pytest.mark.ecosystem("mlx")
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("codec", CODECS)
def test_mlx_lm_runs_every_format_of_every_family(tmp_path, arch, codec):
    """Every matrix in the format, table and head too, converted without an error; the logits are
    those of the dense model of the values, and `inspect --for` foresees it.
    """
    options = {} if codec.startswith("affine") else {"policy": "mlx"}  # no scale of the whole tensor
    source = Producer("halfbyte", codec, options, {}, True)
    tiny = write_tiny(tmp_path / "in", arch, source, **(PATTERN if arch == "gemma3_text" else {}))
    convert(tmp_path / "in", tmp_path / "out", to="mlx")
    with hb.open(tmp_path / "out") as out:
        assert {out.info(key).format for key in out if out.info(key).quantized} == {q.format for q in tiny.packed.values()}
        assert {p.verdict for p in predictions(out, "mlx")} == {"fine"}
    theirs, ours = mlx_lm_logits(tmp_path / "out", ids()), logits(tiny.dense, ids()).numpy()
    assert np.abs(theirs - ours).max() < 1e-4 * np.abs(ours).max()
