"""Fused projections compute what separate ones do, hold the same bytes, and come apart again."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest

import torch
from halfbyte.torch import FusedLinear, QLinear, fuse, packed_modules, unfuse
from halfbyte.transformers import load_model, model_size
from support.tiny_models import agree, ids, logits, write_tiny


@pytest.fixture
def pair(tmp_path):
    """A model as loaded, and fused."""

    def build(arch="llama", producer="ct-int4", **options):
        write_tiny(tmp_path, arch, producer, **options)
        model, fused = load_model(tmp_path)[0], load_model(tmp_path)[0]
        return model, fused, fuse(fused)

    return build


@pytest.mark.parametrize(
    ("arch", "producer"), [("llama", "ct-int4"), ("gemma3_text", "mlx"), ("qwen2", "awq"), ("qwen3", "gptq3")]
)
def test_logits_and_bytes_stay(pair, arch, producer):
    model, fused, count = pair(arch, producer)
    assert count == 4
    assert sum(isinstance(m, FusedLinear) for m in fused.modules()) == 10
    assert agree(logits(fused, ids()), logits(model, ids()))
    assert model_size(fused).nbytes <= model_size(model).nbytes
    assert all(m.shared._made is None for m in fused.modules() if isinstance(m, FusedLinear)), "nothing outlives the step"


def test_case_44_different_global_scales_are_not_fused(pair):
    """NVFP4 with a factor for each matrix: joined under one of them, the others would be off by
    their ratio.
    """
    model, fused, count = pair("llama", "ct-nvfp4")
    assert count == 0
    assert torch.equal(logits(fused, ids()), logits(model, ids()))


def test_other_formats_are_not_fused(pair):
    name = "model.layers.0.self_attn.v_proj"
    model, fused, count = pair("llama", "halfbyte", codecs={name: "int8:g32"})
    assert count == 3
    assert type(fused.model.layers[0].self_attn.q_proj) is QLinear
    assert agree(logits(fused, ids()), logits(model, ids()))


def test_state_copies_and_pickles(pair):
    model, fused, _ = pair()
    want = logits(fused, ids())
    assert fused.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, model.state_dict()[k]) for k, a in fused.state_dict().items())
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(logits(again, ids()), want)
        q, k = again.model.layers[0].self_attn.q_proj, again.model.layers[0].self_attn.k_proj
        assert q.shared is k.shared
        assert q.packed[""] is k.packed[""]
    fused.load_state_dict(model.state_dict(), strict=True)
    assert agree(logits(fused, ids()), want)


def test_unfused_is_what_it_was(pair):
    model, fused, _ = pair("qwen2", "gptq")
    unfuse(fused)
    before, after = packed_modules(model), packed_modules(fused)
    assert before.keys() == after.keys()
    assert all(type(after[n]) is type(before[n]) and after[n].canonical() == before[n].canonical() for n in before if n)
    assert torch.equal(logits(fused, ids()), logits(model, ids()))


def test_a_layer_called_on_another_input_computes_afresh(pair):
    """Whatever is called when, and on what: each answer is the separate layer's."""
    model, fused, _ = pair()
    ours, theirs = fused.model.layers[0].self_attn, model.model.layers[0].self_attn
    a, b = (torch.randn(3, 64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    for name, x in (("q_proj", a), ("k_proj", b), ("v_proj", a), ("q_proj", a), ("q_proj", a), ("k_proj", a), ("v_proj", b)):
        want = getattr(theirs, name)(x)
        assert torch.allclose(getattr(ours, name)(x), want, rtol=1e-5, atol=1e-5)
    got = ours.q_proj(a)
    got.zero_()
    assert torch.allclose(ours.k_proj(a), theirs.k_proj(a), rtol=1e-5, atol=1e-5)


def test_threads_do_not_mix_their_products(pair):
    model, fused, _ = pair()
    ours, theirs = fused.model.layers[0].self_attn, model.model.layers[0].self_attn
    wrong: list[int] = []

    def run(seed: int) -> None:
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
        want = [getattr(theirs, n)(x) for n in ("q_proj", "k_proj", "v_proj")]
        for _ in range(50):
            got = [getattr(ours, n)(x) for n in ("q_proj", "k_proj", "v_proj")]
            if not all(torch.allclose(g, w, rtol=1e-5, atol=1e-5) for g, w in zip(got, want, strict=True)):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fused_block_compiles_as_one_graph(pair):
    _, fused, _ = pair()
    mlp = fused.model.layers[0].mlp
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.allclose(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), mlp(x), rtol=1e-5, atol=1e-5)
