"""`halfbyte quantize` and `load_model` agree on recipes that keep some experts dense: refused
before any work, or loaded.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import halfbyte
import torch
from halfbyte.calibration import calibrate
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.conversion import expert_formats as experts_alike
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.transformers import load_model
from support.calibration_models import WORDS, write_model, write_text
from support.gguf_models import dense_model, write

MOE = "model.layers.0.block_sparse_moe.experts"
ONE = r"layers\.0\..*experts\.1\.w2=keep"
ALIKE = "are all packed (their formats may differ) or all dense"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(folder, model) of a tiny Mixtral with four experts."""
    folder = tmp_path_factory.mktemp("experts") / "in"
    return folder, write_model(folder, "mixtral", num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("to", "rules", "message"),
    [
        ("gptq:int4:g32", [ONE], f"{MOE}.1.w2.weight: dense by this recipe (rule {ONE!r}) among experts that become int4:g32"),
        ("halfbyte:int4:g32", ["w2$=keep"], f"{MOE}.0.w2.weight, {MOE}.1.w2.weight, {MOE}.2.w2.weight, ... (8 tensors): dense"),
        ("mlx:affine4:g32", [r"layers\.0\..*experts\.3\.=keep"],
         f"[quantize] {MOE}.3.w1.weight, {MOE}.3.w2.weight, {MOE}.3.w3.weight: dense"),
        ("mlx:affine4:g32", [r"experts\.3\.=keep"], f"{MOE}.3.w1.weight, {MOE}.3.w2.weight, {MOE}.3.w3.weight, ... (6 tensors)"),
        ("mlx:affine4:g32", [r"2\.w2$=affine4:g64", r"1\.w2$=affine4:g96"], "MLX wants whole groups of 96) among experts that"),
    ],
)  # fmt: skip
def test_some_experts_dense_are_refused_before_any_work(tmp_path, dense, capsys, monkeypatch, to, rules, message):
    """With and without calibration, for a plan, and from Python: nothing is walked, rounded or
    written.
    """
    text = write_text(tmp_path / "text.txt")
    walked = ["--method", "gptq", "--calibration", str(text), "--context", "16", "--sequences", "2"]
    monkeypatch.setattr("halfbyte.calibration.walk.layer_source", lambda *a: pytest.fail("the walk has begun"))
    command = ["quantize", str(dense[0]), str(tmp_path / "out"), "--to", to, *(w for r in rules for w in ("--rule", r))]
    for more in ([], walked, ["--plan"]):
        assert main([*command, *more]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert ALIKE in said
        assert f"--rule '{re.escape(MOE)}=keep'" in said
        assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]
    with open_checkpoint(dense[0]) as checkpoint:
        for verb in (
            lambda: quantize_checkpoint(checkpoint, tmp_path / "out", recipe_of(to, rules)),
            lambda: calibrate(checkpoint, recipe_of(to, rules), text, context=16, sequences=2, device="cpu"),
        ):
            with pytest.raises(FormatError, match=re.escape(message)):
                verb()


@pytest.mark.parametrize(
    "rules",
    [
        [r"0\.block_sparse_moe\.experts=keep"],
        [r"experts\.1\.w2=int8:g32"],
        [r"experts\.\d\.w2=int8:g64", r"experts\.2\.w1=int3:g32"],
        ["experts=keep"],
    ],
)
def test_what_is_allowed_loads(tmp_path, dense, rules):
    """A layer dense and one packed, formats that differ between experts and projections: logits of
    the decoded weights.
    """
    folder, model = dense
    out = tmp_path / "out"
    command = ["quantize", str(folder), str(out), "--to", "halfbyte:int4:g32", *(w for r in rules for w in ("--rule", r))]
    assert main(command) == 0
    assert main(["dequantize", str(out), str(tmp_path / "twin"), "--dtype", "float32"]) == 0
    ids = torch.tensor(np.random.default_rng(0).integers(3, WORDS, (1, 24)))
    with torch.no_grad():
        given, twin = (load_model(p)[0](ids).logits for p in (out, tmp_path / "twin"))
        assert torch.allclose(given, twin, rtol=1e-3, atol=1e-3)
        assert (given - model(ids).logits).abs().max() > 1e-2


