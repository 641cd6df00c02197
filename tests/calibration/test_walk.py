"""GPTQ and AWQ over tiny models of transformers: better than rounding to nearest on the model's own
outputs, every layer met.
"""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.calibration import Spool, calibrate
from halfbyte.calibration.folding import fold, upstream_of
from halfbyte.calibration.spool import job_key
from halfbyte.calibration.statistics import InputCollector
from halfbyte.calibration.walk import CalibrationError, token_sequences
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.conversion.quantize import quantize_checkpoint
from halfbyte.conversion.recipe import recipe_of
from halfbyte.errors import CheckpointError
from halfbyte.tensor.quantize import quantize
from halfbyte.transformers import load_model
from support.calibration_models import WORDS, drift, gguf_drift, write_model, write_text
from support.gguf_families import family_model, write_family
from support.gguf_models import VOCABULARY, dense_model, write
from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("to", ["halfbyte:int3:g32", "compressed-tensors:mxfp4"])
def test_gptq_moves_the_logits_less_than_rounding_to_nearest(tmp_path, kind, to):
    dense = write_model(tmp_path / "in", kind)
    text = write_text(tmp_path / "text.txt", 3000)
    common = ["quantize", str(tmp_path / "in")]
    assert main([*common, str(tmp_path / "rtn"), "--to", to, "--method", "rtn"]) == 0
    found = ["--method", "gptq", "--calibration", str(text), "--context", "64", "--sequences", "40"]
    assert main([*common, str(tmp_path / "gptq"), "--to", to, *found]) == 0
    assert drift(tmp_path / "gptq", dense) < 0.8 * drift(tmp_path / "rtn", dense)
    with halfbyte.open(tmp_path / "gptq") as written:
        assert sum(written.info(k).quantized for k in written) == 2 * 7


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_awq_moves_the_logits_less_and_its_folded_norms_are_written(tmp_path, kind):
    dense = write_model(tmp_path / "in", kind)
    text = write_text(tmp_path / "text.txt", 3000)
    to = "compressed-tensors:int3:g64"
    common = ["quantize", str(tmp_path / "in")]
    assert main([*common, str(tmp_path / "rtn"), "--to", to, "--method", "rtn"]) == 0
    found = ["--method", "awq", "--calibration", str(text), "--context", "64", "--sequences", "40"]
    assert main([*common, str(tmp_path / "awq"), "--to", to, *found]) == 0
    assert drift(tmp_path / "awq", dense) < 0.95 * drift(tmp_path / "rtn", dense)
    norm = "model.layers.0.input_layernorm.weight"
    with halfbyte.open(tmp_path / "in") as a, halfbyte.open(tmp_path / "awq") as b:
        assert not np.array_equal(a[norm], b[norm])
        assert a[norm].dtype == b[norm].dtype


def test_mse_weighted_by_the_inputs_moves_the_logits_less(tmp_path):
    dense = write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt", 3000)
    common = ["quantize", str(tmp_path / "in")]
    to = ["--to", "halfbyte:int3:g64"]
    assert main([*common, str(tmp_path / "rtn"), *to]) == 0
    found = ["--method", "mse", "--calibration", str(text), "--context", "64", "--sequences", "40"]
    assert main([*common, str(tmp_path / "mse"), *to, *found]) == 0
    assert drift(tmp_path / "mse", dense) < 0.9 * drift(tmp_path / "rtn", dense)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_folding_leaves_what_a_layer_computes(tmp_path, kind):
    """Scaled weights and the norm or rows before them: the layer's outputs stay, whatever the
    scales.
    """
    model = write_model(tmp_path / "in", kind)
    layer = model.model.layers[0]
    seen = {}
    layer.register_forward_pre_hook(lambda m, a, k: seen.update(args=a, kwargs=k), with_kwargs=True)
    linear = {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    ids = torch.tensor(np.random.default_rng(0).integers(3, WORDS, (1, 48)))
    with torch.no_grad(), InputCollector(layer, linear) as inputs:
        model(ids, use_cache=False)
        inputs.sequence_done()
    groups = {tuple(n.rpartition(".")[2] for n in g.names): g for g in inputs.groups}
    assert set(groups) == {("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)}
    assert groups["q_proj", "k_proj", "v_proj"].norm == "input_layernorm"
    assert groups["o_proj",].norm == ""
    with torch.no_grad():
        before = layer(*seen["args"], **seen["kwargs"])
        alphas = {}
        for names, group in groups.items():
            source = upstream_of(layer, group)
            readers = [linear[n].weight.data for n in group.names]
            alphas[names] = source if isinstance(source, str) else fold(group, readers, source, lambda w: quantize(w, "int3:g64"))
        after = layer(*seen["args"], **seen["kwargs"])
    assert alphas["o_proj",] == "no operation before it can take the scales"
    assert alphas["q_proj", "k_proj", "v_proj"] > 0
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-4)


def test_case_56_experts_without_tokens_have_the_same_format_and_are_named(tmp_path, capsys):
    """Eight experts, one calibration sequence of few tokens: every expert in one format, a warning,
    and the result loads.
    """
    write_model(tmp_path / "in", "mixtral", num_local_experts=8, num_experts_per_tok=1)
    text = write_text(tmp_path / "text.txt", 40)
    found = ["--method", "gptq", "--calibration", str(text), "--context", "8", "--sequences", "1"]
    to = ["--to", "compressed-tensors:int4:g32"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), *to, *found]) == 0
    said = r"rounded with searched scales: \d+ weights without a calibration token: model\.layers\.0\."
    assert re.search(said, capsys.readouterr().err)
    with halfbyte.open(tmp_path / "out") as written:
        formats = {str(written.info(k).format) for k in written if written.info(k).quantized}
        assert formats == {"int4:g32"}
        assert sum("experts" in k for k in written) == 2 * 8 * 3
        router = next(k for k in written if k.endswith("gate.weight"))
        assert not written.info(router).quantized
    model, _ = load_model(tmp_path / "out")
    assert bool(model(torch.tensor([[5, 7, 9]])).logits.isfinite().all())


