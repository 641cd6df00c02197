"""Experts and fused modules in the walk: each matrix is rounded with the Hessian of what it is
multiplied by, no other.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch.nn import functional

import halfbyte
import torch
from halfbyte import format_named
from halfbyte.calibration import calibrate
from halfbyte.calibration.folding import fold, upstream_of
from halfbyte.calibration.matrices import expert_input, gated_input, layer_matrices
from halfbyte.calibration.sources import layer_source
from halfbyte.calibration.statistics import InputCollector
from halfbyte.calibration.walk import token_sequences
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.conversion.recipe import recipe_of
from halfbyte.quantizers import gptq, weighted_error
from halfbyte.tensor.quantize import quantize
from halfbyte.transformers import load_model
from support.calibration_models import WORDS, drift, gguf_drift, write_model, write_text
from support.gguf_models import VOCABULARY, dense_model, write

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def layer_inputs(model, ids: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what layer 0's experts are given [m, k], which experts take it [m, slots]), a pair a
    sequence.
    """
    seen = []
    experts = model.model.layers[0].mlp.experts
    handle = experts.register_forward_pre_hook(lambda m, args: seen.append((args[0].reshape(-1, args[0].shape[-1]), args[1])))
    with torch.no_grad():
        for sequence in ids:
            model(torch.tensor([sequence]), use_cache=False)
    handle.remove()
    return seen


def test_an_expert_is_rounded_with_the_hessian_of_the_tokens_routed_to_it(tmp_path):
    """Layer 0, every expert and projection: the codes that GPTQ gives for Hessians gathered by
    hand.
    """
    model = write_model(tmp_path / "in", "mixtral", **MIXTRAL)
    text = write_text(tmp_path / "text.txt", 2000)
    fmt = format_named("int4:g32", scale_dtype="float16")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        source = layer_source(checkpoint, "cpu")
        ids = token_sequences(source.tokenizer, text, 48, 12)
        only = ["experts=int4:g32", ".*=keep"]
        found = calibrate(checkpoint, recipe_of("halfbyte:int4:g32", only), text, context=48, sequences=12, device="cpu")
        experts = model.model.layers[0].mlp.experts
        inputs = layer_inputs(model.requires_grad_(False), ids)
        for e in range(4):
            given = torch.zeros(64, 64)
            gated = torch.zeros(128, 128)
            for x, index in inputs:
                mine = x[(index == e).any(-1)]
                if not len(mine):
                    continue
                given.addmm_(mine.T, mine)
                gate, up = functional.linear(mine, experts.gate_up_proj[e]).chunk(2, -1)
                h = functional.silu(gate) * up
                gated.addmm_(h.T, h)
            name = next(m for m in found.weights if f"layers.0.block_sparse_moe.experts.{e}." in m).rpartition(".")[0]
            wanted = {
                "w1": (experts.gate_up_proj[e][:128], given), "w3": (experts.gate_up_proj[e][128:], given),
                "w2": (experts.down_proj[e], gated),
            }  # fmt: skip
            for last, (w, hessian) in wanted.items():
                assert found.weights[f"{name}.{last}"] == gptq(w.numpy(), hessian.double().numpy(), fmt)
    assert found.notes == []


def test_experts_take_part_in_what_the_next_layer_is_given(tmp_path):
    """GPTQ of experts alone moves the logits less than rounding them to nearest."""
    dense = write_model(tmp_path / "in", "mixtral", **MIXTRAL)
    text = write_text(tmp_path / "text.txt", 4000)
    common = ["--to", "halfbyte:int3:g32", "--rule", "experts=int3:g32", "--rule", ".*=keep"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "rtn"), *common]) == 0
    found = ["--method", "gptq", "--calibration", str(text), "--context", "64", "--sequences", "48"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "gptq"), *common, *found]) == 0
    assert drift(tmp_path / "gptq", dense) < 0.8 * drift(tmp_path / "rtn", dense)


@pytest.mark.parametrize("method", ["gptq", "awq", "mse"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_stacks_of_a_gguf_are_rounded_expert_by_expert(tmp_path, monkeypatch, capsys, name, method):
    model = dense_model(name)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(torch.exp(torch.randn_like(p)))  # inputs of very different sizes, which is what calibration is about
    source = write(tmp_path / "in.gguf", name, model, False)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (30, 48)).tolist()
    monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: ids)
    (tmp_path / "text.txt").write_text("")
    to = ["--to", "gguf:q4_0"]
    assert main(["quantize", str(source), str(tmp_path / "rtn.gguf"), *to]) == 0
    found = ["--method", method, "--calibration", str(tmp_path / "text.txt")]
    assert main(["quantize", str(source), str(tmp_path / "found.gguf"), *to, *found]) == 0
    assert "without a calibration token" not in capsys.readouterr().err
    with halfbyte.open(tmp_path / "found.gguf") as a, halfbyte.open(tmp_path / "rtn.gguf") as b, halfbyte.open(source) as c:
        stacks = [k for k in a if "_exps" in k]
        assert len(stacks) == 2 * 3
        for key in stacks:
            assert a.info(key).format.name == "q4_0"
            w = c[f"{key}.weight"]
            assert a[key].shape == w.shape
            norm = f"{key.rpartition('.')[0]}.ffn_norm.weight"
            folded = c[norm] / a[norm] if "down" not in key else 1.0  # AWQ's, the norm of all experts
            assert np.any(folded != 1) == (method == "awq" and "down" not in key)
            for e in range(w.shape[0]):
                assert a[key][e] != b[key][e]
                assert np.abs(a[key][e].dequantize("float32") / folded - w[e]).max() < np.abs(w[e]).max()
    assert gguf_drift(tmp_path / "found.gguf", model) < gguf_drift(tmp_path / "rtn.gguf", model)


