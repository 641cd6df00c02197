"""AWQ's scales for a norm that experts and their router read: no token goes elsewhere, nothing else
changes.
"""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
import torch
from halfbyte.calibration import routed
from halfbyte.calibration.matrices import layer_matrices
from halfbyte.calibration.routed import fold_routed
from halfbyte.calibration.sources import layer_source
from halfbyte.calibration.statistics import InputCollector
from halfbyte.checkpoints import open as open_checkpoint
from halfbyte.cli import main
from halfbyte.quantizers import awq_scales
from halfbyte.tensor.quantize import quantize
from halfbyte.transformers.fill.module_paths import is_experts
from support.calibration_models import WORDS, drift, write_model, write_text
from support.correlated_inputs import problem

QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [], "decoder_sparse_step": 1}
KINDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": QWEN,
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 128},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
NORM = "post_attention_layernorm"


class Layer:
    """Layer 0 of a tiny model, watched on one sequence."""

    def __init__(self, folder, kind: str) -> None:
        model = write_model(folder, kind, **KINDS[kind])
        with open_checkpoint(folder) as checkpoint:
            self.source = layer_source(checkpoint, "cpu")
            self.source.start()
            self.layer = self.source.layer(0)
            self.matrices = layer_matrices(
                self.layer, "model.layers.0", self.source.slots, lambda k: checkpoint.info(k).shape[-2]
            )
        self.seen: dict = {}
        handle = model.model.layers[0].register_forward_pre_hook(
            lambda m, a, k: self.seen.update(args=a, kwargs=k), with_kwargs=True
        )
        with torch.no_grad():
            model(torch.tensor(np.random.default_rng(0).integers(3, WORDS, (1, 96))), use_cache=False)
        handle.remove()
        named = dict(self.layer.named_modules())
        linear = {n: m for n, m in named.items() if isinstance(m, torch.nn.Linear)}
        self.experts = {n: m for n, m in named.items() if is_experts(m)}
        with torch.no_grad(), InputCollector(self.layer, linear, self.experts) as self.inputs:
            self.before = self.output()
            self.inputs.sequence_done()
        self.wanted = {m.key for m in self.matrices if not m.key.endswith(("gate", "router", "gate.weight", "router.weight"))}

    def output(self) -> torch.Tensor:
        with torch.no_grad():
            out = self.layer(*self.seen["args"], **self.seen["kwargs"])
        return out[0] if isinstance(out, tuple) else out

    def routed_to(self) -> list[torch.Tensor]:
        """What the router gives to the experts."""
        (experts,) = self.experts.values()
        got: list[torch.Tensor] = []
        handle = experts.register_forward_pre_hook(lambda m, a, k: got.extend([*a, *k.values()][1:]), with_kwargs=True)
        self.output()
        handle.remove()
        return [t.clone() for t in got]

    def fold(self):
        def dense(path: str) -> bool:
            return self.source.key_of(f"model.layers.0.{path}", "weight") is not None

        with torch.no_grad():
            return fold_routed(
                self.layer, NORM, self.inputs, self.matrices, self.wanted, dense, lambda w: quantize(w, "int3:g64"), self.output
            )


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_gives_the_same_numbers_and_the_layer_what_it_gave(tmp_path, kind):
    it = Layer(tmp_path / "in", kind)
    assert it.inputs.expert_norms == {NORM}
    norm, routed_to = it.layer.get_submodule(NORM).weight.clone(), it.routed_to()
    changed = it.fold()
    assert changed[0] == NORM
    readers = {"qwen2_moe": ["mlp.gate", "mlp.shared_expert_gate"], "gpt_oss": ["mlp.router"]}
    assert sorted(changed[1:]) == readers.get(kind, ["mlp.gate"])
    ratio = (norm / it.layer.get_submodule(NORM).weight).log2()
    assert torch.equal(ratio, ratio.round())
    assert ratio.abs().max() >= 1
    for a, b in zip(routed_to, it.routed_to(), strict=True):
        assert torch.equal(a, b)
    assert torch.allclose(it.before, it.output(), rtol=1e-5, atol=1e-5)