def test_load_model_refuses_what_quantize_refuses(tmp_path, dense, monkeypatch):
    """Were it written all the same, each kind of mixture would be refused by name."""
    monkeypatch.setattr("halfbyte.conversion.quantize.check_experts", lambda *a: [])
    for rule, name in ((r"experts\.1\.w2=keep", f"{MOE}.1.w2.weight"), ("w1$=keep", f"{MOE}.0.w1.weight")):
        out = tmp_path / name
        with open_checkpoint(dense[0]) as checkpoint:
            quantize_checkpoint(checkpoint, out, recipe_of("halfbyte:int4:g32", [rule]))
        with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.* are dense and the other experts of model.*; all of one"):
            load_model(out)


def test_a_whole_projection_of_a_gguf_may_stay_dense_and_that_is_said_first(tmp_path, capsys):
    source = write(tmp_path / "in.gguf", "qwen3moe", dense_model("qwen3moe"), False)
    out = tmp_path / "out.gguf"
    command = ["quantize", str(source), str(out), "--to", "gguf:q4_0", "--rule", "ffn_down_exps=keep"]
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr().err
    names = "blk.0.ffn_down_exps.weight, blk.1.ffn_down_exps.weight"
    assert said.count(f"note: {names}: dense by this recipe (rule 'ffn_down_exps=keep')") == 1
    assert "llama.cpp reads that, but load_model and the commands that run a model want" in said
    with halfbyte.open(out) as written:
        assert not written.info("blk.0.ffn_down_exps.weight").quantized
        assert written.info("blk.0.ffn_up_exps").quantized
    with pytest.raises(CheckpointError, match=r"dense and the other experts of model\.layers\.0\.mlp\.experts packed"):
        load_model(out)
    with open_checkpoint(source) as checkpoint:
        assert experts_alike.check_experts(checkpoint, recipe_of("gguf:q4_0")) == []
        assert experts_alike.check_experts(checkpoint, recipe_of("gguf:q4_0", ["exps=keep"])) == []


def test_stacks_that_are_turned_are_asked_too(tmp_path):
    """gpt-oss's, named like parameters: down kept, gate and up packed."""
    names = {f"model.layers.0.mlp.experts.{n}": np.zeros(s, np.float32) for n, s in
             {"gate_up_proj": (2, 64, 128), "down_proj": (2, 64, 64), "down_proj_bias": (2, 64)}.items()}  # fmt: skip
    save_file(names, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == set(names)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert experts_alike.check_experts(checkpoint, recipe_of("gpt-oss")) == []
        with pytest.raises(FormatError, match=r"experts.down_proj: dense by this recipe \(rule 'down_proj=keep'\)"):
            experts_alike.check_experts(checkpoint, recipe_of("gpt-oss", ["down_proj=keep"]))


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_single_dense_experts_become_the_stacks_that_mlx_lm_reads(tmp_path, arch):
    """Each expert's codes are those of its matrix rounded alone; with a rule they stay single."""
    write_model(tmp_path / "in", arch, **({"num_local_experts": 4} if arch == "mixtral" else {"num_experts": 4}))
    with open_checkpoint(tmp_path / "in") as checkpoint:
        single = [key for key in checkpoint if re.search(r"layers\.0\..*experts\.\d\.(w2|down_proj)\.weight$", key)]
        quantize_checkpoint(checkpoint, tmp_path / "out", recipe_of("mlx:affine4:g32"))
        quantize_checkpoint(checkpoint, tmp_path / "ruled", recipe_of("mlx:affine4:g32", [r"o_proj$=keep"]))
        alone = [halfbyte.quantize(np.asarray(checkpoint[key]), "affine4:g32").dequantize("float32") for key in single]
    assert len(single) == 4
    with open_checkpoint(tmp_path / "out") as out, open_checkpoint(tmp_path / "ruled") as ruled:
        (stack,) = [key for key in out if re.search(r"layers\.0\..*switch_mlp\.down_proj$", key)]
        assert np.array_equal(out[stack].dequantize("float32"), np.stack(alone))
        assert not [key for key in out if re.search(r"experts\.\d", key)]
        assert {key.removesuffix(".weight") for key in single} <= set(ruled)