def test_rules_and_kept_layers_hold_in_a_walk(tmp_path):
    write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        recipe = recipe_of("halfbyte:int4:g32", ["layers\\.0\\.=keep", "down_proj=int8:g64"])
        seen = []
        found = calibrate(checkpoint, recipe, text, "gptq", context=32, sequences=4, progress=lambda *a: seen.append(a))
    assert set(found.weights) == {
        *(f"model.layers.1.self_attn.{m}_proj" for m in "qkvo"),
        *(f"model.layers.1.mlp.{m}_proj" for m in ("gate", "up", "down")),
    }
    assert found.weights["model.layers.1.mlp.down_proj"].format.bits == 8
    assert found.notes == []
    assert [s[0] for s in seen] == [0, 1, 2]


def test_a_packed_source_is_walked_when_asked(tmp_path):
    write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "q8"), "--to", "mlx:affine8:g64"]) == 0
    arguments = ["--to", "mlx:affine4:g64", "--from-packed", "--method", "gptq", "--calibration", str(text)]
    assert main(["quantize", str(tmp_path / "q8"), str(tmp_path / "out"), *arguments, "--context", "32", "--sequences", "4"]) == 0
    with halfbyte.open(tmp_path / "out") as written:
        assert {written.info(k).format.bits for k in written if written.info(k).quantized} == {4}
    with open_checkpoint(tmp_path / "q8") as packed:
        with pytest.raises(CheckpointError, match=r"q8 is packed already \(mlx, 14 weights\)"):
            calibrate(packed, recipe_of("halfbyte:int4:g32"), text, context=32, sequences=4)
        found = calibrate(packed, recipe_of("halfbyte:int4:g32"), text, context=32, sequences=4, from_packed=True)
    assert found.notes == []
    assert len(found.weights) == 14


def test_a_packed_source_is_rounded_with_its_inputs(tmp_path):
    dense = write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt", 3000)
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "q8"), "--to", "mlx:affine8:g64"]) == 0
    common = ["--to", "halfbyte:int3:g32", "--from-packed"]
    found = ["--method", "gptq", "--calibration", str(text), "--context", "64", "--sequences", "40"]
    assert main(["quantize", str(tmp_path / "q8"), str(tmp_path / "rtn"), *common]) == 0
    assert main(["quantize", str(tmp_path / "q8"), str(tmp_path / "gptq"), *common, *found]) == 0
    assert drift(tmp_path / "gptq", dense) < 0.8 * drift(tmp_path / "rtn", dense)


def test_texts_and_tokenizers_that_do_not_do(tmp_path):
    write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt", 20)
    short = pytest.raises(CalibrationError, match=r"text\.txt has 20 tokens; one sequence takes 64")
    with open_checkpoint(tmp_path / "in") as checkpoint, short:
        calibrate(checkpoint, recipe_of("halfbyte:int4:g32"), text, context=64)
    with pytest.raises(CalibrationError, match="has no tokenizer"):
        token_sequences(None, text, 8, 1)


