"""Folder to GGUF and back under another checkpoint's names: the same weights, and the same logits
from both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.conversion import convert_checkpoint
from halfbyte.conversion.gguf_names import RenamedLike
from halfbyte.errors import CheckpointError
from halfbyte.verification.compare import verify
from support.gguf_models import HIDDEN, VOCABULARY, dense_model, write
from support.memory_checkpoint import MemoryCheckpoint, packed

MODELS = ("llama", "qwen3", "gemma3", "gemma2")


def logits(path: Path) -> torch.Tensor:
    model, _ = halfbyte.load_model(path)
    with torch.no_grad():
        return model(torch.arange(3, 35)[None]).logits


def both(tmp_path: Path, name: str, q8_0: bool) -> tuple[Any, Path, Path]:
    """A dense model, a folder of it, and a GGUF of it (its matrices Q8_0 when asked)."""
    model = dense_model(name)
    gguf = write(tmp_path / "model.gguf", name, model, q8_0)
    model.save_pretrained(tmp_path / "folder")
    return model, tmp_path / "folder", gguf


def converted(source: Path, out: Path, to: str, like: Path, **options: Any):
    with open_checkpoint(source) as a, open_checkpoint(like) as b:
        return convert_checkpoint(a, out, to, like=b, **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_gguf_becomes_a_folder_that_runs_the_same(tmp_path, name):
    """Q8_0 to MLX's affine8 and to GPTQ's 8 bits: rows of q and k in transformers' order, norms
    without their 1.
    """
    _, folder, gguf = both(tmp_path, name, q8_0=True)
    want = logits(gguf)
    for to in ("mlx", "compressed-tensors"):
        done = converted(gguf, tmp_path / to, to, folder, workers=1)
        assert done.counts["lossy"] == done.counts["equal"] == 0
        assert done.counts["exact"] + done.counts["exact-if"] > 0
        with halfbyte.open(tmp_path / to) as a, halfbyte.open(gguf) as b:
            assert verify(a, b).verdict == "identical"
        assert torch.allclose(logits(tmp_path / to), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_folder_becomes_a_gguf_that_runs_the_same(tmp_path, name):
    _, folder, gguf = both(tmp_path, name, q8_0=False)
    arguments = ["--to", "compressed-tensors:int4:g32", "--method", "rtn"]
    assert main(["quantize", str(folder), str(tmp_path / "int4"), *arguments]) == 0
    out = tmp_path / "out.gguf"
    done = converted(tmp_path / "int4", out, "gguf", gguf, workers=1)
    assert done.counts["lossy"] == 0
    with halfbyte.open(out) as written:
        types = {written.info(k).dtype for k in written if written.info(k).quantized}
    assert types == {"Q4_0"}
    assert torch.allclose(logits(out), logits(tmp_path / "int4"), rtol=1e-5, atol=1e-5)
    with halfbyte.open(tmp_path / "int4") as a, halfbyte.open(out) as b:
        report = verify(a, b)
        assert {c.status for c in report.comparisons} <= {"identical", "auxiliary"}


def test_there_and_back_every_part_is_as_it_was(tmp_path):
    _, folder, gguf = both(tmp_path, "llama", q8_0=True)
    converted(gguf, tmp_path / "away", "compressed-tensors", folder, workers=1)
    converted(tmp_path / "away", tmp_path / "home.gguf", "gguf", gguf, workers=1)
    with halfbyte.open(gguf) as a, halfbyte.open(tmp_path / "home.gguf") as b:
        assert list(a) == list(b)
        for key in a:
            if a.info(key).quantized:
                assert a[key] == b[key]


def test_the_command_line_takes_like(tmp_path, capsys):
    _, folder, gguf = both(tmp_path, "llama", q8_0=False)
    assert main(["convert", str(folder), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 2
    assert "there is no tokenizer.json here; copy it from the original model, or take" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "x.gguf"), "--to", "gguf", "--like", str(gguf)]) == 0
    assert torch.allclose(logits(tmp_path / "x.gguf"), logits(gguf), rtol=1e-6, atol=1e-6)


def test_another_model_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, folder, _ = both(tmp_path / "a", "llama", q8_0=False)
    _, _, other = both(tmp_path / "b", "gemma3", q8_0=False)
    with pytest.raises(CheckpointError, match="is it the same model"):
        converted(folder, tmp_path / "out.gguf", "gguf", other)
    assert not (tmp_path / "out.gguf").exists()


def test_a_relaid_checkpoint_is_one(tmp_path):
    _, folder, gguf = both(tmp_path, "llama", q8_0=False)
    with open_checkpoint(folder) as a, open_checkpoint(gguf) as b:
        laid = RenamedLike(a, b)
        assert set(laid.keys()) >= {"token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"}
        for key in laid:
            info = laid.info(key)
            assert info.shape == np.asarray(laid[key]).shape == np.asarray(b[key]).shape
            assert np.array_equal(np.asarray(laid[key], np.float32), np.asarray(b[key], np.float32)), key
        assert laid["token_embd.weight"].shape == (VOCABULARY, HIDDEN)
        assert laid.metadata["general.architecture"] == "llama"


def experts(layout: str) -> tuple[MemoryCheckpoint, MemoryCheckpoint]:
    """gpt-oss's interleaved stack, and GGUF's two stacks of the same shapes with other values."""
    path = "model.layers.0.mlp.experts"
    folder = {
        f"{path}.gate_up_proj": packed("mxfp4", (3, 64, 32), 1), f"{path}.down_proj": packed("mxfp4", (3, 32, 32), 2),
        f"{path}.gate_up_proj_bias": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32),
        f"{path}.down_proj_bias": np.ones((3, 32), np.float32),
    }  # fmt: skip
    gguf = {
        "blk.0.ffn_gate_exps": packed("mxfp4", (3, 32, 32), 3), "blk.0.ffn_up_exps": packed("mxfp4", (3, 32, 32), 4),
        "blk.0.ffn_down_exps": packed("mxfp4", (3, 32, 32), 5), "blk.0.ffn_gate_exps.bias": np.zeros((3, 32), np.float32),
        "blk.0.ffn_up_exps.bias": np.zeros((3, 32), np.float32), "blk.0.ffn_down_exps.bias": np.zeros((3, 32), np.float32),
    }  # fmt: skip
    return (
        MemoryCheckpoint(folder, format="gpt-oss", layout=layout, config={"model_type": "gpt_oss"}),
        MemoryCheckpoint(gguf, format="gguf", layout="gguf", metadata={"general.architecture": "gpt-oss"}),
    )


def test_interleaved_stacks_of_gpt_oss_to_the_two_stacks_of_gguf_and_back():
    source, like = experts("gpt-oss")
    laid = RenamedLike(source, like)
    whole = source["model.layers.0.mlp.experts.gate_up_proj"]
    assert np.array_equal(laid["blk.0.ffn_gate_exps"].dequantize(), whole.dequantize()[:, ::2])
    assert np.array_equal(laid["blk.0.ffn_up_exps"].dequantize(), whole.dequantize()[:, 1::2])
    assert laid["blk.0.ffn_down_exps"] == source["model.layers.0.mlp.experts.down_proj"]
    bias = source["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert np.array_equal(laid["blk.0.ffn_gate_exps.bias"], bias[:, ::2])
    assert np.array_equal(laid["blk.0.ffn_up_exps.bias"], bias[:, 1::2])
    held = MemoryCheckpoint({k: laid[k] for k in laid}, format="gguf", layout="gguf", metadata=like.metadata)
    back = RenamedLike(held, source)
    assert back["model.layers.0.mlp.experts.gate_up_proj"] == whole
    assert np.array_equal(back["model.layers.0.mlp.experts.gate_up_proj_bias"], bias)


def test_fused_projections_are_cut_and_joined():
    layer = "model.layers.0"
    fused = {f"{layer}.{p}": packed("int4", (64, 32), i, 32) for i, p in enumerate(("self_attn.qkv_proj", "mlp.gate_up_proj"))}
    apart = {f"{layer}.self_attn.{p}_proj": packed("int4", (n, 32), 3, 32) for p, n in (("q", 32), ("k", 16), ("v", 16))}
    apart |= {f"{layer}.mlp.{p}_proj": packed("int4", (32, 32), 4, 32) for p in ("gate", "up")}
    one, several = MemoryCheckpoint(fused, layout="gptq"), MemoryCheckpoint(apart, layout="gptq")
    laid = RenamedLike(one, several)
    qkv = one["model.layers.0.self_attn.qkv_proj"].dequantize()
    assert np.array_equal(laid["model.layers.0.self_attn.k_proj"].dequantize(), qkv[32:48])
    gate_up = one["model.layers.0.mlp.gate_up_proj"].dequantize()
    assert np.array_equal(laid["model.layers.0.mlp.up_proj"].dequantize(), gate_up[32:])
    held = MemoryCheckpoint({k: laid[k] for k in laid}, layout="gptq")
    back = RenamedLike(held, one)
    assert {k: back[k] for k in back} == fused


@pytest.mark.parametrize("to", ["gguf:nvfp4", "gguf"])
def test_two_level_nvfp4_takes_its_tensor_scale_into_the_file(tmp_path, to):
    """ModelOpt's `weight_scale_2` becomes a `.scale` tensor beside each weight; the header names
    them before they are written.
    """
    _, folder, gguf = both(tmp_path, "llama", q8_0=False)
    arguments = ["--to", "modelopt:nvfp4", "--method", "rtn", "--rule", "down_proj=keep"]  # its rows are 96 long
    assert main(["quantize", str(folder), str(tmp_path / "nvfp4"), *arguments]) == 0
    out = tmp_path / "out.gguf"
    done = converted(tmp_path / "nvfp4", out, to, gguf, workers=1)
    assert done.counts["lossy"] == 0
    with halfbyte.open(tmp_path / "nvfp4") as a, halfbyte.open(out) as b:
        weights = [b[k] for k in b if b.info(k).quantized]
        assert weights
        assert all(q.format.name == "nvfp4_ue4m3" and q.parts["global_scale"] != 1 for q in weights)
        assert verify(a, b).verdict == "identical"
        assert sum(name.endswith(".scale") for name in b.file.headers) == len(weights)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"mlp.up_proj": (32, 32)}, {"mlp.up_proj": (48, 32)}, r"up_proj has 32 rows, .*up_proj 48; is it the same model"),
        ({"mlp.up_proj": (32, 32), "odd_proj": (8, 32)}, {"mlp.up_proj": (32, 32)}, r"like has no counterpart of .*odd_proj of"),
        ({"mlp.up_proj": (32, 32)}, {"mlp.up_proj": (32, 32), "odd_proj": (8, 32)}, r"source has nothing for .*odd_proj of"),
    ],
)
def test_what_does_not_fit_the_other_checkpoint_is_named(ours, theirs, said):
    a, b = (
        MemoryCheckpoint({f"model.layers.0.{k}": packed("int4", s, 1, 32) for k, s in side.items()}, layout="gptq", path=path)
        for side, path in ((ours, "source"), (theirs, "like"))
    )
    with pytest.raises(CheckpointError, match=said):
        RenamedLike(a, b)
    same = RenamedLike(a, a)
    assert {k: same[k] for k in same} == a.tensors