def test_case_56_in_a_stack_the_starved_experts_are_named_one_by_one(tmp_path, monkeypatch, capsys):
    source = write(tmp_path / "in.gguf", "qwen3moe", dense_model("qwen3moe"), False)
    monkeypatch.setattr("halfbyte.calibration.walk.token_sequences", lambda *a: [[5]])
    (tmp_path / "text.txt").write_text("")
    found = ["--method", "gptq", "--calibration", str(tmp_path / "text.txt")]
    assert main(["quantize", str(source), str(tmp_path / "out.gguf"), "--to", "gguf:q4_0", *found]) == 0
    said = capsys.readouterr().err
    assert re.search(r"rounded with searched scales: \d+ weights without a calibration token: blk\.0\.ffn_", said)
    assert "_exps[" in said
    with halfbyte.open(tmp_path / "out.gguf") as written:
        assert {str(written.info(k).format) for k in written if "_exps" in k} == {"q4_0:g32"}
    model, _ = load_model(tmp_path / "out.gguf")
    assert bool(model(torch.tensor([[5, 7, 9]])).logits.isfinite().all())


def test_a_fused_module_is_rounded_by_parts_with_one_hessian(tmp_path):
    """A checkpoint with q, k, v, gate and up apart, in a model that fuses them: each part as GPTQ
    rounds it, better than rtn.
    """
    write_model(tmp_path / "in", "phi3", tie_word_embeddings=False)
    file = tmp_path / "in" / "model.safetensors"
    tensors, out = load_file(file), {}
    for name, value in tensors.items():
        if name.endswith("qkv_proj.weight"):
            for part, rows in zip("qkv", value.split([64, 32, 32]), strict=True):
                out[name.replace("qkv_proj", f"{part}_proj")] = rows.contiguous()
        elif name.endswith("gate_up_proj.weight"):
            for part, rows in zip(("gate", "up"), value.chunk(2), strict=True):
                out[name.replace("gate_up_proj", f"{part}_proj")] = rows.contiguous()
        else:
            out[name] = value
    save_file(out, file, {"format": "pt"})
    text = write_text(tmp_path / "text.txt", 3000)
    with open_checkpoint(tmp_path / "in") as checkpoint:
        source = layer_source(checkpoint, "cpu")
        ids = token_sequences(source.tokenizer, text, 48, 12)
        found = calibrate(checkpoint, recipe_of("halfbyte:int4:g32"), text, context=48, sequences=12, device="cpu")
        assert found.notes == []
        assert len(found.weights) == 2 * 7
        model = layer_source(checkpoint, "cpu")
        model.start()
        given: list[torch.Tensor] = []
        layer = model.layer(0)
        handle = layer.input_layernorm.register_forward_hook(lambda m, a, out: given.append(out[0]))
        model.model.model.layers = torch.nn.ModuleList([layer])
        with torch.no_grad():
            for sequence in ids:
                model.model.model(torch.tensor([sequence]), use_cache=False)
        handle.remove()
        hessian = torch.zeros(64, 64)
        for x in given:
            hessian.addmm_(x.T, x)
        for part in "qkv":
            name = f"model.layers.0.self_attn.{part}_proj"
            w = checkpoint[f"{name}.weight"]
            h = hessian.double().numpy()
            assert found.weights[name] == gptq(w, h, found.weights[name].format)
            assert weighted_error(w, found.weights[name], h) < 0.8 * weighted_error(w, quantize(w, "int4:g32"), h)


@pytest.mark.parametrize("name", ["phi3", "mixtral", "qwen3_moe"])
def test_folding_leaves_what_fused_modules_and_experts_compute(tmp_path, name):
    """Down's scales go into up's rows: of a fused gate_up, of each expert."""
    qwen = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": []}
    more = {"phi3": {}, "mixtral": MIXTRAL, "qwen3_moe": qwen}[name]
    model = write_model(tmp_path / "in", name, **more)
    ids = torch.tensor(np.random.default_rng(0).integers(3, WORDS, (1, 96)))
    with open_checkpoint(tmp_path / "in") as checkpoint:
        source = layer_source(checkpoint, "cpu")
        source.start()
        layer = source.layer(0)
        seen = {}
        other = model.model.layers[0]
        other.register_forward_pre_hook(lambda m, a, k: seen.update(args=a, kwargs=k), with_kwargs=True)
        with torch.no_grad():
            model(ids, use_cache=False)
        matrices = layer_matrices(layer, "model.layers.0", source.slots, lambda k: checkpoint.info(k).shape[-2])
    assert sum(m.view.numel() for m in matrices) >= sum(p.numel() for p in layer.parameters() if p.ndim == 3)
    linear = {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    experts = {"mlp.experts": layer.mlp.experts} if name != "phi3" else {}
    with torch.no_grad(), InputCollector(layer, linear, experts) as inputs:
        before = layer(*seen["args"], **seen["kwargs"])
        inputs.sequence_done()
    alphas = {}
    with torch.no_grad():
        for group in inputs.groups:
            source_of_input = upstream_of(layer, group)
            readers = [m.view for m in matrices if m.input in group.names]
            alphas[group.names[0]] = (
                source_of_input
                if isinstance(source_of_input, str)
                else fold(group, readers, source_of_input, lambda w: quantize(w, "int3:g64"))
            )
        after = layer(*seen["args"], **seen["kwargs"])
    if name == "phi3":
        assert alphas["mlp.down_proj"] > 0
    else:
        downs = [alphas[gated_input("mlp.experts", e)] for e in range(4)]
        assert max(downs) > 0
        assert alphas[expert_input("mlp.experts", 0)] == "no operation before it can take the scales"
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-4)
