"""A decoding step as one list of native operations gives what the model's own forward gives, and
leaves the same cache.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch
from halfbyte.backends.cpu import native, set_threads
from halfbyte.errors import ShapeError
from halfbyte.transformers import load_model
from halfbyte.transformers.compat import cache_name
from halfbyte.transformers.decode import kv_cache as cache_module
from halfbyte.transformers.decode.kv_cache import growing_cache
from halfbyte.transformers.decode.native_step import Step, native_step, supports
from halfbyte.transformers.decode.session import DecodeSession
from support.cpu_weights import each_set, instruction_set, needs_native  # noqa: F401
from support.tiny_models import agree, ids, write_tiny

pytestmark = needs_native
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
FEEDS = ([5, 7, 11], [8], [9], [10, 3], [4], *([t] for t in range(20, 40)), [6, 6, 6], [12])
"""Prompt, single tokens, several again; past a window of 8."""


def loaded(folder, arch, producer="ct-int4", activations="exact", **changes):
    return load_model(write_tiny(folder, arch, producer, **changes).folder, activations=activations)[0]


def own(model, feeds):
    """The logits of the model's own forward after each feed."""
    state = growing_cache(model)

    def logits(feed):
        given = {cache_name(model): state}
        return model(input_ids=torch.tensor([feed]), use_cache=True, logits_to_keep=1, **given).logits[0, -1]

    with torch.inference_mode():
        return [logits(feed) for feed in feeds], state


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("producer", ["ct-int4", "mlx", "gptq3"])
def test_logits_and_cache_are_those_of_the_models_own_forward(tmp_path, monkeypatch, arch, producer):
    monkeypatch.setattr(cache_module, "SPARE", 5)  # the room is used up now and then
    model = loaded(tmp_path, arch, producer)
    text = DecodeSession(model)
    wanted, state = own(model, FEEDS)
    for feed, want in zip(FEEDS, wanted, strict=True):
        assert agree(text(feed), want)
    assert isinstance(text.step, Step)
    text.step.commit()
    for ours, theirs in zip(text.state.layers, state.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == sum(map(len, FEEDS))
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        assert agree(ours.keys, theirs.keys)
        assert agree(ours.values, theirs.values)


def test_biases_are_added(tmp_path):
    model = loaded(tmp_path, "llama", "halfbyte", attention_bias=True)
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    wanted, _ = own(model, FEEDS)
    text = DecodeSession(model)
    assert all(agree(text(feed), want) for feed, want in zip(FEEDS, wanted, strict=True))
    assert text.step is not None


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_int8_differs_by_less_than_its_own_rounding(tmp_path, arch):
    """An activation between two neighbours may round to the other one, which costs at most what
    rounding costs at all.
    """
    folder = tmp_path / "model"
    exact, rounded = loaded(folder, arch), load_model(folder, activations="int8")[0]
    true, own_rounded = (torch.stack(own(m, FEEDS)[0]) for m in (exact, rounded))
    text = DecodeSession(rounded)
    ours = torch.stack([text(feed) for feed in FEEDS])
    assert text.step is not None
    rounding = (own_rounded - true).square().mean().sqrt()
    assert (ours - own_rounded).square().mean().sqrt() <= rounding
    assert 0.5 <= (ours - true).square().mean().sqrt() / rounding <= 1.5


def test_threads_change_no_bit(tmp_path):
    model = loaded(tmp_path, "llama", max_position_embeddings=512)
    prompt = ids(300, 1)[0].tolist()
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        text = DecodeSession(model)
        text(prompt)
        results.append(torch.stack([text([t]) for t in (5, 9, 11)]).numpy())
    set_threads(0)
    # The prompt goes through torch's attention, which is the same on any number of our threads.
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_a_prompt_of_one_token_leaves_the_others_to_the_step(tmp_path):
    model = loaded(tmp_path, "llama")
    feeds = ([5], [8], [9])
    wanted, _ = own(model, feeds)
    text = DecodeSession(model)
    assert all(agree(text(feed), want) for feed, want in zip(feeds, wanted, strict=True))
    assert isinstance(text.step, Step)


def derived(module):
    """The module's class becomes one of the same name that somebody derived."""
    module.__class__ = type(type(module).__name__, (type(module),), {"__module__": "theirs"})


@pytest.mark.parametrize(
    "change",
    [
        derived,
        lambda model: derived(model.model),
        lambda model: derived(model.model.layers[0]),
        lambda model: derived(model.model.layers[0].self_attn),
        lambda model: derived(model.model.layers[1].mlp),
        lambda model: setattr(model.model, "layers", torch.nn.ModuleList(reversed(model.model.layers))),
        lambda model: setattr(model.config, "_attn_implementation", "theirs"),
        lambda model: model.train(),
        lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None),
        lambda model: model.model.layers[0].register_forward_pre_hook(lambda *_: None),
        lambda model: setattr(model.model.layers[0].self_attn, "forward", model.model.layers[0].self_attn.forward),
        lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
        lambda model: setattr(model.model.layers[1].mlp, "up_proj", torch.nn.Linear(64, 128, bias=False)),
        lambda model: setattr(model.model.layers[0], "input_layernorm", torch.nn.RMSNorm(64)),
        lambda model: setattr(model.model.layers[0].mlp, "adapter", torch.nn.Linear(64, 64)),
        lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
        lambda model: setattr(model.config, "final_logit_softcapping", 30.0),
        lambda model: model.to(torch.bfloat16),
    ],
)
def test_what_the_step_would_pass_over_goes_through_the_models_own_forward(tmp_path, change):
    model = loaded(tmp_path, "llama")
    assert supports(model)
    change(model)
    assert not supports(model)