def test_experts_lose_less(tmp_path):
    """Gate's and up's squared error on the tokens that each expert sees, rounded after scaling and
    without.
    """
    it = Layer(tmp_path / "in", "mixtral")
    mine = [m for m in it.matrices if m.expert_of(["mlp.experts"])]

    def lost() -> float:
        total = 0.0
        for m in mine:
            h = it.inputs.of(m.input).hessian.double().numpy()
            d = quantize(m.view.numpy(), "int3:g64").dequantize("float64") - m.view.double().numpy()
            total += float(((d @ h) * d).sum())
        return total

    plain = lost()
    it.fold()
    assert lost() < 0.9 * plain


def test_what_else_reads_the_norm_has_all_put_back(tmp_path, monkeypatch):
    """A reader that no hook sees changes the layer's output: every weight is as it was, to the last
    bit.
    """
    it = Layer(tmp_path / "in", "mixtral")
    weights = {n: p.clone() for n, p in it.layer.named_parameters()}
    norm, plain = it.layer.get_submodule(NORM), it.output
    it.output = lambda: plain() + norm.weight
    assert it.fold() == "more than its experts and their router reads its norm"
    for name, p in it.layer.named_parameters():
        assert torch.equal(p, weights[name])
    monkeypatch.setattr(routed, "has_unit_offset", lambda norm: True)
    assert it.fold() == "its norm holds w - 1, which a power of two does not scale exactly"
    monkeypatch.undo()
    it.wanted = {k for k in it.wanted if not k.endswith("experts.2.w1.weight")}
    assert it.fold() == "weights of mlp.experts are kept"


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "gpt_oss"])
def test_norm_and_router_are_written_as_powers_of_two_apart(tmp_path, kind, capsys):
    """In the file: norm · router is the same product for every input."""
    dense = write_model(tmp_path / "in", kind, tie_word_embeddings=False, **KINDS[kind])
    text = write_text(tmp_path / "text.txt", 3000)
    common = ["quantize", str(tmp_path / "in"), "--to", "halfbyte:int3:g64"]
    found = ["--method", "awq", "--calibration", str(text), "--context", "64", "--sequences", "24"]
    assert main([*common[:2], str(tmp_path / "rtn"), *common[2:]]) == 0
    assert main([*common[:2], str(tmp_path / "awq"), *common[2:], *found]) == 0
    assert "router" not in capsys.readouterr().err
    with halfbyte.open(tmp_path / "in") as a, halfbyte.open(tmp_path / "awq") as b:
        routers = [k for k in a if k.endswith((".gate.weight", ".shared_expert_gate.weight"))]
        assert len(routers) == (4 if kind == "qwen2_moe" else 2)
        for key in routers:
            norm = f"{key.partition('.layers.')[0]}.layers.{key.partition('.layers.')[2][0]}.{NORM}.weight"
            assert not np.array_equal(a[norm], b[norm])
            assert np.array_equal(np.asarray(a[norm] * a[key]), np.asarray(b[norm] * b[key]))
    assert drift(tmp_path / "awq", dense) < drift(tmp_path / "rtn", dense)


@pytest.mark.parametrize("codec", ["int4:g32", "mxfp4"])
def test_scales_of_many_weights_each_with_its_own_inputs(codec):
    problems = [problem(300, 64, seed) for seed in range(3)]
    weights, hessians = [w for w, _ in problems], [h for _, h in problems]
    scales, alpha = awq_scales(weights, hessians, lambda x: quantize(x, codec), powers=True)

    def loss(s: np.ndarray) -> float:
        total = 0.0
        for w, h in problems:
            d = quantize((w * s).astype(np.float32), codec).dequantize("float64") / s - w
            total += float(((d @ h) * d).sum())
        return total

    assert 0 <= alpha <= 1
    assert np.array_equal(np.log2(scales), np.rint(np.log2(scales)))
    assert loss(scales) <= loss(np.ones(64))
    same = awq_scales(weights, [hessians[0]] * 3, lambda x: quantize(x, codec))
    assert np.array_equal(same[0], awq_scales(weights, hessians[0], lambda x: quantize(x, codec))[0])