def test_sequences_are_spread_evenly_over_the_text(tmp_path):
    write_model(tmp_path / "in", "llama")
    (tmp_path / "t.txt").write_text(" ".join(f"w{i % WORDS:02d}" for i in range(400)))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "in")
    got = token_sequences(tokenizer, tmp_path / "t.txt", 40, 4)
    assert [s[0] for s in got] == [0, 120 % WORDS, 240 % WORDS, 360 % WORDS]
    assert {len(s) for s in got} == {40}
    assert json.dumps(got) == json.dumps(token_sequences(tokenizer, tmp_path / "t.txt", 40, 4))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_a_gguf_is_walked_and_written_in_its_own_row_order_and_offsets(tmp_path, monkeypatch, name, method):
    """Rows of q and k are back in llama.cpp's order, folded norms have their 1: the file runs
    closer than plain Q4_0.
    """
    model = dense_model(name)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(torch.exp(torch.randn_like(p)) - (1 if "gemma" in name else 0))
    source = write(tmp_path / "in.gguf", name, model, False)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (40, 48)).tolist()
    monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: ids)
    (tmp_path / "text.txt").write_text("")
    to = ["--to", "gguf:q4_0"]
    assert main(["quantize", str(source), str(tmp_path / "rtn.gguf"), *to, "--method", "rtn"]) == 0
    found = ["--method", method, "--calibration", str(tmp_path / "text.txt")]
    assert main(["quantize", str(source), str(tmp_path / "found.gguf"), *to, *found]) == 0
    assert gguf_drift(tmp_path / "found.gguf", model) < 0.95 * gguf_drift(tmp_path / "rtn.gguf", model)


def test_an_interrupted_run_goes_on_only_with_the_same_calibration(tmp_path):
    """Other text, another method: what an earlier run wrote is not mixed into the result."""
    write_model(tmp_path / "in", "llama")
    texts = [write_text(tmp_path / f"{seed}.txt", 600, seed) for seed in (1, 2)]
    recipe = recipe_of("gptq:int4:g32")

    def stop(done: int, total: int, key: str) -> None:
        if "layers.1" in key:
            raise KeyboardInterrupt

    def run(method: str, text, **options):
        with open_checkpoint(tmp_path / "in") as checkpoint:
            found = calibrate(checkpoint, recipe, text, method, context=32, sequences=4)
            out = tmp_path / "out"
            return quantize_checkpoint(
                checkpoint, out, recipe, found.rounder, named=found.name, max_shard_size=1, workers=1, **options
            )

    for method, text, kept in (("gptq", texts[1], False), ("mse", texts[0], False), ("gptq", texts[0], True)):
        with pytest.raises(KeyboardInterrupt):
            run("gptq", texts[0], progress=stop)
        assert (run(method, text, overwrite=True).resumed > 0) == kept
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("to", ["gptq:int4:g32", "mlx:affine4:g32", "compressed-tensors:nvfp4", "gptq:uint4:g32"])
def test_layers_that_are_done_are_mapped_from_a_folder(tmp_path, to):
    """The same weights, and the same bytes written, as when they are kept in memory."""
    write_model(tmp_path / "in", "llama")
    text = write_text(tmp_path / "text.txt")
    for name in ("memory", "folder"):
        with open_checkpoint(tmp_path / "in") as checkpoint, Spool(tmp_path / name) as spool:
            on_disk = name == "folder"
            found = calibrate(checkpoint, recipe_of(to), text, context=32, sequences=4, spool=spool if on_disk else None)
            quantize_checkpoint(checkpoint, tmp_path / name, recipe_of(to), found.rounder, named=found.name)
            left = {"00000.layer", "00001.layer", "00001.hidden"} if on_disk else set()
            assert {p.name for p in spool.folder.glob("*")} == left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "in", "memory", "text.txt"]
    for path in (tmp_path / "memory").iterdir():
        assert path.read_bytes() == (tmp_path / "folder" / path.name).read_bytes()


@pytest.mark.parametrize("method", ["gptq", "mse"])
def test_a_mix_of_llama_cpp_is_calibrated(tmp_path, monkeypatch, method):
    """256 wide, so that rows are super-blocks: types are the mix's, the logits move less than with
    rounding to nearest, and a Q4_K_M in progress is not taken up as a Q4_K_S.
    """
    model = family_model("internlm2", 256)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(torch.exp(torch.randn_like(p)))
    write_family(tmp_path / "in.gguf", "internlm2", model)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (20, 48)).tolist()
    monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: ids)
    (tmp_path / "text.txt").write_text("")
    common = ["quantize", str(tmp_path / "in.gguf")]
    found = ["--method", method, "--calibration", str(tmp_path / "text.txt")]
    kinds = {}
    for name, more in (("rtn", []), ("found", found)):
        out = tmp_path / f"{name}.gguf"
        assert main([*common, str(out), "--to", "gguf:Q4_K_M", *more]) == 0
        with halfbyte.open(out) as written:
            kinds[name] = {k: str(written.info(k).format) for k in written}
    assert kinds["rtn"] == kinds["found"]
    assert {"q4_K:g32", "q6_K:g16"} <= set(kinds["found"].values())
    assert gguf_drift(tmp_path / "found.gguf", model) < 0.95 * gguf_drift(tmp_path / "rtn.gguf", model)
    with halfbyte.open(tmp_path / "in.gguf") as source:
        jobs = [job_key(source, recipe_of(f"gguf:{mix}"), "gptq") for mix in ("Q4_K_M", "Q4_K_S")]
    assert jobs[0] != jobs[1]