def test_a_hook_on_every_module_is_not_passed_over(tmp_path):
    model = loaded(tmp_path, "llama")
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not supports(model)
    finally:
        hook.remove()
    assert supports(model)


def test_a_cache_of_another_number_of_layers_is_left_to_the_model(tmp_path):
    model = loaded(tmp_path, "llama")
    state = own(model, FEEDS[:1])[1]
    assert native_step(model, state) is not None
    state.layers.pop()
    assert native_step(model, state) is None


@pytest.mark.parametrize("arch", ["phi3", "mixtral", "gpt_oss"])
def test_other_architectures_go_through_their_own_forward(tmp_path, arch):
    model = loaded(tmp_path, arch, "halfbyte")
    wanted, _ = own(model, FEEDS[:5])
    text = DecodeSession(model)
    assert all(torch.equal(text(feed), want) for feed, want in zip(FEEDS, wanted, strict=False))
    assert text.step is None


def test_a_norm_written_in_place_counts(tmp_path):
    model = loaded(tmp_path, "llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(2)
    wanted, _ = own(model, FEEDS[:3])
    text = DecodeSession(model)
    assert all(agree(text(feed), want) for feed, want in zip(FEEDS, wanted, strict=False))


# ------------------------------------------------------------------------------------------------------------------
# one operation


def operations():
    return native().Step()


def run(step, first=(), count=()):
    step.run(np.array(first, np.int64), np.array(count, np.int64), 0, 499)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@each_set
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    d=st.sampled_from([2, 6, 16, 40, 64, 80, 256]),
    count=st.integers(1, 200),
    before=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_attention(instruction_set, group, kv_heads, d, count, before, seed):  # noqa: F811
    """softmax(scale q · keysᵀ) · values, the new token's key and value put behind those there were."""
    heads, scale, room = group * kv_heads, d**-0.5, before + count + 3
    q, k, v = normal(seed, heads, d), normal(seed + 1, kv_heads, d), normal(seed + 2, kv_heads, d)
    keys, values = normal(seed + 3, kv_heads, room, d), normal(seed + 4, kv_heads, room, d)
    old, y = keys.copy(), np.full((heads, d), np.nan, np.float32)
    step = operations()
    step.attend(0, q, k, v, d, scale, y)
    step.bind([keys], [values], [], [])
    run(step, [before], [count])
    new = before + count - 1
    assert np.array_equal(keys[:, new], k)
    assert np.array_equal(values[:, new], v)
    assert np.array_equal(np.delete(keys, new, 1), np.delete(old, new, 1))
    seen, held = keys[:, before : new + 1].astype(np.float64), values[:, before : new + 1].astype(np.float64)
    scores = np.einsum("hgd,htd->hgt", q.reshape(kv_heads, group, d), seen) * scale
    p = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hgt,htd->hgd", p / p.sum(-1, keepdims=True), held).reshape(heads, d)
    assert np.abs(y - wanted).max() <= 4e-6 * np.abs(held).max()


@each_set
@pytest.mark.parametrize("d", [1, 5, 16, 64, 256, 640])
def test_norm(instruction_set, d):  # noqa: F811
    x, scale, y = normal(d, 3, d) * 7, normal(d + 1, d), np.empty((3, d), np.float32)
    step = operations()
    step.norm(x, scale, 1e-6, y)
    run(step)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * scale
    assert np.abs(y - wanted).max() <= 1e-6 * np.abs(wanted).max()
    step = operations()
    step.norm(x, scale, 1e-6, x)
    run(step)
    assert np.array_equal(x, y)


@pytest.mark.parametrize("d", [2, 6, 64, 256])
def test_rotation_is_transformers_bit_for_bit(d):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, angle = torch.from_numpy(normal(d, 1, 3, 1, d)), torch.from_numpy(normal(d + 1, 1, 1, d // 2)).repeat(1, 1, 2)
    cosine, sine = angle.cos(), angle.sin()
    wanted, _ = apply_rotary_pos_emb(q, q, cosine, sine)
    x = q.numpy().copy()
    step = operations()
    step.rotate(x, d, 1)
    none = np.zeros((1, 1), np.float32)
    step.bind([], [], [none, cosine.numpy().reshape(1, d)], [none, sine.numpy().reshape(1, d)])
    run(step)
    assert np.array_equal(x, wanted.numpy())


@pytest.mark.parametrize(("kind", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_gates(kind, name):
    from transformers.activations import ACT2FN

    gate = np.concatenate([normal(0, 1000) * 5, np.float32([0, -0.0, 1e-30, -1e-30, 20, -20, 90, -90, 1e4, -1e4, np.nan])])
    up, y = normal(1, len(gate)), np.empty(len(gate), np.float32)
    step = operations()
    step.gate(native().Gate[kind], gate, up, y)
    run(step)
    with np.errstate(all="ignore"):
        wanted = ACT2FN[name](torch.from_numpy(gate).double()).numpy() * up
        # Far out on the left a value is a difference of numbers near 1 in the formula, and 0 in
        # either.
        error = np.abs(y - wanted)[:-1]
        assert (error <= 2e-6 * np.abs(wanted[:-1]) + 1e-6 * np.abs(up[:-1])).all()
    assert np.isnan(y[-1])


def test_infinity_and_nan_reach_the_result():
    for bad in (np.nan, np.inf):
        q, k, v = normal(0, 1, 16), normal(1, 1, 16), normal(2, 1, 16)
        q[0, 3] = bad
        keys, values, y = np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32), np.zeros((1, 16), np.float32)
        step = operations()
        step.attend(0, q, k, v, 16, 0.25, y)
        step.bind([keys], [values], [], [])
        run(step, [0], [2])
        assert np.isnan(y).all()


def test_what_does_not_fit_is_refused_by_name():
    q, k = normal(0, 4, 16), normal(1, 2, 16)
    cache = np.zeros((2, 8, 16), np.float32)
    step = operations()
    with pytest.raises(ShapeError, match=r"\[step\] v is float32 \(3, 16\); allowed: 32 elements of float32"):
        step.attend(0, q, k, normal(2, 3, 16), 16, 0.25, q)
    with pytest.raises(ShapeError, match=r"\[step\] y is float64"):
        step.add(q, q.astype(np.float64))
    step.attend(0, q, k, k, 16, 0.25, q)
    with pytest.raises(ShapeError, match="bind the caches"):
        run(step)
    with pytest.raises(ShapeError, match="does not have its heads"):
        step.bind([cache[:1]], [cache[:1]], [], [])
    step.bind([cache], [cache.copy()], [], [])
    with pytest.raises(ShapeError, match="tokens 5 to 9 of layer 0; its cache has 8"):
        run(step, [5], [4])
